"""The FP16_Optimizers of apex.optimizers and apex.contrib.optimizers against plain float32."""

from __future__ import annotations

import copy
import importlib
import inspect
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
SHARES_APEX = True
SHAPES = [(), (4,), (3, 5)]
BOTH = ["apex.optimizers", "apex.contrib.optimizers"]


@pytest.fixture(params=BOTH)
def module(apex: types.ModuleType, request: pytest.FixtureRequest) -> Any:
    """A package that has an FP16_Optimizer."""
    return importlib.import_module(request.param)


@pytest.fixture
def flat(apex: types.ModuleType) -> Any:
    """apex.optimizers, whose FP16_Optimizer has flat masters."""
    return importlib.import_module("apex.optimizers")


def parameters(seed: int = 0, dtype: torch.dtype = F16) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def give_gradients(params: list[nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)


def model_and_data() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 4))
    x = torch.randn(32, 8)
    return model, x, torch.stack([x[:, i : i + 4].sum(1) for i in range(4)], 1)


def masters_of(optimizer: Any) -> list[Tensor]:
    """Return the masters in the shapes of the parameters."""
    params = [param for group in optimizer.fp16_groups for param in group]
    if hasattr(optimizer, "fp32_groups"):
        return [master for group in optimizer.fp32_groups for master in group]
    whole = torch.cat(optimizer.fp32_groups_flat)
    parts = whole.split([param.numel() for param in params])
    return [part.view_as(param) for part, param in zip(parts, params, strict=True)]


def test_arguments_are_apexs(module: Any) -> None:
    signature = inspect.signature(module.FP16_Optimizer)
    assert {name: param.default for name, param in signature.parameters.items()} == {
        "init_optimizer": inspect.Parameter.empty, "static_loss_scale": 1.0,
        "dynamic_loss_scale": False, "dynamic_loss_args": None, "verbose": True,
    }  # fmt: skip
    expected = f"{module.__name__}.fp16_optimizer"
    assert module.FP16_Optimizer.__module__ == expected


@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize("of_torch", [True, False])
def test_it_steps_as_float32_does(module: Any, dtype: torch.dtype, of_torch: bool) -> None:
    """Gradients of every step are those of the half parameters; the rest is float32."""
    params, exact = parameters(0, dtype), [p.detach().float() for p in parameters(0, dtype)]
    groups = [{"params": params[:2], "weight_decay": 0.25}, {"params": params[2:]}]
    copies = [{"params": exact[:2], "weight_decay": 0.25}, {"params": exact[2:]}]
    kind = torch.optim.AdamW if of_torch else module.FusedAdam
    options = {"weight_decay": 0.0} if of_torch else {}
    optimizer = module.FP16_Optimizer(kind(groups, lr=0.25, **options), static_loss_scale=8.0)
    expected = kind(copies, lr=0.25, **options)
    for step in range(4):
        give_gradients(params, step)
        for param, other in zip(params, exact, strict=True):
            other.grad = param.grad.float() / 8
        optimizer.step()
        expected.step()
        for param, master, other in zip(params, masters_of(optimizer), exact, strict=True):
            torch.testing.assert_close(master.detach(), other, rtol=1e-6, atol=1e-6)
            assert torch.equal(param, master.to(dtype))
            assert param.dtype is dtype


def test_a_bert_script_trains(module: Any) -> None:
    model, x, y = model_and_data()
    model.half()
    groups = [
        {"params": [p for n, p in model.named_parameters() if "bias" not in n]},
        {"params": [p for n, p in model.named_parameters() if "bias" in n]},
    ]
    groups[0]["weight_decay"] = 0.01
    adam = module.FusedAdam(groups, lr=0.03, bias_correction=False, max_grad_norm=1.0)
    optimizer = module.FP16_Optimizer(adam, dynamic_loss_scale=True, verbose=False)
    losses = []
    for _ in range(60):
        loss = (model(x.half()).float() - y).square().mean()
        optimizer.backward(loss)
        for group in optimizer.param_groups:
            group["lr"] = 0.02
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]
    assert model[0].weight.dtype is F16
    assert optimizer.param_groups[0]["params"][0].dtype is F32
    assert torch.equal(model[0].weight, masters_of(optimizer)[0].half())


@pytest.mark.parametrize("verbose", [True, False])
@pytest.mark.parametrize("dynamic", [True, False])
def test_an_overflow_is_skipped(module: Any, capsys: Any, verbose: bool, dynamic: bool) -> None:
    params = parameters()
    optimizer = module.FP16_Optimizer(
        module.FusedAdam(params), static_loss_scale=8.0, dynamic_loss_scale=dynamic,
        verbose=verbose,
    )  # fmt: skip
    before = [param.detach().clone() for param in params]
    give_gradients(params, 0)
    params[2].grad[1] = float("nan")
    optimizer.step()
    assert all(map(torch.equal, params, before))
    assert optimizer.overflow
    assert not optimizer.state
    assert optimizer.loss_scale == (2.0**15 if dynamic else 8.0)
    printed = capsys.readouterr().out
    kind = "dynamic loss scale of 65536.0" if dynamic else "static loss scale of 8.0"
    expected = f"\nGrad overflow on iteration 0\nUsing {kind}\n"
    assert printed == (expected if verbose else "")


def test_the_dynamic_scale_doubles_after_its_window(module: Any) -> None:
    params = parameters()
    arguments = {"init_scale": 4.0, "scale_window": 3}
    optimizer = module.FP16_Optimizer(
        module.FusedAdam(params), dynamic_loss_scale=True, dynamic_loss_args=arguments
    )
    scales = []
    for _ in range(6):
        give_gradients(params, 0)
        optimizer.step()
        scales.append(optimizer.cur_scale)
    assert scales == [4.0, 4.0, 8.0, 8.0, 8.0, 16.0]


def test_the_scale_falls_no_lower_than_1(module: Any) -> None:
    params = parameters()
    optimizer = module.FP16_Optimizer(
        module.FusedAdam(params), dynamic_loss_scale=True, verbose=False
    )
    for _ in range(20):
        params[1].grad = torch.full_like(params[1], float("inf"))
        optimizer.step()
    assert optimizer.cur_scale == 1


def made(module: Any, seed: int, dynamic: bool = True) -> tuple[list[nn.Parameter], Any]:
    params = parameters(seed)
    groups = [{"params": params[:2]}, {"params": params[2:], "weight_decay": 0.5}]
    adam = module.FusedAdam(groups, lr=0.25)
    return params, module.FP16_Optimizer(adam, dynamic_loss_scale=dynamic)


@pytest.mark.parametrize("dynamic", [True, False])
def test_a_run_goes_on_from_a_file(module: Any, dynamic: bool, tmp_path: Path) -> None:
    params, optimizer = made(module, 0, dynamic)
    give_gradients(params, 0)
    optimizer.step()
    model = {str(index): param for index, param in enumerate(params)}
    torch.save({"model": model, "optimizer": optimizer.state_dict()}, tmp_path / "saved.pt")
    saved = torch.load(tmp_path / "saved.pt")
    scale = {"last_overflow_iter", "scale_factor", "scale_window"} if dynamic else set()
    masters = "fp32_groups_flat" if module.__name__ == "apex.optimizers" else "fp32_groups"
    assert set(saved["optimizer"]) == {
        "dynamic_loss_scale", "cur_scale", "cur_iter", "optimizer_state_dict", masters, *scale
    }  # fmt: skip
    others, loaded = made(module, 1, not dynamic)
    for other, value in zip(others, saved["model"].values(), strict=True):
        other.data.copy_(value)
    loaded.load_state_dict(saved["optimizer"])
    for run, group in ((optimizer, params), (loaded, others)):
        give_gradients(group, 1)
        run.step()
    assert all(map(torch.equal, params, others))
    assert all(map(torch.equal, masters_of(optimizer), masters_of(loaded)))
    assert (loaded.cur_iter, loaded.dynamic_loss_scale) == (2, dynamic)


def test_gradients_are_cleared(module: Any) -> None:
    params = parameters()
    optimizer = module.FP16_Optimizer(module.FusedAdam(params))
    give_gradients(params, 0)
    optimizer.zero_grad(set_grads_to_None=False)
    assert all(param.grad is not None and not param.grad.any() for param in params)
    optimizer.zero_grad()
    assert all(param.grad is None for param in params)


def test_a_closure_is_refused(module: Any) -> None:
    optimizer = module.FP16_Optimizer(module.FusedAdam(parameters()))
    with pytest.raises(RuntimeError, match="steps without a closure; got one; call loss ="):
        optimizer.step(lambda: None)


def test_state_and_groups_may_be_set(module: Any) -> None:
    params, optimizer = made(module, 0)
    give_gradients(params, 0)
    optimizer.step()
    state, groups = optimizer.state, optimizer.param_groups[:1]
    optimizer.state, optimizer.param_groups = {}, groups
    assert (optimizer.optimizer.state, optimizer.optimizer.param_groups) == ({}, groups)
    optimizer.state = state
    assert optimizer.state is state


def test_the_file_of_another_class_is_refused(flat: Any) -> None:
    """Of each of the two in the other; the masters would lie differently."""
    contrib = importlib.import_module("apex.contrib.optimizers")
    for ours, others, missing in (
        (flat, contrib, "fp32_groups_flat"),
        (contrib, flat, "fp32_groups"),
    ):
        params, optimizer = made(ours, 0)
        before = [master.detach().clone() for master in masters_of(optimizer)]
        saved = made(others, 1)[1].state_dict()
        saved["cur_iter"] = 7
        message = f"{ours.__name__}.*.FP16_Optimizer must hold '{missing}'; got .* that saved it"
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict(saved)
        assert optimizer.cur_iter == 0
        assert all(map(torch.equal, masters_of(optimizer), before))


def test_the_file_of_another_model_is_refused(module: Any) -> None:
    _, optimizer = made(module, 0)
    saved = module.FP16_Optimizer(module.FusedAdam(parameters()[:2])).state_dict()
    with pytest.raises(ValueError, match=r"masters of the shapes \[.*\]; got \[.*\]. Call load_st"):
        optimizer.load_state_dict(saved)
    assert optimizer.dynamic_loss_scale


# -- flat masters ----------------------------------------------------------------------------------


def test_parameters_are_views_of_one_tensor_per_group(flat: Any) -> None:
    params, optimizer = made(flat, 0)
    expected = [param.detach().clone() for param in params]
    assert [len(group) for group in optimizer.fp16_groups] == [2, 1]
    assert optimizer.fp16_groups[0][1] is params[1]
    for group, half, full, values in zip(
        optimizer.param_groups,
        optimizer.fp16_groups_flat,
        optimizer.fp32_groups_flat,
        (expected[:2], expected[2:]),
        strict=True,
    ):
        joined = torch.cat([value.reshape(-1) for value in values])
        assert torch.equal(half, joined)
        assert half.dtype is F16
        assert torch.equal(full, joined.float())
        assert full.requires_grad
        assert [id(param) for param in group["params"]] == [id(full)]
    optimizer.fp16_groups_flat[0].fill_(3.0)
    assert params[0].item() == 3.0
    assert params[1].tolist() == [3.0] * 4
    assert torch.equal(params[2], expected[2])


def test_a_script_restores_flat_masters_by_hand(flat: Any) -> None:
    """As apex itself did."""
    params, optimizer = made(flat, 0)
    give_gradients(params, 0)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict()["fp32_groups_flat"])
    _, other = made(flat, 1)
    for current, value in zip(other.fp32_groups_flat, saved, strict=True):
        current.data.copy_(value.data)
    assert all(map(torch.equal, masters_of(optimizer), masters_of(other)))


def test_a_checkpoint_of_apex_loads(flat: Any, tmp_path: Path) -> None:
    """Written by hand, as apex of 2019 wrote it, and continued against Adam in float64."""
    params = parameters()[1:]
    values = torch.linspace(-1, 1, 19)
    state = {"step": 3, "exp_avg": values / 4, "exp_avg_sq": values.square() / 4}
    options = {"lr": 0.25, "bias_correction": True, "betas": (0.5, 0.75), "eps": 1e-8}
    group = {**options, "weight_decay": 0.0, "max_grad_norm": 0.0, "params": [140211]}
    master = values.clone().requires_grad_()
    checkpoint = {
        "dynamic_loss_scale": True, "cur_scale": 512.0, "cur_iter": 30, "last_overflow_iter": 20,
        "scale_factor": 2, "scale_window": 1000, "fp32_groups_flat": [master],
        "optimizer_state_dict": {"state": {140211: state}, "param_groups": [group]},
    }  # fmt: skip
    torch.save(checkpoint, tmp_path / "apex.pt")
    optimizer = flat.FP16_Optimizer(flat.FusedAdam(params), dynamic_loss_scale=True)
    for param, value in zip(params, values.split([4, 15]), strict=True):
        param.data.copy_(value.view_as(param))
    optimizer.load_state_dict(torch.load(tmp_path / "apex.pt"))
    assert (optimizer.cur_scale, optimizer.cur_iter, optimizer.last_overflow_iter) == (512, 30, 20)
    for param in params:
        param.grad = torch.full_like(param, 256.0)
    optimizer.step()
    first, second = state["exp_avg"].double() * 0.5 + 0.25, values.double() ** 2 / 4 * 0.75
    update = first / (1 - 0.5**4) / (((second + 0.0625) / (1 - 0.75**4)).sqrt() + 1e-8)
    expected = (values.double() - 0.25 * update).float()
    torch.testing.assert_close(optimizer.fp32_groups_flat[0].detach(), expected)
    assert torch.equal(params[1], expected[4:].view(3, 5).half())


def test_parameters_that_were_given_other_data_are_views_again(flat: Any) -> None:
    params, optimizer = made(flat, 0)
    params[1].data = params[1].data.clone()
    give_gradients(params, 0)
    optimizer.step()
    assert torch.equal(params[1], masters_of(optimizer)[1].half())
    optimizer.fp16_groups_flat[0].zero_()
    assert not params[1].any()


def test_a_parameter_without_a_gradient_counts_as_0_and_a_group_of_them_stays(flat: Any) -> None:
    params, optimizer = made(flat, 0)
    before = [param.detach().clone() for param in params]
    params[1].grad = torch.ones_like(params[1])
    optimizer.step()
    assert torch.equal(params[0], before[0])
    assert not torch.equal(params[1], before[1])
    assert torch.equal(params[2], before[2])
    assert len(optimizer.state) == 1


def test_frozen_parameters_are_left_out(flat: Any) -> None:
    params = parameters()
    params[1].requires_grad_(False)
    before = params[1].detach().clone()
    adam = flat.FusedAdam(params, lr=0.5, weight_decay=0.5)
    optimizer = flat.FP16_Optimizer(adam)
    give_gradients([params[0], params[2]], 0)
    optimizer.step()
    assert torch.equal(params[1], before)
    assert optimizer.fp32_groups_flat[0].numel() == 16


@pytest.mark.parametrize("kept", [lambda params: params[:0], lambda params: params])
def test_groups_may_be_empty_or_float32(flat: Any, kept: Callable[[Any], Any]) -> None:
    params = parameters(0, F32)
    optimizer = flat.FP16_Optimizer(torch.optim.SGD([{"params": kept(params)}], lr=1.0))
    give_gradients(params, 0)
    expected = [param.detach() - param.grad for param in kept(params)]
    optimizer.step()
    assert all(map(torch.equal, kept(params), expected))


def test_a_group_of_several_dtypes_is_refused_before_anything_changes(flat: Any) -> None:
    half, other, full = (nn.Parameter(torch.ones(2).to(dtype)) for dtype in (F16, F16, F32))
    optimizer = torch.optim.SGD([{"params": [half]}, {"params": [other, full]}], lr=1.0)
    address, held = half.data_ptr(), [group["params"] for group in optimizer.param_groups]
    message = "one dtype, for .*; got torch.float16, torch.float32. Give .* opt_level='O2'"
    with pytest.raises(TypeError, match=message):
        flat.FP16_Optimizer(optimizer)
    assert half.data_ptr() == address
    assert [group["params"] for group in optimizer.param_groups] == held
