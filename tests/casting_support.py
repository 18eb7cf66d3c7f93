"""What tests of the patched functions share."""

import contextlib
import pkgutil
from typing import Any
from unittest import mock

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils import _pytree

from amp_patch.casting import rules
from amp_patch.casting.kept_wrappers import KeptWrappers
from amp_patch.casting.mode import mode, process
from amp_patch.casting.regions import FloatRegion, HalfRegion
from amp_patch.session import session

HALVES = {"O1": torch.float16, "O4": torch.bfloat16}
#: Those in which models are stored, too.
HALF_OF = {**HALVES, "O2": torch.float16, "O3": torch.float16, "O5": torch.bfloat16}
#: The lists of names of torch's functions, by their rule.
LISTS = {
    "half": rules.HALF,
    "float": rules.FLOAT,
    "float_dtype": rules.FLOAT_DTYPE,
    "promote": rules.PROMOTE,
    "banned": rules.BANNED,
}

ANY_DTYPE = st.sampled_from(
    [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.int64]
)


class Product(torch.autograd.Function):
    """``x @ weight`` by a function of a script's own: (N, K) and (K, M) to (N, M)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        grad = grad.to(weight.dtype)  # a forward that casts has made it of its result's dtype
        return grad @ weight.T, x.T @ grad


def activate(amp, opt_level="O1", model=None, **options):
    """Return a model at a level; a linear layer of 3 features where none is given."""
    model = nn.Linear(3, 3) if model is None else model
    amp.initialize(model, opt_level=opt_level, verbosity=0, **options)
    return model


def losses_of(model, loss_of, amp=None, backend=None, fullgraph=False, **options):
    """Return the losses of six steps of SGD, in float32 where no amp is given.

    Args:
        model: is trained.
        loss_of: gets it, compiled where a backend is given.
        options: of `amp.initialize`.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if amp is not None:
        model, optimizer = amp.initialize(model, optimizer, verbosity=0, **options)
    run = torch.compile(model, backend=backend, fullgraph=fullgraph) if backend else model
    losses = []
    for _ in range(6):
        loss = loss_of(run)
        if amp is None:
            loss.backward()
        else:
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def called_at(level: str, where: str, function: Any, *args: Tensor) -> Tensor:
    """Call it as if a model at this level lived, in its forward or not, or in a region."""
    half, casting = HALF_OF.get(level, torch.float16), level in {"O1", "O4"}
    before = process.save()
    process.devices, process.region_dtype = frozenset({"cpu"}), half
    process.dtype = half if casting else torch.float32
    try:
        if where == "inside":
            stored = half if level in {"O2", "O3", "O5"} else None
            mode.enter_model(1, half if casting else torch.float32, half, stored)
        if where == "half_region":
            with HalfRegion():
                return function(*args)
        if where == "float_region":
            with FloatRegion():
                return function(*args)
        return function(*args)
    finally:
        mode.leave_model(1)
        process.restore(before)


@contextlib.contextmanager
def half_kernels_as_on_cuda():
    """Give the CPU's half kernels what those of CUDA are given by the rule "half_out".

    For casts and dtypes. Those of layer norm round more often than CUDA's.
    """
    as_cuda = {name: ("cpu",) for name, kinds in rules.ROUNDED_ONCE.items() if "cuda" in kinds}
    made_anew = mock.patch.object(session.casts, "kept", KeptWrappers())
    with mock.patch.dict(rules.ROUNDED_ONCE, as_cuda), made_anew:
        yield


@contextlib.contextmanager
def casts_on():
    """Casts of O1 for one example of a property: torch stays unpatched, only decorators act."""
    process.dtype, process.devices = torch.float16, frozenset({"cpu"})
    try:
        yield
    finally:
        process.reset()


def existing(path):
    try:
        return pkgutil.resolve_name(path)
    except AttributeError:
        return None


def as_dtypes(tree, floating):
    """Copy a tree's tensors; floating ones take the given dtypes in turn."""
    seen = 0

    def convert(value):
        nonlocal seen
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            return value
        dtype = value.dtype
        if value.is_floating_point():
            dtype = floating[seen % len(floating)]
            seen += 1
        return value.detach().clone().to(dtype)

    return _pytree.tree_map(convert, tree)
