"""The formula of apex's Adam until September 2019."""

from __future__ import annotations

import pytest
import torch

from amp_patch.optimizers.deprecated_adam import deprecated_adam

DTYPES = (torch.float32, torch.float16, torch.float64)


@pytest.mark.parametrize("eps_inside_sqrt", [True, False])
@pytest.mark.parametrize("bias_correction", [True, False])
@pytest.mark.parametrize("weight_decay", [0.0, 0.05])
def test_lists_of_mixed_dtypes_are_stepped(
    eps_inside_sqrt: bool, bias_correction: bool, weight_decay: float
) -> None:
    torch.manual_seed(0)
    params = [torch.randn(4, 3).to(dtype) for dtype in DTYPES]
    moments = [[torch.zeros_like(param) for param in params] for _ in range(2)]
    w = [param.double().clone() for param in params]
    m, v = ([torch.zeros(4, 3, dtype=torch.float64) for _ in params] for _ in range(2))
    for step in (1, 2):
        grads = [torch.randn(4, 3).to(param.dtype) for param in params]
        rest = (0.01, (0.9, 0.99), 1e-2, step, eps_inside_sqrt, bias_correction, weight_decay)
        deprecated_adam([grads, params, *moments], *rest)
        size = 0.01 * ((1 - 0.99**step) ** 0.5 / (1 - 0.9**step) if bias_correction else 1)
        for i, grad in enumerate(grads):
            g = grad.double()
            m[i], v[i] = 0.9 * m[i] + 0.1 * g, 0.99 * v[i] + 0.01 * g**2
            root = (v[i] + 1e-2).sqrt() if eps_inside_sqrt else v[i].sqrt() + 1e-2
            w[i] = w[i] - size * (m[i] / root + weight_decay * w[i])
    for param, expected in zip(params, w, strict=True):
        rtol, atol = (4e-3, 4e-3) if param.dtype is torch.float16 else (1e-5, 1e-6)
        torch.testing.assert_close(param.double(), expected, rtol=rtol, atol=atol)
