"""Drawn training scripts, run with amp and without it.

A script is a list of lines, each a name and a number that it draws all that it needs from. What a
line may not do is left out: what docs/limits.md and docs/mistakes.md say, and nothing else.
"""

from __future__ import annotations

import contextlib
import copy
import random
from types import ModuleType
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

INF = float("inf")
HALVES = {"O2": torch.float16, "O5": torch.bfloat16}


class Setting(NamedTuple):
    """What a script asks of amp; the level None: it trains in plain PyTorch."""

    level: str | None
    loss_scale: float | str = 64.0
    fused_step: bool = False
    is_split: bool = False  # among two optimizers


class Net(nn.Module):
    """Two layers, and a norm that stays in float32 at O2 and O5."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 3)
        self.fails = False

    def forward(self, inputs: Tensor) -> Tensor:
        if self.fails:
            raise ArithmeticError
        return self.last(torch.tanh(self.norm(self.first(inputs))))


class Script:
    """A model in training; each method without an underscore is a line.

    Args:
        amp: without it the losses are not scaled.
        setting: with ``amp`` what it is told; else what it would be told.

    Attributes:
        gradients: which there are: "none", "scaled" ones that wait for a further block, those of
            blocks that are "ready" for a step, of "plain" backwards, or "used" ones.
        overflowed: whether some are not finite.
    """

    def __init__(self, amp: ModuleType | None, setting: Setting) -> None:
        self.amp, self.setting = amp, setting
        torch.manual_seed(0)
        self.model = Net()
        params = list(self.model.parameters())
        parts = [params[:2], params[2:]] if setting.is_split else [params]
        self.optimizers = [torch.optim.SGD(part, lr=0.05, momentum=0.9) for part in parts]
        self.has_masters = setting.level in HALVES
        self.gradients, self.overflowed, self.are_zeros = "none", False, False
        self.values_written = 0
        self._initialize()

    def _initialize(self) -> None:
        if self.amp is not None:
            self.amp.initialize(
                self.model,
                self.optimizers,
                opt_level=self.setting.level,
                loss_scale=self.setting.loss_scale,
                fused_step=self.setting.fused_step,
                verbosity=0,
            )

    def run(self, lines: list[tuple[str, int]]) -> None:
        for name, seed in lines:
            getattr(self, name)(random.Random(seed))

    def masters(self) -> list[Tensor]:
        """Return what the optimizers step."""
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        if self.amp is None:
            return [param for group in groups for param in group["params"]]
        return [param for one in self.optimizers for param in self.amp.master_params(one)]

    def _loss(self, draw: random.Random, factor: float = 1.0) -> Tensor:
        generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
        inputs = torch.randn(8, 6, generator=generator)
        targets = torch.randint(3, (8,), generator=generator)
        return F.cross_entropy(self.model(inputs), targets) * 2 * factor

    def _scaled(self, loss: Tensor, **options: Any) -> contextlib.AbstractContextManager[Tensor]:
        if self.amp is None:
            return contextlib.nullcontext(loss)
        return self.amp.scale_loss(loss, self.optimizers, **options)

    def block(self, draw: random.Random) -> None:
        may_add = self.gradients in ("none", "scaled", "ready")
        may_add |= self.gradients == "used" and not self.has_masters
        if not may_add or self.overflowed:
            return
        can_overflow = self.setting.loss_scale != 1.0 and draw.random() < 0.2
        factor = INF if can_overflow else draw.choice([0.5, 1.0, 2.0])
        delays = draw.random() < 0.3
        with self._scaled(self._loss(draw, factor), delay_unscale=delays) as loss:
            loss.backward()
        self.gradients, self.overflowed = "scaled" if delays else "ready", factor == INF

    def failing_block(self, draw: random.Random) -> None:
        if self.gradients not in ("none", "ready") or self.overflowed:
            return
        self.model.fails = fails_early = draw.random() < 0.5
        with contextlib.suppress(ArithmeticError), self._scaled(self._loss(draw)) as loss:
            loss.backward()
            raise ArithmeticError
        self.model.fails = False
        if not fails_early:
            self._clear("optimizer")

    def plain(self, draw: random.Random) -> None:
        if self.gradients in ("none", "plain") and not self.overflowed:
            self._loss(draw).backward()
            self.gradients = "plain"

    def clip(self, draw: random.Random) -> None:
        if self.gradients not in ("ready", "plain") or self.overflowed:
            return
        how, limit = draw.randrange(3), draw.choice([0.1, 100.0])
        if how == 0:
            nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        elif how == 1:
            nn.utils.clip_grad_norm_(self.masters(), limit)
        else:
            for master in self.masters():
                if master.grad is not None:
                    master.grad.mul_(0.5)

    def step(self, draw: random.Random) -> None:
        if self.gradients not in ("ready", "plain"):
            return
        for optimizer in self.optimizers:
            if self.amp is not None or not self.overflowed:
                optimizer.step()
        self.gradients = "used"

    def clear(self, draw: random.Random) -> None:
        """Clear gradients, after a step or not; what waits scaled is not cleared by hand."""
        ways = ["optimizer", "optimizer in place", "model", "model in place"]
        if self.gradients != "scaled":
            ways += ["None", "in place", "data"]
        self._clear(draw.choice(ways))

    def _clear(self, how: str) -> None:
        is_in_place = how.endswith("in place")
        if how.startswith("optimizer"):
            for optimizer in self.optimizers:
                optimizer.zero_grad(set_to_none=not is_in_place)
        elif how.startswith("model"):
            self.model.zero_grad(set_to_none=not is_in_place)
        for param in self.model.parameters():
            if how == "None":
                param.grad = None
            elif how == "in place" and param.grad is not None:
                param.grad.zero_()
            elif how == "data" and param.grad is not None:
                param.grad.data.zero_()
        self.gradients, self.overflowed = "none", False

    def save_and_load(self, draw: random.Random) -> None:
        if self.gradients == "scaled":
            return
        self.model.load_state_dict(copy.deepcopy(self.model.state_dict()))
        for optimizer in self.optimizers:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    def replace_a_layer(self, draw: random.Random) -> None:
        if self.gradients != "none" or len(self.optimizers[-1].param_groups) > 1:
            return
        torch.manual_seed(draw.randrange(1 << 30))
        self.model.last = nn.Linear(8, 3)
        if self.amp is not None and self.setting.level in HALVES:
            self.model.last.to(HALVES[self.setting.level])
        self.values_written += 1
        self._clear("optimizer")
        self.optimizers[-1].add_param_group({"params": list(self.model.last.parameters())})

    def begin_anew(self, draw: random.Random) -> None:
        """Amp ends, perhaps between a backward and its step, and begins again after that."""
        if self.gradients == "used" or self.overflowed:
            return
        if self.amp is not None:
            self.amp.deactivate()
        if self.gradients != "none":
            for optimizer in self.optimizers:
                optimizer.step()
        self._clear("optimizer")
        self._initialize()


NAMES = st.sampled_from(
    [
        *["block"] * 4,
        *["step", "clear"] * 3,
        *["plain", "clip", "begin_anew"] * 2,
        *["failing_block", "save_and_load", "replace_a_layer"],
    ]
)
LINES = st.lists(st.tuples(NAMES, st.integers(0, 1 << 30)), min_size=4, max_size=12)
SETTINGS = st.builds(
    Setting,
    st.sampled_from(["O1", "O2", "O2", "O5", "O5"]),
    st.sampled_from([64.0, 1.0]),
    st.booleans(),
    st.booleans(),
).map(lambda one: one._replace(fused_step=one.fused_step and one.level in HALVES))
