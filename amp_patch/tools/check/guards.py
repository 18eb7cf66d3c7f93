"""Answers to questions that a script asks of what is not known before it runs; runs nothing."""

from __future__ import annotations

from typing import Any, NamedTuple


class Guard(NamedTuple):
    """The answer to one question: is ``subject`` true, or, with ``equals``, equal to that?

    A set of guards as the subject asks whether all of them hold.
    """

    subject: str | frozenset[Any]
    equals: str | None
    answer: bool


Guards = frozenset[Guard]
NO_GUARDS: Guards = frozenset()
#: How the subjects begin that stand for what a ``try`` raises.
_TRY = "?try"
#: Guards under which a value is true, and those under which it is false; None: it never is.
Truth = tuple[Guards | None, Guards | None]


def contradict(some: Guards, others: Guards) -> bool:
    """Return whether two sets of answers cannot both be given in one run."""
    if some <= others:
        return False
    both = some | others
    equal: dict[object, str] = {}
    for guard in both:
        subject, equals, answer = guard
        if answer and (subject, equals, False) in both:
            return True
        if answer and equals and equal.setdefault(subject, equals) != equals:
            return True
        if not answer and isinstance(subject, frozenset) and subject <= both:
            return True
    return False


def negated(guards: Guards) -> Guards:
    """Return what holds where not all of these do."""
    if len(guards) == 1:
        (only,) = guards
        return frozenset({only._replace(answer=not only.answer)})
    return frozenset({Guard(guards, None, False)})


def together(some: Guards | None, others: Guards | None) -> Guards | None:
    """Return under which guards both hold; None where one of them never does."""
    return None if some is None or others is None else some | others


def opaque(key: str, equals: str | None = None) -> Truth:
    """Return the truth of what nothing is known of but its text."""
    return frozenset({Guard(key, equals, True)}), frozenset({Guard(key, equals, False)})


def of_try(number: int) -> Guard:
    """Return the guard under which the handlers of a ``try`` statement are read."""
    return Guard(f"{_TRY}{number}", None, True)


def is_of_try(guard: Guard) -> bool:
    """Return whether a guard asks what a ``try`` raised; where it is true, a handler runs."""
    return str(guard.subject).startswith(_TRY)
