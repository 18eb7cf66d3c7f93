"""Casts the features inside of objects that are no tensors and no containers of Python's.

Such as a graph, or a batch of the user's own. Knows the graphs of DGL and PyTorch Geometric by the
names of their classes; imports neither, and never changes what it was given.
"""

from __future__ import annotations

import copy
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from amp_patch.casting.mode import FLOATS

Cast = Callable[[Any], Any]


def cast_object(item: Any, dtype: torch.dtype, cast: Cast) -> Any:
    """Return an object with its floating features cast to ``dtype``, or the very object.

    A graph of DGL and the data of PyTorch Geometric come back as a copy that shares all but the
    features that were cast. Anything else that has a method ``to`` is asked for ``to(dtype)``, of
    a copy: some objects convert themselves in place. Its integers, masks and float64 tensors stay
    as they are. Where that raises (a method for devices only) or changes nothing, the very object
    is returned; so are modules and classes, and what holds a module or an optimizer: a trainer,
    say, whose ``to`` would convert the weights and their optimizer's state.

    Args:
        item: neither a tensor nor a container of tensors.
        dtype: what floating features are cast to.
        cast: casts a tensor, or a container of them, to ``dtype``.

    Raises:
        torch.OutOfMemoryError: from the conversion.
    """
    if isinstance(item, (nn.Module, type)) or not callable(getattr(item, "to", None)):
        return item
    convert = _converter(type(item))
    if convert is not None:
        return convert(item, dtype, cast)
    return item if _holds_a_model(item) else _by_its_own_method(item, dtype)


#: In so many objects a model is looked for, and so many items of each: each call of a model looks.
_MOST_LOOKS, _MOST_ITEMS = 64, 16
#: What holds none.
_HOLD_NOTHING = (Tensor, type(None), bool, int, float, str, bytes, type, FunctionType, ModuleType)


def _holds_a_model(item: Any) -> bool:
    """Tell whether a module or an optimizer is in an object's attributes, or in what these hold."""
    waiting = deque([item])
    for _ in range(_MOST_LOOKS):
        if not waiting:
            return False
        for one in _held_by(waiting.popleft()):
            if isinstance(one, (nn.Module, Optimizer)):
                return True
            if not isinstance(one, _HOLD_NOTHING):
                waiting.append(one)
    return False


def _held_by(value: Any) -> Iterable[Any]:
    """Return what an object or a container holds, by no code of its class: that may read files."""
    if isinstance(value, dict):
        return itertools.islice(dict.values(value), _MOST_ITEMS)
    if isinstance(value, (list, tuple)):
        return value[:_MOST_ITEMS] if type(value) in (list, tuple) else ()
    return list(getattr(value, "__dict__", {}).values())


class _FloatsAlone(TorchFunctionMode):
    """Leaves a tensor that is no floating input as it is where ``to`` asks for the half dtype.

    Many a method ``to`` hands its arguments to all tensors of its object: indices of an embedding
    would come in half, rounded.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        asks = func is Tensor.to and any(one is self.dtype for one in (*args[1:], *kwargs.values()))
        return args[0] if asks and args[0].dtype not in FLOATS else func(*args, **kwargs)


def _by_its_own_method(item: Any, dtype: torch.dtype) -> Any:
    try:
        new = copy.copy(item)
        with _FloatsAlone(dtype):
            converted = new.to(dtype)
    except torch.OutOfMemoryError:
        raise
    except Exception:  # whatever a method that is for devices says of a dtype
        return item
    if converted is None:  # it works in place and returns nothing
        converted = new
    return item if converted is new and _same_attributes(new, item) else converted


def _same_attributes(new: Any, old: Any) -> bool:
    """Tell whether two objects have the very same attributes; False for those in ``__slots__``."""
    if not hasattr(new, "__dict__"):
        return False
    ours, theirs = vars(new), vars(old)
    return ours.keys() == theirs.keys() and all(ours[name] is theirs[name] for name in ours)


def _cast_dgl_graph(graph: Any, dtype: torch.dtype, cast: Cast) -> Any:
    """Cast the columns of the frames: one that waits to be sliced or moved is cast after that."""
    new = graph.local_var()
    frames = (*new._node_frames, *new._edge_frames)
    changed = [_cast_columns(frame, dtype) for frame in frames]
    return new if any(changed) else graph


def _cast_columns(frame: Any, dtype: torch.dtype) -> bool:
    """Cast a frame of our own in place; tell whether anything was cast."""
    columns = frame._columns
    floats = {
        name: column.astype(dtype)
        for name, column in columns.items()
        if column.dtype in FLOATS and column.dtype is not dtype
    }
    columns.update(floats)
    return bool(floats)


def cast_frame(frame: Any, dtype: torch.dtype, cast: Cast) -> Any:
    """Return what DGL hands to a user's function: a frame, cast when it is read, or a dictionary.

    Args:
        frame: a frame of DGL, or anything that ``cast`` takes.
        dtype: what floating features are cast to.
        cast: casts a tensor, or a container of them, to ``dtype``.
    """
    if not hasattr(frame, "_columns"):
        return cast(frame)
    new = frame.clone()
    return new if _cast_columns(new, dtype) else frame


def promote_column(column: Any, dtype: torch.dtype) -> None:
    """Let a column of DGL, some of whose rows are to be written now, hold ``dtype``.

    It is made anew in its place, for what it says of its dtype does not follow its casts, and is
    what a write is compared with.
    """
    column.__init__(column.data.to(dtype))


def has_more_neighbours(item: Any, count: int) -> bool:
    """Tell whether a value is a graph of DGL of which a node has more neighbours than ``count``.

    Only a graph of more edges is looked at, in which the device is asked, as by DGL's own layers.
    """
    if _converter(type(item)) is not _cast_dgl_graph or item.num_edges() <= count:
        return False
    degrees = item.in_degrees(), item.out_degrees()
    return any(int(one.max()) > count for one in degrees)


def _cast_pyg_data(data: Any, dtype: torch.dtype, cast: Cast) -> Any:
    changed = False

    def cast_value(value: Any) -> Any:
        nonlocal changed
        new = cast(value)
        changed = changed or new is not value
        return new

    new = copy.copy(data).apply(cast_value)
    return new if changed else data


#: By the class whose subclasses are cast so. The methods ``to`` of these take a device only, and
#: PyTorch Geometric's changes its object.
_CONVERTERS: dict[str, Callable[[Any, torch.dtype, Cast], Any]] = {
    "dgl.heterograph.DGLGraph": _cast_dgl_graph,
    "torch_geometric.data.data.BaseData": _cast_pyg_data,
}


def _converter(kind: type) -> Callable[[Any, torch.dtype, Cast], Any] | None:
    for base in kind.__mro__:
        found = _CONVERTERS.get(f"{base.__module__}.{base.__qualname__}")
        if found is not None:
            return found
    return None
