"""Masters against fp32 training written by hand, and against a model of who wins when."""

import copy
import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from fine_linear import FINE, assert_same, backward, copies, fine_linear, train_step
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer, SparseAdam

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
LEVELS = {"O2": F16, "O5": BF16}


def prepared(
    amp: ModuleType,
    level: str = "O2",
    model: nn.Module | None = None,
    make: Callable[..., Optimizer] = SGD,
    **options: Any,
) -> tuple[nn.Module, Optimizer]:
    model = fine_linear() if model is None else model
    optimizer = make(model.parameters(), lr=0.125)
    options = {"loss_scale": 64.0, "verbosity": 0, **options}
    return amp.initialize(model, optimizer, opt_level=level, **options)


# --- how masters start ---


@pytest.mark.parametrize("level", LEVELS)
def test_masters_are_the_fp32_storage_that_came_in(amp: ModuleType, level: str) -> None:
    model = fine_linear()
    pointers = [param.data_ptr() for param in model.parameters()]
    values = [param.detach().clone() for param in model.parameters()]
    model, optimizer = prepared(amp, level, model)
    masters = list(amp.master_params(optimizer))
    assert [master.data_ptr() for master in masters] == pointers
    assert all(map(torch.equal, masters, values))
    assert {master.dtype for master in masters} == {F32}
    assert {param.dtype for param in model.parameters()} == {LEVELS[level]}


def test_parameters_of_other_dtypes_are_stepped_themselves(amp: ModuleType) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    model.scale = nn.Parameter(torch.ones(1, dtype=F64))
    model, optimizer = prepared(amp, model=model)
    masters = list(amp.master_params(optimizer))
    assert masters[0] is model.scale
    assert masters[1] is not model[0].weight
    assert masters[3] is model[1].weight


def test_attributes_of_parameters_are_on_their_masters(amp: ModuleType) -> None:
    model = fine_linear()
    model.weight.no_decay = True
    model, optimizer = prepared(amp, model=model)
    weight, bias = amp.master_params(optimizer)
    assert weight.no_decay is True
    assert not hasattr(bias, "no_decay")


def test_an_attribute_can_steer_the_optimizer(amp: ModuleType) -> None:
    class Masked(SGD):
        def step(self, closure: None = None) -> None:
            for group in self.param_groups:
                for param in group["params"]:
                    if getattr(param, "masked", False):
                        param.grad = torch.zeros_like(param)
            super().step()

    model = fine_linear()
    model.weight.masked = True
    model, optimizer = prepared(amp, model=model, make=Masked)
    before = copies(model)
    train_step(amp, model, optimizer)
    after = copies(model)
    assert torch.equal(before["weight"], after["weight"])
    assert not torch.equal(before["bias"], after["bias"])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("make", [SGD, Adam, AdamW])
def test_state_from_before_initialize_goes_on(
    amp: ModuleType, level: str, make: type[Optimizer]
) -> None:
    model, options = fine_linear(), {"momentum": 0.5} if make is SGD else {}
    optimizer = make(model.parameters(), lr=0.125, **options)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    reference = copy.deepcopy(optimizer.state_dict())
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=level, loss_scale=64.0, verbosity=0
    )
    for state, old in zip(
        optimizer.state_dict()["state"].values(), reference["state"].values(), strict=True
    ):
        for name, value in old.items():
            assert state[name].dtype is F32
            assert torch.equal(state[name], value)
    assert set(optimizer.state) == set(amp.master_params(optimizer))


# --- training with them ---


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    "make",
    [
        SGD,
        lambda params, lr: SGD(params, lr=lr, momentum=0.9, nesterov=True, weight_decay=0.01),
        lambda params, lr: Adam(params, lr=lr, fused=True),
        lambda params, lr: Adam(params, lr=lr, foreach=True, amsgrad=True),
        lambda params, lr: AdamW(params, lr=lr, foreach=False),
        torch.optim.Adagrad,
        torch.optim.RMSprop,
    ],
    ids=["sgd", "momentum", "fused", "foreach", "loop", "adagrad", "rmsprop"],
)
def test_masters_take_the_optimizers_steps_on_fp32_copies(
    amp: ModuleType, level: str, make: Callable[..., Optimizer]
) -> None:
    model = nn.Sequential(fine_linear(), nn.Tanh(), nn.Linear(3, 2))
    copied = [param.detach().clone() for param in model.parameters()]
    model, optimizer = prepared(amp, level, model, make)
    reference = make(copied, lr=0.125)
    for step in range(6):
        inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        scaled = train_gradients(amp, model, optimizer, inputs)
        for grad, copied_param in zip(scaled, copied, strict=True):
            copied_param.grad = grad.float() / 64.0
        optimizer.step()
        reference.step()
        for master, expected, param in zip(
            amp.master_params(optimizer), copied, model.parameters(), strict=True
        ):
            assert torch.equal(master, expected)
            assert torch.equal(param, expected.to(param.dtype))
        optimizer.zero_grad()


def train_gradients(
    amp: ModuleType, model: nn.Module, optimizer: Optimizer, x: Tensor
) -> list[Tensor]:
    """Return the gradients as the backward left them, multiplied by the scale."""
    with amp.scale_loss(model(x).square().mean(), optimizer) as scaled_loss:
        scaled_loss.backward()
        return [param.grad.clone() for param in model.parameters()]


def test_updates_too_small_for_half_add_up(amp: ModuleType) -> None:
    model, optimizer = prepared(amp, make=lambda params, lr: SGD(params, lr=2.0**-15))
    with torch.no_grad():
        model.weight.fill_(1.0)
    for _ in range(64):
        train_step(amp, model, optimizer)
    assert torch.equal(model.state_dict()["weight"], torch.full((3, 4), 1 - 64 * 2 * 2.0**-15))
    assert torch.equal(model.weight, torch.full((3, 4), 1 - 64 * 2 * 2.0**-15, dtype=F16))


@pytest.mark.parametrize("level", LEVELS)
def test_several_groups_keep_their_options(amp: ModuleType, level: str) -> None:
    model = nn.Sequential(fine_linear(4, 4), fine_linear())
    groups = [
        {"params": model[0].parameters(), "lr": 0.5},
        {"params": [model[1].weight], "lr": 0.0},
        {"params": [model[1].bias], "lr": 0.25},
    ]
    optimizer = SGD(groups, lr=9.0)
    identities = [id(group) for group in optimizer.param_groups]
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=level, loss_scale=64.0, verbosity=0
    )
    assert [id(group) for group in optimizer.param_groups] == identities
    before = copies(model)
    train_step(amp, model, optimizer)
    after = copies(model)
    assert torch.equal(after["1.weight"], before["1.weight"])
    assert torch.equal(after["1.bias"], before["1.bias"] - 0.5)
    assert not torch.equal(after["0.weight"], before["0.weight"])


def test_a_float64_parameter_beside_halves_is_trained_in_float64(amp: ModuleType) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = fine_linear()
            self.scale = nn.Parameter(torch.full((1,), 1 + 2.0**-40, dtype=F64))
            self.phase = nn.Parameter(torch.ones(1, dtype=torch.complex64))

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).float() + 3 * self.scale + self.phase.real

    model, optimizer = prepared(amp, model=Mixed())
    bias = model.linear.bias.detach().clone()
    train_step(amp, model, optimizer)
    assert model.scale.item() == 1 + 2.0**-40 - 0.125 * 18
    assert model.phase.item() == 1 - 0.125 * 6
    assert torch.equal(model.linear.bias, bias - 0.25)


def test_a_parameter_of_two_optimizers_has_one_value(amp: ModuleType) -> None:
    model = fine_linear()
    expected = model.weight.detach().clone()
    optimizers = [SGD(model.parameters(), lr=0.125), SGD([model.weight], lr=0.0625)]
    model, optimizers = amp.initialize(
        model, optimizers, opt_level="O2", loss_scale=64.0, verbosity=0
    )
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        backward(amp, model, optimizers)
        optimizers[0].step()
        optimizers[1].step()
        expected -= 0.25 + 0.125
        assert torch.equal(model.state_dict()["weight"], expected)
        assert torch.equal(model.weight, expected.half())
    masters = [next(amp.master_params(optimizer)) for optimizer in optimizers]
    assert masters[0].data_ptr() == masters[1].data_ptr()


def test_a_half_weight_written_between_two_initializes_has_one_value(amp: ModuleType) -> None:
    model = fine_linear()
    first = SGD(model.parameters(), lr=2.0**-14)
    amp.initialize(model, first, opt_level="O2", loss_scale=64.0, verbosity=0)
    with torch.no_grad():
        model.weight.fill_(1.0)
    second = SGD(model.parameters(), lr=2.0**-14)
    amp.initialize([], second, opt_level="O2", loss_scale=64.0, verbosity=0)
    for _ in range(4):
        for optimizer in (first, second):
            optimizer.zero_grad()
        backward(amp, model, [first, second])
        first.step()
        second.step()
    expected = torch.full((3, 4), 1 - 8 * 2 * 2.0**-14)
    assert torch.equal(model.state_dict()["weight"], expected)


def test_tied_weights_have_one_master(amp: ModuleType) -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    model["b"].weight = model["a"].weight
    expected = model["a"].weight.detach().clone()
    optimizer = SGD(model.parameters(), lr=0.125)
    model, optimizer = amp.initialize(
        model, optimizer, opt_level="O2", loss_scale=64.0, verbosity=0
    )
    assert len(list(amp.master_params(optimizer))) == 3
    loss = model["a"](torch.ones(2, 4).half()).sum() + model["b"](torch.ones(2, 4).half()).sum()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    assert torch.equal(model.state_dict()["a.weight"], expected - 0.5)
    assert torch.equal(model.state_dict()["b.weight"], expected - 0.5)


# --- sparse gradients ---


@pytest.mark.parametrize("level", ["O1", "O2", "O3", "O5"])
@pytest.mark.parametrize("make", [SGD, SparseAdam])
def test_sparse_gradients_step_as_in_fp32(
    amp: ModuleType, level: str, make: type[Optimizer]
) -> None:
    model = nn.Embedding(6, 3, sparse=True)
    with torch.no_grad():
        model.weight.copy_(torch.randint(-8, 8, (6, 3)) / 8)
    reference = copy.deepcopy(model)
    options = {} if make is SGD else {"eps": 1e-4}
    model, optimizer = prepared(
        amp, level, model, lambda p, lr: make(p, lr=lr, **options), loss_scale=4.0
    )
    expected = make(reference.parameters(), lr=0.125, **options)
    for _ in range(2):
        for tokens in (torch.tensor([1, 1, 4]), torch.tensor([1, 0])):
            with amp.scale_loss(model(tokens).float().sum(), optimizer) as scaled_loss:
                scaled_loss.backward()
            reference(tokens).sum().backward()
        assert all(param.grad.is_sparse for param in amp.master_params(optimizer))
        for one in (optimizer, expected):
            one.step()
            one.zero_grad()
    tolerance = {"rtol": 0.01, "atol": 0.01} if make is SparseAdam and level == "O3" else {}
    torch.testing.assert_close(model.state_dict()["weight"], reference.weight.data, **tolerance)


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("order", [("sparse", "dense"), ("dense", "sparse")])
def test_sparse_and_dense_gradients_of_one_weight_are_added(
    amp: ModuleType, level: str, order: tuple[str, str]
) -> None:
    model, optimizer = prepared(amp, level, nn.Embedding(6, 3, sparse=True))
    before = copies(model)["weight"]
    for kind in order:
        rows = model(torch.tensor([1, 1, 4])) if kind == "sparse" else model.weight * 2
        with amp.scale_loss(rows.float().sum(), optimizer) as scaled_loss:
            scaled_loss.backward()
    optimizer.step()
    counts = torch.tensor([0.0, 2, 0, 0, 1, 0])[:, None]
    assert torch.equal(model.state_dict()["weight"], before - 0.125 * (counts + 2))


def test_entries_of_one_row_are_added_in_fp32(amp: ModuleType) -> None:
    model, optimizer = prepared(amp, model=nn.Embedding(2, 1, sparse=True), loss_scale=2.0**10)
    tokens = torch.zeros(65, dtype=torch.long)
    weights = torch.ones(65, 1)
    weights[0] = 2.0**-11
    with amp.scale_loss((model(tokens) * weights).sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
    (master,) = amp.master_params(optimizer)
    assert master.grad.to_dense()[0].item() == 64 + 2.0**-11


# --- None gradients and zero_grad ---


@pytest.mark.parametrize("level", LEVELS)
def test_a_parameter_without_a_gradient_gets_none(amp: ModuleType, level: str) -> None:
    model = nn.ModuleList([fine_linear(), fine_linear()])
    optimizer = Adam(model.parameters(), lr=0.125)
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=level, loss_scale=64.0, verbosity=0
    )
    before = copies(model)
    with amp.scale_loss(model[0](torch.ones(2, 4).to(LEVELS[level])).sum(), optimizer) as scaled:
        scaled.backward()
    assert [master.grad is None for master in amp.master_params(optimizer)] == [False] * 2 + [
        True
    ] * 2
    optimizer.step()
    after = copies(model)
    assert torch.equal(after["1.weight"], before["1.weight"])
    assert not torch.equal(after["0.weight"], before["0.weight"])
    assert len(optimizer.state) == 2


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("fused_step", [False, True])
def test_a_graph_goes_on_behind_a_step_that_left_its_weights_out(
    amp: ModuleType, level: str, fused_step: bool
) -> None:
    """The backward of a second head comes behind the step of the first one."""
    model = nn.ModuleList([fine_linear(), fine_linear()])
    optimizer = Adam(model.parameters(), lr=0.125)
    amp.initialize(
        model, optimizer, opt_level=level, loss_scale=64.0, verbosity=0, fused_step=fused_step
    )
    inputs = torch.ones(2, 4, dtype=LEVELS[level], requires_grad=True)
    losses = [head(inputs).sum() for head in model]
    optimizer.step()  # without any gradients
    for loss in losses:
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        before = copies(model)
        optimizer.step()
        changed = [not torch.equal(before[name], now) for name, now in copies(model).items()]
        assert changed == (
            [True, True, False, False] if loss is losses[0] else [False] * 2 + [True] * 2
        )
        optimizer.zero_grad()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("fused_step", [False, True])
@pytest.mark.parametrize("make", [SGD, Adam, functools.partial(Adam, fused=True)])
def test_a_graph_whose_weights_were_stepped_is_refused_by_torch(
    amp: ModuleType, level: str, make: Callable[..., Optimizer], fused_step: bool
) -> None:
    model, optimizer = prepared(amp, level, make=make, fused_step=fused_step)
    inputs = torch.ones(2, 4, dtype=LEVELS[level], requires_grad=True)
    loss = model(inputs).sum()
    backward(amp, model, optimizer)
    optimizer.step()
    with (
        pytest.raises(RuntimeError, match="modified by an inplace operation"),
        amp.scale_loss(loss, optimizer) as scaled_loss,
    ):
        scaled_loss.backward()


CLEARINGS: dict[str, Callable[[nn.Module, Optimizer], Any]] = {
    "optimizer.zero_grad()": lambda model, optimizer: optimizer.zero_grad(),
    "optimizer.zero_grad(True)": lambda model, optimizer: optimizer.zero_grad(True),
    "optimizer.zero_grad(set_to_none=False)": lambda model, optimizer: optimizer.zero_grad(
        set_to_none=False
    ),
    "model.zero_grad()": lambda model, optimizer: model.zero_grad(),
    "model.zero_grad(set_to_none=False)": lambda model, optimizer: model.zero_grad(False),
    "p.grad = None": lambda model, optimizer: [
        setattr(param, "grad", None) for param in model.parameters()
    ],
    "p.grad.zero_()": lambda model, optimizer: [
        param.grad.zero_() for param in model.parameters() if param.grad is not None
    ],
}


@pytest.mark.parametrize("clearing", CLEARINGS)
@pytest.mark.parametrize("level", ["O1", "O2", "O3", "O5"])
@pytest.mark.parametrize("failed_before", [False, True])
def test_every_way_to_clear_gradients_clears_the_masters(
    amp: ModuleType, level: str, clearing: str, failed_before: bool
) -> None:
    model, optimizer = prepared(amp, level)
    backward(amp, model, optimizer)
    backward(amp, model, optimizer)
    if failed_before:
        with pytest.raises(ArithmeticError), amp.scale_loss(model(torch.ones(2, 4)).sum(),
                                                            optimizer):  # fmt: skip
            raise ArithmeticError
    CLEARINGS[clearing](model, optimizer)
    backward(amp, model, optimizer)
    for master in amp.master_params(optimizer):
        assert torch.equal(master.grad.float(), torch.full(master.shape, 2.0))


@pytest.mark.parametrize("clearing", CLEARINGS)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_clearing_reaches_what_the_last_backward_left_out(
    amp: ModuleType, level: str, clearing: str
) -> None:
    model = nn.ModuleList([fine_linear(), fine_linear()])
    model, optimizer = prepared(amp, level, model)
    inputs = torch.ones(2, 4, dtype=model[0].weight.dtype)
    for layers in ([0], [1]):
        with amp.scale_loss(sum(model[i](inputs).sum() for i in layers), optimizer) as scaled:
            scaled.backward()
    CLEARINGS[clearing](model, optimizer)
    with amp.scale_loss(sum(layer(inputs).sum() for layer in model), optimizer) as scaled:
        scaled.backward()
    for master in amp.master_params(optimizer):
        assert torch.equal(master.grad, torch.full(master.shape, 2.0))


def test_zero_grad_with_set_to_none_false_leaves_zeros(amp: ModuleType) -> None:
    model, optimizer = prepared(amp)
    backward(amp, model, optimizer)
    optimizer.zero_grad(set_to_none=False)
    for tensor in (*model.parameters(), *amp.master_params(optimizer)):
        assert torch.equal(tensor.grad, torch.zeros_like(tensor))
    optimizer.zero_grad()
    for tensor in (*model.parameters(), *amp.master_params(optimizer)):
        assert tensor.grad is None


def test_an_optimizer_whose_zero_grad_takes_no_argument(amp: ModuleType) -> None:
    class Old(SGD):
        def zero_grad(self) -> None:
            super().zero_grad()

    model, optimizer = prepared(amp, make=Old)
    train_step(amp, model, optimizer)
    optimizer.zero_grad()
    assert all(param.grad is None for param in model.parameters())


# --- state dicts ---


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = fine_linear()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("table", torch.rand(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x)) * self.table


@pytest.mark.parametrize("level", LEVELS)
def test_state_dicts_hold_the_masters_exact_values(amp: ModuleType, level: str) -> None:
    model, optimizer = prepared(amp, level, nn.Sequential(Block(), fine_linear(3, 3)))
    for _ in range(3):
        train_step(amp, model, optimizer, torch.randn(8, 4))
    masters = dict(
        zip(
            [name for name, _ in model.named_parameters()],
            amp.master_params(optimizer),
            strict=True,
        )
    )
    state = model.state_dict()
    for name, master in masters.items():
        assert torch.equal(state[name], master)
        assert not state[name].requires_grad
    assert {value.dtype for value in state.values() if value.is_floating_point()} == {F32}
    assert torch.equal(model[1].state_dict()["weight"], masters["1.weight"])
    assert torch.equal(model[0].linear.state_dict(prefix="x.")["x.bias"], masters["0.linear.bias"])
    fresh = nn.Sequential(Block(), nn.Linear(3, 3))
    fresh.load_state_dict(state)
    assert torch.equal(fresh[1].weight, masters["1.weight"])


def test_keep_vars_gives_exact_values_that_require_grad(amp: ModuleType) -> None:
    model = nn.Sequential(fine_linear(), nn.BatchNorm1d(3))
    model[0].bias.requires_grad_(False)
    expected = {name: param.detach().clone() for name, param in model.named_parameters()}
    model, _ = prepared(amp, model=model)
    state = model.state_dict(keep_vars=True)
    for name, value in expected.items():
        assert torch.equal(state[name], value)
        assert state[name].requires_grad == (name != "0.bias")
    assert state["1.weight"] is model[1].weight


@pytest.mark.parametrize("level", LEVELS)
def test_load_state_dict_sets_the_masters(amp: ModuleType, level: str) -> None:
    model, optimizer = prepared(amp, level, Block())
    other = Block()
    with torch.no_grad():
        other.linear.weight.add_(FINE)
    model.load_state_dict(other.state_dict())
    expected = other.state_dict()
    assert_same(model.state_dict(), expected)
    weight = next(amp.master_params(optimizer))
    assert torch.equal(weight, other.linear.weight)
    assert torch.equal(model.linear.weight, other.linear.weight.to(LEVELS[level]))
    reference = SGD([other.linear.weight], lr=0.125)
    backward(amp, model, optimizer, torch.randn(8, 4))
    other.linear.weight.grad = weight.grad.clone()
    optimizer.step()
    reference.step()
    assert torch.equal(model.state_dict()["linear.weight"], other.linear.weight)


def test_loading_into_a_submodule_sets_its_masters_only(amp: ModuleType) -> None:
    model, optimizer = prepared(amp, model=nn.Sequential(fine_linear(4, 4), fine_linear(4, 4)))
    before, other = copies(model), fine_linear(4, 4)
    model[1].load_state_dict(other.state_dict())
    assert torch.equal(model.state_dict()["0.weight"], before["0.weight"])
    assert torch.equal(list(amp.master_params(optimizer))[2], other.weight)


def test_a_partial_state_sets_what_it_has(amp: ModuleType) -> None:
    model, optimizer = prepared(amp)
    before = copies(model)
    new = torch.full((3,), 1 + FINE)
    missing, unexpected = model.load_state_dict({"bias": new, "more": new}, strict=False)
    assert (missing, unexpected) == (["weight"], ["more"])
    assert torch.equal(model.state_dict()["bias"], new)
    assert torch.equal(model.state_dict()["weight"], before["weight"])


@pytest.mark.parametrize("bad", [torch.zeros(5), "text"])
def test_a_state_that_does_not_fit_is_refused_by_torch(amp: ModuleType, bad: Any) -> None:
    model, _ = prepared(amp)
    before = copies(model)
    with pytest.raises(RuntimeError, match="bias"):
        model.load_state_dict({"weight": before["weight"] + FINE, "bias": bad})
    after = model.state_dict()
    assert torch.equal(after["bias"], before["bias"])
    assert torch.equal(after["weight"], before["weight"] + FINE)


@pytest.mark.parametrize("dtype", [F16, BF16, F64])
def test_values_of_other_dtypes_load(amp: ModuleType, dtype: torch.dtype) -> None:
    model, optimizer = prepared(amp)
    state = {name: value.to(dtype) for name, value in copies(model).items()}
    model.load_state_dict(state)
    optimizer.step()
    assert_same(copies(model), {name: value.float() for name, value in state.items()})


def test_assign_is_refused(amp: ModuleType) -> None:
    model, _ = prepared(amp)
    before, pointer = copies(model), model.weight.data_ptr()
    message = (
        r"load_state_dict\(\) must copy into the parameters that amp.initialize\(\) cast, .* got "
        r"assign=True. Leave it out, or call amp.deactivate\(\) first."
    )
    with pytest.raises(RuntimeError, match=message):
        model.load_state_dict(before, assign=True)
    assert_same(copies(model), before)
    assert model.weight.data_ptr() == pointer


def test_writing_to_a_state_dict_writes_to_the_model(amp: ModuleType) -> None:
    model, optimizer = prepared(amp)
    model.state_dict()["weight"].fill_(1 + FINE)
    optimizer.step()
    assert torch.equal(model.weight, torch.ones(3, 4).half())
    assert torch.equal(model.state_dict()["weight"], torch.full((3, 4), 1 + FINE))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("stored", [F32, F16, BF16])
def test_optimizer_state_stays_fp32_through_every_load(
    amp: ModuleType, level: str, stored: torch.dtype
) -> None:
    model, optimizer = prepared(amp, level, make=Adam)
    train_step(amp, model, optimizer)
    state = copy.deepcopy(optimizer.state_dict())
    for entry in state["state"].values():
        for key in ("exp_avg", "exp_avg_sq"):
            entry[key] = (entry[key] + 1e-9).to(stored)
    model.load_state_dict(model.state_dict())
    optimizer.load_state_dict(state)
    model.load_state_dict(model.state_dict())
    masters = list(amp.master_params(optimizer))
    for master, entry in zip(masters, state["state"].values(), strict=True):
        for key in ("exp_avg", "exp_avg_sq"):
            assert optimizer.state[master][key].dtype is F32
            assert torch.equal(optimizer.state[master][key], entry[key].float())
    before = copies(model)
    train_step(amp, model, optimizer)
    assert not torch.equal(before["weight"], copies(model)["weight"])


# --- who wins: writes by the user ---


IN_PLACE_WRITES: dict[str, Callable[[nn.Parameter], Any]] = {
    "clamp_": lambda param: param.clamp_(-0.25, 0.25),
    "init": lambda param: nn.init.constant_(param, 0.75),
    "data.clamp_": lambda param: param.data.clamp_(-0.25, 0.25),
    "data =": lambda param: setattr(param, "data", torch.full_like(param, 0.5)),
    "copy_": lambda param: param.copy_(torch.full(param.shape, 0.625)),
    "one element": lambda param: param.view(-1)[:1].fill_(3.0),
    "numpy": lambda param: param.detach().view(torch.int16).numpy().fill(0),
}


@pytest.mark.parametrize("write", IN_PLACE_WRITES)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("seen_by", ["state_dict", "step", "deactivate", "master_params"])
def test_writes_to_half_weights_reach_the_masters(
    amp: ModuleType, level: str, write: str, seen_by: str
) -> None:
    model, optimizer = prepared(amp, level, make=lambda params, lr: Adam(params, lr=lr, fused=True))
    train_step(amp, model, optimizer)
    exact, rounded = copies(model)["weight"], model.weight.detach().clone()
    with torch.no_grad():
        IN_PLACE_WRITES[write](model.weight)
    written = model.weight.detach().clone()
    expected = torch.where(written == rounded, exact, written.float())
    optimizer.zero_grad()
    if seen_by == "state_dict":
        actual = model.state_dict()["weight"]
    elif seen_by == "deactivate":
        amp.deactivate()
        actual = model.weight
    elif seen_by == "master_params":
        actual = next(amp.master_params(optimizer))
    else:
        optimizer.step()
        actual = next(iter(optimizer.param_groups[0]["params"]))
        assert torch.equal(model.weight, written)
    assert torch.equal(actual, expected)


def test_a_clamped_weight_trains_on_from_the_clamp(amp: ModuleType) -> None:
    model, optimizer = prepared(amp)
    for _ in range(20):
        train_step(amp, model, optimizer)
        with torch.no_grad():
            model.weight.clamp_(-0.5, 0.5)
    assert torch.equal(model.weight, torch.full((3, 4), -0.5, dtype=F16))
    assert torch.equal(model.state_dict()["weight"], torch.full((3, 4), -0.5))


@pytest.mark.parametrize("how", ["copy_", "data"])
def test_writes_to_masters_reach_the_model(amp: ModuleType, how: str) -> None:
    model, optimizer = prepared(amp)
    master = next(amp.master_params(optimizer))
    new = torch.full((3, 4), 2 + FINE)
    with torch.no_grad():
        (master if how == "copy_" else master.data).copy_(new)
    assert torch.equal(model.state_dict()["weight"], new)
    optimizer.step()
    assert torch.equal(model.weight, new.half())
    assert torch.equal(model.state_dict()["weight"], new)


def test_a_half_weight_written_after_the_masters_were_read_is_kept(amp: ModuleType) -> None:
    model, optimizer = prepared(amp)
    list(amp.master_params(optimizer))
    with torch.no_grad():
        model.weight.fill_(0.5)
    assert torch.equal(model.state_dict()["weight"], torch.full((3, 4), 0.5))
    optimizer.step()
    assert torch.equal(model.weight, torch.full((3, 4), 0.5).half())


@pytest.mark.parametrize("through_data", [False, True])
def test_a_skipped_step_ends_what_the_masters_may_be_written_for(
    amp: ModuleType, through_data: bool
) -> None:
    """Clip, skip, clamp, as training a critic does."""
    model, optimizer = prepared(amp)
    with amp.scale_loss(model(torch.ones(2, 4)).sum() * torch.inf, optimizer) as scaled_loss:
        scaled_loss.backward()
    nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
    optimizer.step()
    assert amp.step_was_skipped(optimizer)
    with torch.no_grad():
        (model.weight.data if through_data else model.weight).clamp_(-0.125, 0.125)
    optimizer.zero_grad()
    assert model.state_dict()["weight"].abs().max() == 0.125
    optimizer.step()
    assert model.weight.abs().max() == 0.125


@pytest.mark.parametrize("turns", [(0, 0), (1, 1), (0, 1), (1, 0, 1)])
def test_writes_reach_the_masters_of_two_optimizers_of_one_parameter(
    amp: ModuleType, turns: tuple[int, ...]
) -> None:
    model = fine_linear()
    optimizers = [SGD(model.parameters(), lr=0.5) for _ in range(2)]
    model, optimizers = amp.initialize(
        model, optimizers, opt_level="O2", loss_scale=8.0, verbosity=0
    )
    for turn in turns:
        train_step(amp, model, optimizers[turn])
        with torch.no_grad():
            model.weight.clamp_(-0.25, 0.25)
        assert model.state_dict()["weight"].abs().max() == 0.25
    amp.deactivate()
    assert model.weight.abs().max() == 0.25


def test_masters_have_the_requires_grad_of_their_parameters(amp: ModuleType) -> None:
    model, optimizer = prepared(amp)
    model.weight.requires_grad_(False)
    assert [master.requires_grad for master in amp.master_params(optimizer)] == [False, True]


class Reference:
    """One weight in fp32, its half copy, and who wins where the two differ.

    Attributes:
        exact, half: its values.
        exposed: the user has had the master, and has not written to the half weight since.
        expects_step: the user has had the master, and no step has come since, made or skipped.
    """

    def __init__(self, value: Tensor, dtype: torch.dtype) -> None:
        self.exact = value.clone()
        self.half = value.to(dtype)
        self.dtype = dtype
        self.exposed = self.expects_step = False

    def settle(self) -> None:
        """Let the two agree, as before each step."""
        if self.exposed:
            self.half = self.exact.to(self.dtype)
        else:
            same = self.exact.to(self.dtype) == self.half
            self.exact = torch.where(same, self.exact, self.half.float())
        self.exposed = self.expects_step = False

    def step(self, gradient: float) -> None:
        self.settle()
        self.exact = self.exact - 0.125 * gradient
        self.half = self.exact.to(self.dtype)

    def load(self, value: Tensor) -> None:
        self.exact = value.float().clone()
        self.half = self.exact.to(self.dtype)
        self.exposed = False

    @property
    def state(self) -> Tensor:
        if self.exposed:
            return self.exact
        same = self.exact.to(self.dtype) == self.half
        return torch.where(same, self.exact, self.half.float())


VALUES = st.sampled_from([0.0, 1.0, -0.3, 1 + FINE, 1000.1, -(2.0**-20), float("inf")])
BEYOND_HALF = st.just(7e4)
ACTIONS = st.one_of(
    st.tuples(st.sampled_from(["step", "skip", "state", "expose", "release"])),
    st.tuples(st.sampled_from(["half", "half data", "half element"]), VALUES),
    st.tuples(st.sampled_from(["master", "load"]), VALUES | BEYOND_HALF),
)


def apply(action: tuple[Any, ...], amp: ModuleType, model: nn.Module, optimizer: Any) -> None:
    """Do to a model and its optimizer what `follow` does to the reference."""
    kind, *value = action
    if kind in ("step", "skip"):
        optimizer.zero_grad()
        factor = 1.0 if kind == "step" else float("inf")
        with amp.scale_loss(model(torch.ones(2, 4)).sum() * factor, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
    elif kind == "half":
        model.weight.fill_(value[0])
    elif kind == "half data":
        model.weight.data.mul_(value[0])
    elif kind == "half element":
        model.weight[0, 0] = value[0]
    elif kind == "master":
        next(amp.master_params(optimizer)).data.fill_(value[0])
    elif kind == "expose":
        list(amp.master_params(optimizer))
    elif kind == "load":
        model.load_state_dict({"weight": torch.full((3, 4), value[0])}, strict=False)


def follow(action: tuple[Any, ...], reference: Reference) -> None:
    kind, *value = action
    if kind == "step":
        reference.step(2.0)
    elif kind == "skip" and reference.expects_step:
        reference.settle()
    elif kind.startswith("half"):
        write_half(kind, value[0], reference)
    elif kind in ("master", "expose"):
        reference.settle()
        reference.expects_step = True
        before = reference.exact
        if kind == "master":
            reference.exact = torch.full_like(before, value[0])
        # masters that are only read are known to be so in the first steps
        reference.exposed = not torch.equal(
            reference.exact.view(torch.int32), before.view(torch.int32)
        )
    elif kind == "load":
        reference.load(torch.full((3, 4), value[0]))


def write_half(kind: str, value: float, reference: Reference) -> None:
    if kind == "half data":
        reference.half = reference.half.clone().mul_(value)
        return
    # seen to be written, while the actions write to the masters through .data only
    reference.exposed = False
    reference.half = reference.half.clone()
    (reference.half if kind == "half" else reference.half[0, 0]).fill_(value)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("fused", [False, True])
def test_any_sequence_of_writes_steps_and_loads_follows_the_rule(
    amp: ModuleType, level: str, fused: bool
) -> None:
    @example([("master", 7e4), ("half", 1000.1), ("skip",), ("half data", 1000.1)])
    @given(st.lists(ACTIONS, max_size=12))
    def run(actions: list[tuple[Any, ...]]) -> None:
        model = fine_linear()
        reference = Reference(model.weight.detach(), LEVELS[level])
        model, optimizer = prepared(
            amp, level, model, lambda params, lr: SGD(params, lr=lr, fused=fused)
        )
        for action in actions:
            if action[0] == "release":
                break
            with torch.no_grad() if action[0] not in ("step", "skip") else torch.enable_grad():
                apply(action, amp, model, optimizer)
            follow(action, reference)
            if action[0] in ("state", "step", "load"):
                state = model.state_dict()["weight"]
                torch.testing.assert_close(state, reference.state, rtol=0, atol=0, equal_nan=True)
                torch.testing.assert_close(
                    model.weight.data, reference.half, rtol=0, atol=0, equal_nan=True
                )
        reference.settle()
        amp.deactivate()
        torch.testing.assert_close(
            model.weight.data, reference.exact, rtol=0, atol=0, equal_nan=True
        )

    run()


# --- freezing, unfreezing, groups that come later ---


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("in_optimizer", [True, False])
def test_a_parameter_frozen_at_initialize_can_be_unfrozen(
    amp: ModuleType, level: str, in_optimizer: bool
) -> None:
    model = nn.Sequential(fine_linear(4, 4), fine_linear())
    model[0].requires_grad_(False)
    optimizer = SGD(model.parameters() if in_optimizer else model[1].parameters(), lr=0.125)
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=level, loss_scale=64.0, verbosity=0
    )
    frozen = copies(model)
    train_step(amp, model, optimizer)
    assert torch.equal(copies(model)["0.weight"], frozen["0.weight"])
    model[0].requires_grad_(True)
    if not in_optimizer:
        optimizer.add_param_group({"params": model[0].parameters()})
    optimizer.zero_grad()
    backward(amp, model, optimizer)
    gradient = next(m for m in amp.master_params(optimizer) if m.shape == (4, 4)).grad.clone()
    assert bool(gradient.any())
    assert torch.equal(model[0].weight.grad, gradient.to(LEVELS[level]))
    optimizer.step()
    assert torch.equal(copies(model)["0.weight"], frozen["0.weight"] - 0.125 * gradient)
    assert torch.equal(model[0].weight, copies(model)["0.weight"].to(LEVELS[level]))


class AssigningSGD(Optimizer):
    """Gives its parameters new storages, as optimizers written by hand do."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.data = param.data - group["lr"] * param.grad


@pytest.mark.parametrize("level", LEVELS)
def test_an_optimizer_that_assigns_data_trains_as_one_that_writes(
    amp: ModuleType, level: str
) -> None:
    states = []
    for make in (AssigningSGD, SGD):
        torch.manual_seed(0)
        model, optimizer = prepared(amp, level, nn.Linear(5, 3), make)
        for _ in range(4):
            train_step(amp, model, optimizer, torch.ones(2, 5))
        states.append(copies(model))
        assert_same(
            {k: p.detach().float() for k, p in model.named_parameters()},
            {k: v.to(model.weight.dtype).float() for k, v in states[-1].items()},
        )
        amp.deactivate()
    assert_same(*states)


# --- deactivate, O3 ---


@pytest.mark.parametrize("level", [*LEVELS, "O3"])
@pytest.mark.parametrize("make", [SGD, Adam], ids=["sgd", "adam"])
def test_after_deactivate_the_optimizer_steps_the_same_parameters(
    amp: ModuleType, level: str, make: type[Optimizer]
) -> None:
    model = fine_linear()
    params = list(model.parameters())
    options = {"momentum": 0.5} if make is SGD else {"eps": 1e-4}
    model, optimizer = prepared(amp, level, model, lambda p, lr: make(p, lr=lr, **options))
    train_step(amp, model, optimizer)
    state = copies(model)
    buffers = copy.deepcopy(optimizer.state_dict()["state"])
    amp.deactivate()
    assert all(a is b for a, b in zip(model.parameters(), params, strict=True))
    assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], params, strict=True))
    assert_same(copies(model), state)
    assert set(optimizer.state) == set(params)
    for param, old in zip(params, buffers.values(), strict=True):
        for key, value in old.items():
            assert optimizer.state[param][key].dtype is F32
            assert torch.equal(optimizer.state[param][key], value.float())
    assert "step" not in vars(optimizer)
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    reference = make([torch.nn.Parameter(param.detach().clone()) for param in params], lr=0.125,
                     **options)  # fmt: skip
    reference.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for expected, param in zip(reference.param_groups[0]["params"], params, strict=True):
        expected.grad = param.grad.clone()
    optimizer.step()
    reference.step()
    for expected, param in zip(reference.param_groups[0]["params"], params, strict=True):
        assert torch.equal(expected, param)


def test_deactivate_keeps_gradients(amp: ModuleType) -> None:
    model, optimizer = prepared(amp)
    backward(amp, model, optimizer)
    amp.deactivate()
    for param in model.parameters():
        assert torch.equal(param.grad, torch.full(param.shape, 2.0))


def test_o3_has_no_masters_and_states_half_weights_in_fp32(amp: ModuleType) -> None:
    model, optimizer = prepared(amp, "O3", make=lambda p, lr: Adam(p, lr=lr, eps=1e-4))
    rounded = {name: param.detach().float() for name, param in model.named_parameters()}
    assert all(a is b for a, b in zip(amp.master_params(optimizer), model.parameters(),
                                      strict=True))  # fmt: skip
    assert_same(copies(model), rounded)
    train_step(amp, model, optimizer)
    assert optimizer.state[model.weight]["exp_avg"].dtype is F16
    assert torch.equal(model.state_dict()["weight"], model.weight.float())


def test_o3_takes_state_that_was_there_before(amp: ModuleType) -> None:
    model = fine_linear()
    optimizer = Adam(model.parameters(), lr=0.125, eps=1e-4)
    optimizer.state["shared"] = {"mean": torch.ones(2)}
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    model, optimizer = amp.initialize(
        model, optimizer, opt_level="O3", loss_scale=64.0, verbosity=0
    )
    state = optimizer.state[model.weight]
    assert (state["exp_avg"].dtype, state["step"].dtype) == (F16, F32)
    assert optimizer.state["shared"]["mean"].dtype is F32
    train_step(amp, model, optimizer)


@pytest.mark.parametrize("overridden", [{"master_weights": False}])
def test_master_weights_can_be_switched_off(amp: ModuleType, overridden: dict[str, bool]) -> None:
    model, optimizer = prepared(amp, "O2", **overridden)
    assert next(amp.master_params(optimizer)) is model.weight
    assert model.weight.dtype is F16


# --- what is held ---


def test_masters_go_with_the_optimizer_and_the_model(amp: ModuleType) -> None:
    import gc
    import weakref

    model, optimizer = prepared(amp)
    train_step(amp, model, optimizer)
    references = [weakref.ref(optimizer), *map(weakref.ref, amp.master_params(optimizer))]
    gc.collect()
    gc.disable()
    try:
        del optimizer
        assert references[0]() is None
        param = weakref.ref(model.weight)
        del model
        assert param() is None
        assert [reference() for reference in references] == [None] * 3
    finally:
        gc.enable()


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_the_first_step_may_be_the_classs_with_a_closure(amp: ModuleType, level: str) -> None:
    model = nn.Linear(4, 4)
    optimizer = SGD(model.parameters(), lr=0.5)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    before = [param.detach().clone() for param in model.parameters()]

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).float().square().mean()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        return loss

    SGD.step(optimizer, closure)
    assert not any(map(torch.equal, before, model.parameters()))
    for half, master in zip(model.parameters(), amp.master_params(optimizer), strict=True):
        assert torch.equal(half, master.to(half.dtype))
