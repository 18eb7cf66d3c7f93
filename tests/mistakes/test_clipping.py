"""torch's clip_grad_norm_ with a short way: the bits of torch's own, and whatever it refuses."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.utils.clip_grad
from hypothesis import given
from hypothesis import strategies as st
from support import scaled_backward
from torch import Tensor, nn
from torch.optim import SGD

from amp_patch.mistakes import clipping
from amp_patch.session import session

#: Taken before anything is patched.
TORCHS = torch.nn.utils.clip_grad.clip_grad_norm_
SHORT = clipping._in_few_calls(TORCHS)
KINDS: dict[str, Any] = {
    "plain": lambda grad: grad,
    "none": lambda grad: None,
    "float64": Tensor.double,
    "half": Tensor.half,
    "sparse": Tensor.to_sparse,
    "transposed": lambda grad: grad.t().contiguous().t(),
    "empty": lambda grad: grad[:0],
    "inf": lambda grad: grad.fill_(torch.inf),
}


def params_of(kinds: list[str], seed: int) -> list[nn.Parameter]:
    torch.manual_seed(seed)
    params = []
    for kind in kinds:
        grad = KINDS[kind](torch.randn(3, 4))
        like = torch.zeros(3, 4) if grad is None else torch.zeros(grad.shape, dtype=grad.dtype)
        params.append(nn.Parameter(like))
        params[-1].grad = grad
    return params


def grads_of(params: list[nn.Parameter]) -> list[Tensor | None]:
    return [one.grad.to_dense() if one.grad is not None else None for one in params]


@given(
    kinds=st.lists(st.sampled_from(sorted(KINDS)), max_size=5)
    | st.lists(st.just("plain"), min_size=1, max_size=4),
    norms=st.sampled_from([(1.0,), (1, 2), (0.5, 1.0), (2.0, torch.inf), (100.0, 3)]),
    by_name=st.booleans(),
    options=st.sampled_from([{}, {"error_if_nonfinite": True}, {"foreach": False}]),
    seed=st.integers(0, 99),
)
def test_gradients_have_the_bits_that_torch_gives_them(
    kinds: list[str], norms: tuple[float, ...], by_name: bool, options: dict[str, bool], seed: int
) -> None:
    named = dict(zip(("max_norm", "norm_type"), norms, strict=False)) if by_name else {}
    args = () if by_name else norms
    found: list[Any] = []
    for clip in (TORCHS, SHORT):
        params = params_of(kinds, seed)
        try:
            total: Any = clip(params, *args, **named, **options)
        except (RuntimeError, NotImplementedError) as error:
            total = str(error)
        found.append([total, *grads_of(params)])
    for one, other in zip(*found, strict=True):
        if isinstance(one, Tensor):
            torch.testing.assert_close(other, one, rtol=0, atol=0, equal_nan=True)
        else:
            assert other == one


@pytest.mark.parametrize("args", [(), (1.0, 2.0, False, None, 3), ("one",)])
def test_wrong_arguments_are_torchs_to_refuse(args: tuple[Any, ...]) -> None:
    def message(clip: Any) -> str:
        with pytest.raises((TypeError, ValueError)) as caught:
            clip(params_of(["plain"], 0), *args)
        return str(caught.value)

    assert message(SHORT) == message(TORCHS)


def test_a_function_that_a_script_has_put_there_is_called() -> None:
    def own(parameters: Any, max_norm: float) -> str:
        return "own"

    assert clipping._in_few_calls(own) is own


@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
def test_most_clips_need_none_of_torchs_look_ups(
    amp: ModuleType, monkeypatch: pytest.MonkeyPatch, level: str
) -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=8.0, verbosity=0)
    scaled_backward(amp, model(torch.ones(2, 4)).sum(), optimizer)
    monkeypatch.setattr(
        torch.nn.utils.clip_grad, "_get_total_norm", lambda *args: pytest.fail("torch looks")
    )
    total = torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), max_norm=0.5)
    assert total.item() == pytest.approx((2 * 2.0**2 * (4 + 1)) ** 0.5)
    optimizer.step()
    moved = torch.stack([value.sum() for value in model.state_dict().values()])
    assert moved.isfinite().all()


def test_a_norm_over_all_ranks_is_an_error_before_anything_is_clipped(amp: ModuleType) -> None:
    model = nn.Linear(4, 2)
    optimizer = SGD(model.parameters(), lr=0.5)
    amp.initialize(model, optimizer, opt_level="O1", loss_scale=8.0, verbosity=0)
    scaled_backward(amp, model(torch.ones(2, 4)).sum(), optimizer)
    model.weight.grad[0, 0] = torch.inf
    owners = [step.backward for step in session.optimizers.steps.values()]
    clip = functools.partial(clipping._clip_parts, list(model.parameters()), owners, 0.1)
    with pytest.raises(RuntimeError, match="wants a finite norm"):
        clip(error_if_nonfinite=True)
    assert model.bias.grad.tolist() == [2.0, 2.0]
    clip()
    assert model.bias.grad.tolist() == [0.0, 0.0]


def step_of_two(amp: ModuleType | None, level: str, call: str, alone: str) -> list[Tensor]:
    """Train a head by an optimizer of its own and by one of the whole model; clip each time.

    First for both, of which one steps; then for this one alone; then for both, and both step.

    Args:
        amp: None: in float32, without it.
        level: of `initialize`.
        call: of torch, which clips.
        alone: which optimizer steps alone.

    Returns:
        The model's values.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    both = [SGD(model.parameters(), lr=0.3), SGD(model[2].parameters(), lr=0.5)]
    if amp is not None:
        amp.initialize(model, both, opt_level=level, loss_scale=1.0, verbosity=0)
    own = both[alone == "head"]
    for trained, stepped in ((both, [own]), ([own], [own]), (both, both)):
        for one in trained:
            one.zero_grad()
        loss = (model(torch.linspace(-1, 1, 32).reshape(8, 4)).float() - 1).square().mean()
        with nullcontext(loss) if amp is None else amp.scale_loss(loss, trained) as scaled_loss:
            scaled_loss.backward()
        getattr(nn.utils, call)((model if trained is both else model[2]).parameters(), 0.1)
        for one in stepped:
            one.step()
    return [value.float() for value in model.state_dict().values()]


# the head's own backward reaches the layers below, which wait for the other optimizer's step
@pytest.mark.filterwarnings("ignore:What is written to the gradients of half parameters")
@pytest.mark.parametrize("alone", ["head", "model"])
@pytest.mark.parametrize("call", ["clip_grad_norm_", "clip_grad_value_"])
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_layer_of_two_optimizers_is_clipped_for_both(
    amp: ModuleType, level: str, call: str, alone: str
) -> None:
    expected = step_of_two(None, level, call, alone)
    found = step_of_two(amp, level, call, alone)
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.01)


@pytest.mark.parametrize("call", ["clip_grad_norm_", "clip_grad_value_"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_scaled_gradients_of_layers_that_are_not_clipped_are_no_reason_to_refuse(
    amp: ModuleType, level: str, call: str
) -> None:
    """Those that a head's own block has left in the layers below, of another optimizer."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    both = [SGD(model.parameters(), lr=0.3), SGD(model[2].parameters(), lr=0.5)]
    amp.initialize(model, both, opt_level=level, loss_scale=128.0, verbosity=0)
    scaled_backward(amp, model(torch.ones(2, 4)).float().sum(), both[1])
    clip = getattr(nn.utils, call)
    clip(model[2].parameters(), 0.1)
    grads = torch.cat([param.grad.flatten() for param in amp.master_params(both[1])])
    found = grads.norm() if call == "clip_grad_norm_" else grads.abs().max()
    torch.testing.assert_close(found.item(), 0.1)
    with pytest.raises(RuntimeError, match="got 2 that the backward.* wrote which was not given"):
        clip(model.parameters(), 0.1)
