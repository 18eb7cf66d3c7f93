"""Image classification on several processes, in the way of apex's ImageNet example."""

import argparse
import os

import torch
import torch.nn.functional as F
from outcome import Outcome
from torch import nn

try:
    from apex import amp, optimizers
    from apex.fp16_utils import *
    from apex.multi_tensor_apply import multi_tensor_applier
    from apex.parallel import DistributedDataParallel as DDP
except ImportError:
    raise ImportError("Please install apex from https://www.github.com/nvidia/apex to run this.")


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", default=3, type=int)
    parser.add_argument("--lr", default=0.05, type=float)
    parser.add_argument("--local_rank", default=os.getenv("LOCAL_RANK", 0), type=int)
    parser.add_argument("--sync_bn", action="store_true")
    parser.add_argument("--opt-level", type=str)
    parser.add_argument("--keep-batchnorm-fp32", type=str, default=None)
    parser.add_argument("--loss-scale", type=str, default=None)
    parser.add_argument("--fp32", action="store_true")
    return parser.parse_args()


def main():
    args = parse()
    torch.manual_seed(0)
    args.distributed = int(os.environ.get("WORLD_SIZE", 1)) > 1
    args.world_size, rank = 1, 0
    if args.distributed:
        torch.distributed.init_process_group(backend="gloo", init_method="env://")
        args.world_size = torch.distributed.get_world_size()
        rank = torch.distributed.get_rank()

    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, 10),
    )
    if args.sync_bn:
        import apex

        print("using apex synced BN")
        model = apex.parallel.convert_syncbn_model(model)
    outcome = Outcome(model[5])
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=1e-4)
    if not args.fp32:
        print("opt_level = {}".format(args.opt_level))
        model, optimizer = amp.initialize(
            model,
            optimizer,
            opt_level=args.opt_level,
            keep_batchnorm_fp32=args.keep_batchnorm_fp32,
            loss_scale=args.loss_scale,
        )
    if args.distributed:
        if args.fp32:
            model = nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)
        else:
            model = DDP(model, delay_allreduce=True)

    criterion = nn.CrossEntropyLoss()
    images, targets = torch.randn(32, 3, 8, 8), torch.randint(0, 10, (32,))
    images, targets = images[rank :: args.world_size], targets[rank :: args.world_size]
    model.train()
    for epoch in range(args.epochs):
        adjust_learning_rate(optimizer, epoch, args.lr)
        for start in range(0, len(images), 8):
            input, target = images[start : start + 8], targets[start : start + 8]
            output = model(input)
            loss = criterion(output, target)
            optimizer.zero_grad()
            if args.fp32:
                loss.backward()
            else:
                with amp.scale_loss(loss, optimizer) as scaled_loss:
                    scaled_loss.backward()
            optimizer.step()
    model.eval()
    with torch.no_grad():
        loss = criterion(model(images).float(), targets)
    if args.distributed:
        loss = reduce_tensor(loss.data, args.world_size)
    if rank == 0:
        outcome.report(to_python_float(loss))
    if args.distributed:
        torch.distributed.destroy_process_group()


def adjust_learning_rate(optimizer, epoch, base):
    for param_group in optimizer.param_groups:
        param_group["lr"] = base * (0.5**epoch)


def reduce_tensor(tensor, world_size):
    rt = tensor.clone()
    torch.distributed.all_reduce(rt)
    rt /= world_size
    return rt


if __name__ == "__main__":
    main()
