"""The fused operations by name, over lists of tensors; knows nothing of models or optimizers.

One pass over the gradients receives, unscales and checks them; what it found stays on the device
until asked.
"""

from __future__ import annotations

from pathlib import Path

from .torch_kernels import (
    Cast,
    Comparison,
    GradCheck,
    Unscale,
    accumulate,
    alike,
    clip_by_norm,
    values,
)

__all__ = [
    "Cast",
    "Comparison",
    "GradCheck",
    "Unscale",
    "accumulate",
    "alike",
    "clip_by_norm",
    "source",
    "values",
]


def source(name: str) -> str:
    """Return the text of a CUDA source or header, ``source("cast.cu")``.

    A wheel holds the sources inside the package; a checkout (or an editable install of one)
    beside it.

    Raises:
        FileNotFoundError: no such source in either place.
    """
    package = Path(__file__).parent
    folders = (package / "csrc", package.parent / "csrc")
    for folder in folders:
        if (folder / name).is_file():
            return (folder / name).read_text(encoding="utf-8")
    raise FileNotFoundError(
        f"a CUDA source must lie in one of {', '.join(map(str, folders))}; got {name!r}; "
        "install amp_patch from its wheel or from a complete checkout."
    )
