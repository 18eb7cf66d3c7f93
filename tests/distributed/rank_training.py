"""A small training that is the same on one process and on several ranks, by torch's engines."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from amp_patch import amp
from amp_patch.optimizers import FusedLAMB

#: Of all ranks together.
BATCH = 12
#: Scales that grow soon, so that a rank which counts otherwise is seen.
SCALED = ("O1", "O2", "O3")
SCALES = {"loss_scale": "dynamic", "growth_interval": 3, "max_loss_scale": 2.0**14}


class Trained(NamedTuple):
    """What a training left.

    Attributes:
        params: name -> the whole fp32 value of the parameter, where this rank knows it.
        computed: what this rank computes with, of each parameter the part that it holds.
        norms: of the gradients before each step, where they were clipped.
        losses: of each step, averaged over the ranks.
        scales: after each step.
        skipped: for each step whether this rank skipped it.
        state: the optimizer's, as numbers: those that this rank holds.
    """

    params: dict[str, Tensor]
    computed: list[Tensor]
    norms: list[float]
    losses: list[float]
    scales: list[float]
    skipped: list[bool]
    state: list[Tensor]


class Engine(NamedTuple):
    """One way to train on several ranks.

    Attributes:
        before: called with the model, and what it returns is given to `amp.initialize`.
        optimizer: of the model's parameters.
        after: called with the model that `amp.initialize` returned.
        in_tensor_parallel: how many of so many ranks share the rows of a batch, by tensor parallel.
    """

    before: Callable[[nn.Module], nn.Module]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    after: Callable[[nn.Module], nn.Module]
    in_tensor_parallel: Callable[[int], int] = lambda size: 1


def _same(model: nn.Module) -> nn.Module:
    return model


def adamw(params: Any) -> torch.optim.Optimizer:
    """Return an optimizer whose steps do not hang on the sign of tiny gradients."""
    return torch.optim.AdamW(params, lr=0.02, eps=1e-3)


def zero_adamw(params: Any) -> torch.optim.Optimizer:
    """Return the same, of which each rank keeps the state of its share of the parameters."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns of its use of TorchScript

    return ZeroRedundancyOptimizer(params, torch.optim.AdamW, lr=0.02, eps=1e-3)


def sharded(model: nn.Module, mesh: DeviceMesh | None = None) -> nn.Module:
    """Shard each layer, and what is left, by FSDP2; over all ranks if ``mesh`` is None."""
    for layer in model.children():
        if list(layer.parameters()):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def split(model: nn.Module, mesh: DeviceMesh | None = None) -> nn.Module:
    """Split the outputs of the first layer, and the inputs of the last one, over ranks.

    Args:
        model: its layer norm stays whole on each of the ranks.
        mesh: of one dimension; of all ranks if None.
    """
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),)) if mesh is None else mesh
    plan = {
        "0": ColwiseParallel(output_layouts=Replicate()),
        "3": RowwiseParallel(input_layouts=Replicate()),
    }
    return parallelize_module(model, mesh, plan)


def split_in_sequence(model: nn.Module) -> nn.Module:
    """Split the layers as `split` does, and what the layer norm between them is given."""
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    plan = {
        "0": ColwiseParallel(output_layouts=Shard(0)),
        "1": SequenceParallel(sequence_dim=0),
        "3": RowwiseParallel(input_layouts=Shard(0)),
    }
    return parallelize_module(model, mesh, plan)


def split_and_sharded(model: nn.Module) -> nn.Module:
    """Split over pairs of ranks, and shard by FSDP2 over the pairs."""
    shape = distributed.get_world_size() // 2, 2
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))
    return sharded(split(model, mesh["tensor"]), mesh["data"])


#: model -> the wrapper that was made around it.
_WRAPPERS: dict[nn.Module, nn.Module] = {}


def _keep_wrapper(model: nn.Module) -> nn.Module:
    """Wrap a model for `Engine.after`, and return it as it is."""
    _WRAPPERS[model] = DistributedDataParallel(model)
    return model


def sharded_in_replicas(model: nn.Module) -> nn.Module:
    """Shard over pairs of ranks by FSDP2; each pair has all."""
    shape = distributed.get_world_size() // 2, 2
    return sharded(model, init_device_mesh("cpu", shape, mesh_dim_names=("replica", "shard")))


def flat_on_a_mesh(model: nn.Module) -> nn.Module:
    """Shard by FSDP1, whose state dicts have DTensors then."""
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    return FullyShardedDataParallel(model, device_mesh=mesh, device_id=torch.device("cpu"))


ENGINES = {
    "none": Engine(_same, adamw, _same),
    "ddp": Engine(_same, adamw, DistributedDataParallel),
    "ddp-first": Engine(DistributedDataParallel, adamw, _same),
    "ddp-around": Engine(_keep_wrapper, adamw, lambda model: _WRAPPERS.pop(model)),
    "fsdp2": Engine(sharded, adamw, _same),
    "fsdp2-replicas": Engine(sharded_in_replicas, adamw, _same),
    "fsdp1": Engine(
        lambda model: FullyShardedDataParallel(model, device_id=torch.device("cpu")), adamw, _same
    ),
    "fsdp1-mesh": Engine(flat_on_a_mesh, adamw, _same),
    "zero": Engine(_same, zero_adamw, DistributedDataParallel),
    "tensor": Engine(split, adamw, _same, lambda size: size),
    "sequence": Engine(split_in_sequence, adamw, _same, lambda size: size),
    "tensor-fsdp2": Engine(split_and_sharded, adamw, _same, lambda size: 2),
}


def make_model() -> nn.Module:
    """Return a model whose parameters do not divide evenly, the same at each call."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(7, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 3))


def rows(step: int, rank: int, size: int) -> tuple[Tensor, Tensor]:
    """Return the inputs and targets that a rank has of a step's batch."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(BATCH, 7, generator=generator)
    return inputs[rank::size], torch.stack([inputs.sum(1), inputs.prod(1), inputs[:, 0]], 1)[
        rank::size
    ]


def train(
    engine: str,
    level: str,
    steps: int,
    plants: Mapping[int, int] | None = None,
    max_norm: float | None = None,
    shares: int = 1,
    **options: Any,
) -> Trained:
    """Train by an engine; "none" trains this process alone on the batches of all ranks.

    Args:
        engine: a key of `ENGINES`.
        level: "O1" ...
        steps: how many.
        plants: step -> the rank that has an inf in what it holds of a gradient.
        max_norm: gradients are clipped to it.
        shares: in how many backward passes one process takes the rows, so that it rounds as so many
            ranks do which each have some of them.
        options: of `amp.initialize`.
    """
    chosen = ENGINES[engine]
    is_alone = engine == "none"
    rank = 0 if is_alone else distributed.get_rank()
    size = 1 if is_alone else distributed.get_world_size()
    alike = chosen.in_tensor_parallel(size)
    model = chosen.before(make_model())
    optimizer = chosen.optimizer(model.parameters())
    scales = SCALES if level in SCALED else {}
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=level, verbosity=0, **{**scales, **options}
    )
    model = chosen.after(model)
    losses, held, skipped, norms = [], [], [], []
    for step in range(steps):
        optimizer.zero_grad()
        planted = (plants or {}).get(step)
        is_here = planted is not None and (is_alone or planted % size == rank)
        loss = torch.zeros(())
        for share in range(shares):
            inputs, targets = rows(step, rank // alike + share, size // alike * shares)
            part = (model(inputs).float() - targets).square().mean() / shares
            is_last = share == shares - 1
            with amp.scale_loss(part, optimizer, delay_unscale=not is_last) as scaled_loss:
                _backward(scaled_loss, model, is_here and is_last, overflows_in_loss(engine))
            loss += part.detach()
        if max_norm is not None:
            norms.append(amp.clip_grad_norm_(optimizer, max_norm).item())
        optimizer.step()
        losses.append(_mean(loss, size))
        held.append(amp.loss_scale())
        skipped.append(amp.step_was_skipped(optimizer))
    params = whole_params(model)
    computed = [_part(param).detach().clone() for param in model.parameters()]
    state = [_part(value).clone() for one in optimizer.state.values() for value in one.values()]
    amp.deactivate()
    return Trained(params, computed, norms, losses, held, skipped, state)


def _backward(scaled_loss: Tensor, model: nn.Module, overflows: bool, by_loss: bool) -> None:
    """Run a backward that overflows, or does not: by the loss, or in a gradient it has written."""
    (scaled_loss * float("inf") if overflows and by_loss else scaled_loss).backward()
    if overflows and not by_loss:
        plant(model)


def averages_all(engine: str) -> bool:
    """Return whether each rank gets all gradients, and so the inf of any rank's loss."""
    return engine.startswith("ddp") or engine == "zero"


def overflows_in_loss(engine: str) -> bool:
    """Return whether an inf of a rank's loss is in some gradient of every rank."""
    return averages_all(engine) or engine == "fsdp2-replicas"


def plant(model: nn.Module, among: str = "") -> None:
    """Write an inf to a gradient that this rank holds a part of, of a parameter so named."""
    for name, param in model.named_parameters():
        grad = param.grad
        if among in name and grad is not None and _part(grad).numel():
            _part(grad).view(-1)[0] = float("inf")
            return
    raise AssertionError("this rank holds no gradient")


@contextlib.contextmanager
def without_sync(model: nn.Module, is_local: bool) -> Iterator[None]:
    """Leave the gradients of the backward passes in the block on this rank, if ``is_local``."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(not is_local)
    elif is_local and isinstance(model, DistributedDataParallel | FullyShardedDataParallel):
        with model.no_sync():
            yield
        return
    yield


def whole_params(model: nn.Module) -> dict[str, Tensor]:
    """Return the fp32 values of all parameters, gathered from all ranks where they are spread."""
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model):
            return {
                name.replace("_fsdp_wrapped_module.", ""): param.detach().float().clone()
                for name, param in model.named_parameters()
            }
    state = model.state_dict()
    return {name.removeprefix("module."): _whole(value) for name, value in state.items()}


def _part(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _whole(value: Tensor) -> Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().float().clone()


def _mean(loss: Tensor, size: int) -> float:
    if size > 1:
        loss = loss.clone()
        distributed.all_reduce(loss)
    return loss.item() / size


def train_and_compare(
    engine: str, levels: Sequence[str], steps: int, plants: Mapping[int, int], **options: Any
) -> dict[str, tuple[Trained, Trained | None]]:
    """Return for each level what an engine trains here, and on rank 0 what that trains alone.

    Alone it takes the rows in as many parts as the ranks do.

    bfloat16 needs no loss scale, so that nothing is skipped there: its trainings have no infs.
    """
    size, found = distributed.get_world_size(), {}
    shares = size // ENGINES[engine].in_tensor_parallel(size)
    for level in levels:
        infs = plants if level in SCALED else {}
        by_engine = train(engine, level, steps, infs, **options)
        is_first = distributed.get_rank() == 0
        alone = train("none", level, steps, infs, shares=shares, **options) if is_first else None
        found[level] = by_engine, alone
    return found


def difference(one: Trained, other: Trained) -> float:
    """Return the largest difference of a parameter."""
    return max((one.params[name] - other.params[name]).abs().max().item() for name in other.params)


def trained_by_lamb(engine: str, level: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the parameters that `FusedLAMB` trains by an engine, and alone in float32."""
    chosen = ENGINES[engine]
    size = distributed.get_world_size()
    alike = chosen.in_tensor_parallel(size)
    trained = []
    for is_alone in (False, True):
        model = make_model() if is_alone else chosen.before(make_model())
        optimizer = FusedLAMB(model.parameters(), lr=0.02, eps=1e-2, max_grad_norm=0.1)
        options = {"opt_level": "O0" if is_alone else level, "loss_scale": 128.0, "verbosity": 0}
        amp.initialize(model, optimizer, **options)
        for step in range(4):
            rank, ranks = (0, 1) if is_alone else (distributed.get_rank() // alike, size // alike)
            inputs, targets = rows(step, rank, ranks)
            loss = (model(inputs).float() - targets).square().mean()
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        trained.append(whole_params(model))
        amp.deactivate()
    return trained[0], trained[1]


def clipped_by_torch(engine: str, level: str) -> tuple[float, float, float]:
    """Return the norm by torch's function of what an engine splits in part, as of one process.

    Returns:
        The norm before, the same by `amp.clip_grad_norm_` afterwards, and what one process has.
    """
    norms = []
    for is_alone in (False, True):
        model = make_model() if is_alone else ENGINES[engine].before(make_model())
        optimizer = adamw(model.parameters())
        options = {"opt_level": "O0" if is_alone else level, "loss_scale": 128.0, "verbosity": 0}
        amp.initialize(model, optimizer, **options)
        alike = ENGINES[engine].in_tensor_parallel(distributed.get_world_size())
        size = 1 if is_alone else distributed.get_world_size() // alike
        inputs, targets = rows(0, 0 if is_alone else distributed.get_rank() // alike, size)
        loss = (model(inputs).float() - targets).square().mean()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        norms.append(amp.clip_grad_norm_(optimizer, float("inf")).item())
        amp.deactivate()
    return norms[0], norms[1], norms[2]
