"""Trainings that stop and go on from a checkpoint of `torch.distributed.checkpoint`."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import rank_training as training
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, distributed, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

from amp_patch import amp


def prepare(engine: str, level: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model and its optimizer, initialized, as an engine has them."""
    chosen = training.ENGINES[engine]
    model = chosen.before(training.make_model())
    optimizer = chosen.optimizer(model.parameters())
    scales = training.SCALES if level in training.SCALED else {}
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0, **scales)
    return chosen.after(model), optimizer


def run(
    model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int, alike: bool = False
) -> None:
    """Make the steps from the first one to the last; ``alike``: all ranks on the same rows."""
    rank, size = (0, 1) if alike else (distributed.get_rank(), distributed.get_world_size())
    for step in range(first, last):
        optimizer.zero_grad()
        inputs, targets = training.rows(step, rank, size)
        loss = (model(inputs).float() - targets).square().mean()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state, "amp": amp.state_dict()}


def save_state(folder: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Save a training; all ranks come here."""
    dcp.save(_state(model, optimizer), checkpoint_id=folder)


def load_state(folder: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load what `save_state` saved into an initialized model and its optimizer."""
    state = _state(model, optimizer)
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    amp.load_state_dict(state["amp"])


def numbers(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return all that the next step depends on, of what this rank holds."""
    own: Any = getattr(optimizer, "optim", optimizer)  # ZeRO keeps this rank's share there
    params = [param for group in own.param_groups for param in group["params"]]
    # a loaded state may have another order
    states = [own.state[param][name] for param in params for name in sorted(own.state[param])]
    tensors = [*model.parameters(), *amp.master_params(optimizer), *states]
    scale = torch.tensor(list(amp.state_dict()["loss_scaler0"].values()), dtype=torch.float64)
    parts = [getattr(one, "_local_tensor", one) for one in tensors]
    return [*(part.detach().clone() for part in parts), scale]


def resume(engine: str, levels: tuple[str, ...], folder: str, is_async: bool) -> dict[str, bool]:
    """Return for each level whether a resumed training is to the bit the one that went on."""
    found = {}
    alike = engine == "tensor"
    for level in levels:
        place = str(Path(folder, level))
        model, optimizer = prepare(engine, level)
        run(model, optimizer, 0, 4, alike)
        if is_async:
            saving = dcp.async_save(_state(model, optimizer), checkpoint_id=place)
            saving.result()
        else:
            save_state(place, model, optimizer)
        run(model, optimizer, 4, 7, alike)
        went_on = numbers(model, optimizer)
        amp.deactivate()
        model, optimizer = prepare(engine, level)
        load_state(place, model, optimizer)
        run(model, optimizer, 4, 7, alike)
        resumed = numbers(model, optimizer)
        amp.deactivate()
        found[level] = len(resumed) == len(went_on) and all(map(torch.equal, resumed, went_on))
    return found


def save(engine: str, level: str, folder: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Train and save.

    Returns:
        The whole fp32 parameters, and the full state dicts of the model and the optimizer as they
        are gathered on rank 0.
    """
    model, optimizer = prepare(engine, level)
    run(model, optimizer, 0, 4)
    save_state(folder, model, optimizer)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model_state, optimizer_state = get_state_dict(model, optimizer, options=options)
    return training.whole_params(model), {"model": model_state, "optimizer": optimizer_state}


def load(engine: str, level: str, folder: str) -> tuple[dict[str, Tensor], float]:
    """Load what `save` saved on another number of ranks, and train on.

    Returns:
        The whole fp32 parameters as loaded, and the largest of them three steps later.
    """
    model, optimizer = prepare(engine, level)
    load_state(folder, model, optimizer)
    loaded = training.whole_params(model)
    run(model, optimizer, 4, 7)
    return loaded, max(one.abs().max().item() for one in training.whole_params(model).values())


def sent_by_rank_0(level: str) -> bool:
    """Return whether weights that rank 0 sends to all come in fp32, each as it was."""
    model, optimizer = prepare("fsdp2", level)
    run(model, optimizer, 0, 1)
    torch.manual_seed(1)
    whole = {
        name: torch.randn(value.shape) for name, value in training.make_model().state_dict().items()
    }
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    given = dict(whole) if distributed.get_rank() == 0 else {}
    set_model_state_dict(model, given, options=options)
    came = training.whole_params(model)
    return all(torch.equal(came[name], value) for name, value in whole.items())


def model_state_alone(engine: str) -> bool:
    """Return whether `get_model_state_dict` has the values that `get_state_dict` has."""
    model, optimizer = prepare(engine, "O2")
    run(model, optimizer, 0, 4)
    options = StateDictOptions(full_state_dict=True)
    both, _ = get_state_dict(model, optimizer, options=options)
    both = {name: value.clone() for name, value in both.items()}
    alone = get_model_state_dict(model, options=options)
    rounded = (value.half().float() for value in both.values())
    assert not all(map(torch.equal, both.values(), rounded))  # they are masters
    return list(alone) == list(both) and all(map(torch.equal, alone.values(), both.values()))


def resume_from_states(engine: str, level: str) -> bool:
    """Return whether a training resumes to the bit from what `torch.save` would save.

    Args:
        engine: "zero", of which rank 0 saves the states of all, or "fsdp1".
        level: "O0" ...
    """
    model, optimizer = prepare(engine, level)
    inner = model.module if engine == "zero" else model
    run(model, optimizer, 0, 4)
    if engine == "zero":
        optimizer.consolidate_state_dict()
    saved: list[Any] = [None]
    if engine == "fsdp1" or distributed.get_rank() == 0:
        states = inner.state_dict(), optimizer.state_dict(), amp.state_dict()
        saved = [copy.deepcopy(states)]  # as a file would have them: training goes on in theirs
    if engine == "zero":
        distributed.broadcast_object_list(saved)
    run(model, optimizer, 4, 7)
    went_on = numbers(model, optimizer)
    amp.deactivate()
    model, optimizer = prepare(engine, level)
    inner = model.module if engine == "zero" else model
    for load, state in zip(
        (inner.load_state_dict, optimizer.load_state_dict, amp.load_state_dict),
        saved[0],
        strict=True,
    ):
        load(state)
    run(model, optimizer, 4, 7)
    return all(map(torch.equal, numbers(model, optimizer), went_on))


def by_fsdp1(level: str) -> float:
    """Return the largest difference of a parameter after training that went on from FSDP1's state.

    That of the optimizer is from its own ``optim_state_dict``.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 2))
        wrapped = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
        optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.05)
        return amp.initialize(wrapped, optimizer, opt_level=level, verbosity=0)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(torch.randn(4, 8, generator=generator)).float().square().sum()
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()

    model, optimizer = made()
    train(model, optimizer, 1)
    saved = copy.deepcopy(FullyShardedDataParallel.optim_state_dict(model, optimizer))
    weights = copy.deepcopy(model.state_dict())
    assert {state["exp_avg"].dtype for state in saved["state"].values()} == {torch.float32}
    train(model, optimizer, 2)
    resumed, resumed_optimizer = made()
    resumed.load_state_dict(weights)
    loaded = FullyShardedDataParallel.optim_state_dict_to_load(resumed, resumed_optimizer, saved)
    resumed_optimizer.load_state_dict(loaded)
    train(resumed, resumed_optimizer, 2)
    pairs = zip(model.state_dict().values(), resumed.state_dict().values(), strict=True)
    return max(float((one - other).abs().max()) for one, other in pairs)
