"""Which words a rule may have, and what all wrappers do: ``out`` is left alone, and TorchScript."""

import pytest
import torch
from casting_support import called_at
from torch import Tensor

from amp_patch.casting.libraries.library_casts import Rule, wrap


@pytest.mark.parametrize("rule", [Rule("promot"), Rule("promote", "cpus"), Rule("mean", "never")])
def test_a_rule_of_other_words_is_refused(rule: Rule) -> None:
    with pytest.raises(KeyError):
        wrap(torch.add, rule)


def test_out_is_written_to_where_it_comes_by_its_place() -> None:
    def add(a: Tensor, out: Tensor | None = None, times: int = 1) -> Tensor:
        return torch.mul(a, times, out=out)

    out = torch.zeros(2)
    half = torch.ones(2, dtype=torch.float16)
    function = wrap(add, Rule("promote", "always"))
    assert called_at("O2", "inside", function, half.float(), out) is out
    assert torch.equal(out, torch.ones(2))
    assert called_at("O2", "inside", function, half, None).dtype is torch.float16


def test_torchscript_compiles_the_original() -> None:
    assert wrap(torch.mul, Rule("half")).__prepare_scriptable__() is torch.mul
