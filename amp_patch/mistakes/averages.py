"""Averages of weights that are stored in half, where small updates would be rounded away.

``torch.optim.swa_utils.AveragedModel`` is given fp32 values to average, and keeps the average in
fp32. An average that a script keeps in a copy of its own is told of. Knows models in half and their
fp32 values; no optimizer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from amp_patch.casting.mode import HALVES
from amp_patch.levels import OptLevel
from amp_patch.warn_once import warn_once
from amp_patch.weights import half_model, module_rules
from amp_patch.weights.fp32_values import FP32Values

_CLASS = "torch.optim.swa_utils.AveragedModel"
#: Elements up to which an entry of a copy's state is kept to see if it is written to.
_SMALL = 1 << 16


class _ExactModel:
    """A model's parameters and buffers as an average is to read them: in fp32."""

    def __init__(self, model: nn.Module, store: FP32Values) -> None:
        self._model, self._store = model, store

    def parameters(self) -> Iterator[Tensor]:
        """Yield the fp32 value of each parameter in half, and the others."""
        for param in self._model.parameters():
            yield self._store.exact(param).float() if param.dtype in HALVES else param

    def buffers(self) -> Iterator[Tensor]:
        """Yield buffers, those in half cast up."""
        for buffer in self._model.buffers():
            yield buffer.float() if buffer.dtype in HALVES else buffer


_Exact = Callable[[nn.Module], _ExactModel | None]


def replacements(
    store: FP32Values, levels: Callable[[], Mapping[nn.Module, OptLevel]]
) -> dict[str, Callable[[Any], Any]]:
    """Return, for each method by its path, what makes its replacement.

    Args:
        store: the fp32 values.
        levels: returns the prepared models, with what they were prepared at.
    """

    def exact(model: nn.Module) -> _ExactModel | None:
        """Return what is read of a model that is, or wraps, one in half; None of any other."""
        halves = {id(one) for one, level in levels().items() if level.cast_model_type in HALVES}
        in_half = any(id(module) in halves for module in model.modules())
        return _ExactModel(model, store) if in_half else None

    return {
        f"{_CLASS}.__init__": functools.partial(_copying, exact),
        f"{_CLASS}.update_parameters": functools.partial(_averaging, exact),
    }


def _copying(exact: _Exact, original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def init(self: nn.Module, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        original(self, model, *args, **kwargs)
        source = exact(model)
        if source is not None:
            _store_in_fp32(self.module, source)  # type: ignore[arg-type]  # is a module

    return init


def _averaging(exact: _Exact, original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def update_parameters(self: nn.Module, model: nn.Module) -> None:
        original(self, exact(model) or model)

    return update_parameters


@torch.no_grad()
def _store_in_fp32(copy: nn.Module, source: _ExactModel) -> None:
    """Give a copy of a model in half the fp32 values, and take off the casts of its inputs."""
    for param, exact in zip(copy.parameters(), source.parameters(), strict=True):
        param.data = exact.detach().to(param.device, copy=True)
    for module in copy.modules():
        half_model.detach(module)
        module_rules.detach(module)
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.dtype in HALVES:
                module._buffers[name] = buffer.float()


class _Copy:
    """A parameter of a copy, held weakly, and the one that it is a copy of.

    Attributes:
        version: that it had when it was last looked at; None where what wrote to it is known.
    """

    def __init__(self, copied: Tensor, source: Tensor) -> None:
        self._copied, self._source = TensorWeakRef(copied), TensorWeakRef(source)
        self.version: int | None = copied._version

    @property
    def copied(self) -> Tensor | None:
        """The copy, while it lives and is in half."""
        copied = self._copied()
        return None if copied is None or copied.dtype not in HALVES else copied

    def look(self) -> bool:
        """Return whether it was written to since the last look, and not its source's values."""
        copied, source = self.copied, self._source()
        if copied is None or source is None:
            return False
        version, self.version = self.version, copied._version
        return version not in (None, self.version) and not torch.equal(copied, source)


class HalfCopies:
    """Copies of models in half that a script may be averaging in; false without any.

    Of each copy one parameter is watched.

    Args:
        store: the fp32 values.
        models: returns the prepared models.
    """

    def __init__(self, store: FP32Values, models: Callable[[], Iterable[nn.Module]]) -> None:
        self._store, self._models = store, models
        self._watched: list[_Copy] = []
        # entries of a copy's state dict, which nothing reads, and the versions they had
        self._entries: list[tuple[Tensor, int]] = []

    def __bool__(self) -> bool:
        return bool(self._watched)

    def clear(self) -> None:
        """Watch none any more."""
        self._watched.clear()
        self._entries.clear()

    def noting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return the ``__deepcopy__`` of a parameter that notes copies in half."""

        @functools.wraps(original)
        def deepcopy(param: nn.Parameter, memo: dict[Any, Any]) -> Any:
            is_known = id(param) in memo
            copied = original(param, memo)
            is_first = not is_known and param.dtype in HALVES and _NOTED not in memo
            if is_first and self._is_prepared(param):
                self._note(param, copied, memo)
            return copied

        return deepcopy

    def _is_prepared(self, param: Tensor) -> bool:
        """Return whether a half parameter is of a prepared model; at O3 it has no fp32 value."""
        if self._store.holds(param):
            return True
        return any(param is one for model in self._models() for one in model.parameters())

    def _note(self, param: Tensor, copied: Tensor, memo: dict[Any, Any]) -> None:
        """Watch the first parameter of each copy of a module."""
        memo[_NOTED] = copied
        if any(isinstance(one, nn.Module) for one in list(memo.values())):
            self._watched.append(_Copy(copied, param))

    def note_state(self, module: nn.Module, state: Mapping[str, Any], prefix: str) -> None:
        """A state dict was made: of a copy it holds fp32 tensors that the copy does not read."""
        for name, param in module._parameters.items():
            entry = state.get(prefix + name)
            if entry is None or param is None or self._store.holds(param):
                continue
            if entry.dtype is not param.dtype and entry.numel() <= _SMALL:
                self._entries.append((entry.detach(), entry._version))

    def look(self) -> None:
        """Warn where one was averaged in since the last look; call it before each step."""
        entries, self._entries = self._entries, []
        if any(entry._version != version for entry, version in entries):
            warn_once(_ADVICE)
        if [one for one in self._watched if one.look()]:
            warn_once(_ADVICE)
        self._watched = [one for one in self._watched if one.copied is not None]

    def note_load(self, module: nn.Module) -> None:
        """A state dict is about to be loaded into a module, which is no average."""
        params = [param for param in module._parameters.values() if param is not None]
        for one in self._watched:
            if any(one.copied is param for param in params):
                one.version = None


#: Marks, in the memo of a deep copy, that one of its parameters is watched.
_NOTED = "amp_patch"
_ADVICE = (
    "an average of weights needs fp32, for small updates are rounded away in half precision; got "
    "writes to a copy of a model that amp.initialize() stored in half. Make the copy before "
    "amp.initialize(), and read amp.master_params(optimizer), or model.state_dict(), which hold "
    "fp32 values at O2 and O5; or use torch.optim.swa_utils.AveragedModel(model), which gets them."
)
