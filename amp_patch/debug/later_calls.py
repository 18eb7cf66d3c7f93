"""Tries what mends a call out through the later calls that were given what it returned.

A head casts to half what its encoder returns, whatever that computed in: the encoder in fp32 alone
may mend nothing. Knows how calls are run again; nothing of how the search found the first one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from amp_patch.casting.argument_casts import tensors_in
from amp_patch.casting.nested import map_tensors
from amp_patch.common.weak_modules import ModuleTable

from .facts import Mend
from .mends import Mended, mend
from .paths import root_of
from .ranges import can_look, kinds_in
from .recorded_calls import Call
from .rerun import Rerun
from .watch import Origin

#: How many later calls are followed, at most: each is run up to three times, at each overflow.
_MOST = 30


class Stuck(NamedTuple):
    """A call that was given what a mended one returns, and that no module in fp32 makes finite.

    Attributes:
        model: that was called.
        by: what is to blame, see `facts.Mend`.
        line: of the cast by which the script itself is.
    """

    model: nn.Module
    by: Mend | None
    line: tuple[str, int] | None


class LaterCalls:
    """The calls after one, run again with what that returns where it is mended.

    A call was given what another returned where it got the same numbers in the same order, if in
    another shape or dtype: also detached, as a GAN's discriminator, or flattened.

    Args:
        call: the first one, whose forward was not finite.
        origin: what was not.
        mended: by a module or the model.
        later: the calls after it, in their order.

    Attributes:
        needed: the modules that must be in fp32 as well, each with the model that was called.
        stuck: the first call that fp32 does not mend, where the search ends; None for none.
        untried: the first model whose call was not tried: it was given inf or NaN that is no
            recorded output, or cannot be run again; None for none.
    """

    def __init__(self, call: Call, origin: Origin, mended: Mended, later: Iterable[Call]) -> None:
        self.needed: list[tuple[nn.Module, str]] = []
        self.stuck: Stuck | None = None
        self.untried: nn.Module | None = None
        # the modules of each model in fp32, and whether what they return stays there
        self._in_float: ModuleTable[tuple[list[str], bool]] = ModuleTable()
        self._returned: list[tuple[Tensor, Tensor]] = []  # outputs as recorded, and mended
        self._put_in_float(call, origin, mended)
        self._run(call, _outputs_of(call))
        for one in itertools.islice(later, _MOST):
            if self.stuck is not None:
                return
            try:
                self._follow(one)
            except Exception:  # a call that cannot be made again, or a full GPU: the mend stands
                self.untried = self.untried or one.model()

    def _follow(self, call: Call) -> None:
        """Run a call again if it was given what an earlier one returned."""
        model = call.model()
        assert model is not None
        inputs = map_tensors(self._replacement_for, call.inputs)
        if kinds_in(tensors_in(inputs)) - {"-inf"}:  # a mask has that
            self.untried = self.untried or model
            return
        if inputs is call.inputs:
            return
        # the level casts what a whole model is given
        given = call.given(inputs, takes_float=root_of(model)[0] is not model)
        recorded = _outputs_of(call)
        left = self._run(given, recorded)
        if left is None:
            return
        mended = mend(given, left, None)
        if mended.by not in ("module", "model"):
            self.stuck = Stuck(model, mended.by, mended.line)
            return
        self.needed += [(model, path) for path in self._put_in_float(given, left, mended)]
        self._run(given, recorded)

    def _replacement_for(self, tensor: Tensor) -> Tensor:
        """Return what is in the place of an input of a later call; itself where it is no result."""
        for first, now in self._returned:
            if _same_numbers(first, tensor):
                now = now.detach().reshape(tensor.shape)
                now = now if tensor.dtype is first.dtype else now.to(tensor.dtype)
                return now.requires_grad_(tensor.requires_grad)
        return tensor

    def _put_in_float(self, call: Call, origin: Origin, mended: Mended) -> Sequence[str]:
        """Let what mends a call compute in fp32 in each call of its model; return the paths."""
        model = call.model()
        assert model is not None
        known, stays = self._in_float.get(model, ([], False))
        paths = mended.paths(origin)
        new = [path for path in paths if path not in known]
        self._in_float[model] = [*known, *new], stays or mended.stays
        return new

    def _run(self, given: Call, recorded: Sequence[Tensor]) -> Origin | None:
        """Run a call as it is mended; return what is still not finite.

        Args:
            given: the call, with mended inputs.
            recorded: what it returned as it was recorded.
        """
        model = given.model()
        assert model is not None
        paths, stays = self._in_float.get(model, ([], False))
        now = Rerun(given, [model.get_submodule(path) for path in paths], stays=stays)
        left = now.forward()
        # Of what was finite nothing is mended. What a model returns a second time, as one that is
        # fed its own, is what it returned last.
        pairs = zip(recorded, now.outputs, strict=False)
        new = [(a.detach(), b.detach()) for a, b in pairs if kinds_in([a])]
        self._returned = [*new, *self._returned]
        return left if _is_felt(given, now.outputs) else None


def _outputs_of(call: Call) -> list[Tensor]:
    """Return what a call returned as it was recorded."""
    one = Rerun(call)
    one.forward()
    return one.outputs


def _is_felt(call: Call, outputs: Sequence[Tensor]) -> bool:
    """Return whether an output that is not finite may matter: not if no gradient reached it."""
    reached = {index for grads in call.grads.values() for index in grads}
    felt = [one for index, one in enumerate(outputs) if not reached or index in reached]
    return bool(kinds_in(felt))


def _same_numbers(one: Tensor, other: Tensor) -> bool:
    """Return whether a tensor holds the numbers of one, in the same order; maybe cast."""
    if not (can_look(one) and can_look(other)) or not 0 < one.numel() == other.numel():
        return False
    flat = one.detach().reshape(-1).to(other.device, other.dtype)
    same = torch.isclose(flat, other.detach().reshape(-1), rtol=0.0, atol=0.0, equal_nan=True)
    return bool(same.all())
