"""Batch norm over the batches of all processes. Knows no optimizer and no precision level."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


class SyncBatchNorm(_BatchNorm):
    """Batch norm whose statistics are those of the batches of all processes.

    torch's own, with what apex's had beyond it. Unlike torch's it also runs on the CPU; as apex's
    it is none of torch's class, which torch's DistributedDataParallel refuses there. Without a
    process group, or in a group of one, it is a plain batch norm.

    Args:
        num_features: channels.
        eps: added to the variance.
        momentum: of the running statistics; None averages all batches alike.
        affine: whether there are weight and bias, fp32 of shape (num_features,).
        track_running_stats: whether there are running statistics.
        process_group: whose batches are taken together; None stands for all processes.
        channel_last: inputs are of shape (N, ..., C); else (N, C, ...).
        fuse_relu: put a ReLU after it.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Any = None,
        channel_last: bool = False,
        fuse_relu: bool = False,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.process_group = process_group
        self.channel_last = channel_last
        self.fuse_relu = fuse_relu

    _check_input_dim: Any = nn.SyncBatchNorm._check_input_dim
    _check_non_zero_input_channels = nn.SyncBatchNorm._check_non_zero_input_channels

    def forward(self, input: Tensor, z: Tensor | None = None) -> Tensor:
        """Normalize, scale and shift; add ``z``; apply ReLU with ``fuse_relu``.

        Args:
            input: floating, (N, C) or (N, C, ...), or (N, ..., C) with ``channel_last``.
            z: of the same shape.

        Returns:
            A tensor of the input's shape and dtype.
        """
        if self.channel_last:
            output = self._normalize(input.movedim(-1, 1)).movedim(1, -1)
        else:
            output = self._normalize(input)
        if z is not None:
            output = output + z
        return torch.relu(output) if self.fuse_relu else output

    def _normalize(self, input: Tensor) -> Tensor:
        if input.device.type != "cpu":
            return nn.SyncBatchNorm.forward(cast(Any, self), input)
        group = self._group_to_sum_over()
        if group is None:
            return _BatchNorm.forward(self, input)
        self._check_input_dim(input)
        dims = [dim for dim in range(input.dim()) if dim != 1]
        values = input.to(torch.promote_types(input.dtype, torch.float32))
        count = _sum_over(group, values.new_tensor(float(input.numel() // input.size(1))))
        mean = _sum_over(group, values.sum(dims)) / count
        centered = values - _as_channels(mean, input)
        variance = _sum_over(group, centered.square().sum(dims)) / count
        self._track(mean.detach(), variance.detach(), count)
        output = centered * _as_channels((variance + self.eps).rsqrt(), input)
        if self.weight is not None:
            output = output * _as_channels(self.weight, input)
        if self.bias is not None:
            output = output + _as_channels(self.bias, input)
        return output.to(input.dtype)

    def _group_to_sum_over(self) -> Any:
        if not (self.training and dist.is_initialized()):
            return None
        group = self.process_group or dist.group.WORLD
        return group if dist.get_world_size(group) > 1 else None

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        batches = self.num_batches_tracked
        if self.running_mean is None or self.running_var is None or batches is None:
            return
        batches += 1
        factor = 1.0 / float(batches) if self.momentum is None else self.momentum
        unbiased = variance * (count / (count - 1))
        for running, new in ((self.running_mean, mean), (self.running_var, unbiased)):
            running.lerp_(new.to(running.dtype), factor)


def convert_syncbn_model(
    module: nn.Module, process_group: Any = None, channel_last: bool = False
) -> nn.Module:
    """Put `SyncBatchNorm` in the place of every batch norm of a model.

    Args:
        module: changed in place; instance norms stay as they are.
        process_group: as `SyncBatchNorm`.
        channel_last: as `SyncBatchNorm`.

    Returns:
        ``module``, or a new module if it is a batch norm itself. Parameters and buffers are the
        same objects.
    """
    converted = module
    if isinstance(module, _BatchNorm):
        converted = _converted(module, process_group, channel_last)
    for name, child in module.named_children():
        converted.add_module(name, convert_syncbn_model(child, process_group, channel_last))
    return converted


def create_syncbn_process_group(group_size: int) -> Any:
    """Return this process's group of ``group_size`` neighbouring ranks; None for 0, all of them.

    All processes must call it.

    Raises:
        ValueError: the number of processes is no multiple of ``group_size``.
    """
    return None if group_size == 0 else dist.new_subgroups(group_size)[0]


def _converted(norm: _BatchNorm, process_group: Any, channel_last: bool) -> SyncBatchNorm:
    converted = SyncBatchNorm(
        norm.num_features,
        norm.eps,
        norm.momentum,
        norm.affine,
        norm.track_running_stats,
        process_group,
        channel_last,
    )
    converted._parameters.update(norm._parameters)
    converted._buffers.update(norm._buffers)
    return converted.train(norm.training)


def _as_channels(values: Tensor, input: Tensor) -> Tensor:
    return values.view(-1, *[1] * (input.dim() - 2))


class _SumOver(torch.autograd.Function):
    """The sum over processes, which is that of the gradients as well."""

    @staticmethod
    def forward(ctx: Any, group: Any, tensor: Tensor) -> Tensor:
        ctx.group = group
        total = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, _SumOver.apply(ctx.group, grad)


def _sum_over(group: Any, tensor: Tensor) -> Tensor:
    total: Tensor = _SumOver.apply(group, tensor)
    return total
