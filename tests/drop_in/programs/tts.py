"""A recurrent text-to-speech model with clipping, in the way of Tacotron's scripts."""

import argparse

import torch
from apex import amp
from outcome import Outcome
from torch import nn


class Tacotron(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.encoder = nn.LSTM(8, 8, batch_first=True, bidirectional=True)
        self.attention_rnn = nn.LSTMCell(16, 16)
        self.linear_projection = nn.Linear(16, 4)

    def forward(self, batch):
        text, lengths = batch
        packed = nn.utils.rnn.pack_padded_sequence(self.embedding(text), lengths, batch_first=True)
        encoded, _ = nn.utils.rnn.pad_packed_sequence(self.encoder(packed)[0], batch_first=True)
        hidden = cell = encoded.new_zeros(len(text), 16)
        mels = []
        for memory in encoded.unbind(1):
            hidden, cell = self.attention_rnn(memory, (hidden, cell))
            mels.append(self.linear_projection(hidden))
        return torch.stack(mels, 1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--opt-level", default="O2")
    parser.add_argument("--fp32", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(5)
    model = Tacotron()
    outcome = Outcome(model.linear_projection)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-4, weight_decay=1e-6)
    if not args.fp32:
        model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level)
    text, mel = torch.randint(0, 20, (4, 6)), torch.randn(4, 6, 4)
    lengths = torch.tensor([6, 6, 5, 3])
    model.train()
    for iteration in range(20):
        model.zero_grad()
        loss = nn.MSELoss()(model((text, lengths)), mel)
        if args.fp32:
            loss.backward()
            grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        else:
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            grad_norm = torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
        assert grad_norm.dtype is torch.float32 or args.opt_level == "O3"
        optimizer.step()
    outcome.report(loss)


if __name__ == "__main__":
    main()
