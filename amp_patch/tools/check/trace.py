"""What a script does, in order, as rules ask for it: its calls and blocks of ``scale_loss``."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from . import names
from .guards import NO_GUARDS, Guards, contradict
from .truth import truth_of
from .values import Arguments, Cast, Const, Instance, Made, Member, Params, Value, flat, root

T = TypeVar("T")
P = ParamSpec("P")

#: Where ``enabled`` stands, by whether the device is in the name: ``torch.cuda.amp.autocast``.
_PLACES_OF_ENABLED = {
    ("autocast", True): 0,
    ("autocast", False): 2,
    ("GradScaler", True): 4,
    ("GradScaler", False): 5,
}


def once(
    ask: Callable[Concatenate[Trace, P], T],
) -> Callable[Concatenate[Trace, P], T]:
    """Make a function of a trace work out each answer once: rules look when the script is read.

    Rules ask the same of each block and of each step. Without it the time would grow with the
    square of a script's length.
    """

    @functools.wraps(ask)
    def asked(trace: Trace, /, *args: P.args, **kwargs: P.kwargs) -> T:
        question = (ask, args, *kwargs.items())
        if question not in trace.answers:
            trace.answers[question] = ask(trace, *args, **kwargs)
        return cast(T, trace.answers[question])

    return asked


class Group:
    """Calls in order, and those of each run."""

    def __init__(self, calls: Iterable[Call]) -> None:
        self.calls = list(calls)
        self._by_run: dict[int, list[Call]] = {}
        for call in self.calls:
            self._by_run.setdefault(call.run, []).append(call)
        self._near: dict[int, list[Call]] = {}

    def of_run(self, run: int) -> list[Call]:
        """Return the calls of one run."""
        return self._by_run.get(run, [])

    def with_call(self, call: Call) -> list[Call]:
        """Return those that a run can make as well as this one."""
        if call.run not in self._near:
            self._near[call.run] = self._near_to(call.run)
        return [one for one in self._near[call.run] if not contradict(one.guards, call.guards)]

    def _near_to(self, run: int) -> list[Call]:
        """Return the calls of a run, and those of the top of the script or of what it calls.

        What a run has read itself, ``__init__`` say, it makes with objects of its own.
        """
        own = {call.node for call in self.of_run(run)}
        others = [*self.of_run(0), *self.of_run(run)] if run else self.calls
        return [one for one in others if one.run == run or one.node not in own]


@dataclass(eq=False)
class Block:
    """``with amp.scale_loss(...)``, each time that it is entered.

    Attributes:
        call: of ``scale_loss``.
        scaled: what the block is given as its scaled loss.
        end: as `Call.order`.
    """

    call: Call
    scaled: Value
    end: int | None = None

    @property
    def loss(self) -> Value | None:
        """The loss that is scaled."""
        return self.call.arguments.get("loss", 0)

    def optimizers(self) -> list[Value]:
        """Return those that the block is for."""
        return [root(one) for one in flat(self.call.arguments.get("optimizers", 1))]

    def steps(self, optimizer: Value) -> bool:
        """Return whether it is for an optimizer."""
        return any(one is root(optimizer) for one in self.optimizers())


@dataclass(eq=False)
class Call:
    """A call, or what counts as one, each time that it is made.

    Attributes:
        name: of `names.canonical`; ``".name"`` of a method; ``"=name"`` of an assignment to an
            attribute, ``"=[]"`` to an item; ``"Add="`` of ``+=`` and so on, with what was there
            as the receiver; ``"Pow"`` of ``**``, ``"Div"`` of ``/``, ``"Mult"`` of ``*``;
            ``"with autocast"`` where an autocast begins;
            ``"not called"`` of a method that is a statement, and of what is imported and asked
            whether it is true; ``"def backward"`` of a ``torch.autograd.Function``'s.
        node: where it stands.
        receiver: the object whose method it is.
        guards: the branches that lead to it.
        blocks: of ``scale_loss``, that are open.
        regions: names of the other context managers that are open.
        loops: around it, with the number of the iteration.
        order: of time.
        run: 0 from the top of the script; a number for each function or class that is not reached
            from there, for nobody knows whether one run comes to two of these.
        result: what it returns.
    """

    name: str
    node: ast.AST
    receiver: Value | None
    arguments: Arguments
    guards: Guards
    blocks: tuple[Block, ...]
    regions: tuple[str, ...]
    loops: tuple[tuple[ast.AST, int], ...]
    order: int
    run: int
    result: Value | None = None


@dataclass(eq=False)
class Trace:
    """All calls of a script in order, and its blocks.

    Attributes:
        answers: to what was asked `once`.
    """

    calls: list[Call] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    answers: dict[tuple[Any, ...], Any] = field(default_factory=dict)

    _by_name: dict[str, list[Call]] = field(default_factory=dict)

    def append(self, call: Call) -> None:
        """Add the call that comes next."""
        self.calls.append(call)
        self._by_name.setdefault(call.name, []).append(call)

    def named(self, *found: str) -> list[Call]:
        """Return the calls of these names, in order."""
        return self._named(*found).calls

    def with_call(self, call: Call, *found: str) -> list[Call]:
        """Return the calls of these names that a run can make as well as this one."""
        return self._named(*found).with_call(call)

    @once
    def _named(self, *found: str) -> Group:
        calls = [call for name in found for call in self._by_name.get(name, ())]
        return Group(sorted(calls, key=lambda call: call.order))

    @once
    def scaled(self) -> Group:
        """Return the calls of ``scale_loss`` whose blocks are entered."""
        return Group(block.call for block in self.blocks)

    def initializations(self, call: Call) -> list[Initialization]:
        """Return the calls of ``initialize`` in runs that come to a call, and were not undone."""
        found = self.with_call(call, "amp.initialize")
        return [one for one in map(self._initialization, found) if self._is_on(one, call)]

    @once
    def _initialization(self, call: Call) -> Initialization:
        return Initialization(call)

    def _is_on(self, one: Initialization, call: Call) -> bool:
        return (
            one.is_enabled
            and not contradict(one.guards, call.guards)
            and not any(
                one.call.order < end.order < call.order and end.guards <= call.guards
                for end in self.with_call(call, "amp.deactivate")
            )
        )

    def uses_amp(self, call: Call) -> bool:
        """Return whether a run that comes to a call initializes amp, or scales losses."""
        return bool(self.initializations(call) or self.scaled().with_call(call))

    def initializations_of(self, value: Value, call: Call) -> list[Initialization]:
        """Return the calls of ``initialize`` that a model or optimizer is given to."""
        given = self._given().get(root(value))
        found = given.with_call(call) if given else ()
        return [one for one in map(self._initialization, found) if self._is_on(one, call)]

    @once
    def _given(self) -> dict[Value, Group]:
        """Return the calls of ``initialize`` that each model and optimizer is given to."""
        found: dict[Value, list[Call]] = {}
        for one in map(self._initialization, self.named("amp.initialize")):
            for value in {*map(root, one.models), *map(root, one.optimizers)}:
                found.setdefault(value, []).append(one.call)
        return {value: Group(calls) for value, calls in found.items()}

    def of_models(self, value: Value, call: Call) -> list[Initialization]:
        """Return the calls of ``initialize`` that a model is given to."""
        found = self.initializations_of(value, call)
        return [one for one in found if root(value) in map(root, one.models)]


class Initialization:
    """A call of ``amp.initialize``.

    Attributes:
        models, optimizers: what it may get.
        is_enabled: whether it does anything in some run.
        guards: those under which it does.
    """

    def __init__(self, call: Call) -> None:
        self.call = call
        given = call.arguments
        self.models = list(flat(given.get("models", 0), call.guards))
        self.optimizers = [
            one
            for one in flat(given.get("optimizers", 1), call.guards)
            if not (isinstance(one, Const) and one.value is None)
        ]
        enabled = given.get("enabled", 2)
        when_enabled = truth_of(enabled, call.guards)[0] if enabled is not None else NO_GUARDS
        self.is_enabled = when_enabled is not None
        self.guards = call.guards | (when_enabled or NO_GUARDS)

    @property
    def levels(self) -> list[Const]:
        """The levels that it may ask for; none where nothing is known of them."""
        given = self.call.arguments.get("opt_level", 3)
        if given is None:
            return [] if self.call.arguments.is_open else [Const("O1", self.call.node)]
        found = [one.default or one for one in flat(given, self.call.guards)]
        return [one for one in found if isinstance(one, Const)]

    def is_at(self, *levels: str) -> bool:
        """Return whether it is certainly, or by default, at one of these levels."""
        return any(one.value in levels for one in self.levels)

    @property
    def scales(self) -> bool:
        """Whether it may have a loss scale other than 1."""
        scale = self.call.arguments.get("loss_scale", 8)
        if scale is not None and not is_constant(scale, None):
            return not is_constant(scale, 1.0)
        if self.call.arguments.is_open and self.call.arguments.get("opt_level", 3) is None:
            return False  # a level of a configuration, which may be O0
        return not self.levels or self.is_at("O1", "O2")


def enabled_of(call: Call) -> Value | None:
    """Return what switches an autocast on, or a GradScaler; None where nothing is said."""
    dotted = call.result.dotted if isinstance(call.result, Made) else ""
    is_of_device = dotted.startswith(("torch.cuda.", "torch.cpu."))  # others are told the device
    place = _PLACES_OF_ENABLED[call.name, is_of_device]
    return call.arguments.get("enabled", place)


def cast_by(call: Call) -> Cast | None:
    """Return what a call has cast; None for ``.train()`` of what was cast before, say."""
    result = call.result
    return result if isinstance(result, Cast) and result is not call.receiver else None


def is_constant(value: Value | None, wanted: object) -> bool:
    """Return whether a value is certainly this literal."""
    return (
        isinstance(value, Const)
        and value.value == wanted
        and (not isinstance(wanted, bool | None) or value.value is wanted)
    )


def is_optimizer(value: Value) -> bool:
    """Return whether a value was made by the class of an optimizer."""
    value = root(value)
    if isinstance(value, Made):
        return names.is_optimizer(value.dotted)
    return isinstance(value, Instance) and any(
        isinstance(base, Made | Value) and names.is_optimizer(base.key)
        for base in value.cls.ancestry()
    )


def is_module(value: Value) -> bool:
    """Return whether a value was made by the class of a module."""
    value = root(value)
    if isinstance(value, Made):
        return names.is_module(value.dotted)
    return isinstance(value, Instance) and any(
        names.is_module(base.key) for base in value.cls.ancestry()
    )


def owners_of(optimizer: Value) -> list[Value]:
    """Return the modules whose ``parameters()`` an optimizer was given."""
    return [one.owner for one in root(optimizer).deps if isinstance(one, Params)]


def lies_in(part: Value, whole: Value, depth: int = 3) -> bool:
    """Return whether a module is another, or was looked up in it; not whether it holds it."""
    part, whole = root(part), root(whole)
    is_looked_up = type(part) in (Member, Value) and part.source is None and whole in part.deps
    if part is whole or is_looked_up:
        return True
    inside = (whole.attrs.read(name, frozenset()) for name in whole.attrs.names() if depth)
    return any(lies_in(part, one, depth - 1) for held in inside for one in flat(held))


def is_part_of(part: Value, whole: Value, depth: int = 3) -> bool:
    """Return whether a module is another, or lies in it, as far as that is seen."""
    part, whole = root(part), root(whole)
    if part is whole or part in whole.deps or whole in part.deps:
        return True
    inside = (whole.attrs.read(name, frozenset()) for name in whole.attrs.names() if depth)
    return any(is_part_of(part, one, depth - 1) for held in inside for one in flat(held))
