"""Adam's step of one parameter, which libraries call that carry a FusedAdam of 2019."""

from __future__ import annotations

import importlib
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn

EMPTY = torch.tensor([])


@pytest.fixture
def adam(apex: types.ModuleType) -> Any:
    return importlib.import_module("fused_adam_cuda").adam


@pytest.mark.parametrize("eps_inside_sqrt", [True, False])
@pytest.mark.parametrize("bias_correction", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_it_steps_by_the_formula_and_writes_the_copy(
    adam: Any, eps_inside_sqrt: bool, bias_correction: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    param, copy = torch.randn(4, 3), torch.zeros(4, 3, dtype=dtype)
    average, squares = torch.zeros(2, 4, 3)
    w, m, v = (one.double() for one in (param, average, squares))
    for step in (1, 2, 3):
        grad = (torch.randn(4, 3) * 512).to(dtype)
        options = (0.9, 0.99, 1e-2, torch.tensor(512.0), step, int(not eps_inside_sqrt))
        adam(param, copy, average, squares, grad, 0.1, *options, bias_correction, 0.05)
        g = grad.double() / 512
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g**2
        size = 0.1 * ((1 - 0.99**step) ** 0.5 / (1 - 0.9**step) if bias_correction else 1)
        root = (v + 1e-2).sqrt() if eps_inside_sqrt else v.sqrt() + 1e-2
        w = w - size * (m / root + 0.05 * w)
        torch.testing.assert_close(param, w.float(), rtol=1e-5, atol=1e-6)
        assert torch.equal(copy, param.to(dtype))


class CarriedAdam(torch.optim.Optimizer):
    """What a library has kept of a FusedAdam of 2019."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.step_of = importlib.import_module("fused_adam_cuda").adam

    def step(  # type: ignore[override]  # takes no closure
        self, closure: None = None, grads: Any = None, output_params: Any = None, scale: float = 1.0
    ) -> None:
        (group,) = self.param_groups
        given: list[Tensor] = [p.grad for p in group["params"]] if grads is None else grads[0]
        copies = [EMPTY] * len(given) if output_params is None else output_params[0]
        for param, grad, copy in zip(group["params"], given, copies, strict=True):
            state = self.state[param]
            if not state:
                state.update(step=0, m=torch.zeros_like(param), v=torch.zeros_like(param))
            state["step"] += 1
            moments = (state["m"], state["v"])
            rest = (0.9, 0.999, 1e-8, scale, state["step"], 1, 1, 0.0)
            self.step_of(param.data, copy, *moments, grad, group["lr"], *rest)


def test_a_librarys_own_copy_of_fused_adam_trains_in_an_fp16_optimizer(
    apex: types.ModuleType,
) -> None:
    """OpenNMT-py's ``-optim fusedadam -model_dtype fp16``."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(10, 16, 8, generator=generator)
    losses: dict[bool, list[float]] = {True: [], False: []}
    for half in (True, False):
        torch.manual_seed(1)
        model: Any = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
        optimizer: Any
        if half:
            inner = CarriedAdam(model.half().parameters(), 1e-2)
            wrapper = apex.contrib.optimizers.FP16_Optimizer
            optimizer = wrapper(inner, dynamic_loss_scale=True)
        else:
            optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        for x in inputs:
            optimizer.zero_grad()
            scores = model(x.half() if half else x).float()
            loss = nn.functional.cross_entropy(scores, x[:, :4].argmax(1))
            optimizer.backward(loss) if half else loss.backward()
            optimizer.step()
            losses[half].append(loss.item())
    assert losses[False][-1] < 0.8 * losses[False][0]
    assert losses[True] == pytest.approx(losses[False], rel=0.01)
