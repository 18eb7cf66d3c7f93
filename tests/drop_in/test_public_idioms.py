"""What public training code does with apex beyond its documented use."""

from __future__ import annotations

import types
from collections import OrderedDict

import torch


def test_contrib_optimizers_are_there_after_import_apex(apex: types.ModuleType) -> None:
    """OpenNMT-py: ``import apex; apex.contrib.optimizers.FP16_Optimizer``."""
    assert apex.contrib.optimizers.FP16_Optimizer.__module__ == "apex.optimizers.fp16_optimizer"


def test_applier_reaches_tensors_in_containers_and_batches(apex: types.ModuleType) -> None:
    """Catalyst casts the inputs and outputs of its DataParallel with it."""

    class Batch:
        def to(self, dtype: torch.dtype) -> str:
            return f"batch in {dtype}"

    given = (torch.ones(2), {"a": [torch.ones(1), "text"]}, Batch(), None, 3)
    result = apex.amp._initialize.applier(OrderedDict(all=given), lambda x: x.to(torch.float16))
    first, second, third, *rest = result["all"]
    assert first.dtype is second["a"][0].dtype is torch.float16
    assert second["a"][1] == "text"
    assert third == "batch in torch.float16"
    assert rest == [None, 3]
