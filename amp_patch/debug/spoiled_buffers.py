"""Buffers that were finite, and that a training has made inf or NaN: most often statistics.

A training need not read them, so that nothing overflows; every evaluation with them is wrong. Knows
the models that it is told of, and holds none of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from amp_patch.common.weak_modules import ModuleTable
from amp_patch.weights.half_storage import kept_in_fp32

from .paths import numbered
from .ranges import can_look, kinds_of

#: The word of a rule that keeps a module's buffers in float32.
_FLOAT = "float"


class SpoiledBuffer(NamedTuple):
    """A buffer that holds inf or NaN, and did not.

    Attributes:
        module: its path, as a rules file names it.
        of: the class of the module.
        name: of the buffer in its module.
        dtype: "float16".
        kinds: which of `ranges.KINDS` it holds.
        is_norm: whether `keep_batchnorm_fp32` says in which dtype it is.
    """

    module: str
    of: str
    name: str
    dtype: str
    kinds: tuple[str, ...]
    is_norm: bool

    @property
    def is_of_range(self) -> bool:
        """Whether its numbers may have been too large for float16: also NaN, as of inf - inf."""
        return self.dtype == "float16"

    @property
    def rule(self) -> dict[str, str]:
        """The rule of the module that mends it, {} for none."""
        return {self.module: _FLOAT} if self.is_of_range else {}

    def title(self) -> str:
        """Return one line: which it is, and what it holds."""
        module = f"`{self.module}`" if self.module else "the model itself"
        kinds = " and ".join(self.kinds)
        return f"{self.name} of {module} ({self.of}) holds {kinds}, in {self.dtype}"

    def advice(self) -> str:
        """Return what mends it, in a sentence or two."""
        if not self.is_of_range:
            return (
                "It was given inf or NaN, also in a step that was skipped, and keeps it: mend what "
                f"overflows in the forward. {_KEPT}"
            )
        call = f'rules={{"modules": {{"{self.module}": "{_FLOAT}"}}}}'
        call = "keep_batchnorm_fp32=True" if self.is_norm else call
        first = "Mend first what overflows in a forward, if anything does. " * ("NaN" in self.kinds)
        return (
            f"{first}Float16 holds no number above 65504: call amp.initialize(..., {call}), or "
            f"take O5, whose bfloat16 has the range of float32. {_KEPT}"
        )

    def to_json(self) -> dict[str, Any]:
        """Return all of it as what JSON can hold."""
        words = {"title": self.title(), "advice": self.advice(), "rule": self.rule}
        return {**self._asdict(), "kinds": list(self.kinds), **words}


_KEPT = (
    "What is inf or NaN stays so: begin anew, or from a checkpoint before it, or call "
    "reset_running_stats() of a norm."
)
#: Said above the first one.
HEAD = "What a forward has written into buffers is not finite, and evaluations with it are wrong:"
#: Buffers that a report in words names.
_SHOWN = 10


class SpoiledBuffers:
    """The buffers of models that were finite when `follow` was called, or are new since.

    A new one that holds no other than -inf is a mask, as a first forward may make.
    """

    def __init__(self) -> None:
        # Of each model the paths of the buffers that there were in the beginning; in the second
        # table of those that were inf or NaN even then: masks, bounds.
        self._first: ModuleTable[set[str]] = ModuleTable()
        self._known: ModuleTable[set[str]] = ModuleTable()

    def follow(self, models: Iterable[nn.Module]) -> None:
        """Look at models that were initialized; waits for their devices."""
        for model in models:
            if model not in self._known:
                self._first[model] = {path for path, _ in model.named_buffers()}
                self._known[model] = {path for path, _ in _nonfinite(model)}

    def found(self) -> list[SpoiledBuffer]:
        """Return those that are inf or NaN now; waits for the models' devices."""
        return [
            _described(model, path, kinds)
            for model, known in self._known.items()
            for path, kinds in _nonfinite(model)
            if path not in known and (path in self._first[model] or kinds != ("-inf",))
        ]


def lines(found: Sequence[dict[str, Any]]) -> list[str]:
    """Return spoiled buffers in words, each mend once; [] for none.

    Args:
        found: as `SpoiledBuffer.to_json` returns them.
    """
    if not found:
        return []
    told = [f"  {one['title']}" for one in found]
    more = len(told) - _SHOWN
    rest = [f"  and {more} more"] if more > 0 else []
    mends = dict.fromkeys(one["advice"] for one in found[:_SHOWN])
    return [HEAD, *told[:_SHOWN], *rest, *(f"  mend: {one}" for one in mends)]


def _nonfinite(model: nn.Module) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the path of each floating buffer that holds inf or NaN, and which of them."""
    for path, buffer in model.named_buffers():
        if can_look(buffer) and (kinds := kinds_of(buffer)):
            yield path, kinds


def _described(model: nn.Module, path: str, kinds: tuple[str, ...]) -> SpoiledBuffer:
    module_path, _, name = path.rpartition(".")
    module = model.get_submodule(module_path)
    buffer: Tensor = getattr(module, name)
    is_norm = module in kept_in_fp32(model, True)
    dtype = str(buffer.dtype).removeprefix("torch.")
    return SpoiledBuffer(
        numbered(model, module_path), type(module).__name__, name, dtype, kinds, is_norm
    )
