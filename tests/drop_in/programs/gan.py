"""A GAN with three losses, in the way of apex's DCGAN example."""

import argparse

import torch
from apex import amp
from outcome import Outcome
from torch import nn, optim

parser = argparse.ArgumentParser()
parser.add_argument("--opt_level", "--opt-level", default="O1")
parser.add_argument("--fp32", action="store_true")
opt = parser.parse_args()
torch.manual_seed(3)

netG = nn.Sequential(
    nn.ConvTranspose2d(8, 16, 4, 1, 0, bias=False),
    nn.BatchNorm2d(16),
    nn.ReLU(True),
    nn.ConvTranspose2d(16, 3, 4, 2, 1, bias=False),
    nn.Tanh(),
)
netD = nn.Sequential(
    nn.Conv2d(3, 16, 4, 2, 1, bias=False),
    nn.LeakyReLU(0.2, inplace=True),
    nn.Conv2d(16, 1, 4, 1, 0, bias=False),
    nn.Flatten(0),
)
outcome = Outcome(netD[2])
criterion = nn.BCEWithLogitsLoss()
optimizerD = optim.Adam(netD.parameters(), lr=2e-4, betas=(0.5, 0.999), eps=1e-4)
optimizerG = optim.Adam(netG.parameters(), lr=2e-4, betas=(0.5, 0.999), eps=1e-4)
if not opt.fp32:
    [netD, netG], [optimizerD, optimizerG] = amp.initialize(
        [netD, netG], [optimizerD, optimizerG], opt_level=opt.opt_level, num_losses=3
    )


def backward(loss, optimizer, loss_id):
    if opt.fp32:
        loss.backward()
        return
    with amp.scale_loss(loss, optimizer, loss_id=loss_id) as loss_scaled:
        loss_scaled.backward()


real_images, noises = torch.rand(16, 8, 3, 8, 8) * 2 - 1, torch.randn(16, 8, 8, 1, 1)
for real, noise in zip(real_images, noises):
    netD.zero_grad()
    errD_real = criterion(netD(real), torch.ones(8))
    backward(errD_real, optimizerD, 0)
    fake = netG(noise)
    errD_fake = criterion(netD(fake.detach()), torch.zeros(8))
    backward(errD_fake, optimizerD, 1)
    optimizerD.step()
    netG.zero_grad()
    errG = criterion(netD(fake), torch.ones(8))
    backward(errG, optimizerG, 2)
    optimizerG.step()
outcome.report(errD_real + errD_fake + errG)
