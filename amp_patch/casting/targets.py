"""Finds the attributes of the running torch that casts concern, by dotted path.

Those of the operators of `rules`, those that compute (for regions), and what a user's rule names.
Knows torch's public places and the schemas of its operators; replaces nothing.
"""

from __future__ import annotations

import functools
import pkgutil
import types
from collections.abc import Mapping

import torch

from amp_patch.common.did_you_mean import near

from . import rules

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

# Operators that a module of torch has imported by name.
_IMPORTED = {"softplus": ["torch.distributions.transforms.softplus"]}

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

# Rules of what has no half kernel, and as which a region runs it.
_WITHOUT_HALF = {"no_half": "no_half", "float_on_cpu": "float_on_cpu", "banned": "float_on_cpu"}

# They write to running statistics among their arguments, of which a cast would be a copy.
_REGION_FIRST_ARGUMENT = ("batch_norm", "instance_norm")


@functools.cache
def rule_targets() -> Mapping[str, str]:
    """Return the rule of every attribute to patch, by dotted path, for the running torch.

    The rules, for floating arguments that are not float64, also inside nested containers:
    'half' casts them to the level's half dtype; 'float' to float32; 'float_dtype' as 'float',
    but only where the call gives no dtype; 'promote' to the widest, where they are mixed;
    'no_half' half ones to float32; 'float_on_cpu' those on the CPU; 'banned' refuses the call
    as autocast does, except on the CPU, where it is 'float_on_cpu'.
    """
    running = tuple(map(int, torch.__version__.split(".")[:2]))
    before = rules.NO_HALF_ON_CPU_BEFORE | rules.NO_HALF_BEFORE
    outdated = {op for op, version in before.items() if version <= running}
    ruled = {op: rule for op, rule in rules.rules().items() if op not in outdated}
    found = {path: rule for op, rule in ruled.items() for path in _paths(op)}
    return types.MappingProxyType(found)


def no_half_targets() -> dict[str, dict[str, str]]:
    """Return where the running torch has functions without a half kernel: rules by module and name.

    The rules are 'no_half' and 'float_on_cpu'. Names of a class come with its name:
    ``Tensor.inverse``.
    """
    found: dict[str, dict[str, str]] = {}
    for path, rule in rule_targets().items():
        if rule in ("no_half", "float_on_cpu"):
            place, _, name = path.rpartition(".")
            if place == "torch.Tensor":
                place, name = "torch", f"Tensor.{name}"
            found.setdefault(place, {})[name] = rule
    return found


def region_float_targets() -> dict[str, str]:
    """Return what a region to half computes in float32, by dotted path, for it has no half kernel.

    'no_half' on every device; 'float_on_cpu' on the CPU, so what is 'banned' as well.
    """
    found = {path: rule for path, rule in rule_targets().items() if rule in _WITHOUT_HALF}
    for op, rule in rules.LISTED_WITHOUT_HALF.items():
        found.update(dict.fromkeys(_paths(op), rule))
    return {path: _WITHOUT_HALF[rule] for path, rule in found.items()}


def region_targets() -> list[str]:
    """Return the dotted path of every function whose arguments a precision region casts.

    Beside `rule_targets()` these are the functions that compute new tensors from tensors by the
    schemas of the running torch: no in-place functions, views, factories or conversions.
    """
    found = set(rule_targets())
    for path, owner, prefix in _surfaces():
        names = [name for name in dir(owner) if _computes(prefix + name)]
        found.update(f"{path}.{name}" for name in names if _is_function(getattr(owner, name)))
    found.update(f"torch.Tensor.{name}" for name in rules.OPERATORS if hasattr(torch.Tensor, name))
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
        for method, operator in rules.OPERATORS.items()
        if operator == op and hasattr(torch.Tensor, method)
    ]
    if op in _VF_NAMES:
        paths.append(f"torch._VF.{op}")
    return paths + _IMPORTED.get(op, [])


def _bare_name_paths(name: str) -> list[str]:
    """Return the paths of the operator and of every function with this very name."""
    named = [
        f"{path}.{name}"
        for path, owner, _ in _surfaces()
        if _is_function(getattr(owner, name, None))
    ]
    named += [path for path in rules.IN_OTHER_MODULES if path.endswith(f".{name}")]
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
    close = begun or near(name, sorted(known))
    if close:
        guess = f"; did you mean {' or '.join(map(repr, close))}?"
        return f"{guess} Call amp.initialize(..., rules={{{close[0]!r}: 'float'}})"
    return (
        ", which it has not. Call amp.initialize(..., rules={'softmax': 'float'}), or for a module "
        f"of the model rules={{'modules': {{{name!r}: 'float'}}}}"
    )


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
