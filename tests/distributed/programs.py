"""Drawn trainings over ranks; `plain_programs` has what a plain fp32 loop makes of each.

The gradients are of the data alone, and all numbers are multiples of small powers of two, so that
no sum is rounded, in whatever dtype and order it is taken: where nothing is clipped, ranks and loop
agree to the bit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import rank_training as training
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, distributed, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from amp_patch import amp

SCALED = training.SCALED
ROWS, LR, MOMENTUM = 8, 2.0**-3, 0.5
LAYERS = ("first", "second")
SCALES = {"loss_scale": "dynamic", "growth_interval": 2, "max_loss_scale": 2.0**9}


class Inf(NamedTuple):
    """An overflow.

    Attributes:
        micro_batch: in which of the step.
        rank: on which; one of fewer ranks stands for it.
        layer: of which gradients.
        in_gradient: written to what the rank holds of the gradient; else the loss is infinite.
    """

    micro_batch: int
    rank: int
    layer: str
    in_gradient: bool


class Step(NamedTuple):
    """A step.

    Attributes:
        micro_batches: how many backward passes it sums.
        kept: what becomes of a gradient until the last of them: "delayed" (``delay_unscale``),
            "unsynced" (``no_sync``), or "unscaled", each block by itself.
        max_norm: of each optimizer's gradients; None: they are not clipped.
        infs: the overflows.
        clips_by: "amp", or "torch": its function, or the method of an FSDP1 model.
    """

    micro_batches: int = 1
    kept: str = "unscaled"
    max_norm: float | None = None
    infs: tuple[Inf, ...] = ()
    clips_by: str = "amp"


class Program(NamedTuple):
    """A training.

    Attributes:
        engine: a key of `ENGINES`.
        level: "O0" ...
        optimizers: 1, or 2: one for each layer.
        fused: ``fused_step``.
        actions: steps; "save": keep the states; "load": build all anew, and go on from those kept.
    """

    engine: str
    level: str
    optimizers: int
    fused: bool
    actions: tuple[Step | str, ...]


class Ran(NamedTuple):
    """What a program left.

    Attributes:
        params: name -> the whole parameter in fp32.
        outputs: of the model, for inputs of which each shows one column of the weights.
        norms: of each step, those of each optimizer; empty where the step was skipped.
        skipped: for each step whether it was.
        scales: after each step.
    """

    params: dict[str, Tensor]
    outputs: Tensor
    norms: list[list[float]]
    skipped: list[bool]
    scales: list[float]


class SideBySide(nn.Module):
    """Two layers with the same inputs: the gradients of none hang on weights."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.first, self.second = nn.Linear(4, 5), nn.Linear(4, 3)
        for param in self.parameters():
            param.data = torch.randint(-4, 5, param.shape, generator=generator) / 4.0

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.cat([self.first(inputs), self.second(inputs)], 1)


#: Beside the rows of a batch these show the weights.
COLUMNS = torch.cat([torch.zeros(1, 4), torch.eye(4)])


def batch(index: int, micro_batch: int) -> tuple[Tensor, Tensor]:
    """Return inputs, and the factors of the outputs in the loss."""
    generator = torch.Generator().manual_seed(8 * index + micro_batch)
    return (
        torch.randint(-1, 2, (ROWS, 4), generator=generator).float(),
        torch.randint(-2, 3, (ROWS, 8), generator=generator).float(),
    )


def momentum_of(program: Program) -> float:
    """Return 0 where half weights would have to hold the digits that momentum adds."""
    return 0.0 if program.level == "O3" else MOMENTUM


def has_scale(program: Program) -> bool:
    return program.level in SCALED


def _flat(model: SideBySide) -> nn.Module:
    for name in LAYERS:
        setattr(model, name, training.flat_on_a_mesh(getattr(model, name)))
    return training.flat_on_a_mesh(model)


def _split(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    whole = torch.distributed.tensor.Replicate()
    plan = {
        "first": ColwiseParallel(output_layouts=whole),
        "second": RowwiseParallel(input_layouts=whole),
    }
    return parallelize_module(model, mesh, plan)


#: What is done to a model before `amp.initialize`, and after it.
ENGINES: dict[str, tuple[Callable[[Any], nn.Module], Callable[[Any], nn.Module]]] = {
    "ddp": (lambda model: model, DistributedDataParallel),
    "zero": (lambda model: model, DistributedDataParallel),
    "fsdp2": (training.sharded, lambda model: model),
    "fsdp1": (_flat, lambda model: model),
    "tensor": (_split, lambda model: model),
}


class _Training:
    """A model and its optimizers, initialized for a program, with weights of a seed."""

    def __init__(self, program: Program, seed: int) -> None:
        self.program = program
        before, after = ENGINES[program.engine]
        model = before(SideBySide(seed))
        self._params = groups = [list(model.parameters())]
        if program.optimizers == 2:
            self._params = groups = [
                [p for name, p in model.named_parameters() if layer in name] for layer in LAYERS
            ]
        optimizers = [self._optimizer(params) for params in groups]
        options: dict[str, Any] = dict(SCALES) if has_scale(program) else {}
        if program.fused:
            options["fused_step"] = True
        model, self.optimizers = amp.initialize(
            model, optimizers, opt_level=program.level, verbosity=0, **options
        )
        self.model = after(model)

    def _optimizer(self, params: list[nn.Parameter]) -> torch.optim.Optimizer:
        options = {"lr": LR, "momentum": momentum_of(self.program)}
        if self.program.engine != "zero":
            return torch.optim.SGD(params, **options)
        from torch.distributed.optim import ZeroRedundancyOptimizer  # warns of TorchScript

        return ZeroRedundancyOptimizer(params, torch.optim.SGD, **options)

    def step(self, index: int, step: Step) -> list[float]:
        """Make a step and return the norms."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        for micro_batch in range(step.micro_batches):
            is_last = micro_batch == step.micro_batches - 1
            infs = [one for one in step.infs if one.micro_batch == micro_batch]
            with training.without_sync(self.model, step.kept == "unsynced" and not is_last):
                loss = self._loss(index, micro_batch, infs)
                delays = step.kept == "delayed" and not is_last
                with amp.scale_loss(loss, self.optimizers, delay_unscale=delays) as scaled_loss:
                    scaled_loss.backward()
                    self._plant(infs)
        norms = [] if step.max_norm is None else self._clip(step.max_norm, step.clips_by)
        for optimizer in self.optimizers:
            optimizer.step()
        return norms

    def _clip(self, max_norm: float, by: str) -> list[float]:
        if by == "amp":
            return [amp.clip_grad_norm_(one, max_norm).item() for one in self.optimizers]
        if self.program.engine == "fsdp1" and self.program.optimizers == 1:
            return [self.model.clip_grad_norm_(max_norm).item()]
        norms = [torch.nn.utils.clip_grad_norm_(params, max_norm) for params in self._params]
        whole = [one.full_tensor() if isinstance(one, DTensor) else one for one in norms]
        return [one.item() for one in whole]

    def _loss(self, index: int, micro_batch: int, infs: Sequence[Inf]) -> Tensor:
        rank, size = distributed.get_rank(), distributed.get_world_size()
        rank, size = (0, 1) if self.program.engine == "tensor" else (rank, size)
        inputs, factors = batch(index, micro_batch)
        for inf in infs:
            if not inf.in_gradient and inf.rank % size == rank:
                columns = slice(0, 5) if inf.layer == "first" else slice(5, 8)
                factors[:, columns] = float("inf")
        outputs = self.model(inputs[rank::size])
        return (outputs.float() * factors[rank::size]).sum() * (size / ROWS)

    def _plant(self, infs: Sequence[Inf]) -> None:
        rank, size = distributed.get_rank(), distributed.get_world_size()
        for inf in infs:
            if inf.in_gradient and inf.rank % size == rank:
                training.plant(self.model, inf.layer)

    def states(self) -> Any:
        """Return copies of all states; those of ZeRO as `torch.save` would have them."""
        if self.program.engine != "zero":
            state = self.state_dict()
            return copy.deepcopy(((state["model"], state["optimizers"]), state["amp"]))
        for optimizer in self.optimizers:
            optimizer.consolidate_state_dict()
        held: list[Any] = [None]
        if distributed.get_rank() == 0:
            held = [(self.model.state_dict(), [one.state_dict() for one in self.optimizers])]
        distributed.broadcast_object_list(held)
        return copy.deepcopy((held[0], amp.state_dict()))

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint has of all this."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()  # torch makes no state, before the first step, beside gradients
        of_model, of_optimizers = get_state_dict(self.model, self.optimizers)
        return {"model": of_model, "optimizers": of_optimizers, "amp": amp.state_dict()}

    def load_from(self, folder: str) -> None:
        """Go on from a checkpoint, of another number of ranks maybe."""
        state = self.state_dict()
        dcp.load(state, checkpoint_id=folder)
        self.load(((state["model"], state["optimizers"]), state["amp"]))

    def load(self, states: Any) -> None:
        """Go on from what `states` returned."""
        (of_model, of_optimizers), of_amp = copy.deepcopy(states)
        if self.program.engine == "zero":
            self.model.load_state_dict(of_model)
            for optimizer, state in zip(self.optimizers, of_optimizers, strict=True):
                optimizer.load_state_dict(state)
        else:
            set_state_dict(
                self.model,
                self.optimizers,
                model_state_dict=of_model,
                optim_state_dict=of_optimizers,
            )
        amp.load_state_dict(of_amp)


def run(program: Program, folder: str | None = None, first: int = 0) -> Ran:
    """Run a program on this rank.

    Args:
        program: has "load" only where it has "save" before.
        folder: of a checkpoint that is saved in the end, and loaded first unless ``first`` is 0.
        first: the number of the first action.
    """
    try:
        one = _Training(program, seed=first)
        if folder is not None and first:
            one.load_from(folder)
        states = None
        norms, skipped, scales = [], [], []
        for index, action in enumerate(program.actions[first:], first):
            if action == "save":
                states = one.states()
            elif action == "load":
                if states is not None:
                    amp.deactivate()
                    one = _Training(program, seed=index)
                    one.load(states)
            else:
                assert isinstance(action, Step)
                found = one.step(index, action)
                (was_skipped,) = {amp.step_was_skipped(each) for each in one.optimizers}
                norms.append([] if was_skipped else found)
                skipped.append(was_skipped)
                scales.append(amp.loss_scale())
        if folder is not None and not first:
            dcp.save(one.state_dict(), checkpoint_id=folder)
        outputs = one.model(COLUMNS).detach().float()
        return Ran(training.whole_params(one.model), outputs, norms, skipped, scales)
    finally:
        amp.deactivate()
