"""A buffer whose numbers float16 does not hold is told of, and what the message says mends it."""

import warnings
from collections.abc import Sequence
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

LARGE = [1.0, 2e5]


class Shifted(nn.Module):
    """Wrong without a word where the buffer is infinite: the hyperbolic tangent of it is 1."""

    def __init__(self, numbers: Sequence[float]) -> None:
        super().__init__()
        self.register_buffer("shift", torch.tensor(numbers))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x + self.shift / 1e6).to(x.dtype)


def model_with(numbers: Sequence[float]) -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), Shifted(numbers))


def initialized(amp: ModuleType, model: nn.Module, level: str, **options: object) -> nn.Module:
    optimizer = SGD(model.parameters(), lr=0.1)
    found: nn.Module = amp.initialize(
        model, optimizer, opt_level=level, verbosity=0, loss_scale=1.0, **options
    )[0]
    return found


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_numbers_above_the_range_are_told_of_and_a_rule_keeps_them(
    amp: ModuleType, level: str
) -> None:
    model, x = model_with(LARGE), torch.randn(4, 2)
    exact = model(x)
    with pytest.warns(UserWarning, match=r"65504.*1\.shift of Sequential.*\"1\": \"float\""):
        model = initialized(amp, model, level)
    assert (model(x) - exact).abs().max() > 0.1
    amp.deactivate()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = initialized(amp, model, level, rules={"modules": {"1": "float"}})
    torch.testing.assert_close(model(x).float(), exact, rtol=0.01, atol=0.002)


@pytest.mark.parametrize("level", ["O1", "O4", "O5"])
def test_levels_that_hold_them_say_nothing(amp: ModuleType, level: str) -> None:
    initialized(amp, model_with(LARGE), level)


@pytest.mark.parametrize(
    "numbers",
    [[0.0, -1e9], [-1e5, -1e5], [65504.0, -65504.0], [torch.inf, -torch.inf], [torch.nan, 0.0], []],
    ids=["mask", "all masked", "range", "infinite", "NaN", "empty"],
)
def test_masks_and_what_is_in_range_say_nothing(amp: ModuleType, numbers: list[float]) -> None:
    initialized(amp, model_with(numbers), "O2")


@pytest.mark.parametrize("numbers", [[-1e5, -2e5], [1e5, 1e5]], ids=["two", "positive"])
def test_other_large_numbers_are_no_mask(amp: ModuleType, numbers: list[float]) -> None:
    with pytest.warns(UserWarning, match="65504"):
        initialized(amp, model_with(numbers), "O2")


def test_a_buffer_of_the_model_itself_has_no_rule(amp: ModuleType) -> None:
    with pytest.warns(UserWarning, match=r"shift of Shifted\. .*range of float32\. Where torch"):
        amp.initialize(Shifted(LARGE), opt_level="O3", verbosity=0)


def test_a_warning_that_is_an_error_leaves_the_model_as_it_was(amp: ModuleType) -> None:
    model = model_with(LARGE)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(UserWarning, match="65504"):
        initialized(amp, model, "O2")
    found = model.state_dict()
    assert all(torch.equal(found[name], value) for name, value in before.items())
    assert {value.dtype for value in found.values()} == {torch.float32}
    initialized(amp, model, "O5")
