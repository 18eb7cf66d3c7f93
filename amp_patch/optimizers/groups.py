"""What an optimizer's groups mean: their options and state, by the names that torch gives them.

Knows optimizers, no masters, scales or skipped steps. The updates are `torch_optimizers`'.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from amp_patch.kernels import torch_optimizers
from amp_patch.kernels.cuda_optimizers import (
    ADAM,
    LAMB,
    SGD_RULE,
    Block,
    Column,
    Rule,
    learning_rate,
)

from .lamb import FusedLAMB

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

    def block(self, rows: Rows, weights: Column) -> Block:
        """Return what the CUDA kernels get.

        Args:
            rows: the parameters are on one device.
            weights: the half parameters that get the rounded values; None where there is none.
        """


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
        self.gather(entries, steps[0].device, steps[0].dtype)
        self._all += 1
        return self._steps

    def gather(
        self, entries: Sequence[Entry], device: torch.device, dtype: torch.dtype
    ) -> list[Tensor]:
        """As `advance`, but the counters stay what they are, and are of this device and dtype."""
        steps = [entry["step"] for entry in entries]
        is_known = (self._all.device, self._all.dtype) == (device, dtype)
        if not (is_known and _same(steps, self._steps)):
            self._all = torch.stack([step.to(device, dtype) for step in steps])
            self._steps = [self._all[index] for index in range(len(steps))]
            for entry, step in zip(entries, self._steps, strict=True):
                entry["step"] = step
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
            torch_optimizers.fused_adam(*tensors, steps, **options)
        else:
            torch_optimizers.adam(*tensors, self._counters.values(), **options)

    def block(self, rows: Rows, weights: Column) -> Block:
        """See `Update`."""
        group, params, grads, entries = rows
        if not all(entries):
            _make_adam_state(rows)
        largest = "max_exp_avg_sq" if group["amsgrad"] else None
        states = [[entry[name] for entry in entries] for name in ("exp_avg", "exp_avg_sq")]
        states.append([largest and entry[largest] for entry in entries])
        steps = self._counters.gather(entries, params[0].device, torch.float32)
        decoupled = group.get("decoupled_weight_decay", self._decoupled)
        numbers = (*group["betas"], group["eps"], group["weight_decay"])
        arguments = (*learning_rate(group["lr"]), *numbers, int(decoupled), int(group["maximize"]))
        return Block(arguments, [grads, params, *states, weights, steps])


class SgdUpdate:
    """A group of `torch.optim.SGD`."""

    def __init__(self) -> None:
        self._buffers: dict[int, Tensor] = {}
        self._counts: dict[int, Tensor] = {}

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
        step = torch_optimizers.fused_sgd if group["fused"] else torch_optimizers.sgd
        buffers = [entry.get("momentum_buffer") for entry in entries]
        known = list(buffers)
        step(params, grads, buffers, **options)
        if not all(map(operator.is_, buffers, known)):
            for entry, buffer in zip(entries, buffers, strict=True):
                entry["momentum_buffer"] = buffer

    def block(self, rows: Rows, weights: Column) -> Block:
        """See `Update`."""
        group, params, grads, entries = rows
        buffers: list[Any] = [None] * len(params)
        if group["momentum"] != 0:
            buffers = [entry.get("momentum_buffer") for entry in entries]
        made = [i for i, one in enumerate(buffers) if one is None and group["momentum"] != 0]
        for i in made:
            buffers[i] = torch.zeros_like(params[i])
        self._count(buffers, {id(buffers[i]) for i in made})
        numbers = [group[name] for name in ("momentum", "dampening", "weight_decay")]
        switches = (0, int(group["nesterov"]), int(group["maximize"]))
        arguments = (*learning_rate(group["lr"]), *numbers, *switches)
        counts: Column = [self._counts.get(id(one)) for one in buffers]
        entering = [(entries[i], "momentum_buffer", buffers[i]) for i in made]
        return Block(arguments, [grads, params, buffers, weights, counts], entering)

    def _count(self, buffers: list[Any], new: set[int]) -> None:
        """Count the steps of momentum buffers on their device, which alone knows the first one."""
        for buffer in buffers:
            if buffer is not None and self._buffers.get(id(buffer)) is not buffer:
                self._buffers[id(buffer)] = buffer
                begun = float(id(buffer) not in new)
                count = torch.full((), begun, dtype=torch.float32, device=buffer.device)
                self._counts[id(buffer)] = count
        if len(self._buffers) > 2 * len(buffers):
            used = set(map(id, buffers))
            self._buffers = {key: one for key, one in self._buffers.items() if key in used}


class LambUpdate:
    """A group of `FusedLAMB`, whose own step is on multi-tensor functions."""

    def __init__(self) -> None:
        self._counters = Counters()

    def has_state(self, group: Mapping[str, Any]) -> bool:
        """See `Update`."""
        return True

    def suits(self, rows: Rows) -> bool:
        """See `Update`."""
        return False

    def run(self, rows: Rows) -> None:
        """See `Update`."""

    def block(self, rows: Rows, weights: Column) -> Block:
        """See `Update`."""
        group, params, grads, entries = rows
        if not all(entries):
            _make_adam_state(rows)
        states = [[entry[name] for entry in entries] for name in ("exp_avg", "exp_avg_sq")]
        steps = self._counters.gather(entries, params[0].device, torch.float32)
        names = ("adam_w_mode", "bias_correction", "grad_averaging", "use_nvlamb")
        switches = [int(group[name]) for name in names]
        numbers = (*group["betas"], group["eps"], group["weight_decay"])
        arguments = (*learning_rate(group["lr"]), *numbers, *switches, 0)
        return Block(arguments, [grads, params, *states, weights, steps])


class KeptGroup:
    """What was looked up for the parameters of a group, until somebody changes that."""

    def __init__(self, owner: KeptGroups, update: Update) -> None:
        self.update = update
        self._owner = weakref.proxy(owner)
        self._params: list[Tensor] = []
        self._entries: list[Entry] = []
        self._are_alike = False
        self._seen = -1

    def rows(self, group: Mapping[str, Any], params: list[Tensor], grads: list[Tensor]) -> Rows:
        """Return what the group steps."""
        has_state = self.update.has_state(group)
        is_known = self._seen == self._owner.changes and has_state == bool(self._entries)
        if not (is_known and _same(params, self._params)):
            state = self._owner.state
            self._seen = self._owner.changes
            self._params = list(params)
            self._entries = [state[param] for param in params] if has_state else []
            kinds = {(param.dtype, param.device) for param in params}
            self._are_alike = len(kinds) == 1 and params[0].dtype is torch.float32
        return Rows(group, params, grads, self._entries)

    def suits(self, rows: Rows) -> bool:
        """Return whether the group can be stepped by its `Update`."""
        has_sparse = any(map(_IS_SPARSE, rows.grads))
        return self._are_alike and not has_sparse and self.update.suits(rows)


class KeptGroups:
    """A `KeptGroup` for each group of an optimizer.

    Attributes:
        groups: at least as many as the optimizer has.
        state: the optimizer's.
        changes: how often a look has found that a parameter's state is another object.
    """

    def __init__(self, make_update: Callable[[], Update]) -> None:
        self._make_update = make_update
        self.groups: list[KeptGroup] = []
        self.state: MutableMapping[Any, Entry] = {}
        self.changes = 0
        self._entries: list[Entry] = []

    def look_up(self, optimizer: Optimizer) -> None:
        """See what the optimizer has now."""
        for _ in optimizer.param_groups[len(self.groups) :]:
            self.groups.append(KeptGroup(self, self._make_update()))
        self.state = optimizer.state
        entries = list(self.state.values())
        if not _same(entries, self._entries):
            self.changes, self._entries = self.changes + 1, entries


#: What steps a group of an optimizer of this very type, and its kernels.
UPDATES: dict[type, tuple[Callable[[], Update], Rule]] = {
    AdamW: (functools.partial(AdamUpdate, decoupled=True), ADAM),
    Adam: (functools.partial(AdamUpdate, decoupled=False), ADAM),
    SGD: (SgdUpdate, SGD_RULE),
    FusedLAMB: (LambUpdate, LAMB),
}


def _same(ones: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(ones) == len(others) and all(map(operator.is_, ones, others))


def _make_adam_state(rows: Rows) -> None:
    group, params, _, entries = rows
    is_fused = group.get("fused")
    device = params[0].device if is_fused else torch.device("cpu")
    is_wide = torch.get_default_dtype() is torch.float64 and not is_fused
    dtype = torch.float64 if is_wide else torch.float32
    for param, entry in zip(params, entries, strict=True):
        if not entry:
            entry["step"] = torch.zeros((), dtype=dtype, device=device)
            entry["exp_avg"] = torch.zeros_like(param)
            entry["exp_avg_sq"] = torch.zeros_like(param)
            if group.get("amsgrad"):
                entry["max_exp_avg_sq"] = torch.zeros_like(param)


def suits_kernels(group: Mapping[str, Any]) -> bool:
    """Return whether the CUDA kernels know the options of a group."""
    return not group.get("differentiable") and all(
        _are_numbers([option] if not isinstance(option, (list, tuple)) else option)
        for option in (group[name] for name in _NUMBERS if name in group)
    )


_NUMBERS = ("betas", "eps", "weight_decay", "momentum", "dampening")


def _is_plain(group: Mapping[str, Any], *options: str) -> bool:
    """Return whether options are such as most are: torch's own step has the rest."""
    if group.get("differentiable") or group.get("capturable"):
        return False
    return _are_numbers([group[option] for option in options])


def _are_numbers(values: Sequence[Any]) -> bool:
    return all(isinstance(value, (int, float)) for value in values)


def _has_buffer(entry: Entry) -> bool:
    return entry.get("momentum_buffer") is not None


_IS_SPARSE = operator.attrgetter("is_sparse")
