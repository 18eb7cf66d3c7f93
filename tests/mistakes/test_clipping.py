"""torch's clip_grad_norm_ with a short way: the bits of torch's own, and whatever it refuses."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.utils.clip_grad
from hypothesis import given
from hypothesis import strategies as st
from support import scaled_backward
from torch import Tensor, nn

from amp_patch.mistakes import clipping

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
