"""What comes back to a weight from many uses in one iteration is added up in float32.

At O1 and O4 to its casts, at O2, O3 and O5 to its parts.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from cache_programs import (
    Net,
    Program,
    Run,
    TwiceNet,
    TwiceRun,
    bits,
    maker,
    programs,
    run_both,
    shared_fixtures,
    steps_without_gradients,
)
from cast_counter import CastCounter
from hypothesis import given
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from amp_patch.casting import many_uses
from amp_patch.casting.shared_casts import USES
from amp_patch.casting.weight_cache import WeightCache

HALF_OF = {"O1": torch.float16, "O4": torch.bfloat16}
STORED_IN = {"O2": torch.float16, "O3": torch.float16, "O5": torch.bfloat16}


class Unrolled(nn.Module):
    """Calls one cell and one layer at each step of time, with the same encoding."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.encoder = nn.Linear(6, 8)
        self.cell, self.out = nn.GRUCell(8, 16), nn.Linear(16, 4)
        self.steps = steps

    def forward(self, x: Tensor) -> Tensor:
        encoding, state = torch.tanh(self.encoder(x)).to(x.dtype), x.new_zeros(len(x), 16)
        outputs = []
        for _ in range(self.steps):
            state = self.cell(encoding, state)
            outputs.append(self.out(state))
        return torch.stack(outputs)


@pytest.mark.parametrize("level", HALF_OF)
def test_gradients_of_a_thousand_uses_are_float64_s(amp: ModuleType, level: str) -> None:
    torch.manual_seed(0)
    model, x = Unrolled(1000), torch.randn(4, 6)
    exact = copy.deepcopy(model).double()
    F.mse_loss(exact(x.double()), torch.ones(1000, 4, 4).double()).backward()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=32768.0, verbosity=0)
    with amp.scale_loss(F.mse_loss(model(x).float(), torch.ones(1000, 4, 4)), optimizer) as scaled:
        scaled.backward()
    eps = torch.finfo(HALF_OF[level]).eps
    for found, one in zip(model.parameters(), exact.parameters(), strict=True):
        error = (found.grad.double() - one.grad).norm() / one.grad.norm()
        assert error < 8 * eps


@pytest.mark.parametrize("level", HALF_OF)
def test_a_weight_is_cast_anew_when_its_cast_was_used_so_often(amp: ModuleType, level: str) -> None:
    model, half = nn.Linear(4, 4, bias=False), HALF_OF[level]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=1.0, verbosity=0)
    x = torch.randn(2, 4, dtype=half)

    def step(uses: int) -> int:
        optimizer.zero_grad()
        with CastCounter([model.weight]) as counter:
            loss = sum(model(x).float().sum() for _ in range(uses))
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        return counter.of_weights

    step(1)
    assert not any(step(1) for _ in range(2 * USES[half]))  # refreshed with all others
    assert step(USES[half]) == 0
    assert step(2 * USES[half]) == 1
    assert step(3 * USES[half]) == 2


@pytest.mark.parametrize("half", HALF_OF.values())
@pytest.mark.parametrize("width", [4, 256])  # small, and with memory that goes in the backward
def test_casts_of_one_iteration_have_one_memory(
    cache: WeightCache, half: torch.dtype, width: int
) -> None:
    model = nn.Linear(width, width)
    cache.add_model(model)
    x = torch.randn(2, width, dtype=half)

    def gradient(uses: int) -> Tensor:
        model.weight.grad = None
        casts = [cache.cast(model.weight, half) for _ in range(uses)]
        assert len(set(map(id, casts))) == -(-uses // (USES[half] + 1))
        assert len({cast.data_ptr() for cast in casts}) == 1
        assert torch.equal(casts[-1], model.weight.to(half))
        loss = sum((x @ cast).float().sum() for cast in casts)
        del casts
        loss.backward()
        assert model.weight.grad is not None
        return model.weight.grad

    for _ in range(3):
        one = gradient(1)
        torch.testing.assert_close(gradient(200), 200 * one, rtol=0.06, atol=0.06)
        with torch.no_grad():
            model.weight += 1.0
        cache.mark_stale()


@steps_without_gradients
@pytest.mark.parametrize(("run", "net"), [(Run, Net), (TwiceRun, TwiceNet)])
@shared_fixtures
@given(program=programs())
def test_a_cast_for_each_use_gives_every_bit_that_no_cache_gives(
    amp: ModuleType, monkeypatch: pytest.MonkeyPatch, run: Any, net: Any, program: Program
) -> None:
    for half in HALF_OF.values():
        monkeypatch.setitem(USES, half, 0)
    for what, found, expected in run_both(maker(run, net, "O4"), program, monkeypatch):
        assert torch.equal(bits(found), bits(expected)), what


def parts_of(output: Tensor) -> set[Any]:
    """Return the nodes of a graph that are parts of weights."""
    found, waiting = set(), [output.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found:
            found.add(node)
            waiting += [other for other, _ in node.next_functions]
    return {node for node in found if isinstance(node, many_uses._Part._backward_cls)}


class Used(nn.Module):
    """Calls a function with its weights, again and again, and adds up what that returns."""

    def __init__(self, weights: list[Tensor], call: Callable[..., Tensor]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(weights)
        self.call = call

    def forward(self, x: Tensor, uses: int) -> Tensor:
        total = x.new_zeros((), dtype=torch.float64 if x.dtype is torch.float64 else torch.float32)
        for _ in range(uses):
            total = total + self.call(x, *self.weights).to(total.dtype).mean()
        return total / uses


def embedded(x: Tensor, table: Tensor) -> Tensor:
    return F.embedding(torch.tensor([0, 1, 1]), table)


def rows(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.rand(shape) / 4 for shape in shapes]


CALLS: dict[str, tuple[list[tuple[int, ...]], Callable[..., Tensor]]] = {
    "linear": ([(4, 4), (4,)], lambda x, w, b: F.linear(x, w, b)),
    "linear by names": ([(4, 4), (4,)], lambda x, w, b: F.linear(x, weight=w, bias=b)),
    "matmul": ([(4, 4)], lambda x, w: torch.matmul(x, w)),
    "@": ([(4, 4)], lambda x, w: x @ w),
    "weight @": ([(4, 4)], lambda x, w: w @ x.mT),
    "mm": ([(4, 4)], lambda x, w: x.mm(w)),
    "addmm": ([(4,), (4, 4)], lambda x, b, w: torch.addmm(b, x, w)),
    "einsum": ([(4, 4)], lambda x, w: torch.einsum("ni,oi->no", x, w)),
    "convolution": ([(2, 1, 3), (2,)], lambda x, w, b: F.conv1d(x[:, None], w, b)),
    "layer norm": ([(4,), (4,)], lambda x, w, b: F.layer_norm(x, (4,), w, b)),
    "group norm": ([(4,), (4,)], lambda x, w, b: F.group_norm(x, 2, w, b)),
    "RMS norm": ([(4,)], lambda x, w: F.rms_norm(x, (4,), w)),
    "instance norm": (
        [(4,), (4,)],
        lambda x, w, b: F.instance_norm(x.T[None], weight=w, bias=b)[..., 0],
    ),
    "recurrent layer": (
        [(12, 4), (12, 4), (12,), (12,)],
        lambda x, *w: torch._VF.gru(  # type: ignore[attr-defined]  # as nn.GRU calls it
            x[None], x[None], list(w), True, 1, 0.0, True, False, False
        )[0][0],
    ),
    "cell": (
        [(12, 4), (12, 4), (12,), (12,)],
        lambda x, *weights: torch.gru_cell(x, x, *weights),
    ),
    "embedding": ([(3, 4)], embedded),
}


@pytest.mark.parametrize("level", STORED_IN)
@pytest.mark.parametrize("name", CALLS)
def test_a_thousand_uses_of_a_half_weight_add_up_in_float32(
    amp: ModuleType, level: str, name: str
) -> None:
    """From the second iteration on; in the first one 32 or 64 uses are added up in half."""
    torch.manual_seed(0)
    shapes, call = CALLS[name]
    model, x = Used(rows(*shapes), call), torch.rand(5, 4) + 0.5
    for weight in model.weights:  # half numbers, so that only the gradients are rounded
        weight.data = weight.to(STORED_IN[level]).float()
    x = x.to(STORED_IN[level]).float()
    exact = copy.deepcopy(model).double()
    exact(x.double(), 1000).backward()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=1024.0, verbosity=0)
    for bound in (0.06, 8 * torch.finfo(STORED_IN[level]).eps):
        optimizer.zero_grad()
        with amp.scale_loss(model(x, 1000), optimizer) as scaled:
            scaled.backward()
        for found, one in zip(amp.master_params(optimizer), exact.parameters(), strict=True):
            assert found.grad is not None
            assert one.grad is not None
            error = (found.grad.double() - one.grad).norm() / one.grad.norm()
            assert error < bound
        optimizer.step()


def attend(layer: nn.Module, y: Tensor) -> Tensor:
    """Return the outputs of an attention, whose keys are others than its queries."""
    return layer(y, y + 1, y + 1)[0]  # type: ignore[no-any-return]  # a module's call


@pytest.mark.parametrize(
    ("layer", "call", "count"),
    [
        (nn.GRU(4, 4, batch_first=True), lambda layer, y: layer(y)[0], 4),
        (nn.LSTM(4, 4), lambda layer, y: layer(y)[0], 4),
        (nn.RNN(4, 4, 2, nonlinearity="relu"), lambda layer, y: layer(y)[0], 8),
        (nn.RMSNorm(4), lambda layer, y: layer(y), 1),
        (nn.InstanceNorm1d(3, affine=True), lambda layer, y: layer(y), 2),
        (nn.MultiheadAttention(4, 2), attend, 4),
        # counted by its projection as well, so that parts begin after half as many calls
        (nn.MultiheadAttention(4, 2), lambda layer, y: layer(y, y, y)[0], 8),
    ],
    ids=["GRU", "LSTM", "RNN", "RMSNorm", "InstanceNorm", "attention", "self-attention"],
)
def test_layers_of_several_functions_are_used_in_parts(
    amp: ModuleType, layer: nn.Module, call: Callable[[nn.Module, Tensor], Tensor], count: int
) -> None:
    amp.initialize(layer, opt_level="O5", verbosity=0)
    y = torch.randn(2, 3, 4)
    for _ in range(2 * USES[torch.bfloat16]):
        y = call(layer, y)
    assert len(parts_of(y)) == count


@pytest.mark.parametrize("cell", [nn.GRUCell, nn.LSTMCell, nn.RNNCell])
def test_a_cell_s_own_weights_are_used_in_parts(amp: ModuleType, cell: type[nn.Module]) -> None:
    model = cell(4, 4)
    amp.initialize(model, opt_level="O5", verbosity=0)
    state, x = None, torch.randn(3, 4)
    for _ in range(2 * USES[torch.bfloat16]):
        state = model(x, state)
    assert len(parts_of(state[0] if isinstance(state, tuple) else state)) == 4


@pytest.mark.parametrize(
    "layer", [nn.Linear(8, 8), nn.Conv1d(4, 4, 1), nn.GroupNorm(2, 4), nn.LayerNorm(8)], ids=repr
)
def test_a_layer_s_own_weights_are_used_in_parts(amp: ModuleType, layer: nn.Module) -> None:
    amp.initialize(layer, opt_level="O5", verbosity=0)
    y = torch.randn(2, 4, 8)
    for _ in range(2 * USES[torch.bfloat16]):
        y = layer(y)
    assert len(parts_of(y)) == 2


def looping(amp: ModuleType) -> tuple[nn.Linear, torch.optim.Optimizer]:
    """Return a layer at O5 whose weights are used in parts from the first use on."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    amp.initialize(model, optimizer, opt_level="O5", verbosity=0)
    train(amp, model, optimizer, USES[torch.bfloat16] + 1)
    return model, optimizer


def train(amp: ModuleType, model: nn.Module, optimizer: Any, uses: int) -> int:
    """Return how many parts the graph of one iteration has."""
    optimizer.zero_grad()
    loss = torch.stack([model(torch.ones(2, 4)).sum() for _ in range(uses)]).sum()
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    return len(parts_of(loss))


def test_only_what_is_used_so_often_is_used_in_parts(amp: ModuleType) -> None:
    uses = USES[torch.bfloat16]
    model, optimizer = looping(amp)
    assert train(amp, model, optimizer, 3 * uses) == 2 * 3  # of weight and bias, from the first on
    assert train(amp, model, optimizer, 1) == 2  # nobody knows yet that it is the only one
    assert [train(amp, model, optimizer, uses) for _ in range(3 * uses)] == [0] * (3 * uses)


def test_a_part_has_the_memory_and_the_version_of_its_weight(amp: ModuleType) -> None:
    model, _ = looping(amp)
    assert many_uses.is_used_up(model.weight)
    part = many_uses.part(model.weight)
    assert part is not model.weight
    assert part.data_ptr() == model.weight.data_ptr()
    loss = model(torch.ones(2, 4, requires_grad=True)).sum()
    with torch.no_grad():
        model.weight.add_(1.0)
    assert torch.equal(part, model.weight)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_weight_that_was_given_other_memory_gets_another_part(amp: ModuleType) -> None:
    model, _ = looping(amp)
    model(torch.ones(2, 4))
    model.weight.data = torch.zeros(4, 4, dtype=torch.bfloat16)
    assert torch.equal(model(torch.ones(2, 4)), model.bias.float().expand(2, 4))


def test_what_a_failed_iteration_has_used_ends_with_the_next_one(amp: ModuleType) -> None:
    model, optimizer = looping(amp)
    for _ in range(3):
        model(torch.ones(2, 4))  # no backward
    train(amp, model, optimizer, 2)
    weight = weakref.ref(model.weight)
    del model, optimizer
    gc.collect()
    assert weight() is None


def test_parts_go_with_a_model_that_is_only_evaluated(amp: ModuleType) -> None:
    model, optimizer = looping(amp)
    other, _ = looping(amp)
    for _ in range(3):
        model(torch.ones(2, 4))
        other(torch.ones(2, 4))
    weight = weakref.ref(model.weight)
    others = {key: many_uses._parts[key] for key in map(id, other.parameters())}
    assert len(many_uses._parts) == 4
    del model, optimizer
    gc.collect()
    assert weight() is None
    assert many_uses._parts == others


def test_parts_go_with_a_model_that_was_initialized_again(amp: ModuleType) -> None:
    model, _ = looping(amp)
    amp.deactivate()
    model.weight = nn.Parameter(model.weight.detach().clone())
    amp.initialize(model, opt_level="O5", verbosity=0)
    for _ in range(3):
        model(torch.ones(2, 4))
    weight = weakref.ref(model.weight)
    del model
    gc.collect()
    assert weight() is None


def test_parts_go_with_amp(amp: ModuleType) -> None:
    model, _ = looping(amp)
    model(torch.ones(2, 4))
    weight = weakref.ref(model.weight)
    amp.deactivate()
    del model, _
    gc.collect()
    assert weight() is None


def test_deactivate_forgets_whose_uses_were_many(amp: ModuleType) -> None:
    model, _ = looping(amp)
    model(torch.ones(2, 4))
    amp.deactivate()
    many_uses.begin_anew()  # as the next backward does
    assert not many_uses.is_used_up(model.weight)  # another one may have its id by now


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_deactivate_leaves_nothing_that_waits_for_the_end_of_a_model(
    amp: ModuleType, level: str
) -> None:
    """Else each stage of a training, which initializes the model anew, leaves a list of ids."""
    model = nn.Linear(4, 4)
    waiting = []
    for _ in range(3):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        amp.deactivate()
        waiting.append(len(weakref.finalize._registry))  # type: ignore[attr-defined]  # private
    assert len(set(waiting)) == 1


def plain_backward(loss: Tensor, own: dict[str, nn.Parameter]) -> None:
    loss.backward()


def grad(loss: Tensor, own: dict[str, nn.Parameter]) -> None:
    torch.autograd.grad(loss, list(own.values()))


def nothing_then_a_backward(loss: Tensor, own: dict[str, nn.Parameter]) -> None:
    del loss
    torch.zeros((), requires_grad=True).backward()


@pytest.mark.parametrize("differentiate", [plain_backward, grad, nothing_then_a_backward])
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_parts_go_with_the_weights_of_one_task(
    amp: ModuleType, level: str, differentiate: Callable[[Tensor, Any], None]
) -> None:
    """As a test-time adaptation makes them anew, between two steps of the training."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    own = {name: nn.Parameter(one.detach().clone()) for name, one in model.named_parameters()}
    state = torch.ones(2, 4)
    for _ in range(2 * USES[STORED_IN[level]]):
        state = torch.func.functional_call(model, own, (state.tanh(),))
    assert len(parts_of(state)) >= 2
    loss = state.float().square().mean()
    del state
    differentiate(loss, own)
    living = [weakref.ref(one) for one in own.values()]
    del own, loss
    gc.collect()
    assert [one() for one in living] == [None, None]


def test_uses_after_a_plain_backward_are_counted_anew(amp: ModuleType) -> None:
    """No use of a graph that is gone has the next one take parts."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    amp.initialize(model, optimizer, opt_level="O5", verbosity=0)
    for _ in range(3):
        loss = torch.stack([model(torch.ones(2, 4)).sum() for _ in range(20)]).sum()
        assert not parts_of(loss)
        loss.backward()
        optimizer.zero_grad()


def in_selective_checkpoint(model: nn.Module, x: Tensor) -> Tensor:
    def contexts() -> Any:
        return create_selective_checkpoint_contexts(lambda *_, **__: CheckpointPolicy.MUST_SAVE)

    result: Tensor = checkpoint(model, x, use_reentrant=False, context_fn=contexts)
    return result


@pytest.mark.parametrize(
    "call",
    [
        torch.no_grad()(lambda model, x: model(x)),
        lambda model, x: torch.func.vjp(model, x)[0],
        lambda model, x: torch.vmap(model)(x),
        lambda model, x: torch.compile(model, backend="eager", fullgraph=True)(x),
        in_selective_checkpoint,
    ],
    ids=["without grad", "vjp", "vmap", "compiled", "selective checkpoint"],
)
def test_no_part_where_a_weight_must_be_itself(
    amp: ModuleType, call: Callable[[nn.Module, Tensor], Tensor]
) -> None:
    model, _ = looping(amp)
    x = torch.ones(2, 4)
    result = call(model, x)
    assert not parts_of(result)
    assert not many_uses._parts
    assert torch.equal(result.detach(), model(x).detach())
    assert many_uses._parts


def test_a_checkpoint_repeats_what_was_used_in_parts(amp: ModuleType) -> None:
    model, optimizer = looping(amp)
    x = torch.rand(2, 4, requires_grad=True)

    def gradients(run: Callable[[Tensor], Tensor]) -> list[Tensor]:
        optimizer.zero_grad()
        loss = sum(run(x).square().mean() for _ in range(100))
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        found = [param.grad.clone() for param in amp.master_params(optimizer)]
        optimizer.zero_grad()
        return found

    plain = gradients(model)
    again = gradients(lambda x: checkpoint(model, x, use_reentrant=False))
    for one, other in zip(again, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=0.02, atol=0.02)


@steps_without_gradients
@pytest.mark.filterwarnings("ignore:at a level with fp32 masters the gradients of a step")
@pytest.mark.parametrize("level", ["O2", "O5"])
@shared_fixtures
@given(program=programs(without=("penalty", "other_step", "late_backward")))
def test_a_part_for_each_use_gives_every_bit_that_weights_give(
    amp: ModuleType, monkeypatch: pytest.MonkeyPatch, level: str, program: Program
) -> None:
    """Where each weight is used once: not in a penalty, which derives it twice.

    Half weights are stepped by no other optimizer, and refuse a backward once they were written to.
    """
    make = maker(Run, Net, level)
    expected = make().execute(program)
    with monkeypatch.context() as patch:
        patch.setitem(USES, STORED_IN[level], 0)
        patch.setattr(many_uses, "_FEW", 0)
        found = make().execute(program)
    for (what, one), (_, other) in zip(found, expected, strict=True):
        assert torch.equal(bits(one), bits(other)), what
