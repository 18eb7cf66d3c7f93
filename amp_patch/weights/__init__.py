"""Models stored in half, and the fp32 values and masters of their parameters.

Of gradients there is what masters themselves do with theirs: `lazy_gradients`, `own_gradients`.
"""
