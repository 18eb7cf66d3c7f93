"""The optimizers' rules: their options as the kernels take them, and the same in float64.

Knows nothing of memory and launches.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

import torch
from hypothesis import strategies as st
from torch import Tensor

from cuda_on_cpu import Argument


class Factors(NamedTuple):
    """What gradients bear, and what they are to be clipped by, in memory."""

    scale: Tensor | None
    clip: Tensor | None


class Reference(Protocol):
    """Masters that are stepped by somebody else's arithmetic."""

    masters: list[Tensor]

    def step(self, gradients: Sequence[Tensor]) -> None: ...

    def state(self, name: str) -> list[Tensor]: ...


class History(NamedTuple):
    """What rounding errors grow with.

    Attributes:
        start: the largest magnitude of a master at first.
        total: the sum over all steps of the largest magnitude of a master or gradient.
        steps: their number.
    """

    start: float = 0.0
    total: float = 0.0
    steps: int = 0


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Hyperparameters of a group.

    Attributes:
        name: what the names of its kernels begin with.
        size: bytes of its kernels' Coefficients.
    """

    name: ClassVar[str]
    size: ClassVar[int]
    lr: float = 0.125
    weight_decay: float = 0.1
    decoupled: bool = True
    maximize: bool = False
    lr_on_device: bool = False

    def arguments(self) -> list[Argument]:
        """Return what the kernel that prepares gets."""
        lr: list[Argument] = [self.lr, None]
        return [*([-1.0, torch.tensor(self.lr)] if self.lr_on_device else lr), *self.options()]

    def options(self) -> list[Argument]:
        """Return `arguments` after the learning rate."""
        raise NotImplementedError

    def state(self) -> dict[str, float | None]:
        """Return with what each tensor of the state starts; None for one that is not there."""
        return {"exp_avg": 0.0, "exp_avg_sq": 0.0}

    def reference(self, masters: Sequence[Tensor], dtype: torch.dtype = torch.float64) -> Reference:
        """Copy the masters, to step them by the rule."""
        raise NotImplementedError

    def tolerance(self, masters: Tensor, history: History) -> Tensor:
        """Return what float32's rounding of the values and of their updates may amount to.

        An update is at most a few times lr; a wrong coefficient is off by more than 1e-4 of it.
        """
        return (3e-7 * masters.abs() + 1e-5 * self.lr) * history.steps

    def state_tolerance(self, state: Tensor, history: History) -> Tensor:
        """As `tolerance`, of a tensor of the state."""
        return 3e-6 * state.abs() + 1e-6 * (state.abs().max() if state.numel() else 0.0)


class TorchOptimizer:
    """An optimizer of torch, with decay past it."""

    def __init__(
        self,
        make: Callable[[list[Tensor]], torch.optim.Optimizer],
        masters: Sequence[Tensor],
        dtype: torch.dtype,
        kept: float = 1.0,
    ) -> None:
        self.masters = [master.to(dtype, copy=True) for master in masters]
        self._optimizer, self._kept = make(self.masters), kept

    def step(self, gradients: Sequence[Tensor]) -> None:
        for master, gradient in zip(self.masters, gradients, strict=True):
            master.mul_(self._kept)
            master.grad = gradient.to(master.dtype)
        self._optimizer.step()

    def state(self, name: str) -> list[Tensor]:
        return [self._optimizer.state[master][name] for master in self.masters]


@dataclass(frozen=True, kw_only=True)
class AdamW(Rule):
    name = "adamw"
    size = 36
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    amsgrad: bool = False

    def options(self) -> list[Argument]:
        numbers = [*self.betas, self.eps, self.weight_decay]
        return [*numbers, int(self.decoupled), int(self.maximize)]

    def state(self) -> dict[str, float | None]:
        return {**super().state(), "max_exp_avg_sq": 0.0 if self.amsgrad else None}

    def reference(self, masters: Sequence[Tensor], dtype: torch.dtype = torch.float64) -> Reference:
        return TorchOptimizer(self._optimizer, masters, dtype)

    def _optimizer(self, parameters: list[Tensor]) -> torch.optim.Optimizer:
        kind = torch.optim.AdamW if self.decoupled else torch.optim.Adam
        return kind(
            parameters,
            lr=self.lr,
            betas=self.betas,
            eps=self.eps,
            weight_decay=self.weight_decay,
            amsgrad=self.amsgrad,
            maximize=self.maximize,
            foreach=False,
        )


@dataclass(frozen=True, kw_only=True)
class Sgd(Rule):
    name = "sgd"
    size = 32
    momentum: float = 0.9
    dampening: float = 0.0
    decoupled: bool = False
    nesterov: bool = False

    def options(self) -> list[Argument]:
        numbers = [self.momentum, self.dampening, self.weight_decay]
        return [*numbers, int(self.decoupled), int(self.nesterov), int(self.maximize)]

    def state(self) -> dict[str, float | None]:
        # what the buffer holds before the first step does not matter
        return {"momentum_buffer": torch.nan if self.momentum else None}

    def reference(self, masters: Sequence[Tensor], dtype: torch.dtype = torch.float64) -> Reference:
        kept = 1.0 - self.lr * self.weight_decay if self.decoupled else 1.0
        return TorchOptimizer(self._optimizer, masters, dtype, kept)

    def _optimizer(self, parameters: list[Tensor]) -> torch.optim.Optimizer:
        """Build torch's, which couples all decay."""
        return torch.optim.SGD(
            parameters,
            lr=self.lr,
            momentum=self.momentum,
            dampening=self.dampening,
            weight_decay=0.0 if self.decoupled else self.weight_decay,
            nesterov=self.nesterov,
            maximize=self.maximize,
            foreach=False,
        )

    def tolerance(self, masters: Tensor, history: History) -> Tensor:
        return torch.full_like(masters, 3e-7 * history.total)

    def state_tolerance(self, state: Tensor, history: History) -> Tensor:
        return self.tolerance(state, history)


@dataclass(frozen=True, kw_only=True)
class RMSprop(Rule):
    name = "rmsprop"
    size = 32
    decoupled: bool = False
    alpha: float = 0.99
    eps: float = 1e-3
    momentum: float = 0.0
    centered: bool = False

    def options(self) -> list[Argument]:
        numbers = [self.alpha, self.eps, self.weight_decay, self.momentum]
        return [*numbers, int(self.centered), int(self.maximize)]

    def state(self) -> dict[str, float | None]:
        buffer = 0.0 if self.momentum else None
        grad_avg = 0.0 if self.centered else None
        return {"square_avg": 0.0, "momentum_buffer": buffer, "grad_avg": grad_avg}

    def reference(self, masters: Sequence[Tensor], dtype: torch.dtype = torch.float64) -> Reference:
        return TorchOptimizer(self._optimizer, masters, dtype)

    def _optimizer(self, parameters: list[Tensor]) -> torch.optim.Optimizer:
        return torch.optim.RMSprop(
            parameters,
            lr=self.lr,
            alpha=self.alpha,
            eps=self.eps,
            weight_decay=self.weight_decay,
            momentum=self.momentum,
            centered=self.centered,
            maximize=self.maximize,
            foreach=False,
        )


@dataclass(frozen=True, kw_only=True)
class Adagrad(Rule):
    name = "adagrad"
    size = 16
    decoupled: bool = False
    lr_decay: float = 0.0
    eps: float = 1e-3

    def options(self) -> list[Argument]:
        return [self.lr_decay, self.weight_decay, self.eps, int(self.maximize)]

    def state(self) -> dict[str, float | None]:
        return {"sum": 0.0}

    def reference(self, masters: Sequence[Tensor], dtype: torch.dtype = torch.float64) -> Reference:
        return TorchOptimizer(self._optimizer, masters, dtype)

    def _optimizer(self, parameters: list[Tensor]) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(
            parameters,
            lr=self.lr,
            lr_decay=self.lr_decay,
            weight_decay=self.weight_decay,
            eps=self.eps,
            maximize=self.maximize,
            foreach=False,
        )


@dataclass(frozen=True, kw_only=True)
class Lamb(Rule):
    """The defaults are apex's, but for lr."""

    name = "lamb"
    size = 48
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-6
    bias_correction: bool = True
    gradient_averaging: bool = True
    adapt_always: bool = False

    def options(self) -> list[Argument]:
        switches = (
            *(self.decoupled, self.bias_correction, self.gradient_averaging),
            *(self.adapt_always, self.maximize),
        )
        return [*self.betas, self.eps, self.weight_decay, *map(int, switches)]

    def reference(self, masters: Sequence[Tensor], dtype: torch.dtype = torch.float64) -> Reference:
        return LambReference(self, [master.to(dtype) for master in masters])

    def tolerance(self, masters: Tensor, history: History) -> Tensor:
        # the ratio makes a step as large as lr times the master's typical element
        lr = self.lr * max(1.0, history.start)
        return (3e-7 * masters.abs() + 1e-5 * lr) * history.steps


class LambReference:
    """LAMB, as You et al. and apex have it."""

    def __init__(self, rule: Lamb, masters: list[Tensor]) -> None:
        self.rule, self.steps, self.masters = rule, 0, masters
        self.exp_avg = [torch.zeros_like(master) for master in masters]
        self.exp_avg_sq = [torch.zeros_like(master) for master in masters]

    def step(self, gradients: Sequence[Tensor]) -> None:
        self.steps += 1
        for i, gradient in enumerate(gradients):
            update = self._update(i, -gradient if self.rule.maximize else gradient)
            self.masters[i] = self.masters[i] - self._ratio(self.masters[i], update) * update

    def state(self, name: str) -> list[Tensor]:
        return {"exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}[name]

    def _update(self, i: int, gradient: Tensor) -> Tensor:
        rule, (beta1, beta2) = self.rule, self.rule.betas
        if not rule.decoupled:
            gradient = gradient + rule.weight_decay * self.masters[i]
        share = 1.0 - beta1 if rule.gradient_averaging else 1.0
        self.exp_avg[i] = beta1 * self.exp_avg[i] + share * gradient
        self.exp_avg_sq[i] = beta2 * self.exp_avg_sq[i] + (1.0 - beta2) * gradient**2
        first, second = self.exp_avg[i], self.exp_avg_sq[i]
        if rule.bias_correction:
            first, second = first / (1 - beta1**self.steps), second / (1 - beta2**self.steps)
        update = first / (second.sqrt() + rule.eps)
        return update + rule.weight_decay * self.masters[i] if rule.decoupled else update

    def _ratio(self, master: Tensor, update: Tensor) -> float:
        norms = [tensor.square().sum().sqrt().item() for tensor in (master, update)]
        if 0.0 in norms or not (self.rule.adapt_always or self.rule.weight_decay):
            return self.rule.lr
        return self.rule.lr * norms[0] / norms[1]


_LR = st.sampled_from([2.0**-10, 2.0**-3, 1.0])
_DECAY = st.sampled_from([0.0, 0.1])
_COUPLED = {name: st.booleans() for name in ("maximize", "lr_on_device")}
_SWITCHES = {"decoupled": st.booleans(), **_COUPLED}
_LAMB_SWITCHES = ("bias_correction", "gradient_averaging", "adapt_always")

RULES: dict[str, st.SearchStrategy[Rule]] = {
    "adamw": st.builds(
        AdamW,
        lr=_LR,
        betas=st.sampled_from([(0.9, 0.999), (0.5, 0.9), (0.0, 0.99)]),
        eps=st.sampled_from([1e-8, 1e-3]),
        weight_decay=_DECAY,
        amsgrad=st.booleans(),
        **_SWITCHES,
    ),
    "sgd": st.builds(
        Sgd,
        lr=_LR,
        momentum=st.sampled_from([0.0, 0.9, 0.5]),
        dampening=st.sampled_from([0.0, 0.25]),
        weight_decay=_DECAY,
        **_SWITCHES,
    )
    | st.builds(Sgd, lr=_LR, weight_decay=_DECAY, nesterov=st.just(True), **_SWITCHES),
    "rmsprop": st.builds(
        RMSprop,
        lr=_LR,
        alpha=st.sampled_from([0.99, 0.5]),
        eps=st.sampled_from([1e-3, 0.1]),
        weight_decay=_DECAY,
        momentum=st.sampled_from([0.0, 0.9]),
        centered=st.booleans(),
        **_COUPLED,
    ),
    "adagrad": st.builds(
        Adagrad,
        lr=_LR,
        lr_decay=st.sampled_from([0.0, 0.25]),
        eps=st.sampled_from([1e-10, 1e-3]),
        weight_decay=_DECAY,
        **_COUPLED,
    ),
    "lamb": st.builds(
        Lamb,
        lr=st.sampled_from([2.0**-10, 2.0**-3]),
        betas=st.sampled_from([(0.9, 0.999), (0.5, 0.9)]),
        eps=st.sampled_from([1e-6, 1e-3]),
        weight_decay=st.sampled_from([0.0, 0.01, 0.5]),
        **{name: st.booleans() for name in _LAMB_SWITCHES},
        **_SWITCHES,
    ),
}
