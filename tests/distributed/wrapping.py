"""Models that a parallel wrapper holds before `amp.initialize` gets them."""

from __future__ import annotations

import rank_training as training
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from amp_patch import amp


def said_of(level: str, gives_wrapper: bool) -> str:
    """Return what is said of a model, or of the wrapper around it, that comes wrapped.

    Nothing is changed then.
    """
    model = training.make_model()
    wrapper = DistributedDataParallel(model)
    optimizer = training.adamw(model.parameters())
    try:
        amp.initialize(wrapper if gives_wrapper else model, optimizer, opt_level=level, verbosity=0)
    except RuntimeError as error:
        assert {param.dtype for param in model.parameters()} == {torch.float32}
        return str(error)
    return "nothing"


def of_a_part(level: str) -> str:
    """Return what is said of a model of which a wrapper holds one layer."""
    model = training.make_model()
    model[0] = DistributedDataParallel(model[0])
    optimizer = training.adamw(model.parameters())
    try:
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    except RuntimeError as error:
        return str(error)
    return "nothing"


def all_that_is_said(levels: tuple[str, ...]) -> list[str]:
    """Return what is said of each way at each level."""
    said = []
    for level in levels:
        said += [said_of(level, True), said_of(level, False), of_a_part(level)]
    return said


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, rank: int = 0, size: int = 1
) -> None:
    """Train a model, in a wrapper perhaps, on one rank's share of each batch."""
    for step in range(steps):
        optimizer.zero_grad()
        inputs, targets = training.rows(step, rank, size)
        loss = (model(inputs).float() - targets).square().mean()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()


def sent_at_the_start(level: str, is_written: bool) -> list[list[torch.Tensor]]:
    """Return a model's fp32 values, the masters and the weights after training that began apart.

    Each rank has weights of its own until the wrapper sends those of rank 0.

    Args:
        level: of `amp.initialize`.
        is_written: whether the first rank writes to its weights, or masters, before that.
    """
    rank = torch.distributed.get_rank()
    torch.manual_seed(rank)
    model = training.make_model()
    optimizer = training.adamw(model.parameters())
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    if is_written and rank == 0:
        with torch.no_grad():
            model[0].weight.mul_(1.1)
            list(amp.master_params(optimizer))[1].add_(0.01)
    wrapper = DistributedDataParallel(model)
    started = [value.clone() for value in model.state_dict().values()]
    train(wrapper, optimizer, steps=3, rank=rank, size=2)
    found = [
        started,
        [master.detach().clone() for master in amp.master_params(optimizer)],
        [param.detach().clone() for param in model.parameters()],
    ]
    amp.deactivate()
    return found


def sent_at_the_end(level: str, batches: int) -> list[torch.Tensor]:
    """Return a model's fp32 values after ``join``, in which one rank has more batches.

    Args:
        level: of `amp.initialize`.
        batches: of the other rank.
    """
    rank = torch.distributed.get_rank()
    model = training.make_model()
    optimizer = training.adamw(model.parameters())
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    wrapper = DistributedDataParallel(model)
    with wrapper.join():
        train(wrapper, optimizer, steps=batches + 2 * rank)
    found = [value.clone() for value in model.state_dict().values()]
    amp.deactivate()
    return found


def zero_that_is_refused(level: str, option: str) -> str:
    """Return what is said of ZeRO by an option that amp_patch cannot serve.

    Args:
        level: of `amp.initialize`.
        option: "parameters_as_bucket_view": it sends buckets in which the parameters lay; or
            "overlap_with_ddp": it steps inside of the backward.
    """
    from torch.distributed.optim import ZeroRedundancyOptimizer  # which warns of torch.jit

    model = training.make_model()
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.SGD, lr=0.1, **{option: True}
    )
    try:
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    except TypeError as error:
        return str(error)
    amp.deactivate()
    return "nothing"


def zero_in_join(level: str) -> str:
    """Return what is said of ZeRO in a ``Join``, in which one rank has more batches."""
    from torch.distributed.algorithms.join import Join

    model = training.make_model()
    optimizer = training.zero_adamw(model.parameters())
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    wrapper = DistributedDataParallel(model)
    try:
        with Join([wrapper, optimizer]):
            train(wrapper, optimizer, steps=1 + torch.distributed.get_rank())
    except RuntimeError as error:
        return str(error)
    finally:
        amp.deactivate()
    assert "join_hook" not in vars(optimizer)
    return "nothing"


def zero_of_a_later_group(level: str) -> bool:
    """Return whether ZeRO trains a layer that it is given later as a plain optimizer does."""
    trained = []
    for of in (training.adamw, training.zero_adamw):
        model = training.make_model()
        optimizer = of(model[0].parameters())
        amp.initialize(model, optimizer, opt_level=level, loss_scale=64.0, verbosity=0)
        rank, wrapper = torch.distributed.get_rank(), DistributedDataParallel(model)
        train(wrapper, optimizer, 2, rank, size=2)
        optimizer.add_param_group({"params": list(model[3].parameters()), "lr": 0.01})
        train(wrapper, optimizer, 3, rank, size=2)
        trained.append([param.detach().clone() for param in model.parameters()])
        amp.deactivate()
        assert "add_param_group" not in vars(optimizer)
    return all(map(torch.equal, *trained))


def zero_given_back_after_a_load(level: str) -> torch.dtype:
    """Return the dtype in which ZeRO goes on when it has loaded a checkpoint, and amp is off."""
    model = training.make_model()
    optimizer = training.zero_adamw(model.parameters())
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    wrapper = DistributedDataParallel(model)
    train(wrapper, optimizer, steps=2)
    optimizer.consolidate_state_dict()
    states = [optimizer.state_dict() if torch.distributed.get_rank() == 0 else None]
    torch.distributed.broadcast_object_list(states)
    optimizer.load_state_dict(states[0])
    train(wrapper, optimizer, steps=1)
    amp.deactivate()
    inputs, _ = training.rows(0, 0, 1)
    optimizer.zero_grad()
    DistributedDataParallel(model)(inputs).sum().backward()
    optimizer.step()
    (dtype,) = {param.dtype for param in model.parameters()}
    return dtype


def delaying(level: str, when: str) -> str:
    """Return what is said of a wrapper that shares some gradients in memory of its own."""
    model = training.make_model()
    optimizer = training.adamw(model.parameters())
    options = {
        "delay_all_reduce_named_params": [("3.weight", model[3].weight)],
        "param_to_hook_all_reduce": model[0].weight,
    }
    wrapper = DistributedDataParallel(model, **options) if when == "before" else model
    try:
        amp.initialize(wrapper, optimizer, opt_level=level, verbosity=0)
        if when == "after":
            DistributedDataParallel(model, **options)
    except RuntimeError as error:
        return str(error)
    finally:
        amp.deactivate()
    return "nothing"
