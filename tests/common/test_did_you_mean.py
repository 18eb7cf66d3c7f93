"""The word that was meant, of those that there are."""

from __future__ import annotations

import pytest
import torch

from amp_patch.casting.patched_functions import USER_RULES
from amp_patch.common.did_you_mean import did_you_mean, meant, near
from amp_patch.common.rules_file import PRECISIONS


@pytest.mark.parametrize(
    ("given", "of_functions", "of_modules"),
    [
        ("haf", "half", "half"),
        ("Float", "float", "float"),
        ("half-out", "half_out", None),
        ("prmote", "promote", None),
        (torch.float16, "half", "half"),
        (torch.float32, "float", "float"),
        ("fp16", "half", "half"),
        ("float16", "half", "half"),  # of the words most like bfloat16
        (torch.bfloat16, "bfloat16", "half"),
        ("bf16", "bfloat16", "half"),
        (False, "off", None),
        (None, "off", None),
        ("fast", None, None),
        (3, None, None),
    ],
)
def test_the_rule_that_was_meant(
    given: object, of_functions: str | None, of_modules: str | None
) -> None:
    assert meant(given, USER_RULES) == of_functions
    assert meant(given, PRECISIONS) == of_modules


def test_several_that_are_near_come_in_order() -> None:
    words = ["softmax", "softmin", "softplus", "tanh"]
    assert near("Softmi", words) == ["softmin", "softmax"]
    assert near("softmi", words, likeness=0.9) == ["softmin"]
    assert near("zzz", words) == []


def test_a_sentence_ends_with_the_question_or_without_one() -> None:
    assert did_you_mean("haf", USER_RULES) == "; did you mean 'half'?"
    assert did_you_mean("zzz", USER_RULES) == "."
