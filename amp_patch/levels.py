"""The table of the levels O0 to O5, and the text that apex prints of one.

What a script may change of a level is in `requested_level`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
import torch.distributed

#: The half dtypes.
HALVES: Final = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class OptLevel:
    """Settings of one optimization level; names and values are apex's (O0-O3) and ROCm's (O4, O5).

    Attributes:
        name: 'O0' to 'O5'.
        brief: the sentence that apex prints about the level.
        cast_model_type: dtype in which the model is stored and fed; None leaves both alone.
        patch_torch_functions: whether torch's functions cast their arguments.
        patch_torch_functions_type: half dtype of those casts; None at levels without them.
        keep_batchnorm_fp32: whether batch norms stay float32 when the model is cast; None where
            the level has no opinion.
        master_weights: whether the optimizer steps float32 copies; None as above.
        loss_scale: 'dynamic', or the fixed factor of the loss, finite and above 0.
        cast_model_outputs: dtype of the model's outputs; None means float32 where the model is
            cast, and untouched elsewhere.
    """

    name: str
    brief: str
    cast_model_type: torch.dtype | None
    patch_torch_functions: bool
    patch_torch_functions_type: torch.dtype | None
    keep_batchnorm_fp32: bool | None
    master_weights: bool | None
    loss_scale: float | Literal["dynamic"]
    cast_model_outputs: torch.dtype | None = None

    @property
    def casts_functions(self) -> bool:
        """Whether calls of torch's functions are cast (O1 and O4, unless overridden)."""
        return self.patch_torch_functions

    @property
    def stores_half(self) -> bool:
        """Whether models are stored in half precision (O2, O3 and O5, unless overridden)."""
        return self.cast_model_type in HALVES

    @property
    def half_dtype(self) -> torch.dtype:
        """The 16-bit dtype of this level's casts and regions; float16 where it has none (O0)."""
        for dtype in (self.patch_torch_functions_type, self.cast_model_type):
            if dtype in HALVES:
                return dtype
        return torch.float16

    def options(self) -> dict[str, Any]:
        """Return the settings under the keys, and in the order, that apex prints."""
        return {
            "enabled": True,
            "opt_level": self.name,
            "cast_model_type": self.cast_model_type,
            "patch_torch_functions": self.patch_torch_functions,
            "patch_torch_functions_type": self.patch_torch_functions_type,
            "keep_batchnorm_fp32": self.keep_batchnorm_fp32,
            "master_weights": self.master_weights,
            "loss_scale": self.loss_scale,
        }


# ROCm's table has patch_torch_functions None at O5, by assigning twice to one name; False is meant.
_TABLE: Final = (
    OptLevel(
        name="O0",
        brief="O0:  Pure FP32 training.",
        cast_model_type=torch.float32,
        patch_torch_functions=False,
        patch_torch_functions_type=None,
        keep_batchnorm_fp32=None,
        master_weights=False,
        loss_scale=1.0,
    ),
    OptLevel(
        name="O1",
        brief="O1:  Insert automatic casts around Pytorch functions and Tensor methods.",
        cast_model_type=None,
        patch_torch_functions=True,
        patch_torch_functions_type=torch.float16,
        keep_batchnorm_fp32=None,
        master_weights=None,
        loss_scale="dynamic",
    ),
    OptLevel(
        name="O2",
        brief="O2:  FP16 training with FP32 batchnorm and FP32 master weights.",
        cast_model_type=torch.float16,
        patch_torch_functions=False,
        patch_torch_functions_type=None,
        keep_batchnorm_fp32=True,
        master_weights=True,
        loss_scale="dynamic",
    ),
    OptLevel(
        name="O3",
        brief="O3:  Pure FP16 training.",
        cast_model_type=torch.float16,
        patch_torch_functions=False,
        patch_torch_functions_type=None,
        keep_batchnorm_fp32=False,
        master_weights=False,
        loss_scale=1.0,
    ),
    OptLevel(
        name="O4",
        brief="O4:  Insert automatic casts around Pytorch functions and Tensor methods.",
        cast_model_type=None,
        patch_torch_functions=True,
        patch_torch_functions_type=torch.bfloat16,
        keep_batchnorm_fp32=None,
        master_weights=None,
        loss_scale=1.0,
    ),
    OptLevel(
        name="O5",
        brief="O5:  BFLOAT16 training with FP32 batchnorm and FP32 master weights.",
        cast_model_type=torch.bfloat16,
        patch_torch_functions=False,
        patch_torch_functions_type=None,
        keep_batchnorm_fp32=True,
        master_weights=True,
        loss_scale=1.0,
    ),
)
OPT_LEVELS: Final[Mapping[str, OptLevel]] = {level.name: level for level in _TABLE}


def print_level(level: OptLevel, message: str | None = None) -> None:
    """Print the options in apex's words, on the first rank only.

    Args:
        level: what was resolved.
        message: a line of our own before it, on stderr: what the script prints stays its own.
    """
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if distributed and torch.distributed.get_rank() != 0:
        return
    if message is not None:
        print(message, file=sys.stderr)
    print(describe(level))


def describe(level: OptLevel) -> str:
    """Return the text that apex prints for a resolved level, without the last line's newline.

    NVIDIA's at O0 to O3, ROCm's at O4 and O5, which shows one option more.
    """
    lines = [
        f"Selected optimization level {level.brief}\n",
        "Defaults for this optimization level are:",
        *_option_lines(OPT_LEVELS[level.name]),
        "Processing user overrides (additional kwargs that are not None)...",
        "After processing overrides, optimization options are:",
        *_option_lines(level),
    ]
    return "\n".join(lines)


def _option_lines(level: OptLevel) -> list[str]:
    options = level.options()
    width = 26
    if level.name not in ("O4", "O5"):
        del options["patch_torch_functions_type"]
        width = 22
    return [f"{option:{width}} : {value}" for option, value in options.items()]
