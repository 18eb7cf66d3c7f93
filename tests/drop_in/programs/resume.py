"""Training that is interrupted and goes on from a checkpoint with 'amp': amp.state_dict()."""

import argparse
import os
import tempfile

import torch
from apex import amp
from outcome import Outcome
from torch import nn


def build(args):
    model = nn.Sequential(nn.Linear(10, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    outcome = Outcome(model[3])
    if not args.fp32:
        model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level)
    return model, optimizer, outcome


def train(args, model, optimizer, batches):
    for x, y in batches:
        loss = ((model(x).float() - y) ** 2).mean()
        optimizer.zero_grad()
        if args.fp32:
            loss.backward()
        else:
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
        optimizer.step()
    return loss


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--opt-level", default="O1")
    parser.add_argument("--fp32", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(13)
    x = torch.randn(30, 16, 10)
    batches = list(zip(x, x.sin().mean(-1, keepdim=True)))
    model, optimizer, _ = build(args)
    train(args, model, optimizer, batches[:15])
    checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    if not args.fp32:
        checkpoint["amp"] = amp.state_dict()
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "amp_checkpoint.pt")
        torch.save(checkpoint, path)
        without_interruption = train(args, model, optimizer, batches[15:])

        torch.manual_seed(17)
        model, optimizer, outcome = build(args)
        checkpoint = torch.load(path)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    if not args.fp32:
        amp.load_state_dict(checkpoint["amp"])
    loss = train(args, model, optimizer, batches[15:])
    outcome.report(loss, without_interruption=without_interruption.item())


if __name__ == "__main__":
    main()
