"""Random training programs, run once with the weight cache and once with casts made afresh.

A program is a list of ``(operation, seed)``. It knows of the cache only that the uncached run, in
which every weight is cast at every use, is what it must not differ from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, settings
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from amp_patch import amp
from amp_patch.casting.weight_cache import WeightCache

SCALE = 8.0
#: Of the properties that draw programs.
shared_fixtures = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
#: Programs may well clear gradients before their step, or step after a block that failed.
steps_without_gradients = pytest.mark.filterwarnings(
    "ignore:gradients must last until the step",
    r"ignore:a scale_loss\(\) block that an exception ends",
)
Program = list[tuple[str, int]]
RECOMPUTES = {0: None, 1: True, 2: False}


def uncached(cache: WeightCache, param: nn.Parameter, dtype: torch.dtype) -> Tensor:
    """Stand in for `WeightCache.cast` and `cast_plainly`: autocast without its cache."""
    return param.to(dtype) if param.dtype is torch.float32 else param


class Checkpointed(nn.Module):
    """Features, recomputed in backward where a checkpoint is asked for, and outputs from them."""

    features: Callable[[Tensor], Tensor]
    outputs: Callable[[Tensor], Tensor]

    def forward(self, x: Tensor, reentrant: bool | None = None, fail: bool = False) -> Tensor:
        if reentrant is None:
            features = self.features(x)
        else:
            features = checkpoint(self.features, x, use_reentrant=reentrant)
        if fail:
            raise ArithmeticError("a failing batch")
        return self.outputs(features)


class Net(Checkpointed):
    """Uses each weight once: (4, 6) to (4, 3). The weights are saved for backward as they are
    (conv, bmm), as a view of the same storage (linear) or inside a composite (prelu)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 2, 3, padding=1)
        self.slope = nn.PReLU(2)
        self.mix = nn.Parameter(torch.randn(4, 6, 6) / 3)
        self.narrow = nn.Linear(12, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.head = nn.Linear(6, 3)

    def features(self, x: Tensor) -> Tensor:
        mixed = torch.bmm(self.slope(self.conv(x.unsqueeze(1))), self.mix)
        return self.frozen(self.narrow(mixed.flatten(1)))

    def outputs(self, features: Tensor) -> Tensor:
        return self.head(features)


class TwiceNet(Checkpointed):
    """Uses each weight twice: (4, 6) to (4, 6)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6) / 3)
        self.linear = nn.Linear(6, 6)

    def features(self, x: Tensor) -> Tensor:
        return self.linear(F.linear(x, self.weight).tanh())

    def outputs(self, features: Tensor) -> Tensor:
        return self.linear(torch.matmul(features.tanh(), self.weight))


class Drift(torch.optim.Optimizer):
    """Writes to the weights whatever their gradients are, and leaves no trace in their version."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.data.add_(torch.randn(param.shape), alpha=0.1)


class Run:
    """One run of a program. Each operation draws what it needs from its own seed.

    Attributes:
        seen: every output and gradient, in order.
    """

    def __init__(self, model: nn.Module, opt_level: str) -> None:
        self.model = model
        self.params = list(model.parameters())
        self.own = self.given_optimizer()
        amp.initialize(model, self.own, opt_level=opt_level, loss_scale=SCALE, verbosity=0)
        self.others = self.other_optimizers()
        self.average = [param.detach() + 0.1 for param in self.params]
        self.seen: list[tuple[str, Tensor]] = []
        self.pending: list[tuple[Tensor, int]] = []
        # True from a forward with grad until the cache is told that the iteration is over; writes
        # through .data are promised to be seen between iterations only.
        self.within = False
        self.delayed = False

    def given_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.params, lr=0.05, momentum=0.9)

    def other_optimizers(self) -> list[torch.optim.Optimizer]:
        return [
            torch.optim.SGD(self.params, lr=0.05, foreach=False),
            torch.optim.AdamW(self.params, lr=0.01, fused=True),
        ]

    def execute(self, program: Program) -> list[tuple[str, Tensor]]:
        for position, (operation, seed) in enumerate(program):
            torch.manual_seed(1000 * position + seed)
            getattr(self, operation)(seed)
        return self.seen

    def note(self, what: str, *tensors: Tensor | None) -> None:
        self.seen += [(what, t.detach().clone()) for t in tensors if t is not None]

    def loss(self, seed: int) -> Tensor:
        self.x = torch.randn(4, 6, requires_grad=True)
        self.within = True
        output = self.model(self.x, RECOMPUTES[seed % 3])
        self.note("output", output)
        return output.float().square().mean()

    def backward(self, loss: Tensor, delay: bool = False) -> None:
        with amp.scale_loss(loss, self.own, delay_unscale=delay) as scaled:
            scaled.backward()
        self.within = self.within and delay
        self.delayed = delay
        self.note("gradient", *(param.grad for param in self.params), self.x.grad)

    def repeats_later(self) -> bool:
        """True while a graph waits for its backward to run a checkpointed function again."""
        return any(RECOMPUTES[made_by % 3] is not None for _, made_by in self.pending)

    # -- operations --------------------------------------------------------------------------

    def train(self, seed: int) -> None:
        self.backward(self.loss(seed))

    def accumulate(self, seed: int) -> None:
        self.backward(self.loss(seed), delay=True)

    def forward_only(self, seed: int) -> None:
        self.pending.append((self.loss(seed), seed))

    def late_backward(self, seed: int) -> None:
        if self.pending:
            self.backward(self.pending.pop(seed % len(self.pending))[0])

    def penalty(self, seed: int) -> None:
        loss = self.loss(0)
        (slope,) = torch.autograd.grad(loss, self.x, create_graph=True)
        self.backward(slope.float().square().sum())

    def autograd_grad(self, seed: int) -> None:
        loss = self.loss(2 * (seed % 2))  # reentrant checkpoints refuse autograd.grad
        trained = [param for param in self.params if param.requires_grad]
        if trained:  # torch refuses an empty list
            self.note("autograd.grad", *torch.autograd.grad(loss, trained, allow_unused=True))

    def read_without_grad(self, seed: int) -> None:
        context = torch.no_grad if seed % 2 else torch.inference_mode
        with context():
            self.note("read", self.model(torch.randn(4, 6)))

    def failing_forward(self, seed: int) -> None:
        self.within = True
        try:
            self.model(torch.randn(4, 6, requires_grad=True), RECOMPUTES[seed % 3], fail=True)
        except ArithmeticError:
            return
        raise AssertionError("the forward was to fail")

    def failing_body(self, seed: int) -> None:
        loss = self.loss(seed)
        try:
            with amp.scale_loss(loss, self.own):
                raise ArithmeticError("before the backward")
        except ArithmeticError:
            self.within = False

    def own_step(self, seed: int) -> None:
        if not self.delayed:
            self.own.step()
            self.within = False

    def other_step(self, seed: int) -> None:
        self.others[seed % len(self.others)].step()
        self.within = False

    def zero_grad(self, seed: int) -> None:
        self.own.zero_grad(set_to_none=bool(seed % 2))
        self.delayed = False

    def write_in_place(self, seed: int) -> None:
        with torch.no_grad():
            self.params[seed % len(self.params)].add_(0.25)

    def write_data(self, seed: int) -> None:
        if not self.within:
            self.params[seed % len(self.params)].data.mul_(0.5)

    def replace_data(self, seed: int) -> None:
        if not self.within:
            param = self.params[seed % len(self.params)]
            param.data = param.data * 1.5

    def toggle_requires_grad(self, seed: int) -> None:
        # A checkpoint refuses to repeat what would save other tensors than the first time.
        if not self.repeats_later():
            param = self.params[seed % len(self.params)]
            param.requires_grad_(not param.requires_grad)

    def load_state_dict(self, seed: int) -> None:
        self.model.load_state_dict({k: v * 0.5 for k, v in self.model.state_dict().items()})

    def evaluate_average(self, seed: int) -> None:
        """Swap the weights for their average and back, through .data, within the iteration."""
        self.model.eval()
        self.swap_average()
        # With grad, casts of the average would be what a pending checkpoint finds.
        with torch.set_grad_enabled(bool(seed % 2) and not self.repeats_later()):
            self.note("average", self.model(torch.randn(4, 6)))
        self.swap_average()
        self.model.train()

    def swap_average(self) -> None:
        for param, average in zip(self.params, self.average, strict=True):
            weight = param.detach().clone()
            param.data.copy_(average)
            average.copy_(weight)


class TwiceRun(Run):
    """Steps that do not depend on gradients, so that two runs have the same weights throughout."""

    def given_optimizer(self) -> torch.optim.Optimizer:
        return Drift(self.params)

    def other_optimizers(self) -> list[torch.optim.Optimizer]:
        return [Drift(self.params)]

    def backward(self, loss: Tensor, delay: bool = False) -> None:
        self.own.zero_grad()
        super().backward(loss)


OPERATIONS = [
    "accumulate",
    "autograd_grad",
    "evaluate_average",
    "failing_body",
    "failing_forward",
    "forward_only",
    "late_backward",
    "load_state_dict",
    "other_step",
    "own_step",
    "penalty",
    "read_without_grad",
    "replace_data",
    "toggle_requires_grad",
    "train",
    "write_data",
    "write_in_place",
    "zero_grad",
]


def programs(without: tuple[str, ...] = ()) -> st.SearchStrategy[Program]:
    """Programs of up to 14 operations; half of them training steps, else few graphs are built."""
    known = [operation for operation in OPERATIONS if operation not in without]
    usual = ["train", "train", "accumulate", "forward_only", "late_backward", "own_step"]
    busy = [operation for operation in usual if operation not in without]
    operation = st.one_of(st.sampled_from(busy), st.sampled_from(known))
    return st.lists(st.tuples(operation, st.integers(0, 11)), min_size=2, max_size=14)


def maker(run: type[Run], net: type[nn.Module], opt_level: str) -> Callable[[], Run]:
    """Return what makes a run of a net that has the same weights each time."""

    def make() -> Run:
        torch.manual_seed(0)
        return run(net(), opt_level)

    return make


def bits(tensor: Tensor) -> Tensor:
    """View numbers of 16 or 32 bits as integers: a NaN is equal to itself then."""
    return tensor.view(torch.int16 if tensor.element_size() == 2 else torch.int32)


def run_both(
    make: Callable[[], Run], program: Program, monkeypatch: Any
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield what each run saw: ``(what, with the cache, without)``."""
    cached = make().execute(program)
    with monkeypatch.context() as patch:
        patch.setattr(WeightCache, "cast", uncached)
        patch.setattr(WeightCache, "cast_plainly", uncached)
        reference = make().execute(program)
    for (what, found), (_, expected) in zip(cached, reference, strict=True):
        yield what, found, expected
