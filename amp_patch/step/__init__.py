"""One training step, in its order.

``scale``, ``unscale_`` and ``update`` are hooks of `backward_pass.BackwardPass`, which
``amp.scale_loss`` calls; ``step`` is what `optimizer_step.OptimizerStep` puts in the place of the
optimizer's own::

    scale      the loss is multiplied; gradients of earlier passes are set aside
    (backward, by the user)
    unscale_   what it wrote is divided by the scale, checked, given to the fp32 masters, and added
               to what was set aside
    update     the scale moves; where a gradient overflowed, `skip.Skip` is asked to skip the step
    step       skipped; or made, and the masters rounded into the model's half weights
"""
