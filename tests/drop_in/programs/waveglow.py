"""A flow of invertible convolutions, in the way of WaveGlow's scripts, older and newer."""

import argparse

import torch
import torch.nn.functional as F
from outcome import Outcome
from torch import nn


class Invertible1x1Conv(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.conv = nn.Conv1d(c, c, kernel_size=1, bias=False)
        W = torch.linalg.qr(torch.randn(c, c))[0]
        if torch.det(W) < 0:
            W[:, 0] = -1 * W[:, 0]
        self.conv.weight.data = W.view(c, c, 1).contiguous()

    def forward(self, z):
        batch_size, group_size, n_of_groups = z.size()
        log_det_W = batch_size * n_of_groups * torch.logdet(self.conv.weight.squeeze().float())
        return self.conv(z), log_det_W


class WaveGlow(nn.Module):
    def __init__(self):
        super().__init__()
        self.convinv = nn.ModuleList([Invertible1x1Conv(4) for _ in range(2)])
        self.start = torch.nn.utils.weight_norm(nn.Conv1d(2, 8, 1))
        self.end = nn.Conv1d(8, 4, 1)

    def forward(self, audio):
        log_s_total, log_det_total = 0, 0
        for convinv in self.convinv:
            audio, log_det_W = convinv(audio)
            first, second = audio.chunk(2, 1)
            output = self.end(torch.tanh(self.start(first)))
            log_s, b = output.chunk(2, 1)
            audio = torch.cat([first, torch.exp(log_s) * second + b], 1)
            log_s_total = log_s_total + torch.sum(log_s)
            log_det_total = log_det_total + log_det_W
        return audio, log_s_total, log_det_total


def waveglow_loss(z, log_s_total, log_det_total, sigma=1.0):
    loss = torch.sum(z.float() * z.float()) / (2 * sigma * sigma) - log_s_total - log_det_total
    return loss / (z.size(0) * z.size(1) * z.size(2))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--opt-level", default="O1")
    parser.add_argument("--fp16-optimizer", action="store_true")
    parser.add_argument("--fp32", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(7)
    model = WaveGlow()
    outcome = Outcome(model.end)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, eps=1e-4)
    if args.fp16_optimizer:
        from apex.fp16_utils import FP16_Optimizer, network_to_half

        model = network_to_half(model)
        optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, eps=1e-4)
        optimizer = FP16_Optimizer(optimizer, dynamic_loss_scale=True)
    elif not args.fp32:
        from apex import amp

        model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level)
    audio = torch.randn(8, 4, 4, 16)
    for epoch in range(4):
        for batch in audio:
            model.zero_grad()
            loss = waveglow_loss(*model(batch))
            if args.fp16_optimizer:
                optimizer.backward(loss)
                optimizer.clip_master_grads(10.0)
            elif args.fp32:
                loss.backward()
            else:
                with amp.scale_loss(loss, optimizer) as scaled_loss:
                    scaled_loss.backward()
            optimizer.step()
    outcome.report(loss)


if __name__ == "__main__":
    main()
