"""Wraps a function of another library, or of torch, so that its arguments are cast by a rule.

Has the words that rules are made of, and for each what makes the calls. It must not know what the
functions compute, nor where they stand.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from amp_patch.casting import Args, Function, fused_loss
from amp_patch.casting.many_uses import used
from amp_patch.casting.meeting_dtypes import MEETINGS, casting_where_they_meet
from amp_patch.patching import stand_for

from . import float32_calls, half_calls, promoted_calls
from .call_arguments import Kwargs
from .lookups import looking_up
from .mixtures import mixing
from .promoted_calls import InFloat

#: Makes a call of the function that it is given.
Run = Callable[[Function, Args, Kwargs], Any]


class Rule(NamedTuple):
    """How a function's floating arguments are cast, and where half ones are computed in float32.

    Attributes:
        casts: one of `WORDS`.
        in_float: one of `PLACES`.
    """

    casts: str
    in_float: str = "never"


class Place(NamedTuple):
    """What the second word of a rule says.

    Attributes:
        in_float: whether a call with such tensors is computed in float32.
        by_hubs: so is one on a graph with a hub, and all inside. It acts at O1, too, where float16
            counts a hub's neighbours no further either.
    """

    in_float: InFloat
    by_hubs: bool = False


class Word(NamedTuple):
    """What the first word of a rule says.

    Attributes:
        make: makes what stands in the function's place.
        is_public: users may give it; only `library_rules`, or `rules`, has the others.
        is_for_half: it does nothing before a model is stored in half, so that torch's functions and
            all methods wait for one; "logits" has its like among O1's casts.
    """

    make: Callable[[Function, Place], Function]
    is_public: bool = False
    is_for_half: bool = False


def wrap(function: Function, rule: Rule) -> Function:
    """Return ``function`` with its floating arguments, also those in containers, cast by a rule.

    Raises:
        KeyError: the rule has a word that is none.
    """
    wrapper = WORDS[rule.casts].make(function, PLACES[rule.in_float])
    if rule.casts == "float" or rule == ("stored", "always"):
        _in_float.add(wrapper)
    return wrapper


def computes_in_float(kind: type) -> bool:
    """Tell whether a rule has all that the forward of a class computes in float32."""
    return any(vars(base).get("forward") in _in_float for base in kind.__mro__)


def is_for_half(rule: Rule) -> bool:
    """Tell whether a rule does nothing before a model is stored in half."""
    return WORDS[rule.casts].is_for_half and not PLACES[rule.in_float].by_hubs


def _called_by(run: Run) -> Callable[[Function, Place], Function]:
    """Return what makes wrappers of which ``run`` makes the calls, wherever they compute."""
    return lambda function, place: _calling(function, run, place)


def _placed_by(run: Callable[..., Any]) -> Callable[[Function, Place], Function]:
    """Return the same where ``run`` asks where it computes, by its first argument."""

    def make(function: Function, place: Place) -> Function:
        return _calling(function, functools.partial(run, place.in_float), place)

    return make


def _calling(function: Function, run: Run, place: Place) -> Function:
    if place.by_hubs:
        run = functools.partial(float32_calls.run_unless_hub, run)
    out_at = _position_of_out(function)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        out = args[out_at] if len(args) > out_at else kwargs.get("out")
        if out is not None:  # it must be written to, and a cast of it is a copy
            return function(*args, **kwargs)
        return run(function, args, kwargs)

    return stand_for(wrapper, function)


def _taking_logits(function: Function, place: Place) -> Function:
    """Return torch's cross_entropy for half logits, which a kernel takes where it has one."""
    has_kernel = fused_loss.has_kernel(function)
    run = float32_calls.run_logits if has_kernel else float32_calls.run_wide
    return _calling(function, run, place)


def _counting(function: Function, place: Place) -> Function:
    """Return a function that is called with parts of a weight that is used very often."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            args, kwargs = used(args, kwargs)
        return function(*args, **kwargs)

    return stand_for(wrapper, function)


def _widening(method: Function, place: Place) -> Function:
    """Return a method that takes half arguments in float32; torch.compile reads all of it."""

    @functools.wraps(method)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return float32_calls.run_widened(method, args, kwargs)

    return stand_for(wrapper, method)


def _looking_up(function: Function, place: Place) -> Function:
    return looking_up(function)


def _mixing(function: Function, place: Place) -> Function:
    return mixing(function)


def _meeting(word: str) -> Word:
    def make(function: Function, place: Place) -> Function:
        return casting_where_they_meet(function, word)

    return Word(make, is_for_half=True)


def _position_of_out(function: Function) -> int:
    """Return where a positional ``out`` stands; beyond all arguments where there is none."""
    if type(function) is types.FunctionType and not hasattr(function, "__wrapped__"):
        # of whose signature nothing else is asked: to make it takes twenty times as long
        names = function.__code__.co_varnames[: function.__code__.co_argcount]
        return names.index("out") if "out" in names else sys.maxsize
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # it is not Python's
        return sys.maxsize
    places = [
        place
        for place, parameter in enumerate(parameters)
        if parameter.name == "out" and parameter.kind is not parameter.KEYWORD_ONLY
    ]
    return places[0] if places else sys.maxsize


#: Wrappers that have all in float32 that a function computes.
_in_float: weakref.WeakSet[Function] = weakref.WeakSet()
#: The first words; `library_rules` says what they mean.
WORDS: dict[str, Word] = {
    "half": Word(_placed_by(functools.partial(promoted_calls.run_promoted, True)), is_public=True),
    "promote": Word(
        _placed_by(functools.partial(promoted_calls.run_promoted, False)), is_public=True
    ),
    "stored": Word(_placed_by(half_calls.run_stored), is_public=True, is_for_half=True),
    "float": Word(_called_by(float32_calls.run_float), is_public=True),
    "result": Word(_called_by(half_calls.run_result), is_public=True),
    "counted": Word(_counting, is_for_half=True),
    "first": Word(_called_by(float32_calls.run_like_first)),
    "float_on_cpu": Word(_called_by(float32_calls.run_float_on_cpu), is_for_half=True),
    "frames": Word(_called_by(half_calls.run_frames), is_for_half=True),
    "lengths": Word(_called_by(float32_calls.run_lengths), is_for_half=True),
    "logits": Word(_taking_logits, is_for_half=True),
    "lookup": Word(_looking_up, is_for_half=True),
    "mixed": Word(_mixing, is_for_half=True),
    "loss": Word(_called_by(float32_calls.run_loss)),
    "no_half": Word(_called_by(float32_calls.run_widened), is_for_half=True),
    "powers": Word(_called_by(float32_calls.run_powers), is_for_half=True),
    "registered": Word(_called_by(half_calls.run_registered)),
    "rounded": Word(_called_by(float32_calls.run_rounded), is_for_half=True),
    "rows": Word(_called_by(promoted_calls.run_rows)),
    "sums": Word(_placed_by(promoted_calls.run_sums)),
    "steep": Word(_called_by(float32_calls.run_steep), is_for_half=True),
    "told": Word(_called_by(float32_calls.run_told)),
    "uncast": Word(_called_by(half_calls.run_uncast)),
    "wide": Word(_called_by(float32_calls.run_wide), is_for_half=True),
    "widened": Word(_widening),
    **{word: _meeting(word) for word in MEETINGS},
}
#: The second words.
PLACES: dict[str, Place] = {
    "never": Place(promoted_calls.never),
    "cpu": Place(promoted_calls.on_cpu),
    "mixed": Place(promoted_calls.mixed_or_on_cpu),
    "always": Place(promoted_calls.always),
    "hubs": Place(promoted_calls.never, by_hubs=True),
}
#: Those that users may give.
CASTS = tuple(word for word, one in WORDS.items() if one.is_public)
IN_FLOAT = tuple(word for word, place in PLACES.items() if not place.by_hubs)
