"""Masters against fp32 training written by hand; their gradients, and state dicts of them."""

import copy
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from fine_linear import FINE, assert_same, backward, copies, fine_linear, prepared, train_step
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer, SparseAdam

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
LEVELS = {"O2": F16, "O5": BF16}


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


def test_masters_have_the_requires_grad_of_their_parameters(amp: ModuleType) -> None:
    model, optimizer = prepared(amp)
    model.weight.requires_grad_(False)
    assert [master.requires_grad for master in amp.master_params(optimizer)] == [False, True]


# --- levels without masters ---


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
