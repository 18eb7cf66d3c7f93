"""Small tensors in one memory: nothing but the place of their numbers changes."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from amp_patch.kernels import small_tensors

SHAPES = ((), (0,), (1,), (7,), (3, 5), (2, 3, 4), (4097,))
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    shape = draw(st.sampled_from(SHAPES))
    values = torch.randn(shape).to(draw(st.sampled_from(DTYPES)))
    if draw(st.booleans()):
        return values.permute(tuple(reversed(range(len(shape)))))
    return values[..., ::2] if shape and draw(st.booleans()) else values


def storages(given: list[Tensor]) -> set[int]:
    return {tensor.untyped_storage()._cdata for tensor in given}


@given(st.lists(tensors() | st.none(), max_size=8))
def test_each_model_gets_a_tensor_like_it(models: list[Tensor | None]) -> None:
    pools, made = small_tensors.allocate(models)
    assert [tensor is None for tensor in made] == [model is None for model in models]
    pairs = [(m, t) for m, t in zip(models, made, strict=True) if m is not None and t is not None]
    for number, (model, tensor) in enumerate(pairs):
        assert (tensor.shape, tensor.dtype) == (model.shape, model.dtype)
        assert tensor.stride() == torch.empty_like(model).stride()
        assert tensor.numel() == 0 or tensor.data_ptr() % 16 == 0
        tensor.fill_(number + 1)
    for number, (_, tensor) in enumerate(pairs):  # no two overlap
        assert bool((tensor == number + 1).all())
    assert storages(pools) == storages([tensor for _, tensor in pairs])
    assert len(pools) == len({model.dtype for model, _ in pairs})
    in_pools = sum(int((pool != 0).sum()) for pool in pools)
    assert in_pools == sum(tensor.numel() for _, tensor in pairs)


@given(st.lists(tensors().map(nn.Parameter), max_size=8))
def test_move_together_keeps_the_parameters(params: list[nn.Parameter]) -> None:
    before = [param.detach().clone() for param in params]
    addresses = [param.data_ptr() for param in params]
    small_tensors.move_together(params)
    for param, old, address in zip(params, before, addresses, strict=True):
        assert torch.equal(param, old)
        assert param.requires_grad
        assert param.is_leaf
        if param.numel() > 4096:
            assert param.data_ptr() == address
    moved = [p for p, old in zip(params, addresses, strict=True) if p.data_ptr() != old]
    assert len(storages(moved)) == len({param.dtype for param in moved})


def test_parameters_that_share_a_memory_already_stay() -> None:
    memory = torch.randn(6)
    params = [nn.Parameter(memory[:3]), nn.Parameter(memory[3:]), nn.Parameter(torch.randn(3))]
    small_tensors.move_together(params)
    assert params[0].data_ptr() == memory.data_ptr()
    assert params[1].data_ptr() == memory[3:].data_ptr()


@given(st.lists(st.sampled_from([1, 4, 31, 33, 1000]), min_size=2, max_size=8))
def test_of_what_is_allocated_together_all_share_most(sizes: list[int]) -> None:
    """Also of tensors of one number, each of which is followed by a gap."""
    _, made = small_tensors.allocate([torch.zeros(size).half() for size in sizes])
    together = [tensor for tensor in made if tensor is not None]
    assert small_tensors.share_most(together)
    assert not small_tensors.share_most(together[:1])
    memory = torch.zeros(10_000)
    assert not small_tensors.share_most([memory[:1], memory[100:101]])
