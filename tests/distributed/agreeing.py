"""Ranks that decide together whether to step."""

from __future__ import annotations

import random
import warnings
from typing import Any

import rank_training as training
import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from amp_patch import amp
from amp_patch.debug.trace import tracer
from amp_patch.step import loss_scaling


def random_infs(engine: str, level: str, steps: int) -> training.Trained:
    """Train with an inf on a random rank in every third step or so."""
    drawn = random.Random(level + engine)
    size = distributed.get_world_size()
    plants = {step: drawn.randrange(size) for step in range(steps) if drawn.random() < 0.3}
    return training.train(engine, level, steps, plants)


def one_parameter() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model whose gradients no engine averages, initialized for all ranks together."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(
        model,
        optimizer,
        loss_scale="dynamic",
        verbosity=0,
        max_loss_scale=2.0**10,
        process_group=distributed.group.WORLD,
    )
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer, factor: float = 1.0) -> bool:
    """Make a step and return whether it was skipped."""
    optimizer.zero_grad()
    with amp.scale_loss(model(torch.ones(1, 2)).float().sum() * factor, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    return amp.step_was_skipped(optimizer)


def given_group(failing: int) -> list[bool]:
    """Return which steps were skipped, of which one rank overflows in the second."""
    model, optimizer = one_parameter()
    is_here = distributed.get_rank() == failing
    return [step(model, optimizer, float("inf") if is_here and n == 1 else 1.0) for n in range(3)]


def put_back() -> list[bool]:
    """Return which steps were skipped, where rank 1 puts back what has overflowed in the second."""
    model, optimizer = one_parameter()
    skipped = []
    for number in range(3):
        optimizer.zero_grad()
        is_bad = number == distributed.get_rank() == 1
        kept: list[Tensor] = []
        for factor in (float("inf") if is_bad else 1.0, 1.0):
            optimizer.zero_grad()
            loss = model(torch.ones(1, 2)).float().sum() * factor
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            kept = kept or [param.grad.clone() for param in model.parameters()]
        for param, grad in zip(model.parameters(), kept, strict=True):
            param.grad += grad
        optimizer.step()
        skipped.append(amp.step_was_skipped(optimizer))
    return skipped


def other_numbers_of_blocks(levels: tuple[str, ...]) -> list[float]:
    """Return how far two steps move weights whose gradient is 1/16 in each block, at a rate of 0.1.

    Rank 0 makes one block in each step, and rank 1 three, of which all but the last leave their
    gradients scaled. The ranks sum by hand.
    """
    found = []
    for level in levels:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        group = distributed.group.WORLD
        amp.initialize(model, optimizer, opt_level=level, verbosity=0, process_group=group)
        begun = next(amp.master_params(optimizer)).detach().clone()
        for _ in range(2):
            optimizer.zero_grad()
            for left in reversed(range(1 + 2 * distributed.get_rank())):
                loss = model(torch.ones(1, 2)).float().sum() / 2.0**4
                with amp.scale_loss(loss, optimizer, delay_unscale=left > 0) as scaled_loss:
                    scaled_loss.backward()
            for param in amp.master_params(optimizer):
                distributed.all_reduce(param.grad)
            optimizer.step()
        moved = begun - next(amp.master_params(optimizer)).detach()
        found += [moved.min().item(), moved.max().item()]
        amp.deactivate()
    return found


def averaged_by_hand(levels: tuple[str, ...]) -> list[tuple[Tensor, list[bool]]]:
    """Return the weight, and the skipped steps, where ranks average gradients after the block.

    Nothing tells which ranks step together. Rank 1 overflows in the second step.
    """
    found = []
    for level in levels:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        amp.initialize(model, optimizer, opt_level=level, loss_scale="dynamic", verbosity=0)
        skipped = []
        for number in range(3):
            optimizer.zero_grad()
            factor = float("inf") if number == distributed.get_rank() == 1 else 1.0
            loss = model(torch.ones(1, 2)).float().sum() * factor / 2.0**4
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            for param in amp.master_params(optimizer):
                distributed.all_reduce(param.grad)
            optimizer.step()
            skipped.append(amp.step_was_skipped(optimizer))
        found.append((model.weight.detach().float().clone(), skipped))
        amp.deactivate()
    return found


def other_scale() -> str:
    """Return what is said where rank 1 has loaded another scale."""
    model, optimizer = one_parameter()
    step(model, optimizer)
    if distributed.get_rank() == 1:
        amp.load_state_dict({"loss_scaler0": {"loss_scale": 2.0, "unskipped": 0}})
    try:
        step(model, optimizer)
    except RuntimeError as error:
        return str(error)
    return "nothing"


def other_count() -> str:
    """Return what is said where rank 0 has made a step more."""
    model, optimizer = one_parameter()
    step(model, optimizer)
    if distributed.get_rank() == 0:
        optimizer.step()
    try:
        step(model, optimizer)
    except RuntimeError as error:
        return str(error)
    return "nothing"


def begun_apart(kind: str) -> tuple[str, Tensor, Tensor]:
    """Return what the first block says with DDP where rank 1 differs, and the weight around it."""
    is_other = distributed.get_rank() == 1
    level = "O5" if is_other and kind == "dtype" else "O2"
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rule: dict[str, Any] = {"loss_scale": "dynamic", "max_loss_scale": 4.0}
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, **rule)
    if kind == "loaded" and not is_other:
        amp.load_state_dict({"loss_scaler0": {"loss_scale": 2.0, "unskipped": 0}})
    wrapper = DistributedDataParallel(model)
    with wrapper.no_sync():  # nothing is shared yet
        step_delayed(wrapper, optimizer)
    before, said = model.weight.detach().clone(), "nothing"
    try:
        step(wrapper, optimizer)
    except RuntimeError as error:
        said = str(error)
    after = model.weight.detach().clone()
    amp.deactivate()
    return said, before, after


def begun_alike() -> list[str]:
    """Return what is said where ranks may begin apart: with counts of a scale that never moves.

    Rank 0 also has a block of the model within the wrapper, for itself.
    """
    said = []
    for level, scale in (("O2", 8.0), ("O5", None)):
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        amp.initialize(model, optimizer, opt_level=level, loss_scale=scale, verbosity=0)
        wrapper = DistributedDataParallel(model)
        if distributed.get_rank() == 0:
            step(model, optimizer, 0.0)
        distributed.barrier()
        try:
            step(wrapper, optimizer)
        except RuntimeError as error:
            said.append(str(error))
        amp.deactivate()
    return said


def step_delayed(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Add to the gradients, and leave them scaled."""
    loss = model(torch.ones(1, 2)).float().sum()
    with amp.scale_loss(loss, optimizer, delay_unscale=True) as scaled_loss:
        scaled_loss.backward()


def closure(failing: int) -> list[Any]:
    """Return the weight after a step whose closure returns an inf on one rank."""
    model, optimizer = one_parameter()
    before = model.weight.detach().clone()

    def evaluate() -> Any:
        optimizer.zero_grad()
        loss = model(torch.ones(1, 2)).float().sum()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        return loss * (float("inf") if distributed.get_rank() == failing else 1.0)

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of torch, of what it is asked about a group
        optimizer.step(evaluate)
    return [amp.step_was_skipped(optimizer), torch.equal(model.weight, before)]


def closure_by(sharing: str) -> tuple[Tensor, list[bool]]:
    """Return the weight, and the skipped steps, where no group is given and rank 1 finds an inf.

    Args:
        sharing: "hand" averages gradients after the block, and that of rank 1 overflows; by "ddp"
            the loss that its closure returns is inf, and the gradients are not.
    """
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O1", loss_scale="dynamic", verbosity=0)
    by_hand = sharing == "hand"
    called = model if by_hand else DistributedDataParallel(model)
    skipped = []
    for number in range(3):
        factor = float("inf") if number == distributed.get_rank() == 1 else 1.0

        def evaluate(factor: float = factor) -> Any:
            optimizer.zero_grad()
            loss = called(torch.ones(1, 2)).float().sum() / 2.0**4
            loss, returned = (loss * factor, loss) if by_hand else (loss, loss * factor)
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            for param in amp.master_params(optimizer) if by_hand else ():
                distributed.all_reduce(param.grad)
            return returned

        optimizer.step(evaluate)
        skipped.append(amp.step_was_skipped(optimizer))
    weight = model.weight.detach().clone()
    amp.deactivate()
    return weight, skipped


def traced(kind: str) -> tuple[str, bool]:
    """Return what is said of an overflow on rank 1 that is traced, and whether training goes on.

    Args:
        kind: the model is "sharded", came "wrapped" in DDP, or is wrapped "after" `amp.initialize`.
    """
    model: nn.Module = nn.Sequential(nn.Linear(7, 16), nn.BatchNorm1d(16), nn.Linear(16, 3))
    if kind == "sharded":
        training.sharded(model)
    wrapped = DistributedDataParallel(model) if kind == "wrapped" else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(wrapped, optimizer, loss_scale=8.0, trace_overflow=True, verbosity=0)
    called = DistributedDataParallel(model) if kind == "after" else wrapped
    for number in range(3):
        optimizer.zero_grad()
        inputs, targets = training.rows(number, distributed.get_rank(), 2)
        if number == distributed.get_rank() == 1:
            inputs = inputs * 1e30
        loss = (called(inputs).float() - targets).square().mean()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
    said = "\n".join(str(cause) for cause, _ in tracer.causes.values())
    goes_on = not amp.step_was_skipped(optimizer)
    amp.deactivate()
    return said, goes_on


def behind_the_host(engine: str, level: str, steps: int, plants: dict[int, int]) -> tuple[Any, Any]:
    """Return what a fused optimizer trains that skips by a flag of its device, and one that waits.

    The CPU plays a device that works behind the host.
    """

    def fused(params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=0.02, eps=1e-3, fused=True)

    training.ENGINES[engine] = training.ENGINES[engine]._replace(optimizer=fused)
    waiting = training.train(engine, level, steps, plants)
    loss_scaling.RUNS_AHEAD = {"cpu"}
    return training.train(engine, level, steps, plants), waiting


def beside_a_model_of_its_own(losses: int) -> tuple[list[str], list[float], Tensor]:
    """Return what is warned of, the scales and the weights of a model that ranks share.

    Each rank has another model for itself, which overflows once on rank 0.

    Args:
        losses: 1, or 2: one scale for each model.
    """
    shared, own = nn.Linear(7, 3), nn.Linear(7, 3)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (shared, own)]
    options = {"opt_level": "O1", "num_losses": losses, "verbosity": 0, **training.SCALES}
    _, (of_shared, of_own) = amp.initialize([shared, own], optimizers, **options)
    wrapped, scales = DistributedDataParallel(shared), []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(4):
            for model, optimizer in ((own, of_own), (wrapped, of_shared)):
                optimizer.zero_grad()
                inputs, targets = training.rows(number, distributed.get_rank(), 2)
                loss = (model(inputs).float() - targets).square().mean()
                overflows = model is own and number == 1 and distributed.get_rank() == 0
                loss_id = losses - 1 if model is own else 0
                with amp.scale_loss(loss, optimizer, loss_id=loss_id) as scaled_loss:
                    (scaled_loss * (float("inf") if overflows else 1.0)).backward()
                optimizer.step()
            scales.append(amp.loss_scale())
    amp.deactivate()
    said = [str(one.message) for one in caught if "loss scale must" in str(one.message)]
    return said, scales, shared.weight.detach()


def beside_parameters_of_its_own(kind: str, level: str, together: bool) -> tuple[list[str], Tensor]:
    """Return what is warned of, and the weight that ranks share.

    One optimizer steps a layer that they share and one of each rank. That of rank 0 overflows.

    Args:
        kind: "ignored" by the wrapper, or "outside" of it.
        level: "O1" ...
        together: whether ranks are told to skip together.
    """
    model = nn.Sequential(nn.Linear(7, 3), nn.Linear(3, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scales = training.SCALES if level in training.SCALED else {}
    group = distributed.group.WORLD if together else None
    options = {"opt_level": level, "verbosity": 0, "process_group": group, **scales}
    amp.initialize(model, optimizer, **options)
    wrapped: nn.Module
    if kind == "ignored":
        names = ["1.weight", "1.bias"]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
        wrapped = DistributedDataParallel(model)
    else:
        wrapped = nn.Sequential(DistributedDataParallel(model[0]), model[1])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(4):
            optimizer.zero_grad()
            inputs, targets = training.rows(number, distributed.get_rank(), 2)
            dtype = model[0].weight.dtype if kind == "outside" else torch.float32
            loss = (wrapped(inputs.to(dtype)).float() - targets).square().mean()
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
                if distributed.get_rank() == 0 and number == 1 and level in training.SCALED:
                    model[1].weight.grad.fill_(float("inf"))
            optimizer.step()
    amp.deactivate()
    said = [str(one.message) for one in caught if "amp.initialize" in str(one.message)]
    return said, model[0].weight.detach()


def two_optimizers_of_one_loss() -> tuple[list[str], list[float], list[Tensor]]:
    """Return what is warned of, the scales and the weights that each rank has whole.

    Of a model in tensor parallel one optimizer steps what is split, the other one what is whole.
    What rank 1 holds of a gradient overflows once.
    """
    model = training.ENGINES["tensor"].before(training.make_model())
    layers = [model[0], model[3]], [model[1]]
    optimizers = [training.adamw(nn.ModuleList(some).parameters()) for some in layers]
    amp.initialize(model, optimizers, opt_level="O2", verbosity=0, **training.SCALES)
    scales = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(4):
            inputs, targets = training.rows(number, 0, 1)
            loss = (model(inputs).float() - targets).square().mean()
            with amp.scale_loss(loss, optimizers) as scaled_loss:
                scaled_loss.backward()
                if number == 1 and distributed.get_rank() == 1:
                    training.plant(model, "0.weight")
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            scales.append(amp.loss_scale())
    whole = [value.clone() for value in model[1].state_dict().values()]
    amp.deactivate()
    return [str(one.message) for one in caught], scales, whole
