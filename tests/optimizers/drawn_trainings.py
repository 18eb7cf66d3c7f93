"""Trainings of which each action is drawn, and what two of them are compared by."""

import contextlib
import copy
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import Optimizer

INF, NAN = float("inf"), float("nan")
EPS = 1e-3
Make = Callable[[Any], Optimizer]


class Branches(nn.Module):
    """Two layers of which a batch may leave one out, and a norm that stays in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, inputs: Tensor, leave_out: str) -> Tensor:
        hidden = self.norm(inputs)
        for name in ("first", "second"):
            hidden = hidden if name == leave_out else getattr(self, name)(hidden)
        return hidden


@contextlib.contextmanager
def unless_scaled() -> Iterator[None]:
    """Let pass what is refused while gradients are scaled, and only that."""
    try:
        yield
    except RuntimeError as error:
        if "delay_unscale" not in str(error):
            raise


class Run:
    """A model in training; each method is something that users do."""

    def __init__(
        self, amp: ModuleType, fused: bool, level: str, make: Make, **options: Any
    ) -> None:
        torch.manual_seed(0)
        self.amp = amp
        model = Branches()
        self.spare = nn.Parameter(torch.linspace(-1, 1, 6))
        groups = [
            {"params": [*model.first.parameters(), *model.norm.parameters()]},
            {"params": list(model.second.parameters()), "lr": 0.02},
        ]
        options = {"loss_scale": 64.0, "verbosity": 0, "fused_step": fused, **options}
        self.model, self.optimizer = amp.initialize(model, make(groups), opt_level=level, **options)

    def loss(self, seed: int = 0, leave_out: str = "", factor: float = 1.0) -> Tensor:
        inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))
        return self.model(inputs, leave_out).float().square().mean() * factor

    def backward(self, delay: bool = False, late: bool = False, **options: Any) -> None:
        with self.amp.scale_loss(
            self.loss(**options), self.optimizer, delay_unscale=delay, delay_overflow_check=late
        ) as scaled_loss:
            scaled_loss.backward()

    def failing_backward(self) -> None:
        scaling = self.amp.scale_loss(self.loss(), self.optimizer)
        with contextlib.suppress(ArithmeticError), scaling as scaled_loss:
            scaled_loss.backward()
            raise ArithmeticError

    def step(self, *closure: Callable[[], Tensor]) -> None:
        with unless_scaled():
            self.optimizer.step(*closure)

    def train(self, **options: Any) -> None:
        self.backward(**options)
        self.step()

    def step_with_closure(self) -> None:
        def closure() -> Tensor:
            self.optimizer.zero_grad()
            self.backward(seed=3)
            return self.loss(seed=3).detach()

        self.step(closure)

    def clip(self, max_norm: float, norm_type: float) -> Tensor | None:
        with unless_scaled():
            return self.amp.clip_grad_norm_(self.optimizer, max_norm, norm_type=norm_type)
        return None

    def halve_gradients(self) -> None:
        for master in self.amp.master_params(self.optimizer):
            if master.grad is not None:
                master.grad *= 0.5

    def replace_a_gradient(self) -> None:
        master = next(iter(self.amp.master_params(self.optimizer)))
        master.grad = None if master.grad is None else torch.ones_like(master)

    def write_half_gradients(self) -> None:
        for param in self.model.parameters():
            if param.grad is not None and param.dtype is not torch.float32:
                param.grad *= 0.5

    def clear(self, how: str) -> None:
        if how == "one":
            self.model.first.weight.grad = None
        elif how == "model":
            self.model.zero_grad()
        else:
            self.optimizer.zero_grad(**({} if how == "plain" else {"set_to_none": how == "none"}))

    def penalize(self) -> None:
        with unless_scaled():
            for master in self.amp.master_params(self.optimizer):
                master.requires_grad_()
                (master.square().sum() * 0.01).backward()

    def write(self, to_master: bool) -> None:
        written = self.model.second.weight
        if to_master:
            master = next(iter(self.amp.master_params(self.optimizer)))
            # A weight's own `.data` is seen only after the last block of an accumulation.
            is_weight = any(master is param for param in self.model.parameters())
            written = master if is_weight else master.data
        with torch.no_grad():
            written.mul_(0.5)

    def change_options(self) -> None:
        self.optimizer.param_groups[1]["lr"] *= 2

    def add_group(self) -> None:
        if len(self.optimizer.param_groups) == 2:
            self.optimizer.add_param_group({"params": [self.spare], "lr": 0.1})
        self.spare.grad = torch.linspace(1, 2, 6)

    def reset_state(self) -> None:
        for group in self.optimizer.param_groups:
            self.optimizer.state[group["params"][0]] = {}

    def reload(self) -> None:
        self.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))

    def everything(self) -> dict[str, Any]:
        state = self.optimizer.state_dict()
        return {
            "weights": list(self.model.parameters()),
            # The values of half ones differ: a fused step leaves them as the backward did.
            "have gradients": [param.grad is not None for param in self.model.parameters()],
            "norm's gradients": [param.grad for param in self.model.norm.parameters()],
            "masters": [p for group in self.optimizer.param_groups for p in group["params"]],
            "state": [state["state"][key] for key in sorted(state["state"])],
            "skipped": self.amp.step_was_skipped(self.optimizer),
        }


def gradients_of(run: Run) -> list[Tensor | None]:
    return [master.grad for master in run.amp.master_params(run.optimizer)]


def assert_same(ours: Any, theirs: Any) -> None:
    """Compare bits, through lists and dicts."""
    if isinstance(theirs, Tensor):
        assert ours.dtype is theirs.dtype
        assert ours.shape == theirs.shape
        assert torch.equal(ours.nan_to_num(nan=7.0), theirs.nan_to_num(nan=7.0))
    elif isinstance(theirs, dict):
        assert list(ours) == list(theirs)
        assert_same(list(ours.values()), list(theirs.values()))
    elif isinstance(theirs, list):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert_same(one, other)
    else:
        assert ours == theirs


FACTORS = st.sampled_from([1.0, 1.0, 1.0, INF, NAN])
ACTIONS: st.SearchStrategy[tuple[str, dict[str, Any]]] = st.one_of(
    *[
        st.tuples(
            st.just(name),
            st.fixed_dictionaries(
                {
                    "seed": st.integers(0, 9),
                    "leave_out": st.sampled_from(["", "", "first", "second"]),
                    "factor": FACTORS,
                    "late": st.booleans(),
                }
            ),
        )
        for name in ("train", "train", "train", "backward")
    ],
    st.tuples(st.just("backward"), st.just({"delay": True})),
    st.tuples(
        st.just("clip"),
        st.fixed_dictionaries(
            {"max_norm": st.sampled_from([0.01, 100.0]), "norm_type": st.sampled_from([2.0, INF])}
        ),
    ),
    st.tuples(
        st.just("clear"),
        st.fixed_dictionaries({"how": st.sampled_from(["plain", "none", "zero", "one", "model"])}),
    ),
    st.tuples(st.just("write"), st.fixed_dictionaries({"to_master": st.booleans()})),
    st.tuples(
        st.sampled_from(
            [
                *("step", "step_with_closure", "failing_backward", "halve_gradients"),
                *("replace_a_gradient", "write_half_gradients", "penalize", "change_options"),
                *("add_group", "reset_state", "reload"),
            ]
        ),
        st.just({}),
    ),
)
