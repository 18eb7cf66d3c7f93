"""Runs recorded calls of models a second time, forward and backward, and leaves no trace of it.

Knows models and how calls were recorded; what is looked for is somebody else's (`watch`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from amp_patch.casting import regions
from amp_patch.casting.argument_casts import tensors_in, to_float
from amp_patch.casting.mode import Saved, casts_are_on, mode
from amp_patch.session import session
from amp_patch.weights import module_rules
from amp_patch.weights.half_model import cast_floats

from .paths import root_of
from .places import Place, Places, function_of, names_of
from .ranges import kinds_in
from .recorded_calls import Call, copied
from .saved_state import ModelState, RandomState, attributes_of
from .watch import Origin, Watch, Watched

#: By so large a part may gradients differ that were added up in half precision, in another order.
_ROUNDING = 0.02


class Rerun:
    """A second run of a call.

    Args:
        call: of a model that still lives.
        in_float: modules that compute in fp32 this time.
        function: one that computes in fp32 this time, as by a rule of the user's; "" for none.
        stays: whether what those modules return stays in fp32, as by a rule for them.

    Attributes:
        watched: what it showed.
        model: the call's.
        lost: kinds of numbers that outputs of the first run held, and those of the forward do not.
        outputs: the tensors that the forward returned.
        gradients: that the backward has found, by the ids of parameters and inputs.
    """

    def __init__(
        self,
        call: Call,
        in_float: Sequence[nn.Module] = (),
        function: str = "",
        stays: bool = False,
    ) -> None:
        model = call.model()
        assert model is not None
        self.model = model
        self.watched = Watched()
        self._call, self._in_float, self._function = call, in_float, function
        self._stays = stays
        self._places = Places(names_of(model))
        self._watch = Watch(self._places, self.watched, model)
        self.lost: list[str] = []
        self.outputs: list[Tensor] = []
        self.gradients: dict[int, Tensor] = {}
        self._inputs: Any = None

    def forward(self) -> Origin | None:
        """Run the forward; return where an output that is not finite came from."""
        # Copies once more, for the model may write to them and there may be further runs.
        args, kwargs = self._inputs = copied(self._call.inputs)
        session.cache.mark_stale()  # casts of weights are made anew, where they are seen
        self._call.state.restore(self.model)
        self._introduce()
        self._call.random.restore()
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            stack.enter_context(_around(self._call))
            stack.enter_context(self._looked_at())
            weights = self._call.weights
            outputs = (
                torch.func.functional_call(self.model, weights, args, kwargs)
                if weights
                else self.model(*args, **kwargs)
            )
            self.outputs = tensors_in(outputs)
        self.lost = sorted(self._call.kinds - kinds_in(self.outputs))
        return self._first(self.outputs)

    def backward(self, grads: Mapping[int, Tensor]) -> Origin | None:
        """Run the backward; return where a gradient that is not finite came from.

        Args:
            grads: of the outputs, by their numbers.
        """
        reached = [
            index
            for index in sorted(grads)
            if index < len(self.outputs) and self.outputs[index].requires_grad
        ]
        outputs = [self.outputs[index] for index in reached]
        given = (self._call.weights, self._inputs)
        tensors = (*self.model.parameters(), *tensors_in(given))
        leaves = [one for one in tensors if one.requires_grad]
        with self._looked_at():  # a checkpoint computes its forward again
            self.gradients = _gradients(outputs, [grads[index] for index in reached], leaves)
        return self._first(list(self.gradients.values()))

    def outside(self, grads: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Return of the outputs' gradients what did not come from other outputs, after a forward.

        A model that returns its loss and a hidden state is given the gradient of the loss alone:
        what arrived at the hidden state came from there, and would count twice.
        """
        found: dict[int, Tensor] = {}
        for index, later in self._by_descendants(grads):
            inside = self._inside(index, {one: found[one] for one in later if one in found})
            rest = grads[index] if inside is None else _difference(grads[index], inside)
            if inside is None or rest.any():
                found[index] = rest
        return found

    def _by_descendants(self, grads: Mapping[int, Tensor]) -> list[tuple[int, list[int]]]:
        """Return outputs with those that are made of them, which come first."""
        known = [
            one for one in grads if one < len(self.outputs) and self.outputs[one].requires_grad
        ]
        beneath = {one: _nodes(self.outputs[one].grad_fn) for one in known}
        found = [
            (one, [other for other in known if self.outputs[one].grad_fn in beneath[other]])
            for one in known
        ]
        return sorted(found, key=lambda row: len(row[1]))

    def _inside(self, index: int, grads: Mapping[int, Tensor]) -> Tensor | None:
        """Return the gradient of an output that comes from others; None where none does."""
        if not grads:
            return None
        outputs = [self.outputs[one] for one in grads]
        with self._looked_at():
            (inside,) = torch.autograd.grad(
                outputs,
                [self.outputs[index]],
                list(grads.values()),
                allow_unused=True,
                retain_graph=True,
            )
        return inside

    @contextlib.contextmanager
    def _looked_at(self) -> Iterator[None]:
        """Follow what runs inside, with what is to compute in fp32 this time."""
        after = self._dtype_after()
        in_float = _computing_in_float(self._in_float, None if self._stays else after)
        is_taken = self._stays or self._call.takes_float
        taken = _taken_in(self.model, self._in_float, after if is_taken else None)
        with in_float, taken, self._places.followed(), _Ruled(self._function), self._watch:
            yield

    def _first(self, tensors: Sequence[Tensor]) -> Origin | None:
        origins = map(self._watch.origin_of, tensors)
        found = [origin for origin in origins if origin is not None and not origin.is_meant]
        return min(found, key=self.watched.origins.index, default=None)

    def _dtype_after(self) -> torch.dtype | None:
        """Return what a module that computes in fp32 has to return: half, where no function casts.

        None: as it comes, and what a whole model returns, which the level casts.
        """
        root = root_of(self.model)[0]
        level = session.models.levels.get(root)
        if level is None or root in self._in_float:
            return None
        return level.cast_model_type if level.stores_half else None

    def _introduce(self) -> None:
        for number, tensor in enumerate(tensors_in(self._inputs)):
            self._watch.introduce("input", Place("", 1, ""), f"input {number}", tensor)
        own = {**dict(self.model.named_parameters()), **self._call.weights}
        for name, tensor in (*own.items(), *self.model.named_buffers()):
            place = Place(name.rpartition(".")[0], 1, "")
            self._watch.introduce("weight", place, name.rpartition(".")[2], tensor)
        for (path, name), value in attributes_of(self.model).items():
            if isinstance(value, Tensor):
                self._watch.introduce("weight", Place(path, 1, ""), name, value)


@contextlib.contextmanager
def leaving_no_trace(models: Sequence[nn.Module]) -> Iterator[None]:
    """Put back what runs inside the block change: random numbers, weights, buffers, attributes."""
    random, states = RandomState(), [ModelState(model) for model in models]
    saved = mode.save()
    try:
        mode.restore(Saved(None, False, None))  # before a step, which has switched casts off
        yield
    finally:
        mode.restore(saved)
        for state in states:
            state.restore()
        random.restore()
        session.cache.mark_stale()


@contextlib.contextmanager
def _around(call: Call) -> Iterator[None]:
    """Compute as around the call: in its region, or with casts off."""
    block: Any = contextlib.nullcontext()
    if call.casts_off:
        block = regions.CastsOff()
    elif call.region is not None:
        is_float = call.region is torch.float32
        block = regions.FloatRegion() if is_float else regions.HalfRegion()
    with block:
        yield


class _Ruled(TorchFunctionMode):
    """Lets a function compute in fp32 where casts are on, as ``rules={"mul": "float"}`` does.

    Args:
        function: a bare name of torch's; "" for none.
    """

    def __init__(self, function: str) -> None:
        super().__init__()
        self._function = function

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._function and function_of(func) == self._function and casts_are_on():
            args, kwargs = to_float(args), to_float(kwargs)
        return func(*args, **kwargs)


@contextlib.contextmanager
def _computing_in_float(modules: Sequence[nn.Module], after: torch.dtype | None) -> Iterator[None]:
    """Let modules compute in fp32, as ``amp.float_region()`` in their forward does.

    Args:
        modules: may be called within each other.
        after: the dtype of what they return; None leaves it.
    """
    entered: list[regions.FloatRegion] = []

    def enter(*_: Any) -> None:
        entered.append(regions.FloatRegion())
        entered[-1].__enter__()

    def leave(_: nn.Module, args: Any, outputs: Any) -> Any:
        entered.pop().__exit__(None, None, None)
        return outputs if after is None else cast_floats(outputs, after)

    handles = [
        handle
        for module in modules
        for handle in (
            module.register_forward_pre_hook(enter),
            module.register_forward_hook(leave, prepend=True, always_call=True),
        )
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def _taken_in(
    model: nn.Module, in_float: Sequence[nn.Module], stored: torch.dtype | None
) -> Iterator[None]:
    """Let layers with weights in half cast what modules in fp32 return, as beside a rule.

    Args:
        model: that runs.
        in_float: its modules that compute in fp32.
        stored: the dtype of its weights; None casts nothing.
    """
    handles = []
    if stored is not None:
        enter = module_rules.TakesDtype(stored).enter
        handles = [
            module.register_forward_pre_hook(enter, with_kwargs=True)
            for module in module_rules.takers(model, in_float, stored)
        ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def from_outside(call: Call, grads: Mapping[int, Tensor]) -> Mapping[int, Tensor]:
    """Return of what arrived at a call's outputs that which no other output handed on."""
    if len(grads) < 2:
        return grads
    one = Rerun(call)
    one.forward()
    try:
        return one.outside(grads)
    except RuntimeError as error:
        if "reentrant" not in str(error):  # such a checkpoint has no gradients of some tensors
            raise
        return grads


def _nodes(last: Any) -> set[Any]:
    """Return the nodes of a graph that lead to one, without it."""
    found: set[Any] = set()
    waiting = [last]
    while waiting:
        for one, _ in getattr(waiting.pop(), "next_functions", ()):
            if one is not None and one not in found:
                found.add(one)
                waiting.append(one)
    return found


def _difference(total: Tensor, inside: Tensor) -> Tensor:
    """Return what is left of a gradient, 0 where the rest is rounding, or cannot be told."""
    is_same = torch.isclose(total, inside, rtol=_ROUNDING, equal_nan=True)
    return torch.where(is_same | ~inside.isfinite(), 0.0, total - inside)


def _gradients(
    outputs: list[Tensor], grads: list[Tensor], leaves: list[Tensor]
) -> dict[int, Tensor]:
    """Return the gradients of leaves that have one, by their ids; no hook accumulates any."""
    try:
        found = torch.autograd.grad(outputs, leaves, grads, allow_unused=True, retain_graph=True)
    except RuntimeError as error:
        if "reentrant" not in str(error):
            raise
        return _accumulated(outputs, grads, leaves)
    pairs = zip(leaves, found, strict=True)
    return {id(leaf): grad for leaf, grad in pairs if grad is not None}


def _accumulated(
    outputs: list[Tensor], grads: list[Tensor], leaves: list[Tensor]
) -> dict[int, Tensor]:
    """The same by ``backward()``, as a reentrant checkpoint wants it."""
    saved = [(leaf, leaf.grad) for leaf in leaves]
    try:
        for leaf in leaves:
            leaf.grad = None
        torch.autograd.backward(outputs, grads)
        return {id(leaf): leaf.grad for leaf in leaves if leaf.grad is not None}
    finally:
        for leaf, grad in saved:
            leaf.grad = grad
