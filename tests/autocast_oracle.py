"""Torch's own CUDA autocast, run on fake CUDA tensors, and the same calls under a plain patch.

It knows the names of the rules and nothing of how amp_patch casts: what the rules mean is written
here a second time, as simply as possible. Samples are those of torch's operator database.
"""

import contextlib
import functools
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import hypothesis
import support
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal import common_methods_invocations, common_utils
from torch.testing._internal.autocast_test_lists import AutocastTestLists
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

# torch's test utilities load a profile of their own, of ten examples, for the whole process
hypothesis.settings.load_profile(support.PROFILE)
# and forbid any later change of torch.backends' flags in it
setattr(torch.backends, "__allow_nonbracketed_mutation_flag", True)

__all__ = ["AutocastTestLists", "SampleInput"]

HALF_DTYPES = (torch.float16, torch.bfloat16)
CASTABLE = (torch.float32, *HALF_DTYPES)
# their results are other dtypes or other views of the same values, and casts are not compared
UNCOMPARED = {"aten::_to_copy", "aten::clone", "aten::constant_pad_nd", "prim::device"}

FAKE_MODE = FakeTensorMode(allow_non_fake_inputs=True)

Call = Callable[..., Any]


def operators() -> list[OpInfo]:
    """Return torch's database of operators.

    It is no global here: its functions would be looked through in every test of the process.
    """
    return common_methods_invocations.op_db


def resolve(path: str) -> Any:
    """Return what a dotted path names now."""
    owner, _, name = path.rpartition(".")
    return getattr(_owner(owner), name)


@functools.cache
def _owner(path: str) -> Any:
    """Return a module or a class, for which Python looks among the files in vain each time."""
    return pkgutil.resolve_name(path)


@dataclass
class Outcome:
    """What a call returned, by dtypes, and the kernels it ran with the dtypes of their results."""

    dtypes: list[torch.dtype] = field(default_factory=list)
    kernels: list[tuple[str, tuple[torch.dtype, ...]]] = field(default_factory=list)
    error: str = ""


class Casts:
    """The reference reading of the rules: patches that cast while `active` is set."""

    def __init__(self, half_dtype: torch.dtype = torch.float16) -> None:
        self.active = False
        self.half_dtype = half_dtype

    @contextlib.contextmanager
    def patched(self, targets: dict[str, str]) -> Iterator[None]:
        with contextlib.ExitStack() as undo:
            for path, rule in targets.items():
                owner_path, name = path.rsplit(".", 1)
                owner = _owner(owner_path)
                original = getattr(owner, name)
                own = name in vars(owner)
                undo.callback(
                    *((setattr, owner, name, original) if own else (delattr, owner, name))
                )
                setattr(owner, name, self.wrap(original, rule))
            yield

    def wrap(self, function: Call, rule: str) -> Call:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.active and kwargs.get("out") is None:
                args, kwargs = self.cast(rule, args, kwargs)
            return function(*args, **kwargs)

        return call

    def cast(self, rule: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        found = [value for value in _pytree.tree_leaves((args, kwargs)) if castable(value)]
        if rule == "banned" and any(value.is_cuda for value in found):
            raise RuntimeError("banned under casts")
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.dtype)]
        holds_half = any(value.dtype in HALF_DTYPES for value in found)
        on_cpu = any(value.device.type == "cpu" and value.dtype in HALF_DTYPES for value in found)
        dtype = {
            "half": self.half_dtype,
            "float": torch.float32,
            "float_dtype": None if given else torch.float32,
            "promote": torch.float32 if len({value.dtype for value in found}) > 1 else None,
            "no_half": torch.float32 if holds_half else None,
            "float_on_cpu": torch.float32 if on_cpu else None,
            "banned": torch.float32 if on_cpu else None,
        }[rule]
        if dtype is None:
            return args, kwargs
        return _pytree.tree_map_only(
            torch.Tensor,
            lambda value: value.to(dtype) if castable(value) else value,
            (args, kwargs),
        )


class KernelLog(TorchDispatchMode):
    """Records each kernel that makes new values; casts are off while torch is inside a kernel."""

    def __init__(self, casts: Casts, outcome: Outcome) -> None:
        super().__init__()
        self.casts = casts
        self.outcome = outcome

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.equal.default:
            return True  # fake tensors have no values to compare
        active, self.casts.active = self.casts.active, False
        try:
            result = func(*args, **(kwargs or {}))
        finally:
            self.casts.active = active
        name = func._schema.name
        view = any(value.alias_info is not None for value in func._schema.returns)
        if name not in UNCOMPARED and not view:
            self.outcome.kernels.append((name, tuple(dtypes_of(result, floating=True))))
        return result


def castable(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in CASTABLE


def dtypes_of(tree: Any, floating: bool = False) -> list[torch.dtype]:
    tensors = [leaf for leaf in _pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    return [leaf.dtype for leaf in tensors if leaf.is_floating_point() or not floating]


def observe(casts: Casts, function: Call, args: Any, kwargs: Any, *, autocast: bool) -> Outcome:
    """Run a call on fake CUDA tensors, under torch's autocast or under the active patches."""
    outcome = Outcome()
    torch.set_autocast_enabled("cuda", autocast)
    torch.set_autocast_dtype("cuda", torch.float16)
    casts.active = not autocast
    try:
        with KernelLog(casts, outcome):
            outcome.dtypes = dtypes_of(function(*args, **kwargs))
    except Exception as error:
        outcome.error = f"{type(error).__name__}: {error}"
    finally:
        casts.active = False
        torch.set_autocast_enabled("cuda", False)
        torch.clear_autocast_cache()
    return outcome


def fake_cuda(tree: Any, floating: tuple[torch.dtype, ...]) -> Any:
    """Copy a tree's tensors as fake CUDA ones; floating ones take the given dtypes in turn."""
    seen = 0

    def convert(value: Any) -> Any:
        nonlocal seen
        if isinstance(value, torch.device) or (isinstance(value, str) and value == "cpu"):
            return torch.device("cuda")
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            return value
        dtype = value.dtype
        if value.is_floating_point():
            dtype = floating[seen % len(floating)]
            seen += 1
        return torch.empty_strided(value.shape, value.stride(), dtype=dtype, device="cuda")

    return _pytree.tree_map(convert, tree)


def observe_both(
    casts: Casts, path: str, args: Any, kwargs: Any, floating: tuple[torch.dtype, ...]
) -> tuple[Outcome, Outcome] | None:
    """Observe the function at `path` under torch's autocast and under the patches.

    None where autocast refuses the call.
    """
    with FAKE_MODE:
        cuda_args, cuda_kwargs = fake_cuda((args, kwargs), floating)
        function = resolve(path)
        expected = observe(casts, function, cuda_args, cuda_kwargs, autocast=True)
        if expected.error:
            return None
        return expected, observe(casts, function, cuda_args, cuda_kwargs, autocast=False)


def half_failures(
    casts: Casts, path: str, sample: SampleInput, *, active: bool
) -> dict[torch.dtype, str]:
    """Return the error of each half dtype in which a call, that float32 allows, fails on the CPU.

    Outputs that require gradients are also run backward.
    """
    failures = {}
    try:
        _run_as(path, sample, torch.float32)
    except Exception:
        return failures
    for dtype in HALF_DTYPES:
        casts.active, casts.half_dtype = active, dtype
        try:
            _run_as(path, sample, dtype)
        except Exception as error:
            failures[dtype] = f"{type(error).__name__}: {error}"
        finally:
            casts.active = False
    return failures


def _run_as(path: str, sample: SampleInput, dtype: torch.dtype) -> None:
    def convert(value: torch.Tensor) -> torch.Tensor:
        if value.is_floating_point() and value.layout is torch.strided:
            return value.detach().to(dtype).requires_grad_(value.requires_grad)
        return value

    args, kwargs = _pytree.tree_map_only(
        torch.Tensor, convert, ((sample.input, *sample.args), sample.kwargs)
    )
    result = resolve(path)(*args, **kwargs)
    tensors = [leaf for leaf in _pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    losses = [leaf.abs().sum() for leaf in tensors if leaf.requires_grad]
    if losses:
        torch.autograd.backward(losses)


def operator_name(name: str) -> str:
    """Return the operator's name as the rules have it: linalg_inv, layer_norm."""
    return name.removeprefix("nn.functional.").replace(".", "_")


def _names(op: OpInfo) -> list[str]:
    # torch has aliases of igamma with "torch." before them
    return [op.name, *(alias.name.removeprefix("torch.") for alias in op.aliases)]


def operator_names(op: OpInfo) -> list[str]:
    """Return the operator's name, and those of its aliases, as the rules have them."""
    return list(map(operator_name, _names(op)))


def spellings(op: OpInfo) -> Iterator[tuple[str, str]]:
    """Yield the operator name and dotted path of each public spelling of a database entry."""
    for name in _names(op):
        for path in (f"torch.{name}", f"torch.Tensor.{name}"):
            with contextlib.suppress(AttributeError, ImportError):
                resolve(path)
                yield operator_name(name), path


def samples(op: OpInfo, count: int, *, requires_grad: bool = False) -> list[SampleInput]:
    """Return up to `count` float32 samples, evenly spaced over those that torch has."""
    try:
        with (
            mock.patch.object(common_utils, "set_rng_seed", _unseeded),
            # the iterator looks for a unittest.TestCase among its callers: pytest's are not, and to
            # find the sources of all of them takes a tenth of a second per operator
            mock.patch.object(inspect, "stack", list),
        ):
            found = list(op.sample_inputs("cpu", torch.float32, requires_grad=requires_grad))
    except Exception:
        return []
    return [found[i * len(found) // count] for i in range(count)] if len(found) > count else found


def _unseeded(seed: int | None = None) -> None:
    """Stand for a seeding: without a GPU each queues one more call for when CUDA starts."""
