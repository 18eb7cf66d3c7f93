"""apex's lists for torch.nn.functional; scripts append to them and remove from them."""

import torch.nn.functional

MODULE = torch.nn.functional

FP16_FUNCS = [
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "conv_tbc",
    "linear",
]
BFLOAT16_FUNCS = list(FP16_FUNCS)
FP32_FUNCS = [
    "interpolate",
    "grid_sample",
    "softplus",
    "softmin",
    "log_softmax",
    "softmax",
    "gelu",
    "layer_norm",
    "group_norm",
    "local_response_norm",
    "normalize",
    "cosine_similarity",
    "poisson_nll_loss",
    "cosine_embedding_loss",
    "cross_entropy",
    "hinge_embedding_loss",
    "kl_div",
    "l1_loss",
    "mse_loss",
    "margin_ranking_loss",
    "multilabel_margin_loss",
    "multilabel_soft_margin_loss",
    "multi_margin_loss",
    "nll_loss",
    "binary_cross_entropy_with_logits",
    "smooth_l1_loss",
    "soft_margin_loss",
    "triplet_margin_loss",
    "ctc_loss",
]
BANNED_FUNCS = [
    (
        "binary_cross_entropy",
        "binary_cross_entropy is unsafe in half precision: use "
        "binary_cross_entropy_with_logits without the sigmoid before it.",
    )
]
