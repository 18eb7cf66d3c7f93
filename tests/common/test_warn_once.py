"""A message is warned of once, and again after a reset."""

import warnings

from amp_patch.common.warn_once import WarnOnce


def test_each_message_comes_once_until_a_reset() -> None:
    warn_once = WarnOnce()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for message in ("one", "two", "one", "two"):
            warn_once(message)
        warn_once.reset()
        warn_once("one")
        warn_once("one")
    assert [str(warning.message) for warning in caught] == ["one", "two", "one"]
