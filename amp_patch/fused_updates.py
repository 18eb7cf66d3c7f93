"""What an optimizer's groups mean: their options and state, by the names that torch gives them.

Knows optimizers, no masters, scales or skipped steps. The updates themselves are `torch_updates`'.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW

from . import torch_updates

Entry = dict[str, Any]


class Rows(NamedTuple):
    """What one group steps now: the parameters that have gradients, these, and their state."""

    group: Mapping[str, Any]
    params: list[Tensor]
    grads: list[Tensor]
    entries: list[Entry]


class Update(Protocol):
    """One group's way to step, with what it keeps from step to step."""

    def has_state(self, group: Mapping[str, Any]) -> bool:
        """Return whether the optimizer keeps anything per parameter; else rows have no entries."""

    def suits(self, rows: Rows) -> bool:
        """Return whether `run` can do it; else torch's own step must.

        The parameters are dense, real and of float32, the gradients dense.
        """

    def run(self, rows: Rows) -> None:
        """Step, with the bits of torch's own step."""


class Counters:
    """The step counters of many parameters, in one memory: one call advances all."""

    def __init__(self) -> None:
        self._steps: list[Tensor] = []
        self._all = torch.zeros(0)

    def advance(self, entries: Sequence[Entry]) -> list[Tensor]:
        """Add 1 to each ``entry["step"]``, which is replaced where it was not in that memory.

        Returns:
            The counters, 0-dim.
        """
        steps = [entry["step"] for entry in entries]
        if len(steps) != len(self._steps) or not all(map(operator.is_, steps, self._steps)):
            self._all = torch.stack(steps)
            self._steps = [self._all[index] for index in range(len(steps))]
            for entry, step in zip(entries, self._steps, strict=True):
                entry["step"] = step
        self._all += 1
        return self._steps

    def values(self) -> list[float]:
        """Return what they count. Waits for the device."""
        values: list[float] = self._all.tolist()
        return values


class AdamUpdate:
    """A group of `torch.optim.Adam` or `torch.optim.AdamW`."""

    def __init__(self, decoupled: bool) -> None:
        self._decoupled = decoupled
        self._counters = Counters()

    def has_state(self, group: Mapping[str, Any]) -> bool:
        """See `Update`."""
        return True

    def suits(self, rows: Rows) -> bool:
        """See `Update`."""
        group = rows.group
        return _is_plain(group, "lr", "eps", "weight_decay") and _are_numbers(group["betas"])

    def run(self, rows: Rows) -> None:
        """See `Update`."""
        group, params, grads, entries = rows
        if not all(entries):
            _make_adam_state(rows)
        names = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")[: 3 if group["amsgrad"] else 2]
        exp_avgs, exp_avg_sqs, *largest = [[entry[name] for entry in entries] for name in names]
        steps = self._counters.advance(entries)
        options = {
            **{name: group[name] for name in ("lr", "betas", "eps", "weight_decay", "maximize")},
            "decoupled": group.get("decoupled_weight_decay", self._decoupled),
        }
        tensors = (params, grads, exp_avgs, exp_avg_sqs, largest[0] if largest else [])
        if group["fused"]:
            torch_updates.fused_adam(*tensors, steps, **options)
        else:
            torch_updates.adam(*tensors, self._counters.values(), **options)


class SgdUpdate:
    """A group of `torch.optim.SGD`."""

    def has_state(self, group: Mapping[str, Any]) -> bool:
        """See `Update`."""
        return bool(group["momentum"] != 0)

    def suits(self, rows: Rows) -> bool:
        """See `Update`."""
        if not _is_plain(rows.group, "lr", "momentum", "dampening", "weight_decay"):
            return False
        return not rows.group["fused"] or len(set(map(_has_buffer, rows.entries))) <= 1

    def run(self, rows: Rows) -> None:
        """See `Update`."""
        group, params, grads, entries = rows
        names = ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize")
        options = {name: group[name] for name in names}
        step = torch_updates.fused_sgd if group["fused"] else torch_updates.sgd
        buffers = [entry.get("momentum_buffer") for entry in entries]
        known = list(buffers)
        step(params, grads, buffers, **options)
        if not all(map(operator.is_, buffers, known)):
            for entry, buffer in zip(entries, buffers, strict=True):
                entry["momentum_buffer"] = buffer


#: What steps a group of an optimizer of this very type; a `FusedLAMB` steps like this by itself.
UPDATES: dict[type, Callable[[], Update]] = {
    AdamW: functools.partial(AdamUpdate, decoupled=True),
    Adam: functools.partial(AdamUpdate, decoupled=False),
    SGD: SgdUpdate,
}


def _make_adam_state(rows: Rows) -> None:
    group, params, _, entries = rows
    device = params[0].device if group["fused"] else torch.device("cpu")
    is_wide = torch.get_default_dtype() is torch.float64 and not group["fused"]
    dtype = torch.float64 if is_wide else torch.float32
    for param, entry in zip(params, entries, strict=True):
        if not entry:
            entry["step"] = torch.zeros((), dtype=dtype, device=device)
            entry["exp_avg"] = torch.zeros_like(param)
            entry["exp_avg_sq"] = torch.zeros_like(param)
            if group["amsgrad"]:
                entry["max_exp_avg_sq"] = torch.zeros_like(param)


def _is_plain(group: Mapping[str, Any], *options: str) -> bool:
    """Return whether options are such as most are: torch's own step has the rest."""
    if group.get("differentiable") or group.get("capturable"):
        return False
    return _are_numbers([group[option] for option in options])


def _are_numbers(values: Sequence[Any]) -> bool:
    return all(isinstance(value, (int, float)) for value in values)


def _has_buffer(entry: Entry) -> bool:
    return entry.get("momentum_buffer") is not None
