"""Which of many modules must be in fp32: a search for a small set among suspects.

Knows no script: a set is tried by calling ``works``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Works = Callable[[Sequence[str]], bool]


def smallest_set(suspects: Sequence[str], works: Works) -> list[str] | None:
    """Return suspects that work together, none of which can be left out.

    First the shortest run of suspects from the front that works: one, two, four ... then halving
    between the last two. Then parts of it are left out, in halves, quarters ..., single ones. With
    the culprits in front this takes a few trials for hundreds of suspects.

    Args:
        suspects: the most suspicious first. A module inside of another suspect counts by itself.
        works: tries a set.

    Returns:
        None where not even all of them work.
    """
    count = _shortest_front(suspects, works)
    if count is None:
        return None
    return _without_superfluous(list(suspects[:count]), works)


def _shortest_front(suspects: Sequence[str], works: Works) -> int | None:
    fails, count = 0, 1
    while not works(suspects[:count]):
        if count >= len(suspects):
            return None
        fails, count = count, min(2 * count, len(suspects))
    while count - fails > 1:
        middle = (count + fails) // 2
        if works(suspects[:middle]):
            count = middle
        else:
            fails = middle
    return count


def _without_superfluous(found: list[str], works: Works) -> list[str]:
    """Leave out what can be, the least suspicious first: a module rather than one inside of it."""
    size = len(found) // 2
    while size >= 1:
        end = len(found)
        while end > 0 and len(found) > 1:
            start = max(0, end - size)
            rest = found[:start] + found[end:]
            if rest and works(rest):
                found = rest
            end = start
        size //= 2
    return found
