"""What torch looks like unpatched: the identity of everything that a patch could replace.

It knows nothing of amp_patch's own rules, so that a target missing there cannot hide here: whole
namespaces are compared, not lists of names.
"""

import functools
import operator
import sys
import weakref
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
import torch._dynamo.mutation_guard
import torch.backends.mha
import torch.optim.optimizer as torch_optimizer
import torch.utils.checkpoint

# torch patches itself too: importing dynamo, as the building of any optimizer does, replaces
# torch.manual_seed, and the first compilation replaces nn.Module.__init__
torch._dynamo.mutation_guard.install_generation_tagging_init()

NAMESPACES = (
    torch,
    torch._C._nn,
    torch._VF,
    torch.autograd,
    torch.backends.mha,
    torch.fft,
    torch.func,
    torch.linalg,
    torch.nn.functional,
    torch.nn.init,
    torch.nn.modules.activation,
    torch.nn.modules.rnn,
    torch.nn.modules.transformer,
    torch.nn.utils,
    torch_optimizer,
    torch.special,
    torch.utils.checkpoint,
)
CLASSES = (
    torch.Tensor,
    torch.autograd.Function,
    torch.nn.GRU,
    torch.nn.LSTM,
    torch.nn.Module,
    torch.nn.MultiheadAttention,
    torch.nn.Parameter,
    torch.nn.RNN,
    torch.nn.RNNBase,
    torch.nn.TransformerEncoder,
    torch.nn.TransformerEncoderLayer,
    torch.optim.Optimizer,
)
GLOBAL_HOOKS = (
    torch_optimizer._global_optimizer_pre_hooks,
    torch_optimizer._global_optimizer_post_hooks,
    torch.nn.modules.module._global_forward_hooks,
    torch.nn.modules.module._global_forward_pre_hooks,
)
ABSENT = object()
FUNCTIONS = (FunctionType, BuiltinFunctionType)


@dataclass(frozen=True)
class Snapshot:
    """The attributes seen, by owner, and the names that other modules bound to them."""

    attributes: dict[Any, dict[str, Any]]
    bound_names: dict[tuple[str, str], Any]
    hooks: tuple[tuple[Any, ...], ...]
    fast_path: bool


class _Last:
    """Holds what was recorded last where no patch looks for functions, as it does in tables."""

    modules: list[str] = []
    objects: list[Any] = []
    snapshot: Snapshot


_last = _Last()


def take() -> Snapshot:
    """Record what stands now in torch, and where other modules have bound its functions.

    To record takes longer than many tests. What was recorded last is returned again while all is
    the very object that it was then.
    """
    if not is_left():
        attributes = {owner: _attributes(owner) for owner in (*NAMESPACES, *CLASSES)}
        _last.snapshot = _take(attributes)
        _last.modules, _last.objects = list(sys.modules), _objects()
    return _last.snapshot


def last() -> Snapshot:
    """Return what was recorded last."""
    return _last.snapshot


def is_left() -> bool:
    """Tell whether all is the very object that it was when the last snapshot was recorded."""
    if _last.modules != list(sys.modules):
        return False
    now = _objects()
    return len(now) == len(_last.objects) and all(map(operator.is_, now, _last.objects))


def _objects() -> list[Any]:
    """Return objects of which one is another once anything that a snapshot holds is."""
    found: list[Any] = [torch.backends.mha.get_fastpath_enabled()]
    for owner in (*NAMESPACES, *CLASSES):
        found.append(owner)
        found += vars(owner).values()
    for module, names in _bound.by_module:
        if module in sys.modules:
            found.append(module)
            found += map(vars(sys.modules[module]).get, names)
    for hooks in GLOBAL_HOOKS:
        found.append(hooks)
        found += hooks.values()
    return found


def _take(attributes: dict[Any, dict[str, Any]]) -> Snapshot:
    return Snapshot(
        attributes=attributes,
        bound_names=_bound_names(attributes, frozenset(sys.modules)),
        hooks=_hooks(),
        fast_path=torch.backends.mha.get_fastpath_enabled(),
    )


def differences(before: Snapshot) -> list[str]:
    """Name everything that is not what it was when ``before`` was taken, by identity."""
    changed = [f"{owner.__name__}.{name}" for owner, name, _ in _changed_attributes(before)]
    changed += [f"{module}.{name}" for module, name, _ in _changed_bound_names(before)]
    if before.hooks != _hooks():
        changed.append("a global hook of torch.optim or torch.nn")
    if before.fast_path != torch.backends.mha.get_fastpath_enabled():
        changed.append("torch.backends.mha.set_fastpath_enabled")
    return changed


def restore(before: Snapshot) -> None:
    """Put the attributes and bound names back, so that one leak does not fail the next tests."""
    for owner, name, value in _changed_attributes(before):
        if value is ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, value)
    for module, name, value in _changed_bound_names(before):
        setattr(sys.modules[module], name, value)
    torch.backends.mha.set_fastpath_enabled(before.fast_path)


def _attributes(owner: Any) -> dict[str, Any]:
    # a module's counters and flags change in normal use, its functions and classes do not
    return {name: value for name, value in vars(owner).items() if callable(value)}


def _changed_attributes(before: Snapshot) -> list[tuple[Any, str, Any]]:
    changed = []
    for owner, old in before.attributes.items():
        new = vars(owner)
        changed += [(owner, name, old[name]) for name in old if new.get(name) is not old[name]]
        if owner in CLASSES:  # modules load submodules and functions lazily, classes do not
            changed += [(owner, name, ABSENT) for name in _attributes(owner).keys() - old.keys()]
    return changed


class _Bound:
    """The names that torch's functions are bound to, as they were last looked for.

    Attributes:
        modules: those that were imported then.
        by_module: the name of each module that has some, and these.
        seen: for the name of each module outside torch the module, the number of its globals, and
            which of these are such names.
    """

    modules: frozenset[str] = frozenset()
    by_module: list[tuple[str, list[str]]] = []
    seen: dict[str, tuple[weakref.ref[Any], int, list[str]]] = {}


_bound = _Bound()
_NEVER: tuple[Any, int, list[str]] = (lambda: None, 0, [])


@functools.cache
def _is_torchs(module_name: str) -> bool:
    return module_name.partition(".")[0] == "torch"


def _bound_names(
    attributes: dict[Any, dict[str, Any]], modules: frozenset[str]
) -> dict[tuple[str, str], Any]:
    """Return what the names in modules hold that torch's functions are bound to.

    To look for such names takes longer than most tests: done once per set of modules, and only in
    those that have come or have other globals.
    """
    if _bound.modules != modules:
        _bound.modules, _bound.by_module = modules, _find_bound_names(attributes)
    return {
        (module, name): vars(sys.modules[module]).get(name, ABSENT)
        for module, names in _bound.by_module
        for name in names
    }


def _find_bound_names(attributes: dict[Any, dict[str, Any]]) -> list[tuple[str, list[str]]]:
    originals = {
        id(value)
        for names in attributes.values()
        for value in names.values()
        if isinstance(value, FUNCTIONS)
    }
    found = []
    for module_name, module in list(sys.modules.items()):
        if _is_torchs(module_name) or not isinstance(module, type(sys)):
            continue
        reference, number, names = _bound.seen.get(module_name, _NEVER)
        if reference() is not module or number != len(vars(module)):
            held = list(vars(module).items())
            names = [name for name, value in held if id(value) in originals]
            _bound.seen[module_name] = weakref.ref(module), len(held), names
        if names:
            found.append((module_name, names))
    return found


def _changed_bound_names(before: Snapshot) -> list[tuple[str, str, Any]]:
    return [
        (module, name, value)
        for (module, name), value in before.bound_names.items()
        if module in sys.modules and vars(sys.modules[module]).get(name, ABSENT) is not value
    ]


def _hooks() -> tuple[tuple[Any, ...], ...]:
    return tuple(tuple(hooks.values()) for hooks in GLOBAL_HOOKS)
