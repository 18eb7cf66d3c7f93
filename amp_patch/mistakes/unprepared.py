"""Optimizers that `amp.initialize` never got, and the parameters that only they can step.

Knows parameters that no prepared optimizer steps, which of them a scaled loss has reached, and what
their gradients are multiplied by.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, compress
from typing import NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import TensorWeakRef

from amp_patch.common.scales import Scale, kept
from amp_patch.gradients.any_values import are_any
from amp_patch.gradients.foreign_gradients import Watch
from amp_patch.gradients.scaled_gradients import bring_to, by_scale
from amp_patch.optimizers.groups import params_of
from amp_patch.step.held_params import Joined, LetGo
from amp_patch.step.optimizer_backward import OptimizerBackward
from amp_patch.step.optimizer_step import OptimizerStep
from amp_patch.step.prepared_optimizers import PreparedOptimizers, Reached
from amp_patch.weights.parameter_lists import stored_grad

from .stray_gradients import OpenBlock, ScaledGradient

_MEND = (
    "call amp.initialize(model, [optimizer, other_optimizer]) with every optimizer that the loss "
    "trains, and amp.scale_loss(loss, [optimizer, other_optimizer])"
)


#: So many losses are looked at after each `UnpreparedParams.find`: a GAN has two or three.
_LOSSES = 4


class _Watched(NamedTuple):
    """A parameter, and the thread that trains it; None: any may.

    While torch runs the backward of another thread nobody may read the gradients that it writes.
    """

    param: TensorWeakRef
    thread: int | None

    @classmethod
    def here(cls, params: Iterable[Tensor]) -> list[_Watched]:
        """Return parameters that this thread trains."""
        return [cls(TensorWeakRef(param), threading.get_ident()) for param in params]


class UnpreparedParams:
    """Parameters that no prepared optimizer steps; false where there are none to be found.

    What a scaled backward writes to them stays multiplied by the loss scale. They are those of
    prepared models, those of other models that the first scaled losses reach, and those of any
    others from the first step of their optimizer on.

    Args:
        plain_backwards: returns how many backwards there were that were of no scaled loss.
        steps: of the prepared optimizers.

    Attributes:
        scaled: those with scaled gradients, by their ids; some may be others by now.
        blocks: those of scaled losses that are open.
    """

    def __init__(
        self, plain_backwards: Callable[[], int], steps: Mapping[Optimizer, OptimizerStep]
    ) -> None:
        self._plain_backwards, self._steps = plain_backwards, steps
        self._params: list[_Watched] = []
        self._frozen: dict[int, TensorWeakRef] = {}  # by the id of the parameter
        self._known: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self.scaled: dict[int, ScaledGradient] = {}
        self._losses_to_look_at = 0
        self.blocks: list[OpenBlock] = []
        self._doubted: dict[int, TensorWeakRef] = {}  # gradients, by the id of the parameter

    def __bool__(self) -> bool:
        return self.looks_at_losses or bool(self._params)

    @property
    def looks_at_losses(self) -> bool:
        """True while `look_at` is to be called: a look at all of a graph takes time."""
        return self._losses_to_look_at > 0

    def find(self, models: Iterable[nn.Module], optimizers: PreparedOptimizers) -> None:
        """Look for them anew: models or optimizers were prepared."""
        stepped = set(map(id, optimizers.params()))
        found = {
            id(param): param
            for model in models
            for param in model.parameters()
            if id(param) not in stepped
        }
        trained = [one for one in found.values() if one.requires_grad]
        self._params = [_Watched(TensorWeakRef(one), None) for one in trained]
        self._frozen = {
            key: TensorWeakRef(one) for key, one in found.items() if not one.requires_grad
        }
        self._known.clear()
        self._losses_to_look_at = _LOSSES if optimizers.scalers.scale_losses else 0

    def look_at(self, leaves: Iterable[Tensor], optimizers: PreparedOptimizers) -> None:
        """Watch what a scaled loss reaches from now on, its own backward included.

        Args:
            leaves: of its graph.
            optimizers: those that are prepared.
        """
        self._losses_to_look_at -= 1
        steps = list(optimizers.steps.values())
        masters = chain.from_iterable(step.backward.pairs().master for step in steps)
        here = self._alive(threading.get_ident())
        known = set(map(id, chain(optimizers.params(), masters, here)))
        new = [leaf for leaf in leaves if id(leaf) not in known]
        self._params += _Watched.here(new)
        for block in self._open()[-1:]:
            block.watches.append(self._watch(new, block))

    def expect_foreign(self) -> None:
        """Gradients of a loss that is not scaled are true: there is nothing to do."""

    def watch_foreign(self, scale: Scale) -> Watch:
        """See `OthersBackwards.watch_foreign`; it may add to what earlier ones wrote."""
        found = ((key, one, one.left()) for key, one in [*self.scaled.items()])
        there = [(key, one, grad) for key, one, grad in found if grad is not None]
        left = list(compress(there, are_any([grad for _, _, grad in there])))
        for old, grads in by_scale((grad, one.scale) for _, one, grad in left):
            bring_to(scale, old, grads)
        own = kept(scale)
        self.scaled = {
            key: one._replace(version=grad._version, scale=own) for key, one, grad in left
        }
        self._forget_dead()
        for outer in self._open():
            outer.true.is_on = False
        block = OpenBlock(Watch.of([]), own)
        block.watches = [watch := self._watch(self._alive(threading.get_ident()), block)]
        self.blocks.append(block)
        return watch

    def _open(self) -> list[OpenBlock]:
        """Return the blocks of this thread, each inside of the one before."""
        thread = threading.get_ident()
        return [block for block in self.blocks if block.thread == thread]

    def _watch(self, params: Sequence[Tensor], block: OpenBlock) -> Watch:
        """Return parameters as they are in a block, which keeps their true gradients so."""
        watch = Watch.of(params, self._plain_backwards())
        rows = zip(watch.params, watch.grads, strict=True)
        left = [(p, grad) for p, grad in rows if grad is not None and id(p) not in self.scaled]
        doubted = self._doubted
        true = [p for p, grad in left if id(p) not in doubted or doubted[id(p)]() is not grad]
        for outer in self._open():
            if outer is not block and true:
                scaled = {id(param) for param, _ in outer.written(self._plain_backwards())}
                true = [param for param in true if id(param) not in scaled]
        if true:
            block.true.keep(true)
        return watch

    def note_foreign(
        self, watch: Watch, optimizers: Sequence[OptimizerBackward], scale: Scale
    ) -> None:
        """See `OthersBackwards.note_foreign`."""
        for block in [one for one in self.blocks if one.watches[0] is watch]:
            for one in optimizers:
                one.pairs()  # what has come to them in the block may ask for it
            self.blocks.remove(block)
            block.true.end()
            self._note(block.written(self._plain_backwards()), optimizers, scale)
        for outer in self._open()[-1:]:
            outer.true.is_on = True

    def follow(
        self, before: Sequence[Tensor], now: Sequence[Tensor], let_go: LetGo
    ) -> list[Joined]:
        """See `Strays.follow`: an optimizer takes over what blocks have written to its new ones."""
        gone, new = _not_in(now, before), _not_in(before, now)
        if gone:
            for param, scale in let_go(gone):
                if (grad := stored_grad(param)) is not None:
                    self.scaled[id(param)] = ScaledGradient.of(param, grad, kept(scale))
            steps = list(self._steps.values())
            held = set(map(id, chain.from_iterable(one.backward.pairs().model for one in steps)))
            held.update(id(one.param()) for one in self._params)
            left = [one for one in gone if one.requires_grad and id(one) not in held]
            self._params += _Watched.here(left)
        if not new:
            return []
        self.look()
        ids = set(map(id, new))
        self._params = [one for one in self._params if id(one.param()) not in ids]
        joined = list(map(self._joined, new))
        for block in self.blocks:
            block.take(new)
        return joined

    def look(self) -> None:
        """See `Strays.look`."""
        for step in list(self._steps.values()):
            step.backward.pairs()

    def _joined(self, param: Tensor) -> Joined:
        scale, has_grad = self._scale_of(param), stored_grad(param) is not None
        true = next((one.true for one in self._open()[::-1] if one.true.has(param)), None)
        return Joined(param, scale, has_grad, true)

    def _scale_of(self, param: Tensor) -> Scale:
        known = self.scaled.pop(id(param), None)
        for block in self._open()[::-1]:
            if block.true.has(param):
                return 1.0
            if any(one is param for one, _ in block.written(self._plain_backwards())):
                return block.scale
        if known is not None and known.left() is not None:
            return known.scale
        scales = (step.backward.foreign.scale_of(param) for step in list(self._steps.values()))
        return next((scale for scale in scales if scale is not None), 1.0)

    def begin_plain(self, reached: Reached) -> None:
        """A backward of no scaled loss begins: what it is about to add to is unscaled.

        Args:
            reached: see `Reached`.
        """
        for block in self._open():
            block.true.is_on = False
        rows = [(key, one.left(), one.scale) for key, one in [*self.scaled.items()]]
        for key, grad, scale in rows if rows else ():
            if key in reached():
                del self.scaled[key]
                if grad is not None:
                    bring_to(1.0, scale, [grad])

    def end_plain(self) -> None:
        """It has ended, or failed; what follows is of the innermost open block again."""
        for block in self._open()[-1:]:
            block.true.is_on = True

    @contextlib.contextmanager
    def unscaling(self) -> Iterator[None]:
        """Unscale all that is left after the block, of whose gradients nobody knows then.

        In the block half parameters become float32 ones, and an optimizer may take over some.
        """
        self.look()
        for step in list(self._steps.values()):
            if step.backward.current.is_open:  # called in a block, after its backward
                step.backward.current.end_early(steps=False)
        left = [
            (one.param(), one.scale) for one in [*self.scaled.values()] if one.left() is not None
        ]
        yield
        for block in self.blocks:
            block.true.end()
        self.blocks.clear()
        ids = set(self.scaled)
        self.scaled.clear()
        for param, scale in left:
            if id(param) in ids and param is not None and (grad := stored_grad(param)) is not None:
                bring_to(1.0, scale, [grad])

    def _forget_dead(self) -> None:
        self._params = [one for one in self._params if one.param() is not None]
        self._doubted = {key: one for key, one in self._doubted.items() if one() is not None}

    def _alive(self, thread: int | None = None) -> list[Tensor]:
        """Return them all, or but those that another thread than this trains."""
        found = [one for one in self._params if thread is None or one.thread in (None, thread)]
        return [param for one in found if (param := one.param()) is not None]

    def _note(
        self,
        written: Sequence[tuple[Tensor, Tensor]],
        optimizers: Sequence[OptimizerBackward],
        scale: Scale,
    ) -> None:
        stepped = {id(param) for one in optimizers for param in one.params()} if written else ()
        own = kept(scale) if written else scale
        for param, grad in written:
            if id(param) not in stepped:
                self.scaled[id(param)] = ScaledGradient.of(param, grad, own)

    def forget(self, params: Iterable[Tensor]) -> None:
        """The gradients of these parameters were unscaled in place."""
        for param in params:
            self.scaled.pop(id(param), None)

    def refuse(
        self,
        optimizer: Optimizer,
        models: Iterable[nn.Module],
        optimizers: PreparedOptimizers,
        is_plain: bool,
    ) -> None:
        """Raise where the next step of an optimizer that is not prepared uses scaled gradients.

        Args:
            optimizer: about to step.
            models, optimizers: those that are prepared.
            is_plain: whether the last backward was of no scaled loss.

        Raises:
            RuntimeError: as said.
        """
        params = params_of(optimizer)
        if optimizer not in self._known:
            self._known.add(optimizer)
            count = self._count_unwatched(params, models, optimizers)
            has_scaled = optimizers.scalers.scale_losses and any(
                step.backward.zeroing.passes for step in optimizers.steps.values()
            )
            if count and has_scaled and not is_plain:
                raise RuntimeError(_refusal(optimizer, count))
        if count := len(self._scaled_of(params, optimizers)):
            raise RuntimeError(_refusal(optimizer, count))

    def refuse_clip(
        self, params: Sequence[Tensor], call: str, optimizers: PreparedOptimizers, is_plain: bool
    ) -> None:
        """Raise where gradients that are clipped together are scaled.

        Args:
            params: with these gradients.
            call: how the function is called that clips.
            optimizers: those that are prepared.
            is_plain: whether the last backward was of no scaled loss.

        Raises:
            RuntimeError: as said.
        """
        scaled = self._scaled_of(params, optimizers)
        if self._frozen and not is_plain and optimizers.scalers.scale_losses:
            scaled |= self._unfrozen(params, optimizers)
        if count := len(scaled):
            raise RuntimeError(
                f"{call} needs unscaled gradients; got {count} of parameters that no optimizer of "
                "amp.initialize() steps, which are multiplied by the loss scale. Call "
                "amp.clip_grad_norm_(optimizer, max_norm), freeze what is not to be trained by "
                "requires_grad_(False) and clear what it has by model.zero_grad(), or train these: "
                "optimizer.add_param_group({'params': [...]}), or an optimizer that "
                "amp.initialize() and amp.scale_loss() get."
            )

    def _unfrozen(self, params: Iterable[Tensor], optimizers: PreparedOptimizers) -> set[int]:
        """Return the ids of those frozen for `find` with a gradient that no optimizer steps."""
        thawed = {
            id(param)
            for param in params
            if (found := self._frozen.get(id(param))) is not None
            and found() is param
            and param.requires_grad
            and stored_grad(param) is not None
        }
        return thawed - set(map(id, optimizers.params())) if thawed else thawed

    def _scaled_of(self, params: Iterable[Tensor], optimizers: PreparedOptimizers) -> set[int]:
        """Return the ids of those among parameters whose gradients are scaled still.

        Those are left out that a prepared optimizer has got since `find`, by `add_param_group` or
        because it wraps the one that holds them: it unscales them.
        """
        known = {id(param) for param in params if id(param) in self.scaled}
        scaled = {key for key in known if self.scaled[key].left() is not None}
        return scaled.difference(map(id, optimizers.params())) if scaled else scaled

    def _count_unwatched(
        self, params: Sequence[Tensor], models: Iterable[nn.Module], optimizers: PreparedOptimizers
    ) -> int:
        """Watch parameters that were frozen, of no prepared model, or not there for `find`.

        Returns:
            How many of the prepared models' have a gradient, of which nobody knows whether it is
            scaled. One of another model most likely is not.
        """
        self._forget_dead()  # a script may make an optimizer of another copy in every step
        known = set(map(id, chain(optimizers.params(), self._alive())))
        own = {id(param) for model in models for param in model.parameters()}
        new = [param for param in params if id(param) not in known]
        if not optimizers.scalers.scale_losses:
            new = [param for param in new if id(param) in own]
        self._params += _Watched.here(new)
        grads = ((param, stored_grad(param)) for param in new)
        self._doubted |= {id(p): TensorWeakRef(grad) for p, grad in grads if grad is not None}
        return sum(stored_grad(param) is not None for param in new if id(param) in own)


def _not_in(some: Iterable[Tensor], params: Iterable[Tensor]) -> list[Tensor]:
    """Return those of ``params`` that are not among some others."""
    ids = set(map(id, some))
    return [param for param in params if id(param) not in ids]


def _refusal(optimizer: Optimizer, count: int) -> str:
    return (
        "gradients that scale_loss() has scaled must be unscaled before they are stepped; got a "
        f"step of an optimizer of type {type(optimizer).__name__} that amp.initialize() never got, "
        f"with {count} gradients that are multiplied by the loss scale; {_MEND}."
    )
