"""What tests of several rooms share: how often a property is drawn."""

from typing import Any

import hypothesis


def examples(times: float, **options: Any) -> hypothesis.settings:
    """Return settings that draw so many times the number of examples of the profile.

    ``HYPOTHESIS_PROFILE`` chooses the profile, and a property has no number of its own.

    Args:
        times: 1 or more; `trains` is for fewer.
        options: further ones of ``hypothesis.settings``.
    """
    number = int(times * hypothesis.settings.default.max_examples)
    return hypothesis.settings(max_examples=number, **options)


def trains(**options: Any) -> hypothesis.settings:
    """Return settings for a property that trains for each example: a quarter of the profile's."""
    return examples(1 / 4, **options)
