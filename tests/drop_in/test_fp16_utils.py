"""apex.fp16_utils: conversions against copies made by hand, the optimizer against plain float32."""

from __future__ import annotations

import copy
import importlib
import math
import pickle
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import LBFGS, SGD, Adam

SHARES_APEX = True
STAR = """BN_convert_float DynamicLossScaler FP16Model FP16_Optimizer LossScaler clip_grad_norm
    convert_module convert_network fp16_optimizer fp16util loss_scaler
    master_params_to_model_params model_grads_to_master_grads network_to_half prep_param_lists
    to_python_float tofp16"""
INF = float("inf")


@pytest.fixture
def fp16(apex: types.ModuleType) -> Any:
    """The package apex.fp16_utils."""
    return importlib.import_module("apex.fp16_utils")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def network() -> nn.Sequential:
    """Convolution, affine batch norm, batch norm without weights, linear layer."""
    return nn.Sequential(
        nn.Conv1d(3, 4, 2),
        nn.BatchNorm1d(4),
        nn.BatchNorm1d(4, affine=False),
        nn.Flatten(),
        nn.Linear(12, 2),
    )


def dtypes(module: nn.Module) -> dict[str, torch.dtype]:
    return {name: tensor.dtype for name, tensor in module.state_dict().items()}


def test_star_import_gives_what_scripts_expect(fp16: Any) -> None:
    names: dict[str, Any] = {}
    exec("from apex.fp16_utils import *", names)
    assert sorted(set(names) - {"__builtins__"}) == sorted(STAR.split())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_convert_network_keeps_affine_batch_norms(fp16: Any, dtype: torch.dtype) -> None:
    model = network()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    params = list(model.parameters())
    assert fp16.convert_network(model, dtype) is model
    for name, value in model.state_dict().items():
        kept = name.startswith("1.") or name.endswith("num_batches_tracked")
        assert torch.equal(value, expected[name] if kept else expected[name].to(dtype)), name
        assert value.dtype == (expected[name].dtype if kept else dtype), name
    assert [id(param) for param in model.parameters()] == [id(param) for param in params]


def test_convert_module_casts_gradients_and_not_children(fp16: Any) -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    module.register_parameter("scale", nn.Parameter(torch.ones(2)))
    module.register_buffer("count", torch.tensor(3))
    gradient = torch.tensor([1.0, 1 / 3])
    module.scale.grad = gradient.clone()
    fp16.convert_module(module, torch.half)
    assert module.scale.dtype == torch.half
    assert torch.equal(module.scale.grad, gradient.half())
    assert module.count.dtype == torch.int64
    assert module[0].weight.dtype == torch.float32
    (module.scale.float() * 2).sum().backward()
    assert torch.equal(module.scale.grad, gradient.half() + 2)


def test_converted_recurrent_layer_runs(fp16: Any) -> None:
    layer = fp16.convert_network(nn.LSTM(3, 4), torch.bfloat16)
    output, _ = layer(torch.randn(2, 1, 3, dtype=torch.bfloat16))
    assert output.dtype == torch.bfloat16


def test_network_to_half_takes_float32_inputs(fp16: Any) -> None:
    model = network()
    reference = copy.deepcopy(model)
    half = fp16.network_to_half(model)
    assert isinstance(half[0], fp16.tofp16)
    assert half[1] is model
    assert dtypes(model)["0.weight"] == torch.half
    assert dtypes(model)["1.weight"] == torch.float32
    inputs = torch.randn(5, 3, 4)
    output = half(inputs)
    assert output.dtype == torch.half
    torch.testing.assert_close(output.float(), reference(inputs), rtol=0.01, atol=0.01)


def test_bn_convert_float_finds_nested_norms(fp16: Any) -> None:
    model = nn.Sequential(nn.Sequential(nn.BatchNorm2d(2), nn.Linear(2, 2))).half()
    assert fp16.BN_convert_float(model) is model
    assert model[0][0].weight.dtype == torch.float32
    assert model[0][0].running_var.dtype == torch.float32
    assert model[0][1].weight.dtype == torch.half


def test_fp16_model_casts_every_input(fp16: Any) -> None:
    class Sum(nn.Module):
        def forward(self, first: Tensor, second: Tensor) -> Tensor:
            return first + second

    first, second = torch.tensor([1 / 3]), torch.tensor([1 / 7])
    model = fp16.FP16Model(Sum())
    assert torch.equal(model(first, second), first.half() + second.half())
    assert isinstance(model.network, Sum)


@pytest.mark.parametrize("flat", [False, True])
def test_param_lists_there_and_back(fp16: Any, flat: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)).half()
    model[0].bias.requires_grad_(False)
    trained = [model[0].weight, model[1].weight, model[1].bias]
    model_params, masters = fp16.prep_param_lists(model, flat_master=flat)
    assert [id(param) for param in model_params] == [id(param) for param in trained]
    assert len(masters) == (1 if flat else 3)
    assert all(master.dtype == torch.float32 and master.requires_grad for master in masters)
    for index, param in enumerate(trained[:-1]):
        param.grad = torch.full_like(param, index + 0.5)
    fp16.model_grads_to_master_grads(model_params, masters, flat_master=flat)
    if flat:
        expected = torch.cat([torch.full((6,), 0.5), torch.full((4,), 1.5), torch.zeros(2)])
        assert torch.equal(masters[0].grad, expected)
    else:
        assert torch.equal(masters[1].grad, torch.full((2, 2), 1.5))
        assert masters[2].grad is None
    before = [param.detach().clone() for param in trained]
    with torch.no_grad():
        for master in masters:
            master.add_(1 / 3)
    fp16.master_params_to_model_params(model_params, masters, flat_master=flat)
    for param, old in zip(trained, before, strict=True):
        assert torch.equal(param, (old.float() + 1 / 3).half())


def test_gradients_are_copied_again_into_the_same_tensors(fp16: Any) -> None:
    model_params, masters = fp16.prep_param_lists(nn.Linear(2, 2).half())
    for value in (1.0, 2.0):
        for param in model_params:
            param.grad = torch.full_like(param, value)
        fp16.model_grads_to_master_grads(model_params, masters)
        assert all(bool((master.grad == value).all()) for master in masters)
    model_params[0].grad = None
    fp16.model_grads_to_master_grads(model_params, masters)
    assert masters[0].grad is None


def test_one_flat_master_needs_one_dtype(fp16: Any) -> None:
    model = nn.Sequential(nn.Linear(2, 2).half(), nn.Linear(2, 2))
    with pytest.raises(TypeError, match="one dtype; got torch.float16, torch.float32. Call prep_"):
        fp16.prep_param_lists(model, flat_master=True)


def test_numbers_of_tensors_and_sequences(fp16: Any) -> None:
    assert type(fp16.to_python_float(torch.tensor([2.5]))) is float
    assert fp16.to_python_float(torch.tensor(2.5)) == 2.5
    assert fp16.to_python_float([3.5]) == 3.5


def test_static_scaler_scales_and_stays(fp16: Any) -> None:
    scaler = fp16.LossScaler(8)
    param = nn.Parameter(torch.tensor([INF]))
    param.grad = torch.tensor([INF])
    scaler.update_scale(scaler.has_overflow([param]))
    assert scaler.loss_scale == 8
    weight = nn.Parameter(torch.tensor(3.0))
    scaler.backward(weight * 2)
    assert weight.grad == 16
    assert scaler.scale_gradient(None, (torch.ones(1), None), ()) == (torch.tensor([8.0]), None)


def test_scaled_backward_may_keep_the_graph(fp16: Any) -> None:
    weight = nn.Parameter(torch.tensor(3.0))
    loss = weight * weight
    scaler = fp16.DynamicLossScaler(init_scale=4)
    scaler.backward(loss, retain_graph=True)
    scaler.backward(loss)
    assert weight.grad == 2 * 4 * 6


@pytest.mark.parametrize(("value", "found"), [(1.0, False), (INF, True), (math.nan, True)])
def test_dynamic_scaler_looks_at_gradients(fp16: Any, value: float, found: bool) -> None:
    params = [nn.Parameter(torch.ones(2, dtype=torch.half)) for _ in range(3)]
    params[2].grad = torch.tensor([60000.0, value]).half()
    params[1].grad = torch.full_like(params[1], 60000)  # finite, and its sum is not
    assert fp16.DynamicLossScaler().has_overflow(params) is found


def test_dynamic_scale_follows_its_rule(fp16: Any) -> None:
    @given(st.lists(st.booleans(), max_size=40), st.integers(1, 4))
    def holds(overflows: list[bool], window: int) -> None:
        scaler = fp16.DynamicLossScaler(init_scale=16.0, scale_window=window)
        exponent, clean = 4, 1  # the first rise comes one iteration early
        for overflow in overflows:
            scaler.update_scale(overflow)
            if overflow:
                exponent, clean = max(exponent - 1, 0), 1
            else:
                exponent += clean % window == 0
                clean += 1
            assert scaler.loss_scale == 2.0**exponent
        assert scaler.cur_iter == len(overflows)

    holds()


# FP16_Optimizer


def half_model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).half()


def batch(rows: int = 16) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(rows, 4)
    return inputs, inputs.sum(1, keepdim=True).tanh()


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    dtype = next(model.parameters()).dtype
    return F.mse_loss(model(inputs.to(dtype)).float(), targets)


def wrapped(fp16: Any, params: Any, lr: float = 0.1, **options: Any) -> Any:
    return fp16.FP16_Optimizer(SGD(params, lr=lr), verbose=False, **options)


def mixed(fp16: Any, **options: Any) -> tuple[nn.Parameter, nn.Parameter, Any]:
    """A half weight, a float32 weight and an optimizer of both."""
    half, full = nn.Parameter(torch.ones(2).half()), nn.Parameter(torch.ones(2))
    return half, full, wrapped(fp16, [half, full], **options)


def product(half: Tensor, full: Tensor, factor: float = 1.0) -> Tensor:
    """A loss whose gradients are factor * (1, 2), and factor * (3, 3)."""
    return (half.float() * torch.tensor([1.0, 2.0]) + 3 * full).sum() * factor


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scale", [{"static_loss_scale": 128.0}, {"dynamic_loss_scale": True}])
def test_training_reaches_the_loss_of_float32(
    fp16: Any, dtype: torch.dtype, scale: dict[str, Any]
) -> None:
    reference = half_model().float()
    model = copy.deepcopy(reference).to(dtype)
    plain, inner = Adam(reference.parameters(), lr=0.01), Adam(model.parameters(), lr=0.01)
    optimizer = fp16.FP16_Optimizer(inner, verbose=False, **scale)
    inputs, targets = batch(64)
    for _ in range(60):
        optimizer.zero_grad()
        loss = loss_of(model, inputs, targets)
        optimizer.backward(loss)
        optimizer.step()
        plain.zero_grad()
        expected = loss_of(reference, inputs, targets)
        expected.backward()
        plain.step()
    assert model[0].weight.dtype == dtype
    assert expected < 0.1
    torch.testing.assert_close(loss.item(), expected.item(), rtol=0.1, atol=0.005)
    masters = optimizer.param_groups[0]["params"]
    for param, master in zip(optimizer.all_fp16_params, masters, strict=True):
        assert master.dtype == torch.float32
        assert torch.equal(param, master.to(dtype))


def test_masters_stand_where_half_parameters_stood(fp16: Any) -> None:
    half, full = nn.Parameter(torch.ones(2).half()), nn.Parameter(torch.ones(3))
    frozen = nn.Parameter(torch.ones(1).half(), requires_grad=False)
    optimizer = wrapped(fp16, [{"params": [full, half]}, {"params": [frozen], "lr": 1.0}])
    first, second = optimizer.param_groups
    assert first["params"][0] is full
    master = first["params"][1]
    assert second["params"][0] is frozen
    assert optimizer.fp16_groups == [[half], []]
    assert optimizer.fp32_from_fp16_groups[0][0] is master
    assert optimizer.fp32_from_fp16_groups[1] == []
    assert optimizer.fp32_from_fp32_groups[0][0] is full
    assert [*optimizer.all_fp16_params] == [half]
    assert optimizer.all_fp32_from_fp16_params[0] is master
    assert optimizer.all_fp32_from_fp32_params[0] is full
    assert optimizer.param_groups is optimizer.optimizer.param_groups


def test_state_of_before_moves_to_the_masters(fp16: Any) -> None:
    param = nn.Parameter(torch.ones(2).half())
    inner = SGD([param], lr=0.5, momentum=0.5)
    param.grad = torch.full_like(param, 2.0)
    inner.step()
    optimizer = fp16.FP16_Optimizer(inner, verbose=False)
    (master,) = optimizer.param_groups[0]["params"]
    momentum = optimizer.state[master]["momentum_buffer"]
    assert momentum.dtype == torch.float32
    assert torch.equal(momentum, torch.full((2,), 2.0))
    assert param not in optimizer.state


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_other_dtypes_are_refused(fp16: Any, dtype: torch.dtype) -> None:
    half, other = nn.Parameter(torch.ones(2).half()), nn.Parameter(torch.ones(2, dtype=dtype))
    inner = SGD([half, other], lr=0.1)
    with pytest.raises(TypeError, match=f"float16, bfloat16 and float32; got one in {dtype}. Call"):
        fp16.FP16_Optimizer(inner, verbose=False)
    assert inner.param_groups[0]["params"][0] is half
    optimizer = wrapped(fp16, [half])
    with pytest.raises(TypeError, match="float16, bfloat16 and float32"):
        optimizer.add_param_group({"params": [other]})
    assert len(optimizer.param_groups) == 1


def test_verbose_prints_each_parameter(fp16: Any, capsys: pytest.CaptureFixture[str]) -> None:
    fp16.FP16_Optimizer(SGD([nn.Parameter(torch.ones(2).half())], lr=0.1))
    assert capsys.readouterr().out == (
        "FP16_Optimizer processing param group 0:\n"
        "FP16_Optimizer received torch.HalfTensor with torch.Size([2])\n"
    )
    wrapped(fp16, [nn.Parameter(torch.ones(2).half())])
    assert capsys.readouterr().out == ""


def test_gradients_of_masters_are_unscaled(fp16: Any) -> None:
    half, full, optimizer = mixed(fp16, static_loss_scale=64.0)
    optimizer.backward(product(half, full))
    assert torch.equal(half.grad, torch.tensor([64.0, 128.0]).half())
    (gradients,) = optimizer.inspect_master_grad_data()
    assert torch.equal(gradients[0], torch.tensor([1.0, 2.0]))
    assert torch.equal(gradients[1], torch.tensor([3.0, 3.0]))
    assert gradients[0].dtype == torch.float32
    optimizer.step()
    assert torch.equal(half, (torch.ones(2) - 0.1 * torch.tensor([1.0, 2.0])).half())
    torch.testing.assert_close(full.detach(), torch.full((2,), 0.7))


def test_gradient_too_small_for_half_reaches_the_master(fp16: Any) -> None:
    param = nn.Parameter(torch.zeros(1).half())
    optimizer = wrapped(fp16, [param], lr=1.0, static_loss_scale=2.0**14)
    optimizer.backward(param * 2.0**-20 * 2.0**-8)
    optimizer.step()
    assert optimizer.param_groups[0]["params"][0].item() == -(2.0**-28)


def test_verbosity_0_silences_the_skip(
    fp16: Any, apex: types.ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    half, full, optimizer = mixed(fp16, dynamic_loss_scale=True)
    state = importlib.import_module("apex.amp")._amp_state
    before, state.verbosity = state.verbosity, 0
    try:
        optimizer.backward(product(half, full, INF))
        optimizer.step()
    finally:
        state.verbosity = before
    assert capsys.readouterr().out == ""


def test_unused_parameters_keep_no_gradient(fp16: Any) -> None:
    half, full, optimizer = mixed(fp16, static_loss_scale=4.0)
    optimizer.backward(full.sum())
    assert optimizer.inspect_master_grad_data()[0][0] is None
    optimizer.zero_grad(set_grads_to_None=True)
    optimizer.backward(half.float().sum())
    assert optimizer.inspect_master_grad_data()[0][1] is None


@pytest.mark.parametrize("at_once", [True, False])
def test_backward_passes_add_up_while_the_scale_grows(fp16: Any, at_once: bool) -> None:
    args = {"init_scale": 4.0, "scale_window": 1}
    half, full, optimizer = mixed(fp16, dynamic_loss_scale=True, dynamic_loss_args=args)
    for _ in range(3):
        optimizer.backward(product(half, full), update_master_grads=at_once)
    if not at_once:
        assert optimizer.inspect_master_grad_data()[0][0] is None
        optimizer.update_master_grads()
    assert optimizer.loss_scale == (32.0 if at_once else 8.0)
    (gradients,) = optimizer.inspect_master_grad_data()
    assert torch.equal(gradients[0], torch.tensor([3.0, 6.0]))
    assert torch.equal(gradients[1], torch.tensor([9.0, 9.0]))


@pytest.mark.parametrize(
    "scale",
    [
        {"static_loss_scale": 64.0},
        {"dynamic_loss_scale": True, "dynamic_loss_args": {"init_scale": 4.0, "scale_window": 2}},
    ],
)
@pytest.mark.parametrize("passes", [1, 2, 3])
def test_several_backward_passes_before_a_step_train_as_in_float32(
    fp16: Any, scale: dict[str, Any], passes: int
) -> None:
    """apex unscaled what the first of them left at float32 parameters a second time."""
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    reference = copy.deepcopy(model)
    fp16.convert_network(model, torch.half)
    optimizer = wrapped(fp16, model.parameters(), **scale)
    plain = SGD(reference.parameters(), lr=0.1)
    batches = [batch() for _ in range(passes)]
    for _ in range(4):
        optimizer.zero_grad()
        plain.zero_grad()
        for inputs, targets in batches:
            optimizer.backward(loss_of(model, inputs, targets))
            loss_of(reference, inputs, targets).backward()
        optimizer.step()
        plain.step()
    assert model[0].weight.dtype is torch.half
    assert model[1].weight.dtype is torch.float32
    for param, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(param.float(), expected, rtol=0.02, atol=0.02)
        assert not torch.equal(expected, torch.ones_like(expected))


def test_own_backward_pass_of_a_scaled_loss(fp16: Any) -> None:
    half, full, optimizer = mixed(fp16, static_loss_scale=4.0)
    optimizer.backward(product(half, full))
    optimizer.zero_grad()
    (product(half, full) * optimizer.loss_scale).backward()
    optimizer.backward(product(half, full))
    (gradients,) = optimizer.inspect_master_grad_data()
    assert torch.equal(gradients[0], torch.tensor([2.0, 4.0]))
    assert torch.equal(gradients[1], torch.tensor([6.0, 6.0]))


def test_overflow_of_before_is_forgotten(fp16: Any) -> None:
    args = {"init_scale": 4.0}
    half, full, optimizer = mixed(fp16, dynamic_loss_scale=True, dynamic_loss_args=args)
    optimizer.loss_scaler.unscale([torch.tensor([INF])], [torch.ones(1)], 1.0)
    optimizer.backward(product(half, full))
    assert optimizer.overflow is False


@pytest.mark.parametrize("to_none", [True, False])
def test_zero_grad_clears_model_and_masters(fp16: Any, to_none: bool) -> None:
    half, full, optimizer = mixed(fp16, static_loss_scale=4.0)
    optimizer.backward(product(half, full))
    master = optimizer.param_groups[0]["params"][0]
    optimizer.zero_grad(set_grads_to_None=to_none)
    for param in (half, full, master):
        assert param.grad is None if to_none else not param.grad.any()
    optimizer.backward(product(half, full))
    assert torch.equal(master.grad, torch.tensor([1.0, 2.0]))
    assert torch.equal(full.grad, torch.tensor([3.0, 3.0]))


def test_graph_is_kept_where_asked(fp16: Any) -> None:
    half, full, optimizer = mixed(fp16, static_loss_scale=4.0)
    loss = product(half, full) ** 2
    optimizer.backward(loss, retain_graph=True)
    once = optimizer.inspect_master_grad_data()[0][0].clone()
    optimizer.backward(loss)
    assert torch.equal(optimizer.inspect_master_grad_data()[0][0], 2 * once)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        optimizer.backward(loss)


@pytest.mark.parametrize("place", ["half", "full"])
def test_overflow_skips_the_step(fp16: Any, place: str, capsys: pytest.CaptureFixture[str]) -> None:
    args = {"init_scale": 2048.0}
    half, full, optimizer = mixed(fp16, dynamic_loss_scale=True, dynamic_loss_args=args)
    optimizer.backward({"half": half, "full": full}[place].float().sum() * INF)
    assert optimizer.overflow is True
    assert optimizer.clip_master_grads(1.0) == -1
    assert optimizer.inspect_master_grad_data() is None
    assert "in an overflow state." in capsys.readouterr().out
    assert optimizer.step() is None
    assert capsys.readouterr().out == (
        "Gradient overflow.  Skipping step, reducing loss scale to 1024.0\n"
    )
    assert torch.equal(half, torch.ones(2).half())
    assert torch.equal(full, torch.ones(2))
    optimizer.zero_grad()
    optimizer.backward(product(half, full))
    optimizer.step()
    assert optimizer.overflow is False
    assert capsys.readouterr().out == ""
    torch.testing.assert_close(full.detach(), torch.full((2,), 0.7))


@pytest.mark.parametrize("norm_type", [2, INF])
def test_clipping_the_masters(fp16: Any, norm_type: float) -> None:
    half, full, optimizer = mixed(fp16, static_loss_scale=16.0)
    optimizer.backward(product(half, full))
    flat = torch.tensor([1.0, 2.0, 3.0, 3.0], dtype=torch.float64)
    norm = torch.linalg.vector_norm(flat, norm_type)
    assert optimizer.clip_master_grads(0.5, norm_type).item() == pytest.approx(norm.item())
    clipped = torch.cat(optimizer.inspect_master_grad_data()[0])
    torch.testing.assert_close(clipped.double(), flat * 0.5 / norm, rtol=1e-5, atol=0)


def lbfgs(params: Any) -> LBFGS:
    return LBFGS(params, lr=0.5, max_iter=6, line_search_fn="strong_wolfe")


def test_closure_is_evaluated_on_the_moved_model(fp16: Any) -> None:
    torch.manual_seed(4)
    reference = half_model().float()
    model = copy.deepcopy(reference).half()
    plain = lbfgs(reference.parameters())
    optimizer = fp16.FP16_Optimizer(lbfgs(model.parameters()), 128.0, verbose=False)
    inputs, targets = batch(64)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, inputs, targets)
        optimizer.backward(loss)
        return loss

    def plain_closure() -> Tensor:
        plain.zero_grad()
        loss = loss_of(reference, inputs, targets)
        loss.backward()
        return loss

    losses = [(optimizer.step(closure).item(), plain.step(plain_closure).item()) for _ in range(5)]
    assert losses[-1][1] < 0.2 * losses[0][1]
    assert losses[-1][0] == pytest.approx(losses[-1][1], rel=0.2, abs=0.002)
    assert optimizer.first_closure_call_this_step is True


def test_closure_that_overflows_is_repeated(fp16: Any, capsys: pytest.CaptureFixture[str]) -> None:
    half, full, optimizer = mixed(fp16, dynamic_loss_scale=True)
    factors = iter([INF, INF, 1.0])

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = product(half, full, next(factors))
        optimizer.backward(loss)
        return loss

    assert optimizer.step(closure).item() == 9.0
    line = "OVERFLOW within closure! Skipping step, reducing loss scale to {}\n"
    assert capsys.readouterr().out == line.format(32768.0) + line.format(16384.0)
    torch.testing.assert_close(full.detach(), torch.full((2,), 0.7))


def test_closure_that_never_is_finite_ends(fp16: Any) -> None:
    args = {"min_loss_scale": 2.0**14}
    half, full, optimizer = mixed(fp16, dynamic_loss_scale=True, dynamic_loss_args=args)

    def closure() -> None:
        optimizer.zero_grad()
        optimizer.backward(product(half, full, math.nan))

    with pytest.raises(RuntimeError, match="down to the lowest, 16384.0. Look for the inf or NaN"):
        optimizer.step(closure)
    assert optimizer.first_closure_call_this_step is True


def test_scale_may_be_set(fp16: Any) -> None:
    half, full, optimizer = mixed(fp16, dynamic_loss_scale=True)
    assert optimizer.loss_scale == 2.0**16
    optimizer.loss_scale = 8.0
    optimizer.backward(product(half, full))
    assert torch.equal(half.grad, torch.tensor([8.0, 16.0]).half())
    assert optimizer.loss_scaler.loss_scale() == 8.0


def test_state_and_groups_may_be_set(fp16: Any) -> None:
    _, _, optimizer = mixed(fp16)
    groups, state = [dict(optimizer.param_groups[0], lr=7.0)], {"a": 1}
    optimizer.param_groups, optimizer.state = groups, state
    assert optimizer.optimizer.param_groups is groups
    assert optimizer.optimizer.state is state
    assert optimizer.state is state


def trained(fp16: Any, model: nn.Module, optimizer: Any, steps: int) -> None:
    torch.manual_seed(1)
    inputs, targets = batch()
    for _ in range(steps):
        optimizer.zero_grad()
        optimizer.backward(loss_of(model, inputs, targets))
        optimizer.step()


def test_resumed_run_goes_on_bit_by_bit(fp16: Any) -> None:
    args = {"init_scale": 32.0, "scale_window": 3}

    def made() -> tuple[nn.Module, Any]:
        torch.manual_seed(2)
        model = half_model()
        return model, fp16.FP16_Optimizer(
            Adam(model.parameters(), 0.01), 1.0, True, args, verbose=False
        )

    model, optimizer = made()
    trained(fp16, model, optimizer, 4)
    state = optimizer.state_dict()
    assert list(state) == [
        "loss_scaler", "dynamic_loss_scale", "overflow", "first_closure_call_this_step",
        "optimizer_state_dict", "fp32_from_fp16",
    ]  # fmt: skip
    assert type(state["loss_scaler"]).__module__ == "apex.amp.scaler"
    again, other = made()
    again.load_state_dict(model.state_dict())
    other.load_state_dict(pickle.loads(pickle.dumps(state)))
    trained(fp16, again, other, 5)
    trained(fp16, model, optimizer, 5)
    assert other.loss_scale == optimizer.loss_scale == 256.0
    for mine, theirs in zip(
        optimizer.all_fp32_from_fp16_params, other.all_fp32_from_fp16_params, strict=True
    ):
        assert torch.equal(mine, theirs)


def test_checkpoint_is_loaded_as_scripts_do(fp16: Any, tmp_path: Path) -> None:
    _, _, optimizer = mixed(fp16, dynamic_loss_scale=True)
    optimizer.loss_scale = 32.0
    torch.save({"optimizer": optimizer.state_dict()}, tmp_path / "checkpoint.pt")
    _, _, other = mixed(fp16)
    other.load_state_dict(torch.load(tmp_path / "checkpoint.pt")["optimizer"])
    assert other.loss_scale == 32.0


def test_loaded_scaler_moves_alone(fp16: Any) -> None:
    _, _, optimizer = mixed(fp16, dynamic_loss_scale=True)
    half, full, other = mixed(fp16)
    other.load_state_dict(optimizer.state_dict())
    other.backward(product(half, full, INF))
    assert other.dynamic_loss_scale is True
    assert (optimizer.loss_scale, other.loss_scale) == (2.0**16, 2.0**15)


def test_state_of_another_model_is_refused(fp16: Any) -> None:
    _, _, optimizer = mixed(fp16)
    other = wrapped(fp16, [nn.Parameter(torch.ones(2).half()) for _ in range(2)])
    with pytest.raises(ValueError, match=r"must hold \[1\] masters in its groups; got \[2\]. Call"):
        optimizer.load_state_dict(other.state_dict())


@pytest.mark.parametrize("kind", ["not wrapped", "half of it"])
def test_state_of_another_kind_is_refused_before_anything_is_loaded(fp16: Any, kind: str) -> None:
    _, _, optimizer = mixed(fp16, dynamic_loss_scale=True)
    before = optimizer.loss_scaler
    state = optimizer.optimizer.state_dict()
    if kind == "half of it":
        state = {key: optimizer.state_dict()[key] for key in ("loss_scaler", "fp32_from_fp16")}
    with pytest.raises(ValueError, match=r"must hold loss_scaler, .*; got one with \[.*Load it"):
        optimizer.load_state_dict(state)
    assert optimizer.loss_scaler is before


@pytest.mark.parametrize("act", [pickle.dumps, copy.deepcopy])
def test_optimizer_itself_is_not_pickled(fp16: Any, act: Any) -> None:
    _, _, optimizer = mixed(fp16)
    with pytest.raises(RuntimeError, match=r"cannot be pickled or copied; .* Save optimizer.state"):
        act(optimizer)


@pytest.mark.parametrize("alone", [True, False])
def test_group_added_later_gets_masters(fp16: Any, alone: bool) -> None:
    _, _, optimizer = mixed(fp16, static_loss_scale=4.0)
    added = nn.Parameter(torch.ones(2).half())
    optimizer.add_param_group({"params": added if alone else [added], "lr": 1.0})
    optimizer.backward(added.float().sum())
    optimizer.step()
    assert torch.equal(added, torch.zeros(2).half())
    assert optimizer.fp16_groups[1] == [added]
    assert optimizer.fp32_from_fp16_groups[1][0] is optimizer.param_groups[1]["params"][0]
