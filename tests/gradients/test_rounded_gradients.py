"""Half gradients after a block, read as in plain fp32."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from support import scaled_backward
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from trained_pair import INPUTS, Pair

LEVELS = ("O1", "O2", "O5")


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("delays", [(False,), (False, False), (True, False), (False, True, False)])
@pytest.mark.parametrize("options", [{}, {"loss_scale": 1.0}], ids=["scaled", "1.0"])
def test_they_are_true_behind_a_block(
    amp: ModuleType, level: str, delays: tuple[bool, ...], options: dict[str, Any]
) -> None:
    pair = Pair(amp, level, **options)
    for inputs, delay in zip(INPUTS, delays, strict=False):
        pair.backward(inputs, delay_unscale=delay)
    pair.assert_equal_gradients()


CLIPS: dict[str, Callable[[Pair], Any]] = {
    "model": lambda pair: nn.utils.clip_grad_norm_(pair.model.parameters(), 0.1),
    "masters": lambda pair: nn.utils.clip_grad_norm_(pair.amp.master_params(pair.optimizer), 0.1),
    "amp": lambda pair: pair.amp.clip_grad_norm_(pair.optimizer, 0.1),
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("clip", CLIPS)
def test_they_are_clipped_with_the_masters(amp: ModuleType, level: str, clip: str) -> None:
    pair = Pair(amp, level)
    pair.backward(INPUTS[0])
    CLIPS[clip](pair)
    nn.utils.clip_grad_norm_(pair.plain.parameters(), 0.1)
    pair.assert_equal_gradients()


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_layer_without_gradients_is_no_matter_of_a_clip(amp: ModuleType, level: str) -> None:
    model, x = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]), torch.ones(2, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=64.0, verbosity=0)
    used, unused = model
    half = used.weight.dtype
    with amp.scale_loss(used(x.to(half)).float().sum(), optimizer) as scaled:
        scaled.backward()
    # each of 16 weights has 2 for a gradient, each of 4 biases too
    assert amp.clip_grad_norm_(optimizer, 0.5).item() == pytest.approx(80**0.5)
    assert used.weight.grad is not None
    torch.testing.assert_close(
        used.weight.grad.float(), torch.full((4, 4), 1 / 80**0.5), rtol=0.01, atol=0
    )
    assert unused.weight.grad is None


def test_where_layers_are_clipped_alone_each_is_shown_and_no_other(amp: ModuleType) -> None:
    pair = Pair(amp, "O2")
    pair.backward(INPUTS[0])
    layers = list(zip(pair.model, pair.plain, strict=True))
    for layer, plain in (layers[2], layers[0]):
        others = [
            p.grad for p in pair.model.parameters() if not any(p is q for q in layer.parameters())
        ]
        versions = [grad._version for grad in others]
        nn.utils.clip_grad_norm_(layer.parameters(), 0.1)
        nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        pair.assert_equal_gradients()
        assert [grad._version for grad in others] == versions
    pair.optimizer.step()  # the clip is no write of the script's, of which a warning would tell


@pytest.mark.parametrize("fused_step", [False, True])
def test_of_two_optimizers_of_one_model_the_gradients_of_the_one_in_use_are_clipped(
    amp: ModuleType, fused_step: bool, recwarn: pytest.WarningsRecorder
) -> None:
    pair = Pair(amp, "O2")
    amp.deactivate()
    kinds = (torch.optim.SGD, torch.optim.AdamW)
    optimizers, others = (
        [kind(model.parameters(), lr=0.1) for kind in kinds] for model in (pair.model, pair.plain)
    )
    amp.initialize(pair.model, optimizers, opt_level="O2", fused_step=fused_step, verbosity=0)
    for pair.optimizer, other in zip(optimizers, others, strict=True):
        for inputs in INPUTS:
            pair.optimizer.zero_grad()
            other.zero_grad()
            pair.backward(inputs)
            for model in (pair.model, pair.plain):
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            pair.optimizer.step()
            other.step()
    for name, value in pair.model.state_dict().items():
        torch.testing.assert_close(value, pair.plain.state_dict()[name], rtol=0, atol=3e-3)
    assert not [one for one in recwarn if "has no effect" in str(one.message)]


def test_a_clip_of_one_optimizer_leaves_scaled_gradients_of_another(amp: ModuleType) -> None:
    pair = Pair(amp, "O2", loss_scale=64.0)
    other = nn.Linear(4, 2)
    second = torch.optim.SGD(other.parameters(), lr=0.5)
    other, second = amp.initialize(other, second, opt_level="O2", loss_scale=64.0, verbosity=0)
    pair.backward(INPUTS[0])
    pair.backward(INPUTS[1], delay_unscale=True)
    scaled_backward(amp, other(INPUTS[0]).float().square().mean(), second)
    nn.utils.clip_grad_norm_(other.parameters(), 0.1)
    pair.backward(INPUTS[2])
    pair.assert_equal_gradients()


def test_two_optimizers_that_share_a_parameter_both_receive_it(amp: ModuleType) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(4, 2)
    plain = copy.deepcopy(layer)
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.5) for _ in range(2)]
    layer, optimizers = amp.initialize(layer, optimizers, opt_level="O2", verbosity=0)
    plain(INPUTS[0]).square().mean().backward()
    scaled_backward(amp, layer(INPUTS[0]).float().square().mean(), optimizers)
    for one in optimizers:
        for stepped, other in zip(amp.master_params(one), plain.parameters(), strict=True):
            torch.testing.assert_close(stepped.grad, other.grad, rtol=2e-3, atol=1e-3)
    for param, other in zip(layer.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(param.grad.float(), other.grad, rtol=2e-3, atol=1e-3)


def test_two_optimizers_that_share_a_sparse_one_take_no_write_for_the_scripts(
    amp: ModuleType,
) -> None:
    """Each puts another tensor into its place: sparse ones cannot be written to."""
    table = nn.Embedding(5, 3, sparse=True)
    both = [torch.optim.SGD(table.parameters(), lr=0.5) for _ in range(2)]
    table, both = amp.initialize(table, both, opt_level="O2", loss_scale=64.0, verbosity=0)
    before = table.weight.detach().float()
    for _ in range(2):
        scaled_backward(amp, table(torch.tensor([1, 1, 3])).float().sum(), both)
    for optimizer in both:
        optimizer.step()
    expected = torch.tensor([0.0, 4.0, 0.0, 2.0, 0.0])[:, None].expand(5, 3)
    torch.testing.assert_close(table.weight.float(), before - expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("passes", [1, 2])
def test_sparse_ones_are_true(amp: ModuleType, passes: int) -> None:
    table = nn.Embedding(5, 3, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.5)
    table, optimizer = amp.initialize(
        table, optimizer, opt_level="O2", loss_scale=64.0, verbosity=0
    )
    for _ in range(passes):
        scaled_backward(amp, table(torch.tensor([1, 1, 3])).float().sum(), optimizer)
    expected = torch.tensor([0.0, 2.0, 0.0, 1.0, 0.0])[:, None].expand(5, 3) * passes
    assert table.weight.grad.is_sparse
    torch.testing.assert_close(table.weight.grad.float().to_dense(), expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        before = table.weight.detach().clone()
        optimizer.step()
    torch.testing.assert_close(table.weight.float(), before - 0.5 * expected, rtol=2e-3, atol=1e-3)


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_clearing_by_data_clears_the_masters(amp: ModuleType, level: str) -> None:
    pair = Pair(amp, level)
    pair.backward(INPUTS[0])
    before = [param.detach().clone() for param in pair.model.parameters()]
    for param in pair.model.parameters():
        param.grad.data.zero_()
    pair.optimizer.step()
    for param, old in zip(pair.model.parameters(), before, strict=True):
        assert torch.equal(param, old)


class Wrapped(torch.Tensor):
    """A user's tensor around another one, of whose numbers torch knows nothing."""

    inner: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapped:
        made: Wrapped = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, requires_grad=inner.requires_grad
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def inner(value: Any) -> Any:
            return value.inner if isinstance(value, Wrapped) else value

        def wrapped(value: Any) -> Any:
            return Wrapped(value) if isinstance(value, torch.Tensor) else value

        result = func(*tree_map(inner, args), **tree_map(inner, kwargs or {}))
        return tree_map(wrapped, result)


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_gradients_of_a_users_class_are_stepped(amp: ModuleType, level: str) -> None:
    trained = []
    for make in (lambda inputs: inputs, Wrapped):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        for _ in range(3):
            optimizer.zero_grad()
            with amp.scale_loss(model(make(torch.ones(2, 4))).float().sum(), optimizer) as loss:
                loss.backward()
            optimizer.step()
        trained.append(list(model.state_dict().values()))
        amp.deactivate()
    for one, other in zip(*trained, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_beside_a_sparse_gradient_a_master_may_have_one_of_the_scripts(
    amp: ModuleType, level: str
) -> None:
    class Looked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.layer = nn.Embedding(8, 4, sparse=True), nn.Linear(4, 4)
            self.unused = nn.Linear(4, 4)

        def forward(self, index: Tensor) -> Tensor:
            outputs: Tensor = self.layer(self.table(index))
            return outputs

    model = Looked()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    loss = model(torch.tensor([1, 2, 3])).float().square().mean()
    scaled_backward(amp, loss, optimizer)
    last = list(amp.master_params(optimizer))[-1]
    last.grad = torch.full_like(last, 2.0)
    assert amp.clip_grad_norm_(optimizer, 1e-3) >= 4.0  # the norm of the four twos
    torch.testing.assert_close(last.grad.norm(), torch.tensor(1e-3), rtol=0.1, atol=0)
