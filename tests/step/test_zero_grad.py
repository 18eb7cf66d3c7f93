"""``optimizer.zero_grad()`` clears what plain PyTorch clears, and an overflow with it."""

import weakref
from types import ModuleType
from typing import Any

import pytest
import torch
from linear_training import backward, linear, prepared, train_step
from support import scaled_backward
from torch import nn
from torch.optim import SGD

from amp_patch.step.zero_grad import ZeroGrad

INF = float("inf")


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_clears_the_overflow_with_the_gradients(
    amp: ModuleType, set_to_none: bool
) -> None:
    model, optimizer = prepared(amp)
    backward(amp, model, optimizer, INF)
    optimizer.zero_grad(set_to_none=set_to_none)
    backward(amp, model, optimizer)
    optimizer.step()
    assert not amp.step_was_skipped(optimizer)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_zero_grad_that_the_script_has_replaced_is_the_one_that_clears(
    amp: ModuleType, level: str
) -> None:
    model = linear()
    optimizer = SGD(model.parameters(), lr=0.5)
    clear, calls = optimizer.zero_grad, []

    def to_zeros(set_to_none: bool = True) -> None:
        calls.append(set_to_none)
        clear(set_to_none=False)

    optimizer.zero_grad = to_zeros
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    backward(amp, model, optimizer)
    optimizer.step()
    optimizer.zero_grad()
    assert calls == [True]
    grads = [param.grad for param in amp.master_params(optimizer)]
    assert [None if grad is None else grad.any().item() for grad in grads] == [False] * len(grads)


class ClearsInPlace(SGD):
    """As torch's optimizers did before 2.0, and some of apex and of scripts still do."""

    def zero_grad(self, set_grads_to_None: bool = False) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if set_grads_to_None:
                    param.grad = None
                elif param.grad is not None:
                    param.grad.detach_().zero_()


@pytest.mark.parametrize("to_none", [False, True])
@pytest.mark.parametrize("is_stepped", [False, True])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
def test_what_an_optimizers_own_zero_grad_leaves_is_stepped(
    amp: ModuleType, level: str, is_stepped: bool, to_none: bool
) -> None:
    """Zeros of a layer that is frozen since: its momentum goes on, as it does without amp."""
    model, optimizer = prepared(
        amp, level, lambda params: ClearsInPlace(params, lr=0.125, momentum=0.5)
    )
    train_step(amp, model, optimizer)
    if not is_stepped:
        optimizer.zero_grad(set_grads_to_None=True)
        backward(amp, model, optimizer)
    model.bias.requires_grad_(False)
    optimizer.zero_grad(set_grads_to_None=to_none)
    before = model.state_dict()["bias"].clone()
    backward(amp, model, optimizer)
    optimizer.step()
    assert torch.equal(model.state_dict()["bias"], before) is to_none


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize(
    ("args", "options", "is_short"),
    [
        ((), {}, True),
        ((), {"set_to_none": True}, True),
        ((True,), {}, True),
        ((), {"set_to_none": False}, False),
        ((False,), {}, False),
    ],
)
def test_gradients_that_become_none_are_cleared_without_torch(
    amp: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    level: str,
    args: tuple[bool, ...],
    options: dict[str, bool],
    is_short: bool,
) -> None:
    model, optimizer = prepared(amp, level)
    backward(amp, model, optimizer)
    others: list[object] = []
    clear = ZeroGrad._clear_otherwise

    def noted(*given: Any, **named: Any) -> bool:
        others.append(given)
        return clear(*given, **named)

    monkeypatch.setattr(ZeroGrad, "_clear_otherwise", noted)
    optimizer.zero_grad(*args, **options)
    assert (not others) is is_short
    grads = [param.grad for param in model.parameters()]
    assert all(grad is None if is_short else not grad.any() for grad in grads)


@pytest.mark.parametrize("width", [4, 100])
@pytest.mark.parametrize("fused_step", [False, True])
@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.parametrize("of", ["optimizer", "model"])
def test_what_was_cleared_is_gone(
    amp: ModuleType, of: str, level: str, fused_step: bool, width: int
) -> None:
    model = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)
    options = {"opt_level": level, "fused_step": fused_step, "loss_scale": 8.0, "verbosity": 0}
    amp.initialize(model, optimizer, **options)
    for _ in range(3):
        scaled_backward(amp, model(torch.ones(2, width)).float().square().mean(), optimizer)
        optimizer.step()
        grads = [weakref.ref(param.grad) for param in model.parameters()]
        {"optimizer": optimizer, "model": model}[of].zero_grad()
        assert [grad() for grad in grads] == [None] * 4


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_what_a_fused_step_has_used_is_not_stepped_again_where_a_script_keeps_it(
    amp: ModuleType, level: str
) -> None:
    """It is multiplied by the scale."""
    model = nn.Linear(4, 4)
    optimizer = SGD(model.parameters(), lr=1.0)
    amp.initialize(model, optimizer, opt_level=level, fused_step=True, loss_scale=64.0, verbosity=0)
    scaled_backward(amp, model(torch.ones(2, 4)).float().square().mean(), optimizer)
    optimizer.step()
    kept = [param.grad for param in model.parameters()]
    optimizer.zero_grad()
    for param, grad in zip(model.parameters(), kept, strict=True):
        param.grad = grad
    before = [master.detach().clone() for master in amp.master_params(optimizer)]
    with pytest.warns(UserWarning, match="gradients of a step are dropped with it"):
        optimizer.step()
    assert all(map(torch.equal, amp.master_params(optimizer), before))
