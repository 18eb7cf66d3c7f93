"""Gradients that stay multiplied by a loss scale: they follow the scale, to the bit."""

import pytest
import torch
from torch import nn

from amp_patch.gradients.param_pairs import ParamPairs
from amp_patch.gradients.scaled_gradients import ScaledGradients, bring_to, by_scale


@pytest.fixture
def params() -> list[nn.Parameter]:
    """Two parameters, of which one has a gradient of 6 that is multiplied by 2."""
    params = [nn.Parameter(torch.zeros(2)) for _ in range(2)]
    params[0].grad = torch.full((2,), 12.0)
    return params


@pytest.fixture
def scaled() -> ScaledGradients:
    scaled = ScaledGradients()
    scaled.begin(2.0)
    return scaled


@pytest.mark.parametrize("scale", [2.0, 8.0, 0.5, torch.tensor(8.0)])
def test_they_follow_the_scale(
    params: list[nn.Parameter], scaled: ScaledGradients, scale: float | torch.Tensor
) -> None:
    scaled.bring_to(scale, params)
    assert params[0].grad.tolist() == [6.0 * float(scale)] * 2
    assert params[1].grad is None
    assert scaled.scale == scale


def test_sparse_gradients_follow_the_scale(scaled: ScaledGradients) -> None:
    param = nn.Parameter(torch.zeros(3, 2))
    param.grad = torch.sparse_coo_tensor([[2]], [[1.0, 2.0]], (3, 2))
    scaled.bring_to(4.0, [param])
    assert param.grad.to_dense().tolist() == [[0.0, 0.0], [0.0, 0.0], [2.0, 4.0]]


def test_equal_scales_touch_nothing(params: list[nn.Parameter], scaled: ScaledGradients) -> None:
    version = params[0].grad._version
    scaled.bring_to(2.0, params)
    assert params[0].grad._version == version


def test_a_write_is_seen_in_place_and_where_there_was_none(
    params: list[nn.Parameter], scaled: ScaledGradients
) -> None:
    scaled.bring_to(4.0, params)
    assert not scaled.were_written()
    params[0].grad += 1
    assert scaled.were_written()
    scaled.bring_to(4.0, params)
    assert not scaled.were_written()
    params[1].grad = torch.ones(2)
    assert scaled.were_written()
    scaled.bring_to(4.0, params)
    params[0].grad = params[0].grad.clone()
    assert scaled.were_written()


def test_none_are_left_when_they_are_forgotten(
    params: list[nn.Parameter], scaled: ScaledGradients
) -> None:
    scaled.bring_to(4.0, params)
    scaled.forget()
    params[0].grad += 1
    assert scaled.scale is None
    assert not scaled.were_written()


@pytest.fixture
def pairs(params: list[nn.Parameter]) -> ParamPairs:
    """A half parameter with its master, both shown 12; one that is stepped itself; one without."""
    half = nn.Parameter(torch.zeros(2, dtype=torch.float16))
    half.grad = torch.full((2,), 12.0, dtype=torch.float16)
    master = nn.Parameter(torch.zeros(2))
    return ParamPairs([half, *params], [master, *params])


def test_in_a_block_they_are_shown_unscaled_and_wait_on_behind_it(
    pairs: ParamPairs, scaled: ScaledGradients
) -> None:
    half, param, without = pairs.model
    before = half.grad, param.grad
    with scaled.shown(pairs):
        assert [stepped.grad.tolist() for stepped in pairs.master[:2]] == [[6.0, 6.0]] * 2
        assert pairs.master[0].grad.dtype is torch.float32
        assert without.grad is None
    assert (half.grad, param.grad) == before
    assert pairs.master[0].grad is None
    assert half.grad.tolist() == param.grad.tolist() == [12.0, 12.0]


def test_what_a_master_has_already_is_shown_with_them(
    pairs: ParamPairs, scaled: ScaledGradients
) -> None:
    earlier = pairs.master[0].grad = torch.ones(2)
    with scaled.shown(pairs):
        assert pairs.master[0].grad.tolist() == [7.0, 7.0]
    assert pairs.master[0].grad is earlier
    assert earlier.tolist() == [1.0, 1.0]


def test_what_the_block_clears_is_cleared_where_it_waits(
    pairs: ParamPairs, scaled: ScaledGradients
) -> None:
    with scaled.shown(pairs):
        pairs.master[0].grad = None
    assert pairs.model[0].grad is None
    assert pairs.model[1].grad.tolist() == [12.0, 12.0]
    with scaled.shown(pairs):
        pairs.model[1].grad.zero_()
        scaled.forget()  # as zero_grad(set_to_none=False) does
    assert pairs.model[1].grad.tolist() == [0.0, 0.0]
    with scaled.shown(pairs):  # nothing waits
        pairs.model[1].grad.fill_(3.0)
    assert pairs.model[1].grad.tolist() == [3.0, 3.0]


def test_what_has_one_scale_is_brought_to_another_together() -> None:
    device, other = torch.tensor(4.0), torch.tensor(4.0)
    rows = [("a", 2.0), ("b", device), ("c", 2.0), ("d", other), ("e", device)]
    assert [names for _, names in by_scale(rows)] == [["a", "c"], ["b", "e"], ["d"]]
    for old in (2.0, device):
        for new in (8.0, torch.tensor(8.0)):
            grads = [torch.full((2,), float(old)), torch.full((3,), 0.5 * float(old))]
            bring_to(new, old, grads)
            assert [grad.tolist() for grad in grads] == [[8.0] * 2, [4.0] * 3]


@pytest.mark.parametrize("cleared", ["neither", "master", "half"])
def test_copies_are_followed_into_the_gradients_of_half_parameters(
    pairs: ParamPairs, scaled: ScaledGradients, cleared: str
) -> None:
    half, master, before = pairs.model[0], pairs.master[0], pairs.model[0].grad
    scaled.copy_to_masters(pairs)
    assert master.grad.tolist() == [12.0, 12.0]
    assert master.grad.dtype is torch.float32
    master.grad.data.fill_(1.0 + 2.0**-12)  # which float16 does not have
    if cleared != "neither":
        (master if cleared == "master" else half).grad = None
    scaled.follow()
    assert master.grad is None
    if cleared == "neither":
        assert half.grad is before
        assert half.grad.tolist() == [1.0, 1.0]
    else:
        assert half.grad is None
    assert pairs.model[1].grad.tolist() == [12.0, 12.0]


@pytest.mark.parametrize("replaced", [False, True])
def test_a_half_gradient_that_is_written_to_beside_its_copy_stays(
    pairs: ParamPairs, scaled: ScaledGradients, replaced: bool
) -> None:
    """A script has read the copies, for a log; written to, they win."""
    half = pairs.model[0]
    for written, expected in ((False, 6.0), (True, 9.0)):
        scaled.copy_to_masters(pairs)
        if replaced:
            half.grad = half.grad * 0.5
        else:
            half.grad.mul_(0.5)
        if written:
            pairs.master[0].grad.fill_(9.0)
        scaled.follow()
        assert half.grad.tolist() == [expected] * 2


def test_what_a_master_has_of_its_own_is_no_copy(
    pairs: ParamPairs, scaled: ScaledGradients
) -> None:
    own = pairs.master[0].grad = torch.ones(2)
    scaled.copy_to_masters(pairs)
    scaled.follow()
    assert pairs.master[0].grad is own
    assert pairs.model[0].grad.tolist() == [12.0, 12.0]
