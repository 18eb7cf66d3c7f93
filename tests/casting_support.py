"""What tests of the patched functions share."""

import pkgutil

import torch
from torch import nn
from torch.utils import _pytree

HALVES = {"O1": torch.float16, "O4": torch.bfloat16}


def activate(amp, opt_level="O1", model=None, **options):
    model = nn.Linear(2, 2) if model is None else model
    amp.initialize(model, opt_level=opt_level, verbosity=0, **options)
    return model


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
