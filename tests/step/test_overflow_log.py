"""The last overflow of each scaler: names, shares and kinds against counts by hand."""

import torch
from torch import Tensor, nn

from amp_patch import kernels
from amp_patch.step.loss_scaling import Found
from amp_patch.step.overflow_log import NonFinite, OverflowLog

INF, NAN = float("inf"), float("nan")


def found(*values: list[float]) -> Found:
    """Return the check of gradients with these values."""
    params = [nn.Parameter(torch.zeros(len(one))) for one in values]
    for param, one in zip(params, values, strict=True):
        param.grad = torch.tensor(one)
    grads = [param.grad for param in params]
    return kernels.unscaler(grads, grads).run(grads, grads, 1.0), params


def of_size(param: Tensor) -> str:
    return f"of size {param.numel()}"


def test_each_parameter_has_its_share_of_inf_and_nan() -> None:
    log = OverflowLog()
    log.note(0, 8.0, 3, [found([1.0, INF, NAN], [1.0]), found([NAN, 2.0])], of_size)
    (last,) = log.last()
    assert last.params == (
        NonFinite("of size 3", "inf and NaN", 3, 1, 1),
        NonFinite("of size 2", "NaN", 2, 0, 1),
    )
    assert (last.scaler_id, last.scale, last.step_number, last.total) == (0, 8.0, 3, 3)


def test_of_each_scaler_the_last_is_kept_and_all_are_counted() -> None:
    log = OverflowLog()
    assert log.last() == []
    for step, scaler_id in enumerate([1, 0, 1], start=1):
        log.note(scaler_id, 2.0 * step, step, [found([INF])], of_size)
    first, second = log.last()
    assert (first.scaler_id, first.skips, first.scale) == (0, 1, 4.0)
    assert (second.scaler_id, second.skips, second.scale) == (1, 2, 6.0)


def test_where_nobody_can_tell_no_parameter_is_named() -> None:
    log = OverflowLog()
    log.note(0, 8.0, 1, [], of_size)
    assert log.last()[0].params is None
