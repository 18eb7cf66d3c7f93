"""Counts the casts of a training step of BERT's shape, by amp_patch's O1 and by autocast."""

from contextlib import nullcontext
from dataclasses import dataclass
from unittest import mock

import torch
from bert_shape import MaskedLanguageModel
from cast_counter import CastCounter
from torch import Tensor

from amp_patch import amp

TOKENS = torch.arange(8).view(2, 4)
_softmax = torch.softmax


@dataclass(frozen=True)
class Casts:
    """The casts dispatched for one micro-batch, its bulk refreshes of the weights apart."""

    forward: int
    backward: int
    of_weights: int
    """How many of both read a parameter."""
    bulk_copies: int

    @property
    def total(self) -> int:
        return self.forward + self.backward

    @classmethod
    def read(cls, forward: CastCounter, backward: CastCounter) -> "Casts":
        return cls(
            forward.casts,
            backward.casts,
            forward.of_weights + backward.of_weights,
            forward.bulk_copies + backward.bulk_copies,
        )


def amp_casts(
    *,
    opt_level: str = "O1",
    rules: str | None = None,
    recompute: bool = False,
    micro_batches: int = 1,
    steps: int = 3,
) -> list[Casts]:
    """Count the casts of each micro-batch of the last of ``steps`` training steps.

    Args:
        opt_level: the level to train at.
        rules: the profile to train by.
        recompute: whether ``torch.utils.checkpoint`` computes each layer again in backward.
        micro_batches: how many backward passes go into a step; all but the last are delayed.
        steps: the casts of the weights are made in the first, and refreshed in later ones.
    """
    model = MaskedLanguageModel(recompute=recompute)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    options = {"opt_level": opt_level, "rules": rules, "verbosity": 0}
    model, optimizer = amp.initialize(model, optimizer, **options)
    for _ in range(steps):
        optimizer.zero_grad()
        counts = []
        for number in range(1, micro_batches + 1):
            forward, backward = (CastCounter(model.parameters()) for _ in range(2))
            with forward:
                loss = model(TOKENS, TOKENS)
            delay = number < micro_batches
            with backward, amp.scale_loss(loss, optimizer, delay_unscale=delay) as scaled_loss:
                scaled_loss.backward()
            counts.append(Casts.read(forward, backward))
        optimizer.step()
    amp.deactivate()
    return counts


def _softmax_by_cuda_list(scores: Tensor, dim: int) -> Tensor:
    return _softmax(scores.float(), dim)


def autocast_casts(*, cuda_list: bool) -> Casts:
    """Count the casts of a step under CPU autocast to float16.

    Args:
        cuda_list: follow CUDA's list, which runs softmax in float32. Of the operators of this
            model it is the only one that the CPU's list treats otherwise.
    """
    model = MaskedLanguageModel()
    forward, backward = (CastCounter(model.parameters()) for _ in range(2))
    emulation = mock.patch("torch.softmax", _softmax_by_cuda_list) if cuda_list else nullcontext()
    with forward, emulation, torch.autocast("cpu", dtype=torch.float16):
        loss = model(TOKENS, TOKENS)
    with backward:
        loss.backward()
    return Casts.read(forward, backward)
