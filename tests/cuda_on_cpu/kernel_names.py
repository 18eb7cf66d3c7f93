"""The kernels that each CUDA source must hold: one per mix of dtypes, and those without any."""

from itertools import product

import torch

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
PAIRS = list(product(DTYPES, DTYPES))

KERNELS = {
    "accumulate.cu": [
        "accumulate_{}_{}_to_{}".format(*mix) for mix in product(DTYPES, DTYPES, DTYPES)
    ],
    "adagrad.cu": ["adagrad_prepare", *("adagrad_{}_to_{}".format(*pair) for pair in PAIRS)],
    "adamw.cu": ["adamw_prepare", *("adamw_{}_to_{}".format(*pair) for pair in PAIRS)],
    "cast.cu": ["cast_{}_to_{}".format(*pair) for pair in PAIRS],
    "cross_entropy.cu": [
        *(f"cross_entropy_{dtype}" for dtype in DTYPES),
        *(f"cross_entropy_backward_{dtype}" for dtype in DTYPES),
    ],
    "lamb.cu": [
        *("lamb_prepare", "lamb_ratios"),
        *("lamb_moments_{}_to_{}".format(*pair) for pair in PAIRS),
        *(f"lamb_update_{dtype}" for dtype in DTYPES),
    ],
    "reconcile.cu": ["reconcile_float16", "reconcile_bfloat16"],
    "rmsprop.cu": ["rmsprop_prepare", *("rmsprop_{}_to_{}".format(*pair) for pair in PAIRS)],
    "sgd.cu": ["sgd_prepare", *("sgd_{}_to_{}".format(*pair) for pair in PAIRS)],
    "summarize.cu": ["summarize", "clip_coefficient"],
    "unscale.cu": ["unscale_{}_to_{}".format(*pair) for pair in PAIRS],
    "update_scale.cu": ["update_scale"],
}
