"""Owns the data of O1 and O4: how the arguments of each of torch's operators are cast.

It must not know how a cast is made, when casts are active or how an attribute is replaced.

The five lists are those of torch's CUDA autocast (ATen/autocast_mode.h, torch 2.15), written with
the operators' names; they hold on every device. `targets` finds where the running torch has them.
"""

from __future__ import annotations

HALF = (
    "_convolution",
    "_scaled_dot_product_flash_attention",
    "_thnn_fused_gru_cell",
    "_thnn_fused_lstm_cell",
    "addbmm",
    "addmm",
    "addmv",
    "addr",
    "baddbmm",
    "bmm",
    "chain_matmul",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_tbc",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "convolution",
    "cudnn_convolution",
    "cudnn_convolution_transpose",
    "einsum",
    "gru_cell",
    "linalg_multi_dot",
    "linalg_vecdot",
    "linear",
    "lstm_cell",
    "matmul",
    "mm",
    "mv",
    "prelu",
    "rnn_relu_cell",
    "rnn_tanh_cell",
    "scaled_dot_product_attention",
)

FLOAT = (
    "_upsample_bicubic2d_aa",
    "_upsample_bilinear2d_aa",
    "_upsample_nearest_exact1d",
    "_upsample_nearest_exact2d",
    "_upsample_nearest_exact3d",
    "acos",
    "asin",
    "binary_cross_entropy_with_logits",
    "cdist",
    "cosh",
    "cosine_embedding_loss",
    "cosine_similarity",
    "dist",
    "erfinv",
    "exp",
    "expm1",
    "frobenius_norm",
    "group_norm",
    "hinge_embedding_loss",
    "huber_loss",
    "kl_div",
    "l1_loss",
    "layer_norm",
    "linalg_matrix_sqrth",
    "log",
    "log10",
    "log1p",
    "log2",
    "logsumexp",
    "margin_ranking_loss",
    "mse_loss",
    "multi_margin_loss",
    "multilabel_margin_loss",
    "native_layer_norm",
    "nll_loss",
    "nll_loss2d",
    "nuclear_norm",
    "pdist",
    "poisson_nll_loss",
    "pow",
    "reciprocal",
    "renorm",
    "rms_norm",
    "rsqrt",
    "sinh",
    "smooth_l1_loss",
    "soft_margin_loss",
    "softplus",
    "tan",
    "triplet_margin_loss",
    "upsample_bicubic2d",
    "upsample_bilinear2d",
    "upsample_linear1d",
    "upsample_nearest1d",
    "upsample_nearest2d",
    "upsample_nearest3d",
    "upsample_trilinear3d",
)

FLOAT_DTYPE = (
    "cumprod",
    "cumsum",
    "linalg_matrix_norm",
    "linalg_vector_norm",
    "log_softmax",
    "norm",
    "prod",
    "softmax",
    "sum",
)

PROMOTE = (
    "addcdiv",
    "addcmul",
    "atan2",
    "bilinear",
    "cross",
    "dot",
    "grid_sampler",
    "index_put",
    "scatter_add",
    "tensordot",
    "vdot",
)

BANNED = ("binary_cross_entropy",)

# Functions of modules that torch imports with none of its own, by dotted paths. Autocast casts what
# flex_attention hands on, by no list.
IN_OTHER_MODULES = {"torch.nn.attention.flex_attention.flex_attention": "half"}

# Operators that run listed ones inside C++, where no patch of the inner name reaches them, other
# names of listed operators, products of matrices that torch's lists do not have yet, and what takes
# one dtype.
COMPOSITES = {
    "_grouped_mm": "half",
    "allclose": "promote",
    "arccos": "float",
    "arcsin": "float",
    "arctan2": "promote",
    "cartesian_prod": "promote",
    "cross_entropy": "float",
    "cross_entropy_loss": "float",
    "cumulative_trapezoid": "float",
    "dsmm": "half",
    "embedding_bag": "promote",
    "grid_sample": "promote",
    "grouped_mm": "half",
    "gru": "half",
    "heaviside": "promote",
    "inner": "promote",
    "isclose": "promote",
    "lerp": "promote",
    "linalg_cross": "promote",
    "linalg_matmul": "half",
    "linalg_norm": "float_dtype",
    "linear_cross_entropy": "promote",
    "lstm": "half",
    "meshgrid": "promote",
    "nll_loss_nd": "float",
    "norm_except_dim": "float",
    "pairwise_distance": "float",
    "rnn_relu": "half",
    "rnn_tanh": "half",
    "special_erfinv": "float",
    "special_expm1": "float",
    "special_log1p": "float",
    "special_log_softmax": "float_dtype",
    "special_logsumexp": "float",
    "special_softmax": "float_dtype",
    "spmm": "half",
    "square": "float",
    "sum_to_size": "float",
    "trapezoid": "float",
    "trapz": "float",
    "upsample": "float",
    "upsample_bilinear": "float",
    "upsample_nearest": "float",
}

# Operators in none of the lists that have no half kernel, on no device. Or one on CUDA devices that
# helps little: for sizes that are powers of two (`fft`), or to complex numbers of float16 parts,
# which few others take.
NO_HALF = frozenset(
    {
        "cholesky_inverse",
        "cholesky_solve",
        "complex",
        "ctc_loss",
        "det",
        "fft_fft",
        "fft_fft2",
        "fft_fftn",
        "fft_hfft",
        "fft_hfft2",
        "fft_hfftn",
        "fft_ifft",
        "fft_ifft2",
        "fft_ifftn",
        "fft_ihfft",
        "fft_ihfft2",
        "fft_ihfftn",
        "fft_irfft",
        "fft_irfft2",
        "fft_irfftn",
        "fft_rfft",
        "fft_rfft2",
        "fft_rfftn",
        "geqrf",
        "histogram",
        "histogramdd",
        "inverse",
        "linalg_cholesky",
        "linalg_cholesky_ex",
        "linalg_cond",
        "linalg_det",
        "linalg_eig",
        "linalg_eigh",
        "linalg_eigvals",
        "linalg_eigvalsh",
        "linalg_householder_product",
        "linalg_inv",
        "linalg_inv_ex",
        "linalg_ldl_factor",
        "linalg_ldl_factor_ex",
        "linalg_ldl_solve",
        "linalg_lstsq",
        "linalg_lu",
        "linalg_lu_factor",
        "linalg_lu_factor_ex",
        "linalg_lu_solve",
        "linalg_matrix_power",
        "linalg_matrix_rank",
        "linalg_pinv",
        "linalg_polar",
        "linalg_qr",
        "linalg_slogdet",
        "linalg_solve",
        "linalg_solve_ex",
        "linalg_solve_triangular",
        "linalg_svd",
        "linalg_svdvals",
        "linalg_tensorinv",
        "linalg_tensorsolve",
        "linalg_vander",
        "lobpcg",
        "logdet",
        "lu",
        "lu_solve",
        "matrix_power",
        "nanquantile",
        "orgqr",
        "ormqr",
        "pinverse",
        "polar",
        "quantile",
        "slogdet",
        "special_airy_ai",
        "special_bessel_j0",
        "special_bessel_j1",
        "special_bessel_y0",
        "special_bessel_y1",
        "special_chebyshev_polynomial_t",
        "special_chebyshev_polynomial_u",
        "special_chebyshev_polynomial_v",
        "special_chebyshev_polynomial_w",
        "special_erfcx",
        "special_hermite_polynomial_h",
        "special_hermite_polynomial_he",
        "special_laguerre_polynomial_l",
        "special_legendre_polynomial_p",
        "special_log_ndtr",
        "special_modified_bessel_i0",
        "special_modified_bessel_i1",
        "special_modified_bessel_k0",
        "special_modified_bessel_k1",
        "special_ndtri",
        "special_scaled_modified_bessel_k0",
        "special_scaled_modified_bessel_k1",
        "special_shifted_chebyshev_polynomial_t",
        "special_shifted_chebyshev_polynomial_u",
        "special_shifted_chebyshev_polynomial_v",
        "special_shifted_chebyshev_polynomial_w",
        "special_spherical_bessel_j0",
        "special_zeta",
        "stft",
        "svd",
        "triangular_solve",
        "view_as_complex",
    }
)

# The same whose forward or backward has no float16 or no bfloat16 kernel on the CPU; a test probes
# the running torch for them.
NO_HALF_ON_CPU = frozenset(
    {
        "_upsample_lanczos2d_aa",
        "avg_pool3d",
        "rrelu",
    }
)

# The reverse: half kernels on the CPU alone. A model is to compute alike on both, so these are in
# float32 on every device.
NO_HALF_ON_CUDA = frozenset(
    {
        "angle",
        "histc",
        "igamma",
        "igammac",
        "special_gammainc",
        "special_gammaincc",
    }
)

# As `NO_HALF_ON_CPU` for older versions: the one named got the kernels.
NO_HALF_ON_CPU_BEFORE = {
    "logcumsumexp": (2, 9),
    "special_i1": (2, 15),
    "special_i1e": (2, 15),
    "trace": (2, 13),
}

# As `NO_HALF`: the version named removed the function.
NO_HALF_BEFORE = {
    "cholesky": (2, 14),
    "qr": (2, 14),
}

# Operators of the lists above that have no half kernel either, on no device or not on the CPU. A
# region, in which no list counts, computes half arguments of theirs in float32.
LISTED_WITHOUT_HALF = {
    "cdist": "no_half",
    "linalg_matrix_norm": "no_half",
    "multi_margin_loss": "float_on_cpu",
    "nuclear_norm": "no_half",
    "pdist": "no_half",
}

# Of which functions torch's kernel for half tensors computes in float32 and rounds once, in forward
# and backward, by kind of device. Not that of group_norm: on CUDA its backward reads a mean and a
# deviation that are rounded to half (aten/src/ATen/native/group_norm.cpp). Nor that of layer_norm
# on the CPU: it adds up the gradients of weight and bias in half.
ROUNDED_ONCE = {
    "layer_norm": ("cuda",),
    "rms_norm": ("cuda",),
    "softmax": ("cpu", "cuda"),
    "special_softmax": ("cpu", "cuda"),
}

# What users may give as ``rules`` by its name: function -> rule.
PROFILES = {
    "fast-norms": {
        "group_norm": "half_out",
        "layer_norm": "half_out",
        "rms_norm": "half_out",
        "softmax": "half_out",
    },
}

# What differs from torch's CUDA autocast, and why. A composite's rule casts once, before all of it,
# where autocast casts inside C++: results have the same dtype, and steps between may be in float32.
DIFFERENCES = {
    "corrcoef": "stays float32; autocast halves only the product inside, and with it the result",
    "cov": "stays float32; autocast halves only the product inside, and with it the result",
    "cross_entropy": "its log_softmax is float32 too; autocast's has the input's dtype",
    "cumulative_trapezoid": "its differences are float32 too; autocast's are half",
    "inner": "a number as a tensor counts as well; autocast lets the other operand's dtype rule",
    "ldexp": "stays half; before torch 2.11 autocast runs the pow inside in float32",
    "linalg_matrix_power": "stays float32; a negative power inverts, which has no half kernel",
    "linalg_matrix_sqrth": "float32; before torch 2.14 autocast leaves it alone",
    "linear_cross_entropy": "as cross_entropy, which it calls",
    "matrix_power": "stays float32; a negative power inverts, which has no half kernel",
    "pairwise_distance": "its differences are float32 too; autocast's are half",
    "rms_norm": "float32; before torch 2.12 autocast leaves it alone",
    "sum_to_size": "always float32; autocast leaves the dtype where nothing is to be summed",
    "trapezoid": "its differences are float32 too; autocast's are half",
    "trapz": "its differences are float32 too; autocast's are half",
    "triplet_margin_with_distance_loss": "as pairwise_distance, which it calls",
}

# The version of torch whose autocast came to do the same.
DIFFERENCES_BEFORE = {
    "ldexp": (2, 11),
    "linalg_matrix_sqrth": (2, 14),
    "rms_norm": (2, 12),
}

# The operator behind each operator method of Tensor; in-place ones are never wrapped.
OPERATORS = {
    "__abs__": "abs",
    "__add__": "add",
    "__eq__": "eq",
    "__floordiv__": "floor_divide",
    "__ge__": "ge",
    "__gt__": "gt",
    "__le__": "le",
    "__lt__": "lt",
    "__matmul__": "matmul",
    "__mod__": "remainder",
    "__mul__": "mul",
    "__ne__": "ne",
    "__neg__": "neg",
    "__pow__": "pow",
    "__radd__": "add",
    "__rdiv__": "reciprocal",
    "__rfloordiv__": "floor_divide",
    "__rmatmul__": "matmul",
    "__rmod__": "remainder",
    "__rmul__": "mul",
    "__rpow__": "pow",
    "__rsub__": "sub",
    "__rtruediv__": "reciprocal",
    "__sub__": "sub",
    "__truediv__": "div",
}


def rules() -> dict[str, str]:
    """Return the rule of every operator that has one in some version of torch, by its name."""
    return {
        **dict.fromkeys(NO_HALF, "no_half"),
        **dict.fromkeys(NO_HALF_ON_CUDA, "no_half"),
        **dict.fromkeys(NO_HALF_BEFORE, "no_half"),
        **dict.fromkeys(NO_HALF_ON_CPU, "float_on_cpu"),
        **dict.fromkeys(NO_HALF_ON_CPU_BEFORE, "float_on_cpu"),
        **COMPOSITES,
        **dict.fromkeys(HALF, "half"),
        **dict.fromkeys(FLOAT, "float"),
        **dict.fromkeys(FLOAT_DTYPE, "float_dtype"),
        **dict.fromkeys(PROMOTE, "promote"),
        **dict.fromkeys(BANNED, "banned"),
    }
