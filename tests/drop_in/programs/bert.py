"""A language model with gradient accumulation, in the way of BERT's pre-training scripts."""

import argparse

import torch
from apex import amp
from apex.amp import _amp_state
from apex.normalization import FusedLayerNorm
from apex.optimizers import FusedLAMB
from outcome import Outcome
from torch import nn

amp.register_half_function(torch, "einsum")


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.LayerNorm = FusedLayerNorm(width, eps=1e-12)

    def forward(self, hidden):
        q, k, v = self.qkv(hidden).chunk(3, dim=-1)
        scores = torch.einsum("bqd,bkd->bqk", q, k) / q.shape[-1] ** 0.5
        probs = nn.Softmax(dim=-1)(scores)
        return self.LayerNorm(hidden + self.out(torch.einsum("bqk,bkd->bqd", probs, v)))


class Bert(nn.Module):
    def __init__(self, vocabulary=50, width=16):
        super().__init__()
        self.embeddings = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList([Layer(width), Layer(width)])
        self.decoder = nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.embeddings.weight, std=0.2)
        self.decoder.weight = self.embeddings.weight

    def forward(self, tokens):
        hidden = self.embeddings(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.decoder(hidden)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--opt_level", "--opt-level", default="O1")
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    parser.add_argument("--fp32", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(1)
    model = Bert()
    outcome = Outcome(model.layers[0].out)
    no_decay = ["bias", "gamma", "beta", "LayerNorm"]
    named = list(model.named_parameters())
    groups = [
        {
            "params": [p for n, p in named if not any(nd in n for nd in no_decay)],
            "weight_decay": 0.01,
        },
        {"params": [p for n, p in named if any(nd in n for nd in no_decay)], "weight_decay": 0.0},
    ]
    optimizer = FusedLAMB(groups, lr=2e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + 0.1 * step))
    if not args.fp32:
        model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level)
    criterion = nn.CrossEntropyLoss(ignore_index=-1)
    tokens, labels = torch.randint(0, 50, (8, 4, 12)), torch.randint(0, 50, (8, 4, 12))
    model.train()
    stepped = 0
    for epoch in range(6):
        for micro, (batch, label) in enumerate(zip(tokens, labels)):
            loss = criterion(model(batch).view(-1, 50), label.view(-1))
            loss = loss / args.gradient_accumulation_steps
            if args.fp32:
                loss.backward()
            else:
                with amp.scale_loss(loss, optimizer) as scaled_loss:
                    scaled_loss.backward()
            if (micro + 1) % args.gradient_accumulation_steps == 0:
                optimizer.step()
                if args.fp32 or _amp_state.loss_scalers[0]._unskipped != 0:
                    scheduler.step()
                    stepped += 1
                for param in model.parameters():
                    param.grad = None
    with torch.no_grad():
        final = criterion(model(tokens[0]).float().view(-1, 50), labels[0].view(-1))
    outcome.report(final, stepped=stepped)


if __name__ == "__main__":
    main()
