"""Training steps of one model by torch's autocast, by amp_patch, and written by hand.

Each starts from the same weights, and steps the same optimizer.
"""

from __future__ import annotations

import argparse
import contextlib
import pkgutil
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
from benchmarks.host_models import HostModel
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import SGD, AdamW, Optimizer
from torch.utils._pytree import tree_leaves, tree_map

from amp_patch import amp
from amp_patch.casting import rules as cast_rules
from amp_patch.casting import targets

Step = Callable[[], None]
Compile = Callable[[nn.Module], nn.Module]
#: Steps that are not timed, more than those in which amp_patch looks for mistakes of the script
#: (`early_looks.WATCHED`).
WARM_UP = 36
MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]
#: The first one is stepped where nobody says which. SGD has momentum, and a rate by which no loss
#: overflows: a skipped step takes another time.
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "AdamW(fused=True)": partial(AdamW, fused=True),
    "AdamW": AdamW,
    "AdamW(foreach=True)": partial(AdamW, foreach=True),
    "SGD(fused=True)": partial(SGD, lr=1e-6, momentum=0.9, fused=True),
    "SGD": partial(SGD, lr=1e-6, momentum=0.9),
    "SGD(foreach=True)": partial(SGD, lr=1e-6, momentum=0.9, foreach=True),
}
_FUSED = OPTIMIZERS["AdamW(fused=True)"]
HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class Batches(NamedTuple):
    """What is computed for one step.

    Attributes:
        count: how many micro-batches.
        unscale_each: whether amp_patch unscales the gradients of each, not those of all at the end.
    """

    count: int = 1
    unscale_each: bool = False

    def are_delayed(self) -> list[bool]:
        """Return for each micro-batch whether its gradients stay scaled."""
        return [not self.unscale_each] * (self.count - 1) + [False]


ONE_BATCH = Batches()


def add_batches(parser: argparse.ArgumentParser) -> None:
    """Let a script take the fields of `Batches`."""
    parser.add_argument("--micro-batches", type=int, default=1, metavar="N", help="of each step")
    parser.add_argument("--unscale-each", action="store_true", help="without delay_unscale=True")


def _started(make: Callable[[], HostModel]) -> HostModel:
    torch.manual_seed(0)
    return make()


@contextlib.contextmanager
def autocast(
    make: Callable[[], HostModel],
    half: str,
    compiled: Compile,
    make_optimizer: MakeOptimizer = _FUSED,
    batches: Batches = ONE_BATCH,
) -> Iterator[Step]:
    """torch's own: with a ``GradScaler`` in float16, without any scale in bfloat16."""
    model, loss_of, _ = _started(make)
    optimizer = make_optimizer(list(model.parameters()))
    scaler = torch.amp.GradScaler("cpu")
    model = compiled(model)

    def scaled_step() -> None:
        optimizer.zero_grad()
        for _ in range(batches.count):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = loss_of(model)
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    def plain_step() -> None:
        optimizer.zero_grad()
        for _ in range(batches.count):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = loss_of(model)
            loss.backward()
        optimizer.step()

    yield scaled_step if half == "fp16" else plain_step


@contextlib.contextmanager
def list_of_cuda() -> Iterator[None]:
    """Let torch's autocast on a CPU run in fp32 what it runs so on CUDA devices.

    For what its casts take; a wrapper of Python, as this, takes other time.
    """

    def in_float32(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            dtypes = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.dtype)]
            if torch.is_autocast_enabled("cpu") and not dtypes:
                args, kwargs = tree_map(_float32, (args, kwargs))
            return function(*args, **kwargs)

        return call

    with contextlib.ExitStack() as stack:
        for name in rules_of_cpu_autocast():
            for path in targets.user_rule_targets(name):
                owner, _, own_name = path.rpartition(".")
                place = pkgutil.resolve_name(owner)
                function = in_float32(getattr(place, own_name))
                stack.enter_context(mock.patch.object(place, own_name, function))
        yield


def _float32(leaf: Any) -> Any:
    is_half = isinstance(leaf, Tensor) and leaf.dtype in HALVES.values()
    return leaf.float() if is_half else leaf


def rules_of_cpu_autocast() -> dict[str, str]:
    """Return what leaves alone the functions that run in fp32 under CUDA's autocast alone.

    On a CPU torch's autocast follows a list of its own, without layer norm, softmax and others.
    """
    names = torch._C._dispatch_get_all_op_names()
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    cast = [name for name in names if has_kernel(name, "AutocastCPU")]
    known = {name.removeprefix("aten::").split(".")[0].removesuffix("_loss") for name in cast}
    return {
        op: "off"
        for op, rule in cast_rules.rules().items()
        if rule in ("float", "float_dtype")
        and op.removesuffix("_nd").removesuffix("_loss") not in known
        and _is_public(op)
    }


def _is_public(op: str) -> bool:
    try:
        return bool(targets.user_rule_targets(op))
    except ValueError:
        return False


@contextlib.contextmanager
def amp_patch(
    make: Callable[[], HostModel],
    opt_level: str,
    compiled: Compile,
    make_optimizer: MakeOptimizer = _FUSED,
    batches: Batches = ONE_BATCH,
    *,
    fused_step: bool = False,
    rules: dict[str, str] | None = None,
) -> Iterator[Step]:
    """The same at a level."""
    model, loss_of, _ = _started(make)
    optimizer = make_optimizer(list(model.parameters()))
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=opt_level, fused_step=fused_step, rules=rules, verbosity=0
    )
    model = compiled(model)
    delayed = batches.are_delayed()

    def step() -> None:
        optimizer.zero_grad()
        for is_delayed in delayed:
            loss = loss_of(model)
            with amp.scale_loss(loss, optimizer, delay_unscale=is_delayed) as scaled_loss:
                scaled_loss.backward()
        optimizer.step()

    try:
        yield step
    finally:
        amp.deactivate()


@contextlib.contextmanager
def bare(
    make: Callable[[], HostModel],
    half: str,
    compiled: Compile,
    make_optimizer: MakeOptimizer = _FUSED,
    batches: Batches = ONE_BATCH,
) -> Iterator[Step]:
    """What one writes by hand for this one model: no hook, no safety, nothing that may change.

    A half model (batch norms in fp32), fp32 masters, multi-tensor copies, one check in float16.
    Micro-batches are added up in half.
    """
    bare_model = _BareModel(make, HALVES[half], compiled, make_optimizer, batches.count)
    yield bare_model.scaled_step if half == "fp16" else bare_model.plain_step


class _BareModel:
    def __init__(
        self,
        make: Callable[[], HostModel],
        half: torch.dtype,
        compiled: Compile,
        make_optimizer: MakeOptimizer,
        micro_batches: int,
    ) -> None:
        self.micro_batches = micro_batches
        model, _, self.loss_of = _started(make)
        masters = {param: param.detach().clone() for param in model.parameters()}
        for module in model.modules():
            if not isinstance(module, _BatchNorm):
                for param in module.parameters(recurse=False):
                    param.data = param.data.to(half)
        self.params = [param for param in model.parameters() if param.requires_grad]
        self.halves = [param for param in self.params if param.dtype is half]
        self.own = [param for param in self.params if param.dtype is not half]
        self.masters = [masters[param] for param in self.halves]
        self.grads = [torch.zeros_like(master) for master in self.masters]
        for master, grad in zip(self.masters, self.grads, strict=True):
            master.grad = grad
        self.optimizer = make_optimizer([*self.masters, *self.own])
        self.found_inf, self.inverse = torch.zeros(1), torch.ones(1)
        self.scale, self.unskipped = 65536.0, 0
        self.model = compiled(model)

    def scaled_step(self) -> None:
        for param in self.params:
            param.grad = None
        for _ in range(self.micro_batches):
            (self.loss_of(self.model) * self.scale).backward()
        torch._foreach_copy_(self.grads, [param.grad for param in self.halves])
        self.found_inf.zero_()
        self.inverse.fill_(1 / self.scale)
        torch._amp_foreach_non_finite_check_and_unscale_(
            [*self.grads, *(param.grad for param in self.own)], self.found_inf, self.inverse
        )
        if self.found_inf.item():
            self.scale, self.unskipped = self.scale / 2, 0
            return
        self.unskipped += 1
        self._step()

    def plain_step(self) -> None:
        for param in self.params:
            param.grad = None
        for _ in range(self.micro_batches):
            self.loss_of(self.model).backward()
        torch._foreach_copy_(self.grads, [param.grad for param in self.halves])
        self._step()

    def _step(self) -> None:
        self.optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(self.halves, self.masters)
