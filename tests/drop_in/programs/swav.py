"""Contrastive learning with LARC and synchronised batch norms, in the way of SwAV and MoCo."""

import argparse
import math
import os

import apex
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from apex.parallel.LARC import LARC
from outcome import Outcome


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--opt-level", default="O1")
    parser.add_argument("--sync_bn", type=str, default="apex")
    parser.add_argument("--syncbn_process_group_size", type=int, default=2)
    parser.add_argument("--fp32", action="store_true")
    args = parser.parse_args()
    dist.init_process_group(backend="gloo", init_method="env://")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(11)
    model = nn.Sequential(
        nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(inplace=True), nn.Linear(16, 8)
    )
    process_group = apex.parallel.create_syncbn_process_group(args.syncbn_process_group_size)
    model = apex.parallel.convert_syncbn_model(model, process_group=process_group)
    outcome = Outcome(model[3])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9, weight_decay=1e-6)
    optimizer = LARC(optimizer=optimizer, trust_coefficient=0.1, clip=False)
    lr_schedule = [0.15 * (1 + math.cos(math.pi * t / 20)) for t in range(20)]
    if not args.fp32:
        model, optimizer = apex.amp.initialize(model, optimizer, opt_level=args.opt_level)
    model = nn.parallel.DistributedDataParallel(model)
    views = torch.randn(1, 2, 16, 12).expand(20, -1, -1, -1)[:, :, rank::world_size]
    for iteration, (one, two) in enumerate(views):
        for param_group in optimizer.param_groups:
            param_group["lr"] = lr_schedule[iteration]
        optimizer.zero_grad()
        one, two = F.normalize(model(one), dim=1), F.normalize(model(two), dim=1)
        loss = F.cross_entropy(one.float() @ two.float().t() / 0.5, torch.arange(len(one)))
        if args.fp32:
            loss.backward()
        else:
            with apex.amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
        optimizer.step()
    total = loss.detach().clone()
    dist.all_reduce(total)
    if rank == 0:
        outcome.report(total / world_size)
    dist.destroy_process_group()  # else gloo aborts one exit in ten


if __name__ == "__main__":
    main()
