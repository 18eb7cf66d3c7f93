"""Whether anybody but its owner holds a tensor, for every way of holding one."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from amp_patch.kernels import reusable as reuse
from amp_patch.kernels.reusable import Reusable, is_held


class Owner:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def a_gradient(tensor: Tensor) -> Tensor:
    holder = torch.zeros_like(tensor)
    holder.grad = tensor
    return holder


def a_graph(tensor: Tensor) -> Tensor:
    return tensor * torch.ones_like(tensor, requires_grad=True)


def a_linear_layer(tensor: Tensor) -> Tensor:
    return nn.functional.linear(torch.ones(1, 3, requires_grad=True), tensor.view(1, 3))


HOLDERS: list[Callable[[Tensor], Any]] = [
    lambda tensor: tensor,
    lambda tensor: [tensor],
    lambda tensor: tensor.view(-1),
    lambda tensor: tensor.detach(),
    lambda tensor: tensor[1:],
    a_gradient,
    a_graph,
    a_linear_layer,
]


@contextlib.contextmanager
def frames_evaluated_by_torch() -> Iterator[None]:
    """Have torch evaluate all frames, as it does from a compilation that raised on."""
    frames: Any = torch._C._dynamo.eval_frame
    before = frames.set_eval_frame(False)  # compiles nothing
    try:
        yield
    finally:
        frames.set_eval_frame(before)


@pytest.mark.parametrize("evaluated_by", [contextlib.nullcontext, frames_evaluated_by_torch])
@pytest.mark.parametrize("hold", HOLDERS)
def test_whoever_holds_a_tensor_is_seen_until_he_lets_go(
    hold: Callable[[Tensor], Any], evaluated_by: Callable[[], Any]
) -> None:
    with evaluated_by():
        check_holding(hold)


def check_holding(hold: Callable[[Tensor], Any]) -> None:
    owner = Owner(torch.ones(3))
    reusable = Reusable([torch.ones(3), torch.ones(3)])
    assert reusable.are_free()
    seen = [is_held(owner.tensor)]  # an assert would hold it, too
    held = hold(owner.tensor), hold(reusable.tensors[1])
    seen.append(is_held(owner.tensor))
    assert not reusable.are_free()
    del held
    assert reusable.are_free()
    seen.append(is_held(owner.tensor))
    assert seen == [False, True, False]


@pytest.mark.parametrize("hold", HOLDERS)
def test_tensors_may_share_their_memory(hold: Callable[[Tensor], Any]) -> None:
    memory = torch.ones(6)
    reusable = Reusable([memory[:3], memory[3:]])
    assert reusable.are_free()
    held = hold(reusable.tensors[1])
    assert not reusable.are_free()
    del held
    assert reusable.are_free()


def test_no_tensors_are_free() -> None:
    assert Reusable([]).are_free()


def test_where_torch_cannot_count_every_tensor_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reuse, "_count_storage_uses", lambda storage: reuse._MANY_USES)
    owner = Owner(torch.ones(3))
    held = is_held(owner.tensor)
    assert held
    assert not Reusable([torch.ones(3)]).are_free()
