"""The gradients of one optimizer, from the backward that writes them to the step that uses them.

Half gradients, multiplied by a loss scale, become gradients of the fp32 masters. Nothing here knows
an optimizer or a loss scaler. `gradients.Gradients` has the order; around one backward it is::

    set_aside    what earlier backwards have left waits in `earlier_gradients`
    (backward, by the user)
    receive      what it wrote is divided by the scale and checked, see `gradient_buffers`, and what
                 waited is added: by `usual_pass`, or where anything is unusual by `any_pass`
    round_into_halves
                 half gradients hold what the masters have received, see `rounded_gradients`
    finish       where a parameter got no gradient, what waited is its gradient again

or, with ``delay_unscale=True``, they stay as they are for the next backward to add to, see
`scaled_gradients`. A backward outside of ``scale_loss`` is the subject of `outside_passes`. What a
script does to gradients in between is noticed by the others.
"""
