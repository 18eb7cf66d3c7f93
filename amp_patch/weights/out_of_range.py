"""Warns of buffers whose numbers float16 does not hold.

They become infinite, and what is computed with them may still be finite: `tanh` of them, or what is
divided by them. Knows buffers with what they were made of; changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from amp_patch.common.warn_once import warn
from amp_patch.kernels.tensor_values import is_infinite


def warn_of_infinite(model: nn.Module, originals: Mapping[Tensor, Tensor]) -> None:
    """Warn of buffers of which finite numbers became infinite.

    Not of a mask, whose one large negative number stands for minus infinity.

    Args:
        model: has them.
        originals: of each buffer that is in half the float32 one that it was made of.
    """
    found = {id(half) for half, original in originals.items() if _overflows(half, original)}
    names = [name for name, buffer in model.named_buffers() if id(buffer) in found]
    if names:
        of_modules = [name.rpartition(".")[0] for name in names]
        rules = ", ".join(f'"{path}": "float"' for path in dict.fromkeys(of_modules) if path)
        by_rule = f', or amp.initialize(..., rules={{"modules": {{{rules}}}}})' if rules else ""
        warn(
            "numbers of buffers that are in float16 must lie below 65504, for larger ones are "
            "infinite there, and what is computed of them is infinite or wrong without a word; got "
            f"larger ones in {', '.join(names)} of {type(model).__name__}. Call "
            "amp.initialize(..., opt_level='O5'), whose bfloat16 has the range of float32"
            f"{by_rule}. Where torch.empty() made them, fill them before."
        )


def _overflows(half: Tensor, original: Tensor) -> bool:
    """Tell whether numbers are lost, as far as there is memory that can be read."""
    if half.dtype is not torch.float16:  # bfloat16 has the range of float32
        return False
    if type(original) is not Tensor or original.is_meta or original.layout is not torch.strided:
        return False
    if not is_infinite(half.detach()):
        return False
    lost = original[half.detach().isinf() & original.isfinite()]
    return lost.numel() > 0 and not bool((lost == lost[0]).all() and lost[0] < 0)
