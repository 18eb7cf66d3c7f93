"""Owns the data of O1 and O4: which torch attributes are patched and how their arguments are cast.

It must not know how a cast is made, when casts are active or how an attribute is replaced.

The five lists are those of torch's CUDA autocast (ATen/autocast_mode.h, torch 2.15), written with
the operators' names; they hold on every device. `targets()` says on which public attributes of
the running torch each of them is reached.
"""

from __future__ import annotations

import difflib
import functools
import pkgutil

import torch

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

# Operators that run listed ones inside C++, where no patch of the inner name reaches them, and
# other names of listed operators.
COMPOSITES = {
    "arccos": "float",
    "arcsin": "float",
    "arctan2": "promote",
    "cross_entropy": "float",
    "cross_entropy_loss": "float",
    "cumulative_trapezoid": "float",
    "grid_sample": "promote",
    "gru": "half",
    "inner": "promote",
    "linalg_matmul": "half",
    "linalg_norm": "float_dtype",
    "linear_cross_entropy": "promote",
    "lstm": "half",
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
    "square": "float",
    "sum_to_size": "float",
    "trapezoid": "float",
    "trapz": "float",
    "upsample": "float",
    "upsample_bilinear": "float",
    "upsample_nearest": "float",
}

# Operators in none of the lists whose forward or backward has no float16 or no bfloat16 kernel on
# the CPU; a test probes the running torch for them.
NO_HALF_ON_CPU = frozenset(
    {
        "_upsample_lanczos2d_aa",
        "avg_pool3d",
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
        "rrelu",
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

# The same for older versions of torch: the one named got the kernels, or removed the function.
NO_HALF_ON_CPU_BEFORE = {
    "cholesky": (2, 14),
    "logcumsumexp": (2, 9),
    "qr": (2, 14),
    "special_i1": (2, 15),
    "special_i1e": (2, 15),
    "trace": (2, 13),
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
    "linalg_matrix_sqrth": "float32; before torch 2.15 autocast leaves it alone",
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
    "linalg_matrix_sqrth": (2, 15),
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

# Where users reach an operator, and what the place puts before its name in the operator's name.
SURFACES = {
    "torch": "",
    "torch.functional": "",
    "torch.Tensor": "",
    "torch.nn.functional": "",
    "torch._C._nn": "",
    "torch.fft": "fft_",
    "torch.linalg": "linalg_",
    "torch.special": "special_",
}

# torch's RNN modules call these through torch._VF, which answers to every name of torch.
_VF_NAMES = (
    "gru",
    "gru_cell",
    "lstm",
    "lstm_cell",
    "rnn_relu",
    "rnn_relu_cell",
    "rnn_tanh",
    "rnn_tanh_cell",
)

# Computing functions of torch.nn.functional that are no operators: a region casts at their entry.
_REGION_COMPOSITES = (
    "adaptive_max_pool1d_with_indices",
    "adaptive_max_pool2d_with_indices",
    "adaptive_max_pool3d_with_indices",
    "affine_grid",
    "dropout1d",
    "dropout2d",
    "dropout3d",
    "fold",
    "fractional_max_pool2d_with_indices",
    "fractional_max_pool3d_with_indices",
    "gaussian_nll_loss",
    "gumbel_softmax",
    "interpolate",
    "linear_cross_entropy",
    "local_response_norm",
    "logsigmoid",
    "lp_pool1d",
    "lp_pool2d",
    "lp_pool3d",
    "max_unpool1d",
    "multi_head_attention_forward",
    "multilabel_soft_margin_loss",
    "normalize",
    "softmin",
    "softsign",
    "tanhshrink",
    "triplet_margin_with_distance_loss",
    "unfold",
    "upsample",
    "upsample_bilinear",
    "upsample_nearest",
)

# No computation, or none in which the arguments' dtype matters: conversions, factories, lookups.
_REGION_EXCLUDED = frozenset(
    {
        "bernoulli",
        "binomial",
        "chalf",
        "choose_qparams_optimized",
        "clone",
        "dequantize",
        "embedding",
        "embedding_bag",
        "empty_quantized",
        "int_repr",
        "linspace",
        "logspace",
        "multinomial",
        "native_batch_norm",
        "normal",
        "poisson",
        "resize",
        "resize_as",
        "type_as",
    }
)
_REGION_EXCLUDED_STARTS = (
    "_",
    "batch_norm_",
    "cudnn_",
    "fbgemm_",
    "miopen_",
    "mkldnn_",
    "new_",
    "q_per_",
    "quantize",
    "sparse_",
    "to_",
)
_REGION_EXCLUDED_ENDS = ("_like", "_")

# They write to running statistics among their arguments, of which a cast would be a copy.
_REGION_FIRST_ARGUMENT = ("batch_norm", "instance_norm")


def rules() -> dict[str, str]:
    """Return the rule of every operator that has one in some version of torch, by its name."""
    return {
        **dict.fromkeys(NO_HALF_ON_CPU, "float_on_cpu"),
        **dict.fromkeys(NO_HALF_ON_CPU_BEFORE, "float_on_cpu"),
        **COMPOSITES,
        **dict.fromkeys(HALF, "half"),
        **dict.fromkeys(FLOAT, "float"),
        **dict.fromkeys(FLOAT_DTYPE, "float_dtype"),
        **dict.fromkeys(PROMOTE, "promote"),
        **dict.fromkeys(BANNED, "banned"),
    }


def targets() -> dict[str, str]:
    """Return the rule of every attribute to patch, by dotted path, for the running torch.

    The rules, for floating arguments that are not float64, also inside nested containers:
    'half' casts them to the level's half dtype; 'float' to float32; 'float_dtype' as 'float',
    but only where the call gives no dtype; 'promote' to the widest, where they are mixed;
    'float_on_cpu' half ones on the CPU to float32; 'banned' refuses the call as autocast
    does, except on the CPU, where it is 'float_on_cpu'.
    """
    running = tuple(map(int, torch.__version__.split(".")[:2]))
    outdated = {op for op, version in NO_HALF_ON_CPU_BEFORE.items() if version <= running}
    return {path: rule for op, rule in rules().items() if op not in outdated for path in _paths(op)}


def region_targets() -> list[str]:
    """Return the dotted path of every function whose arguments a precision region casts.

    Beside `targets()` these are the functions that compute new tensors from tensors by the
    schemas of the running torch: no in-place functions, views, factories or conversions.
    """
    found = set(targets())
    for path, owner, prefix in _surfaces():
        names = [name for name in dir(owner) if _computes(prefix + name)]
        found.update(f"{path}.{name}" for name in names if _is_function(getattr(owner, name)))
    found.update(f"torch.Tensor.{name}" for name in OPERATORS if hasattr(torch.Tensor, name))
    found.update(path for name in _REGION_COMPOSITES for path in _paths(name))
    return sorted(found)


def first_argument_targets() -> list[str]:
    """Return those of `region_targets()` of which a region must cast the first argument only."""
    return [path for name in _REGION_FIRST_ARGUMENT for path in _paths(name)]


def user_rule_targets(name: str) -> list[str]:
    """Return the dotted paths that a user's rule for `name` means.

    Args:
        name: a dotted path, which means itself, or the bare name of a torch function, which
            means every public place where torch has it.

    Raises:
        ValueError: nothing has this name, or it is a function that works in place.
    """
    if name.endswith("_") and not name.endswith("__"):
        raise ValueError(
            "rules must name functions that return their result; got the in-place "
            f"{name!r}: name {name.rstrip('_')!r} and call that."
        )
    paths = _dotted_path(name) if "." in name else _bare_name_paths(name)
    if not paths:
        raise ValueError(
            "rules must name functions of torch, by a bare name ('softmax') or a dotted path "
            f"('torch.nn.functional.softmax'); got {name!r}{_suggestion(name)}."
        )
    return paths


@functools.cache
def _surfaces() -> list[tuple[str, object, str]]:
    """Return path, object and operator-name prefix of each surface of the running torch."""
    return [(path, pkgutil.resolve_name(path), prefix) for path, prefix in SURFACES.items()]


def _paths(op: str) -> list[str]:
    """Return every dotted path at which the running torch offers the operator."""
    paths = [
        f"{path}.{op.removeprefix(prefix)}"
        for path, owner, prefix in _surfaces()
        if op.startswith(prefix) and _is_function(getattr(owner, op.removeprefix(prefix), None))
    ]
    paths += [
        f"torch.Tensor.{method}"
        for method, operator in OPERATORS.items()
        if operator == op and hasattr(torch.Tensor, method)
    ]
    if op in _VF_NAMES:
        paths.append(f"torch._VF.{op}")
    return paths


def _bare_name_paths(name: str) -> list[str]:
    """Return the paths of the operator and of every function with this very name."""
    named = [
        f"{path}.{name}"
        for path, owner, _ in _surfaces()
        if _is_function(getattr(owner, name, None))
    ]
    return list(dict.fromkeys(named + _paths(name)))


def _is_function(value: object) -> bool:
    return callable(value) and not isinstance(value, type)


def _dotted_path(path: str) -> list[str]:
    """Return the path alone when it leads to something callable, else nothing."""
    try:
        found = pkgutil.resolve_name(path)
    except (ImportError, AttributeError, ValueError):
        return []
    return [path] if _is_function(found) else []


def _suggestion(name: str) -> str:
    """Return the end of an error message: existing names close to `name`, and a call with one."""
    known = {
        f"{path}.{attribute}" if "." in name else attribute
        for path, owner, _ in _surfaces()
        for attribute in dir(owner)
        if not attribute.endswith("_") and _is_function(getattr(owner, attribute, None))
    }
    begun = sorted((n for n in known if n.startswith(name)), key=lambda n: (len(n), n))[:3]
    close = begun or difflib.get_close_matches(name, sorted(known), n=3, cutoff=0.7)
    guess = f"; did you mean {' or '.join(map(repr, close))}?" if close else ", which it has not."
    return f"{guess} Call amp.initialize(..., rules={{{(close or ['softmax'])[0]!r}: 'float'}})"


def _computes(op: str) -> bool:
    """Tell whether the operator makes a new tensor from tensors, by its schemas."""
    if op in _REGION_EXCLUDED or op.endswith(_REGION_EXCLUDED_ENDS):
        return False
    if op.startswith(_REGION_EXCLUDED_STARTS):
        return False
    return any(map(_schema_computes, torch._C._jit_get_schemas_for_operator(f"aten::{op}")))


def _schema_computes(schema: torch._C.FunctionSchema) -> bool:
    """Tell whether one overload takes a tensor, writes to none and returns no view."""
    takes = any("Tensor" in str(argument.type) for argument in schema.arguments)
    returned = [result for result in schema.returns if "Tensor" in str(result.type)]
    aliases = [value.alias_info for value in (*schema.arguments, *returned)]
    writes = any(alias is not None and alias.is_write for alias in aliases)
    views = any(result.alias_info is not None for result in returned)
    return takes and bool(returned) and not writes and not views
