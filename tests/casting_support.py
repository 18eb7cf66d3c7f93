"""What tests of the patched functions share."""

import contextlib
import pkgutil
from unittest import mock

import torch
from torch import nn
from torch.utils import _pytree

from amp_patch.casting import rules

HALVES = {"O1": torch.float16, "O4": torch.bfloat16}


def activate(amp, opt_level="O1", model=None, **options):
    model = nn.Linear(2, 2) if model is None else model
    amp.initialize(model, opt_level=opt_level, verbosity=0, **options)
    return model


@contextlib.contextmanager
def half_kernels_as_on_cuda():
    """Give the CPU's half kernels what those of CUDA are given by the rule "half_out".

    For casts and dtypes. Those of layer norm round more often than CUDA's.
    """
    as_cuda = {name: ("cpu",) for name, kinds in rules.ROUNDED_ONCE.items() if "cuda" in kinds}
    with mock.patch.dict(rules.ROUNDED_ONCE, as_cuda):
        yield


def existing(path):
    try:
        return pkgutil.resolve_name(path)
    except AttributeError:
        return None


def as_dtypes(tree, floating):
    """Copy a tree's tensors; floating ones take the given dtypes in turn."""
    seen = 0

    def convert(value):
        nonlocal seen
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            return value
        dtype = value.dtype
        if value.is_floating_point():
            dtype = floating[seen % len(floating)]
            seen += 1
        return value.detach().clone().to(dtype)

    return _pytree.tree_map(convert, tree)
