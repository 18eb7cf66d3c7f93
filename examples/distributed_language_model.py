"""Train the language model of language_model.py on several GPUs, or on several processes of a CPU.

    torchrun --nproc_per_node=2 examples/distributed_language_model.py --engine ddp --opt-level O2

ddp       each rank has the model, and a share of each batch
fsdp2     each rank has a part of every parameter, and a share of each batch
tensor    pairs of ranks share the work of large layers; the pairs are as the ranks of fsdp2
pipeline  each of two ranks has half of the layers, and passes micro-batches on
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

import torch
from language_model import (
    BATCH,
    CONTEXT,
    LanguageModel,
    load_text,
    next_character_loss,
    windows,
)
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import OneCycleLR

from amp_patch import amp

MICRO_BATCHES = 4

#: Runs forward and backward on a batch of all ranks, and returns its loss where this rank knows it.
Backward = Callable[[Tensor, Tensor], Tensor]


def optimizer_of(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=1e-2)


def ddp(opt_level: str, device: torch.device) -> tuple[Optimizer, Backward]:
    model = LanguageModel().to(device)
    model, optimizer = amp.initialize(model, optimizer_of(model), opt_level=opt_level, verbosity=0)
    model = DistributedDataParallel(model)  # after amp.initialize()
    return optimizer, backward_of(model, optimizer, distributed.get_rank())


def fsdp2(opt_level: str, device: torch.device) -> tuple[Optimizer, Backward]:
    model = LanguageModel().to(device)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)  # before amp.initialize()
    model, optimizer = amp.initialize(model, optimizer_of(model), opt_level=opt_level, verbosity=0)
    return optimizer, backward_of(model, optimizer, distributed.get_rank())


def tensor(opt_level: str, device: torch.device) -> tuple[Optimizer, Backward]:
    model = LanguageModel().to(device)
    shape = distributed.get_world_size() // 2, 2
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("data", "tensor"))
    plan = {"head": ColwiseParallel(output_layouts=Replicate())}
    for number in range(len(model.blocks)):
        plan[f"blocks.{number}.feed_forward.0"] = ColwiseParallel()
        plan[f"blocks.{number}.feed_forward.2"] = RowwiseParallel()
    parallelize_module(model, mesh["tensor"], plan)
    for block in model.blocks:
        fully_shard(block, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    model, optimizer = amp.initialize(model, optimizer_of(model), opt_level=opt_level, verbosity=0)
    return optimizer, backward_of(model, optimizer, mesh["data"].get_local_rank(), shape[0])


def backward_of(
    model: nn.Module, optimizer: Optimizer, share: int, shares: int | None = None
) -> Backward:
    """Return what trains ``model`` on one of the equal shares of each batch.

    Args:
        model: gets the gradients of all shares, averaged.
        optimizer: of its parameters.
        share: which one this rank has.
        shares: how many there are; None: one for each rank.
    """
    shares = shares or distributed.get_world_size()

    def backward(characters: Tensor, following: Tensor) -> Tensor:
        own, own_following = characters.chunk(shares)[share], following.chunk(shares)[share]
        loss = next_character_loss(model(own), own_following)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        mean = loss.detach().float().clone()
        distributed.all_reduce(mean)
        return mean / distributed.get_world_size()

    return backward


class FirstHalf(nn.Module):
    """Characters (N, T) to what the second half is given (N, T, width)."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.characters, self.positions = model.characters, model.positions
        self.blocks = model.blocks[: len(model.blocks) // 2]

    def forward(self, text: Tensor) -> Tensor:
        places = torch.arange(text.shape[1], device=text.device)
        return self.blocks(self.characters(text) + self.positions(places))


class SecondHalf(nn.Module):
    """What the first half returns (N, T, width) to logits of the next characters (N, T, 128)."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.blocks = model.blocks[len(model.blocks) // 2 :]
        self.norm, self.head = model.norm, model.head

    def forward(self, hidden: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(hidden)))


def pipeline(opt_level: str, device: torch.device) -> tuple[Optimizer, Backward]:
    halves = (FirstHalf, SecondHalf)
    if distributed.get_world_size() != len(halves):
        raise SystemExit("--engine pipeline is for two ranks: torchrun --nproc_per_node=2")
    rank = distributed.get_rank()
    is_last = rank == len(halves) - 1
    model = halves[rank](LanguageModel()).to(device)
    model, optimizer = amp.initialize(
        model,
        optimizer_of(model),
        opt_level=opt_level,
        verbosity=0,
        process_group=distributed.group.WORLD,  # an overflow in one stage is one of all
    )

    def scaled_loss(logits: Tensor, following: Tensor) -> Tensor:
        return next_character_loss(logits, following) * scale / MICRO_BATCHES

    stage = PipelineStage(model, rank, len(halves), device)
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=scaled_loss, scale_grads=False)

    def backward(characters: Tensor, following: Tensor) -> Tensor:
        nonlocal scale
        losses: list[Tensor] = []
        # The schedule computes the losses inside of the block, so the block is given their factor.
        with amp.scale_loss(torch.ones((), device=device), optimizer) as scale:
            if is_last:
                schedule.step(target=following, losses=losses)
            else:
                schedule.step(characters)
        loss = torch.stack(losses).detach().sum() / scale if is_last else torch.zeros_like(scale)
        distributed.broadcast(loss, src=len(halves) - 1)
        return loss

    scale = torch.ones((), device=device)
    return optimizer, backward


ENGINES = {"ddp": ddp, "fsdp2": fsdp2, "tensor": tensor, "pipeline": pipeline}


def train(engine: str, opt_level: str, steps: int, seed: int = 0) -> list[float]:
    """Train from scratch, and return the loss of each step in nats per character.

    Every engine, on any number of ranks, trains the same model on the same batches.
    """
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    torch.manual_seed(seed)
    text = load_text(device.type)
    optimizer, backward = ENGINES[engine](opt_level, device)
    schedule = OneCycleLR(optimizer, max_lr=1e-2, total_steps=steps + 1)
    losses = []
    torch.manual_seed(seed)
    for _ in range(steps):
        starts = torch.randint(len(text) - CONTEXT, (BATCH,))
        optimizer.zero_grad()
        losses.append(backward(*windows(text, starts)))
        optimizer.step()
        schedule.step()
    return torch.stack(losses).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", choices=ENGINES, default="ddp")
    parser.add_argument("--opt-level", default="O1", help="O0 to O5 (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    distributed.init_process_group()  # torchrun says where the others are
    losses = train(args.engine, args.opt_level, args.steps, args.seed)
    if distributed.get_rank() == 0:
        final = sum(losses[-10:]) / 10
        print(f"{args.engine}, {args.opt_level}: loss {losses[0]:.4f} -> {final:.4f}")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
