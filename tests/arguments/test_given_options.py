"""Which other arguments are refused, and the words of each refusal."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import exactly
from torch import nn

from amp_patch import arguments


@pytest.mark.parametrize(
    ("loss", "received"),
    [
        (1.0, "float"),
        (None, "NoneType"),
        ([torch.zeros(1)], "list"),
        (torch.zeros(1, dtype=torch.int64), "torch.int64"),
        (torch.zeros(1, dtype=torch.complex64), "torch.complex64"),
    ],
)
def test_what_is_no_loss_is_refused(loss: Any, received: str) -> None:
    message = (
        f"scale_loss() scales a floating tensor; got {received}; call it with the loss itself, "
        "not with loss.item(), once per loss or with the sum of the losses."
    )
    with pytest.raises(TypeError, match=exactly(message)):
        arguments.loss_of(loss)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_floating_loss_is_taken_as_it_is(dtype: torch.dtype) -> None:
    loss = torch.zeros(3, dtype=dtype)
    assert arguments.loss_of(loss) is loss


def test_a_loss_that_makes_its_own_backward_is_told_where_it_works() -> None:
    """As that of Opacus's ghost clipping."""

    class Clipped:
        def backward(self) -> None:
            """Clip the gradients of each sample."""

    message = (
        "scale_loss() scales a floating tensor; got Clipped, an object with a backward() of its "
        "own; call that outside of scale_loss(), at a level without a scale: amp.initialize(..., "
        "opt_level='O4'), or loss_scale=1.0."
    )
    with pytest.raises(TypeError, match=exactly(message)):
        arguments.loss_of(Clipped())


@pytest.mark.parametrize("count", [0, -1, 1.0, "1", None, True])
def test_a_wrong_number_of_losses_is_refused(count: Any) -> None:
    message = (
        f"num_losses must be an int of at least 1; got {count!r}; call "
        "amp.initialize(..., num_losses=1)."
    )
    with pytest.raises(ValueError, match=exactly(message)):
        arguments.count_of(count)


def test_a_number_of_losses_is_taken() -> None:
    assert [arguments.count_of(count) for count in (1, 3)] == [1, 3]


def test_rules_are_copied() -> None:
    rules = {"softmax": "half"}
    taken = arguments.function_rules_of(rules)
    assert taken == rules
    assert taken is not rules


@pytest.mark.parametrize(
    ("given", "name", "mended"),
    [
        (torch.nn.functional.gelu, "gelu", "{'softmax': 'half'}"),
        (3, "int", "{'softmax': 'half'}"),
        (nn.LayerNorm, "LayerNorm", "{'modules': {'blocks.*.norm': 'half'}}"),
        (nn.Linear(1, 1), "Linear", "{'modules': {'blocks.*.norm': 'half'}}"),
    ],
)
def test_functions_are_named_by_strings(given: Any, name: str, mended: str) -> None:
    message = (
        "rules must name functions by strings, and modules of the model by their paths in it; got "
        f"{name} in the place of one; call amp.initialize(..., rules={mended})."
    )
    with pytest.raises(TypeError, match=exactly(message)):
        arguments.function_rules_of({"exp": "half", given: "half"})


@pytest.mark.parametrize(
    ("norms", "error", "message"),
    [
        (
            (-1.0, 2.0),
            ValueError,
            "max_norm must be a number of at least 0; got -1.0; call "
            "amp.clip_grad_norm_(optimizer, max_norm=1.0).",
        ),
        (
            (float("nan"), 2.0),
            ValueError,
            "max_norm must be a number of at least 0; got nan; call "
            "amp.clip_grad_norm_(optimizer, max_norm=1.0).",
        ),
        (
            ("one", 2.0),
            TypeError,
            "max_norm must be a number; got str; call "
            "amp.clip_grad_norm_(optimizer, max_norm=1.0).",
        ),
        (
            ("1.0", 2.0),
            TypeError,
            "max_norm must be a number; got str; call "
            "amp.clip_grad_norm_(optimizer, max_norm=1.0).",
        ),
        (
            (b"1", 2.0),
            TypeError,
            "max_norm must be a number; got bytes; call "
            "amp.clip_grad_norm_(optimizer, max_norm=1.0).",
        ),
        (
            (1.0, "2"),
            TypeError,
            "norm_type must be a number; got str; call "
            "amp.clip_grad_norm_(optimizer, 1.0, norm_type=2.0).",
        ),
        (
            (torch.ones(2), 2.0),
            TypeError,
            "max_norm must be a number; got Tensor; call "
            "amp.clip_grad_norm_(optimizer, max_norm=1.0).",
        ),
        (
            (1.0, 0),
            ValueError,
            "norm_type must be a number above 0, or inf; got 0; call "
            "amp.clip_grad_norm_(optimizer, 1.0, norm_type=2.0).",
        ),
        (
            (1.0, float("nan")),
            ValueError,
            "norm_type must be a number above 0, or inf; got nan; call "
            "amp.clip_grad_norm_(optimizer, 1.0, norm_type=2.0).",
        ),
        (
            (1.0, None),
            TypeError,
            "norm_type must be a number; got NoneType; call "
            "amp.clip_grad_norm_(optimizer, 1.0, norm_type=2.0).",
        ),
    ],
)
def test_wrong_norms_are_refused(norms: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=exactly(message)):
        arguments.norms_of(*norms)


def test_norms_come_as_floats() -> None:
    inf = float("inf")
    assert arguments.norms_of(0, 1) == (0.0, 1.0)
    assert arguments.norms_of(torch.tensor(0.5), "inf") == (0.5, inf)
    assert arguments.norms_of(inf, 0.5) == (inf, 0.5)


@pytest.mark.parametrize("state", [None, [], "amp", 3])
def test_what_is_no_state_is_refused(state: Any) -> None:
    message = (
        "a state of the loss scalers is a dict, as amp.state_dict() returned it; got "
        f"{type(state).__name__}; call amp.load_state_dict(checkpoint['amp']) with what was saved."
    )
    with pytest.raises(TypeError, match=exactly(message)):
        arguments.refuse_no_state(state)
    arguments.refuse_no_state({})


@pytest.mark.parametrize("enabled", ["False", None, 2, 1.0, []])
def test_what_neither_enables_nor_disables_is_refused(enabled: Any) -> None:
    message = (
        f"enabled must be True or False; got {enabled!r}; call amp.initialize(..., "
        "enabled=False) to leave models and optimizers alone."
    )
    with pytest.raises(TypeError, match=exactly(message)):
        arguments.enabled_of(enabled)
    assert [arguments.enabled_of(given) for given in (True, False, 1, 0)] == [True, False] * 2


@pytest.mark.parametrize(
    ("given", "meant"), [("O2", "O2"), ("O9", "O9"), ("o1", "O1"), ("05", "O5")]
)
def test_a_level_in_the_place_of_enabled_is_told_its_own(given: str, meant: str) -> None:
    message = (
        f"enabled, the third argument, must be True or False; got the opt_level {given!r}; call "
        f"amp.initialize(models, optimizers, opt_level='{meant}')."
    )
    with pytest.raises(TypeError, match=exactly(message)):
        arguments.enabled_of(given)


@pytest.mark.parametrize("verbosity", ["1", "skip", None, 1.0, []])
def test_a_wrong_verbosity_is_refused(verbosity: Any) -> None:
    message = (
        "verbosity must be an int, of which 0 prints nothing, or 'skips' for the lines of skipped "
        f"steps alone; got {verbosity!r}; call amp.initialize(..., verbosity=0)."
    )
    with pytest.raises(TypeError, match=exactly(message)):
        arguments.verbosity_of(verbosity)
    given = [0, 1, 2, "skips"]
    assert [arguments.verbosity_of(one) for one in given] == given
