"""Which parameters have masters, what these start with, and how the optimizer gets its own back."""

import copy
from types import ModuleType

import pytest
import torch
from fine_linear import assert_same, backward, copies, fine_linear, prepared, train_step
from support import scaled_backward
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from amp_patch.weights.fp32_values import FP32Values
from amp_patch.weights.master_pairs import MasterPairs

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
LEVELS = {"O2": F16, "O5": BF16}


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


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_weight_of_another_shape_that_no_step_has_taken_is_released(
    amp: ModuleType, level: str
) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    scaled_backward(amp, model(torch.ones(2, 4)).float().sum(), optimizer)
    optimizer.step()
    model.weight.data, model.bias.data = torch.full((2, 4), 0.5), torch.zeros(2)  # pruned
    amp.deactivate()
    assert {param.dtype for param in model.parameters()} == {torch.float32}
    assert model(torch.ones(1, 4)).tolist() == [[2.0, 2.0]]


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


def test_names_stay_with_masters_and_what_is_no_half_parameter_stays_itself() -> None:
    half, other = nn.Parameter(torch.ones(2).half()), nn.Parameter(torch.ones(2))
    pairs = MasterPairs(SGD([half, other], lr=0.1), FP32Values(), None, ())
    (name, master), *others = pairs.replace([("weight", half), other, "no tensor"])
    assert (name, master.dtype, others) == ("weight", F32, [other, "no tensor"])
    assert list(pairs) == [(half, master)]
    assert pairs.replace([half]) == [master]
    assert pairs.param_of(master) is half
    assert pairs.param_of(other) is other
    pairs.drop_after(0)
    assert (len(pairs), pairs.versions.equal) == (0, [])
    assert pairs.param_of(master) is master
