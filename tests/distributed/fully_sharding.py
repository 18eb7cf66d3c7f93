"""Models that FSDP2 shards in ways that do, or do not, go with a level."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import rank_training as training
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
    register_fsdp_forward_method,
)

from amp_patch import amp


def late(level: str) -> list[str]:
    """Return what is said of sharding, by both kinds of FSDP, after `amp.initialize`."""
    model = training.make_model()
    optimizer = training.adamw(model.parameters())
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    said = []
    for shard in (fully_shard, FullyShardedDataParallel):
        try:
            shard(model)
        except RuntimeError as error:
            said.append(str(error))
    amp.deactivate()
    fully_shard(model)
    return said


def by_policy(level: str, dtype: torch.dtype) -> str | list[float]:
    """Return the losses of a model with a MixedPrecisionPolicy, or what is said of it."""
    model = fully_shard(training.make_model(), mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
    model.set_requires_all_reduce(False)  # which says nothing where there are no replicas
    optimizer = training.adamw(model.parameters())
    try:
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    except RuntimeError as error:
        return str(error)
    found = _losses(model, optimizer)
    amp.deactivate()
    return found


def by_mixed_precision(level: str, dtype: torch.dtype) -> str:
    """Return what is said of an FSDP1 model with a `MixedPrecision`."""
    model = FullyShardedDataParallel(
        training.make_model(),
        device_id=torch.device("cpu"),
        mixed_precision=MixedPrecision(param_dtype=dtype),
    )
    try:
        amp.initialize(model, training.adamw(model.parameters()), opt_level=level, verbosity=0)
    except RuntimeError as error:
        return str(error)
    return "nothing"


def batch_norms(are_apart: bool) -> str | list[float]:
    """Return the losses of a model with a batch norm at O2, or what is said of it."""
    model = nn.Sequential(nn.Linear(7, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    if are_apart:
        fully_shard(model[1])
    optimizer = training.adamw(fully_shard(model).parameters())
    try:
        amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    except RuntimeError as error:
        assert {param.dtype for param in model.parameters()} == {torch.float32}
        return str(error)
    return _losses(model, optimizer)


def two_groups(level: str) -> list[float]:
    """Return the losses of a module whose biases are gathered by a process group of their own."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult

    others = FSDPMeshInfo(DeviceMesh.from_group(distributed.new_group(), "cpu"), shard_mesh_dim=0)
    model = training.make_model()
    apart = ShardPlacementResult(placement=None, mesh_info=others)
    fully_shard(model, shard_placement_fn=lambda param: apart if param.ndim == 1 else None)
    optimizer = training.adamw(model.parameters())
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    return _losses(model, optimizer)


def original_params(levels: tuple[str, ...]) -> list[str]:
    """Return what is said of FSDP1 with ``use_orig_params=True``; "trains" where nothing is."""
    found = []
    for level in levels:
        model = FullyShardedDataParallel(
            training.make_model(), device_id=torch.device("cpu"), use_orig_params=True
        )
        optimizer = training.adamw(model.parameters())
        try:
            amp.initialize(model, optimizer, opt_level=level, verbosity=0)
            losses = _losses(model, optimizer)
            found.append("trains" if losses == sorted(losses, reverse=True) else str(losses))
        except RuntimeError as error:
            found.append(str(error))
        amp.deactivate()
    return found


def norms_beside_whole_ones(level: str, is_given: bool) -> tuple[list[float], float]:
    """Return the norm by each call that clips, of parts and whole parameters, and a plain model's.

    FSDP1 leaves one layer whole, by ``NO_SHARD``; another is not in it at all.

    Args:
        level: of `amp.initialize`.
        is_given: whether the user says which ranks step together.
    """

    def build() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))

    def flat(module: nn.Module, **options: Any) -> FullyShardedDataParallel:
        return FullyShardedDataParallel(module, device_id=torch.device("cpu"), **options)

    plain, model = build(), build()
    plain(torch.ones(2, 4)).square().mean().backward()
    whole = flat(model[1], sharding_strategy=ShardingStrategy.NO_SHARD)
    sharded = flat(nn.Sequential(model[0], whole))
    optimizer = torch.optim.SGD([*sharded.parameters(), *model[2].parameters()], lr=0.1)
    options = {"loss_scale": 16.0, "process_group": distributed.group.WORLD if is_given else None}
    amp.initialize([sharded, model[2]], optimizer, opt_level=level, verbosity=0, **options)
    loss = model[2](sharded(torch.ones(2, 4))).float().square().mean()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    found = [
        amp.clip_grad_norm_(optimizer, 1e3),
        nn.utils.clip_grad_norm_([*sharded.parameters(), *model[2].parameters()], 1e3),
    ]
    amp.deactivate()
    return [norm.item() for norm in found], nn.utils.get_total_norm(
        [param.grad for param in plain.parameters() if param.grad is not None]
    ).item()


def flat_without_sync() -> list[tuple[bool, float]]:
    """Return whether a step was skipped, and the scale, of FSDP1 that shares gradients at last.

    Rank 1 overflows before that: in a block around ``no_sync()`` that leaves whole gradients, and
    in one inside of it that leaves those of ``NO_SHARD``, which always are.
    """
    found = []
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD):
        model = FullyShardedDataParallel(
            nn.Linear(4, 4), device_id=torch.device("cpu"), sharding_strategy=strategy
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        amp.initialize(model, optimizer, opt_level="O1", verbosity=0, **training.SCALES)
        for is_last in (False, True):
            overflows = not is_last and distributed.get_rank() == 1
            loss = model(torch.ones(2, 4)).float().mean() * (float("inf") if overflows else 1.0)
            with contextlib.ExitStack() as around:
                if strategy is ShardingStrategy.NO_SHARD and not is_last:
                    around.enter_context(model.no_sync())
                with (
                    amp.scale_loss(loss, optimizer) as scaled_loss,
                    contextlib.ExitStack() as inside,
                ):
                    if not is_last:
                        inside.enter_context(model.no_sync())
                    scaled_loss.backward()
        optimizer.step()
        found.append((amp.step_was_skipped(optimizer), amp.loss_scale()))
        amp.deactivate()
    return found


def clipped_by_the_model(level: str) -> tuple[list[float], list[float], str]:
    """Clip by the method of an FSDP1 model, in the block and after it.

    Returns:
        The norms that it returned, and those of the gradients that were then stepped, in both
        places; what it says where the gradients are still scaled.
    """
    model = training.ENGINES["fsdp1"].before(training.make_model())
    optimizer = training.adamw(model.parameters())
    amp.initialize(model, optimizer, opt_level=level, loss_scale=128.0, verbosity=0)
    inputs, targets = training.rows(0, distributed.get_rank(), distributed.get_world_size())
    found, stepped = [], []
    for is_in_block in (True, False):
        optimizer.zero_grad()
        loss = (model(inputs).float() - targets).square().mean()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
            if is_in_block:
                found.append(model.clip_grad_norm_(0.5).item())
        if not is_in_block:
            found.append(model.clip_grad_norm_(0.5).item())
        stepped.append(amp.clip_grad_norm_(optimizer, float("inf")).item())
    optimizer.zero_grad()
    loss = (model(inputs).float() - targets).square().mean()
    with amp.scale_loss(loss, optimizer, delay_unscale=True) as scaled_loss:
        scaled_loss.backward()
    try:
        model.clip_grad_norm_(0.5)
        said = "nothing"
    except RuntimeError as error:
        said = str(error)
    amp.deactivate()
    return found, stepped, said


def written_parts(level: str) -> dict[str, bool]:
    """Return for each place where a script finds weights whether what it writes there counts.

    It writes to what this rank holds of them, or to the DTensors.
    """
    model = fully_shard(training.make_model())
    optimizer = training.adamw(model.parameters())
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    found = {}
    for number, place in enumerate(("state", "groups", "weights", "state as a whole")):
        _losses(model, optimizer)
        read = list(amp.master_params(optimizer)) if place == "weights" else []
        weights: dict[str, list[Any]] = {
            "groups": [param for group in optimizer.param_groups for param in group["params"]],
            "weights": list(model.parameters()),
        }
        value = 0.25 * (number + 1)
        with torch.no_grad():
            for weight in weights.get(place) or model.state_dict().values():
                (weight if "whole" in place else weight.to_local()).fill_(value)
            model(training.rows(0, 0, 1)[0])
        model.reshard()
        stepped = amp.master_params(optimizer) if read else []  # what was written waits for it
        held = [*model.parameters(), *model.state_dict().values(), *stepped]
        found[place] = all(bool((one.to_local() == value).all()) for one in held)
    return found


def fused() -> tuple[list[str], bool]:
    """Return the warnings of ``fused_step`` on sharded parameters, and whether it steps alike."""
    trained = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for fused_step in (False, True):
            found = training.train("fsdp2", "O2", 4, fused_step=fused_step)
            trained.append(found.computed)
    messages = [str(one.message) for one in caught if "fused_step" in str(one.message)]
    return messages, all(map(torch.equal, *trained))


def before_and_after(engine: str, level: str) -> list[Any]:
    """Return the dtypes of a sharded model that runs before, at, and after a level."""
    model = training.ENGINES[engine].before(training.make_model())
    optimizer = training.adamw(model.parameters())
    found: list[Any] = []
    inputs, _ = training.rows(0, distributed.get_rank(), distributed.get_world_size())
    for step in ("before", "at", "after"):
        if step == "at":
            amp.initialize(model, optimizer, opt_level=level, verbosity=0)
            _losses(model, optimizer)
        elif step == "after":
            amp.deactivate()
        optimizer.zero_grad()
        output = model(inputs)
        if step != "at":
            output.sum().backward()
            optimizer.step()
        found.append((next(model.parameters()).dtype, bool(torch.isfinite(output).all())))
    return found


def given_up(engine: str, level: str, fails_in: str, reshards: bool = True) -> list[torch.dtype]:
    """Return the dtypes of a sharded model that is given back after a pass that failed, and runs.

    Args:
        engine, level: of the model.
        fails_in: "forward", of a layer norm, whose weights are gathered then, or "backward".
        reshards: False: FSDP2 keeps what it has gathered from the forward to the backward.
    """

    def fail(*_: Any) -> None:
        raise ValueError("out of memory, say")

    model = training.ENGINES[engine].before(training.make_model())
    if not reshards:
        model.set_reshard_after_forward(False)
    optimizer = training.adamw(model.parameters())
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    _losses(model, optimizer)
    kind = nn.LayerNorm if fails_in == "forward" else nn.Tanh
    part = next(module for module in model.modules() if isinstance(module, kind))
    in_forward, in_backward = part.register_forward_pre_hook, part.register_full_backward_pre_hook
    handle = in_forward(fail) if fails_in == "forward" else in_backward(fail)
    with contextlib.suppress(ValueError):
        _losses(model, optimizer)
    handle.remove()
    amp.deactivate()
    model(training.rows(0, 0, 1)[0]).sum().backward()
    optimizer.step()
    return sorted({param.dtype for param in model.parameters()}, key=str)


class Encoder(nn.Module):
    """A model that is called by another method than its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def encode(self, inputs: torch.Tensor) -> torch.Tensor:
        self.got = inputs.dtype
        codes: torch.Tensor = self.layer(inputs)
        return codes


def by_method(is_torchs_first: bool) -> list[torch.dtype]:
    """Return the dtypes that a method of a sharded model gets and returns, by who is told first."""
    amp.register_forward_method(Encoder, "encode")
    model: Any = fully_shard(Encoder())
    if is_torchs_first:
        register_fsdp_forward_method(model, "encode")
    amp.initialize(model, opt_level="O2", verbosity=0)
    if not is_torchs_first:
        register_fsdp_forward_method(model, "encode")
    codes = model.encode(torch.ones(1, 4))
    amp.deactivate()
    return [model.got, codes.dtype]


def _losses(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        inputs, targets = training.rows(0, 0, 1)
        loss = (model(inputs).float() - targets).square().mean()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
