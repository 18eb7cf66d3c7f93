"""Tensors that are spread over ranks (DTensor), and the part of one that this rank holds."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor


def is_spread(tensor: Tensor) -> bool:
    """Return whether a tensor is a DTensor."""
    kind = _dtensor()
    return kind is not None and isinstance(tensor, kind)


def any_spread(tensors: Iterable[Tensor]) -> bool:
    """Return whether one of the tensors is a DTensor."""
    kind = _dtensor()
    return kind is not None and any(issubclass(one, kind) for one in set(map(type, tensors)))


def local(tensor: Any) -> Any:
    """Return the very tensor that this rank holds of a DTensor; any other stands for itself.

    No copy, and outside of autograd: what is written to it is written to the DTensor.
    """
    return tensor._local_tensor if is_spread(tensor) else tensor


def by_mesh(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return the plain tensors, and the DTensors of each mesh: torch's functions take no mixture.

    Those that are alike keep their order.
    """
    if not any_spread(tensors):
        return [list(tensors)]
    found: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        mesh = tensor.device_mesh if is_spread(tensor) else None  # type: ignore[attr-defined]  # it is a DTensor
        found.setdefault(mesh, []).append(tensor)
    return list(found.values())


def whole(tensor: Any) -> Any:
    """Return all of a DTensor on each rank, by a collective; any other stands for itself."""
    return tensor.full_tensor() if is_spread(tensor) else tensor


def beside(model: Any, number: Tensor) -> Tensor:
    """Return a tensor that is the same on all ranks, to compute with where ``model`` is spread."""
    if not is_spread(model):
        return number
    mesh = model.device_mesh
    placements = [_replicate()] * mesh.ndim
    from_local: Any = type(model).from_local
    spread: Tensor = from_local(number, mesh, placements, run_check=False)
    return spread


def spread_as(model: Any, part: Tensor) -> Tensor:
    """Return a tensor of which this rank holds ``part``, spread as ``model`` is.

    Args:
        model: a DTensor; for any other tensor ``part`` itself is returned.
        part: of the shape of ``local(model)``, of any dtype. Not copied.
    """
    if not is_spread(model):
        return part
    from_local: Any = type(model).from_local
    spread: Tensor = from_local(
        part,
        model.device_mesh,
        model.placements,
        run_check=False,
        shape=model.shape,
        stride=model.stride(),
    )
    # The part itself is kept, not the view that autograd makes of it.
    set_part(spread, part)
    return spread


def place_gradients(params: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
    """Have gradients spread over ranks as their parameters are, so that part belongs to part.

    By a collective where one is not: of a layer norm in sequence parallel each rank has a summand
    of the gradient. All ranks must come here.

    Returns:
        The gradients that the parameters have now.
    """
    placed: list[Any] = list(grads)
    for row, (param, grad) in enumerate(zip(params, placed, strict=True)):
        placements = getattr(param, "placements", None)
        if is_spread(param) and grad.placements != placements:
            placed[row] = param.grad = grad.redistribute(placements=placements)
    return placed


def summed(grad: Any) -> Any:
    """Return a gradient of which no rank has a mere summand, by a collective where one has."""
    if not is_spread(grad) or not any(one.is_partial() for one in grad.placements):
        return grad
    placements = [_replicate() if one.is_partial() else one for one in grad.placements]
    return grad.redistribute(placements=placements)


def set_part(tensor: Any, part: Tensor) -> None:
    """Let this rank hold another tensor of the same shape for a DTensor."""
    tensor._local_tensor = part


def set_data(param: Any, value: Any) -> None:
    """Let a parameter hold other numbers, ``param.data = value``, also where both are DTensors.

    Args:
        param: stays the object that it is, with its weak references.
        value: of the same shape, in any dtype.
    """
    param.data = value
    if is_spread(param):
        # torch sets the outer tensor alone.
        param._local_tensor, param._spec = local(value), value._spec


def _dtensor() -> type | None:
    """Return the class; None where nobody has imported it, so that no tensor is of it."""
    module = sys.modules.get("torch.distributed.tensor")
    found: type | None = getattr(module, "DTensor", None)
    return found


def _replicate() -> Any:
    return sys.modules["torch.distributed.tensor"].Replicate()


def place(tensor: Tensor) -> int:
    """Return the address of what this rank holds of a tensor."""
    part: Tensor = local(tensor)
    return part.data_ptr()


def detached(tensor: Tensor) -> Tensor:
    """Return a tensor outside of autograd that has the memory of another, and its version.

    A DTensor's own ``detach()`` gives what this rank holds a version of its own.
    """
    found = tensor.detach()
    if is_spread(tensor):
        set_part(found, local(tensor))
    return found


def version_of(tensor: Tensor) -> int:
    """Return a number that each write in place to a tensor moves.

    A DTensor and what this rank holds of it have a version each: the one moves with what is called
    with the DTensor, the other with a write to ``dtensor.to_local()``, as
    ``torch.distributed.checkpoint.load`` makes it.
    """
    part: Tensor = local(tensor)
    return part._version if part is tensor else tensor._version + part._version


def are_equal_here(one: Tensor, other: Tensor) -> bool:
    """Return whether this rank holds equal numbers of two tensors; NaN equals nothing."""
    return torch.equal(local(one), local(other))
