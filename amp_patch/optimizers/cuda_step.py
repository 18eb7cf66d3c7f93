"""One optimizer's step by the CUDA kernels: half gradient in, half weight out.

Knows its groups, what gradients wait and which half parameter a master belongs to; nothing of
hooks, closures or the rule of a scale.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from amp_patch import kernels
from amp_patch.kernels import tensor_tables, torch_kernels
from amp_patch.kernels.cuda_optimizers import Batch, Block, Factors, Rule
from amp_patch.kernels.graph_capture import captures
from amp_patch.weights.half_gradients import HalfGradients
from amp_patch.weights.lazy_gradients import LazyGradients, stored_grad

from .groups import KeptGroups, Update, suits_kernels
from .lamb import FusedLAMB


class _Kept(NamedTuple):
    """What is kept for a kind of rows."""

    batch: Batch
    groups: KeptGroups


class FusedLaunch:
    """The launches of one optimizer, again and again.

    Args:
        make_update: of a group.
        rule: the kernels of the optimizer.
        lazy: what gradients wait.
    """

    def __init__(self, make_update: Callable[[], Update], rule: Rule, lazy: LazyGradients) -> None:
        self._rule, self._lazy = rule, lazy
        # Rows whose gradients are still scaled, and those whose are not.
        self._kept = {
            scaled: _Kept(Batch(rule), KeptGroups(make_update)) for scaled in (True, False)
        }
        self._scales: dict[torch.device, tensor_tables.Resident] = {}

    def is_expected(self, optimizer: Optimizer) -> bool:
        """Return whether kernels can step all groups, as far as the first tensor of each tells."""
        first = [param for group in optimizer.param_groups for param in group["params"][:1]]
        return self._are_there(optimizer, first)

    def step(
        self,
        optimizer: Optimizer,
        param_of: Callable[[Tensor], Tensor],
        found_inf: Tensor | None,
    ) -> bool:
        """Step all groups; return False, with nothing changed, where kernels cannot.

        Args:
            optimizer: whose groups and state are read.
            param_of: returns the half parameter of a master, or what it is given.
            found_inf: float32, one element; not 0: nothing changes. None: it is 0. It is waited
                for where momentum is made, of which a skipped step is to leave no trace.
        """
        params = [param for group in optimizer.param_groups for param in group["params"]]
        if not self._are_there(optimizer, params):
            return False
        half = self._waiting()
        blocks = {
            scaled: self._blocks(optimizer, param_of, half if scaled else None, scaled)
            for scaled in (True, False)
        }
        if not all(self._kept[s].batch.holds(own) for s, own in blocks.items() if own):
            return False
        made = [one for own in blocks.values() for block in own for one in block.made]
        if made and found_inf is not None and captures.wait_for(found_inf):
            return True
        clip = self._lamb_clip(optimizer, half, blocks[False])
        for entry, name, tensor in made:
            entry[name] = tensor
        for scaled, own in blocks.items():
            if own:
                factors = self._factors(half if scaled else None, clip, own)
                self._kept[scaled].batch.step(factors, found_inf)
        return True

    @torch.no_grad()
    def clip(self, optimizer: Optimizer, max_norm: float) -> Tensor | None:
        """Clip gradients to a total 2-norm: those that wait when the step unscales them.

        Returns:
            The norm before, 0-dim; None, with nothing done, where none wait in half.
        """
        half = self._waiting()
        if half is None or half.clip is not None:
            return None
        stored = [stored_grad(p) for group in optimizer.param_groups for p in group["params"]]
        others = [grad for grad in stored if grad is not None]
        norms = [half.norm(), *torch_kernels.norms_of(others, 2.0)]
        total = torch_kernels.combined(norms, 2.0)
        half.clip = (max_norm / (total + 1e-6)).clamp(max=1.0)
        torch_kernels.multiply(others, half.clip)
        return total

    def _are_there(self, optimizer: Optimizer, params: Sequence[Tensor]) -> bool:
        suit = all(map(suits_kernels, optimizer.param_groups))
        return suit and kernels.are_used((self._rule.source,), params)

    def _waiting(self) -> HalfGradients | None:
        """Return the gradients that wait in half, checked; all others are stored."""
        source = self._lazy.source
        if not isinstance(source, HalfGradients) or not self._lazy.are_alone():
            self._lazy.materialize()
            return None
        source.refuse_written(range(len(source.grads)))
        return source

    def _blocks(
        self,
        optimizer: Optimizer,
        param_of: Callable[[Tensor], Tensor],
        half: HalfGradients | None,
        scaled: bool,
    ) -> list[Block]:
        waiting: dict[int, Tensor] = {}
        if half is not None:
            waiting = dict(zip(map(id, self._lazy.params), half.grads, strict=True))
        kept, blocks = self._kept[scaled].groups, []
        kept.look_up(optimizer)
        for one, group in zip(kept.groups, optimizer.param_groups, strict=False):
            found: list[Any] = [
                waiting.get(id(param)) if scaled else stored_grad(param)
                for param in group["params"]
            ]
            pairs = [(p, g) for p, g in zip(group["params"], found, strict=True) if g is not None]
            if pairs:
                params, grads = map(list, zip(*pairs, strict=True))
                weights = [None if (weight := param_of(p)) is p else weight for p in params]
                blocks.append(one.update.block(one.rows(group, params, grads), weights))
        return blocks

    def _factors(
        self, half: HalfGradients | None, clip: Tensor | None, blocks: Sequence[Block]
    ) -> Factors:
        if half is None:
            return Factors(None, clip)
        if half.clip is not None:
            clip = half.clip if clip is None else half.clip * clip.to(half.clip.device)
        return Factors(self._scale(half.scale, blocks), clip)

    def _scale(self, scale: float | Tensor, blocks: Sequence[Block]) -> Tensor:
        if isinstance(scale, Tensor):
            return scale
        first: Any = blocks[0].columns[1][0]
        if first.device not in self._scales:
            self._scales[first.device] = tensor_tables.scalar(first.device)
        return self._scales[first.device].holding(scale)

    def _lamb_clip(
        self, optimizer: Optimizer, half: HalfGradients | None, unscaled: Sequence[Block]
    ) -> Tensor | None:
        """Return what `FusedLAMB` clips all gradients by, None for other optimizers."""
        max_norm = optimizer.defaults.get("max_grad_norm")
        if not isinstance(optimizer, FusedLAMB) or not max_norm:
            return None
        stored: list[Any] = [grad for block in unscaled for grad in block.columns[0]]
        norms = torch_kernels.norms_of(stored, 2.0)
        if half is not None:
            norms.append(half.norm())
        total = torch_kernels.combined(norms, 2.0)
        factor: Tensor = (max_norm / total).clamp(max=1.0)
        return factor
