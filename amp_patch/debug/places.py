"""Where in a model the code runs that an operator is called by: module, function and line.

Of an operator in backward: where that was in forward that it belongs to.

Knows modules, and the nodes of autograd's graphs; nothing of values.
"""

from __future__ import annotations

import contextlib
import linecache
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules import module as module_hooks
from torch.overrides import TorchFunctionMode

from amp_patch.casting import rules
from amp_patch.common.running_backward import is_in_backward
from amp_patch.common.warn_once import NOT_THE_USERS, users_frame

#: The number that the next node of an autograd graph gets.
next_node: Callable[[], int] = torch._C._autograd._get_sequence_nr

#: Functions in Python that call many others: their operators are told by their own names.
_COMPOSITES = {"multi_head_attention_forward", "apply", "checkpoint", "backward", "grad"}
#: What an operator of ATen is called by users.
_OPERATORS = {
    "addmm": "linear",
    "mm": "matmul",
    "convolution": "conv",
    "native_layer_norm": "layer_norm",
    "native_group_norm": "group_norm",
    "native_batch_norm": "batch_norm",
    "_native_batch_norm_legit": "batch_norm",
    "nll_loss_forward": "nll_loss",
}


class Place(NamedTuple):
    """A place in a model.

    Attributes:
        module: the innermost module's path, "" for the model itself.
        call: which call of that module, from 1.
        operator: the function that users call, such as "linear".
        line: the file and the number of the line that calls it, outside of torch and amp_patch;
            None where no such line is in the model, as in an `nn.Sequential` of torch's layers.
        is_own: whether it is the backward of the script's own ``autograd.Function``.
    """

    module: str
    call: int
    operator: str
    line: tuple[str, int] | None = None
    is_own: bool = False


class Places(TorchFunctionMode):
    """Follows the modules and functions that run, while it is entered.

    Attributes:
        innermost: the module that runs, and its arguments; None outside of the model.

    Args:
        names: the path of each module, by its id.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self._names = names
        self._calls: Counter[str] = Counter()
        self._modules: list[tuple[nn.Module, int, Any]] = []
        self._functions: list[str] = []
        self._of_nodes: dict[int, Place] = {}
        self._around: FrameType | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self._functions.append(function_of(func))
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self._functions.pop()

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """Follow inside the block."""
        before = module_hooks.register_module_forward_pre_hook(self._enter)
        after = module_hooks.register_module_forward_hook(self._leave, always_call=True)
        self._around = users_frame()
        try:
            with self:
                yield
        finally:
            before.remove()
            after.remove()
            self._modules.clear()
            self._around = None

    @property
    def innermost(self) -> tuple[nn.Module, Any] | None:
        """The innermost module of the model that runs, and its arguments."""
        return (self._modules[-1][0], self._modules[-1][2]) if self._modules else None

    def here(self, operator: str, is_cast: bool) -> Place:
        """Return where an operator of ATen is called, and note it for the node that it made.

        Args:
            operator: the name, such as "addmm".
            is_cast: whether all it does is to change a dtype.
        """
        name = "cast" if is_cast else self._name(operator)
        place = Place(*self._module(), name, self._line())
        # The node is made before its operator is called.
        self._of_nodes.setdefault(next_node() - 1, place)
        return place

    def of_node(self, node: Any) -> Place:
        """Return where the forward was whose backward a node of autograd's graph is."""
        place = self._of_nodes.get(node._sequence_nr())
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            name = type(node).__name__.removesuffix("Backward")
            made_by: Any = type(node)  # with the class of the user's Function
            package = made_by._forward_cls.__module__.partition(".")[0]
            is_own = package not in ("torch", "amp_patch")
            place = (place or Place("", 1, name))._replace(operator=name, is_own=is_own)
        elif place is None:
            place = Place("", 1, readable(node.name()))
        # a Function's own backward runs, or a hook of a tensor
        line = self._line()
        return place if line is None else place._replace(line=line)

    def _line(self) -> tuple[str, int] | None:
        """Return the innermost line of the model's own code that runs."""
        frame = users_frame()
        file = frame.f_code.co_filename
        if frame is self._around or file.startswith(NOT_THE_USERS):
            return None  # the line that has the model run once more, or none
        return file, frame.f_lineno

    def _module(self) -> tuple[str, int]:
        if not self._modules:
            return "", 1
        module, call, _ = self._modules[-1]
        return self._names[id(module)], call

    def _name(self, operator: str) -> str:
        function = self._functions[-1] if self._functions else ""
        if not function or function in _COMPOSITES:
            return _OPERATORS.get(operator, operator.strip("_"))
        return function.strip("_")

    def _enter(self, module: nn.Module, args: Any) -> None:
        if id(module) in self._names:
            name = self._names[id(module)]
            if not is_in_backward():  # a checkpoint runs its modules again there
                self._calls[name] += 1
            self._modules.append((module, self._calls[name], args))

    def _leave(self, module: nn.Module, args: Any, outputs: Any) -> None:
        # A checkpoint that has recomputed enough leaves its modules without a word.
        while any(known is module for known, _, _ in self._modules):
            if self._modules.pop()[0] is module:
                return


def shown_line(line: tuple[str, int] | None) -> str:
    """Return a line in words, its file as seen from the working directory, and what it says."""
    if line is None:
        return ""
    file, number = line
    near = file
    if os.path.isabs(file):
        with contextlib.suppress(OSError, ValueError):  # the directory is gone; another drive
            near = os.path.relpath(file)
    where = f"{file if near.startswith(os.pardir) else near}:{number}"
    text = linecache.getline(file, number).strip()
    return f"{where}: {text}" if text else where


def function_of(func: Any) -> str:
    """Return the name of a function as rules have it: "mul" of ``Tensor.__mul__``."""
    name = getattr(func, "__name__", "")
    return rules.OPERATORS.get(name, name)


def makes_gradients() -> bool:
    """Return whether it makes gradients now: a checkpoint computes its forward there, with grad."""
    return is_in_backward() and not torch.is_grad_enabled()


def names_of(model: nn.Module) -> dict[int, str]:
    """Return the path of each module by its id; of a shared one the first."""
    return {id(module): name for name, module in model.named_modules()}


#: Where a word begins: "Loss" of "SmoothL1Loss", but no "P" of "Log1P" and no "D" of "Loss2D".
_WORD = re.compile("(?<=[a-z])(?=[A-Z])|(?<=[A-Z0-9])(?=[A-Z][a-z])")


def readable(node: str) -> str:
    """Return the function of a node: "mse_loss" of "MseLossBackward0"."""
    name = node.rpartition("::")[2].rstrip("0123456789").removesuffix("Backward")
    if name == "ToCopy":
        return "cast"
    return _WORD.sub("_", name).lower().lstrip("_")
