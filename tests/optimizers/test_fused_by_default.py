"""AdamW and Adam on a GPU step by torch's fused kernel, unless the script has chosen."""

import copy
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from support import CountItems, scaled_backward, trains
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from amp_patch.optimizers import fused_by_default
from amp_patch.step import loss_scaling

#: With few options, as scripts have them.
MAKERS: dict[str, Callable[..., Optimizer]] = {
    "adamw": lambda params, **kw: AdamW(params, lr=0.125, **kw),
    "adam": lambda params, **kw: Adam(params, lr=0.125, amsgrad=True, weight_decay=0.1, **kw),
}
LEVELS = ["O1", "O2", "O4", "O5"]


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the CPU taken for a GPU, whose optimizers the host runs ahead of."""
    monkeypatch.setattr(fused_by_default, "ON_GPU", lambda tensor: True)
    monkeypatch.setattr(loss_scaling, "RUNS_AHEAD", {"cpu"})


def start(
    amp: ModuleType, level: str, make: Callable[..., Optimizer], device: Any = "cpu", **kw: Any
) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).to(device)
    options = {"verbosity": 0, "loss_scale": "dynamic", "max_loss_scale": 1024.0}
    return amp.initialize(model, make(model.parameters(), **kw), opt_level=level, **options)


def step(amp: ModuleType, model: nn.Module, optimizer: Optimizer, factor: float = 1.0) -> None:
    optimizer.zero_grad()
    inputs = torch.linspace(-1, 1, 12, device=next(model.parameters()).device).reshape(3, 4)
    scaled_backward(amp, model(inputs).float().square().sum() * factor, optimizer)
    optimizer.step()


def fused_of(optimizer: Optimizer) -> list[Any]:
    return [group["fused"] for group in optimizer.param_groups]


@pytest.mark.usefixtures("on_gpu")
def test_trains_as_with_fused_to_the_bit(amp: ModuleType) -> None:
    @trains()
    @example("O2", "adamw", ["finite", "reload"])  # after a step masters ask for gradients
    @given(
        st.sampled_from(LEVELS),
        st.sampled_from(list(MAKERS)),
        st.lists(st.sampled_from(["finite", "overflow", "reload", "load from plain"]), max_size=6),
    )
    def run(level: str, name: str, events: list[str]) -> None:
        outcomes = []
        for options in ({}, {"fused": True}):
            model, optimizer = start(amp, level, MAKERS[name], **options)
            for event in events:
                if event in ("finite", "overflow"):
                    step(amp, model, optimizer, torch.inf if event == "overflow" else 1.0)
                    continue
                saved = copy.deepcopy(optimizer.state_dict())
                if event == "load from plain":
                    for group in saved["param_groups"]:
                        group["fused"] = options.get("fused")
                optimizer.load_state_dict(saved)
            assert fused_of(optimizer) == [True]
            state = optimizer.state_dict()
            assert [group.pop("fused") for group in state["param_groups"]] == [options.get("fused")]
            outcomes.append([model.state_dict(), state, amp.step_was_skipped(optimizer)])
            amp.deactivate()
        torch.testing.assert_close(outcomes[0], outcomes[1], rtol=0, atol=0)

    run()


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", MAKERS)
def test_no_step_waits(amp: ModuleType, level: str, name: str) -> None:
    model, optimizer = start(amp, level, MAKERS[name])
    for factor in (1.0, torch.inf, 1.0):
        with CountItems() as items:
            step(amp, model, optimizer, factor)
        assert items.count == 0
        assert amp.step_was_skipped(optimizer) == (factor != 1.0)
    assert [float(state["step"]) for state in optimizer.state.values()] == [2.0] * 4


CHOSEN: dict[str, Callable[[Any], Optimizer]] = {
    "foreach": lambda params: AdamW(params, foreach=True),
    "one by one": lambda params: AdamW(params, foreach=False),
    "not fused": lambda params: AdamW(params, fused=False),
    "differentiable": lambda params: Adam(params, differentiable=True),
    "another type": SGD,
    "a subclass": lambda params: type("Own", (AdamW,), {})(params),
    "its own step": lambda params: with_own_step(AdamW(params)),
    "betas of tensors": lambda params: AdamW(
        params, betas=(torch.tensor(0.9), torch.tensor(0.99)), foreach=None, capturable=False
    ),
    "one group chosen": lambda params: AdamW(
        [{"params": [param], "foreach": place == 0 or None} for place, param in enumerate(params)]
    ),
}


def with_own_step(optimizer: Optimizer) -> Optimizer:
    own: Any = optimizer
    own.step = lambda closure=None: type(optimizer).step(optimizer, closure)
    return optimizer


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("kind", CHOSEN)
def test_what_was_chosen_stays(amp: ModuleType, kind: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = CHOSEN[kind](model.parameters())
    before = fused_of(optimizer)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    assert fused_of(optimizer) == before


@pytest.mark.usefixtures("on_gpu")
def test_o0_steps_as_torch_does(amp: ModuleType) -> None:
    _, optimizer = start(amp, "O0", MAKERS["adamw"])
    assert fused_of(optimizer) == [None]


def test_off_a_gpu_torch_steps_as_ever(amp: ModuleType) -> None:
    _, optimizer = start(amp, "O2", MAKERS["adamw"])
    assert fused_of(optimizer) == [None]


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("level", LEVELS)
def test_all_is_given_back(amp: ModuleType, level: str) -> None:
    model, optimizer = start(amp, level, MAKERS["adamw"])
    step(amp, model, optimizer)
    amp.deactivate()
    assert fused_of(optimizer) == [None]
    assert not hasattr(optimizer, "_step_supports_amp_scaling")
    assert not optimizer._optimizer_state_dict_post_hooks
    assert not optimizer._optimizer_load_state_dict_post_hooks
    before = [param.detach().clone() for param in model.parameters()]
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert not any(map(torch.equal, before, model.parameters()))


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("level", LEVELS)
def test_groups_that_are_added_are_followed(amp: ModuleType, level: str) -> None:
    model, optimizer = start(amp, level, MAKERS["adamw"])
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    assert fused_of(optimizer) == [True, True]
    # one that says otherwise is stepped as it says, for which the host has to be told
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))], "foreach": True})
    assert fused_of(optimizer) == [True, True, None]
    for factor in (1.0, torch.inf):
        with CountItems() as items:
            step(amp, model, optimizer, factor)
        assert items.count == 1
        assert amp.step_was_skipped(optimizer) == (factor != 1.0)


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("level", LEVELS)
def test_a_script_may_choose_later(amp: ModuleType, level: str) -> None:
    model, optimizer = start(amp, level, MAKERS["adamw"])
    step(amp, model, optimizer)
    optimizer.param_groups[0]["fused"] = False
    before = [master.detach().clone() for master in amp.master_params(optimizer)]
    step(amp, model, optimizer, torch.inf)
    assert amp.step_was_skipped(optimizer)
    assert all(map(torch.equal, before, amp.master_params(optimizer)))
    amp.deactivate()
    assert fused_of(optimizer) == [False]


@pytest.mark.usefixtures("on_gpu")
def test_goes_on_from_steps_before(amp: ModuleType) -> None:
    """torch's fused kernel takes counters of float32; not fused it counts in the default dtype."""
    model = nn.Linear(4, 2)
    optimizer = AdamW(model.parameters(), lr=0.125)
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    for state in optimizer.state.values():
        state["step"] = state["step"].double()
    options = {"opt_level": "O2", "loss_scale": 1024.0, "verbosity": 0}
    model, optimizer = amp.initialize(model, optimizer, **options)
    step(amp, model, optimizer)
    assert fused_of(optimizer) == [True]
    counters = [state["step"] for state in optimizer.state.values()]
    assert [(one.dtype, float(one)) for one in counters] == [(torch.float32, 2.0)] * 2


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("kind", ["parameter", "averages"])
def test_what_the_kernel_refuses_is_stepped_as_torch_does(amp: ModuleType, kind: str) -> None:
    """On a GPU it raises: "must have same dtype, device, and layout"; on a CPU it is wrong."""
    outcomes = []
    for is_initialized in (True, False):
        model = nn.Linear(4, 3, bias=False)
        weight = torch.linspace(-1, 1, 24).reshape(3, 8)
        weight = weight[:, ::2] if kind == "parameter" else weight[:, :4].contiguous()
        model.weight = nn.Parameter(weight)
        optimizer = AdamW(model.parameters(), lr=0.125)
        for count in range(2):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).square().sum().backward()
            optimizer.step()
            state = optimizer.state[model.weight]
            if kind == "averages" and count == 0:
                for name in ("exp_avg", "exp_avg_sq"):
                    state[name] = state[name].t().contiguous().t()
            if is_initialized and count == 0:
                amp.initialize(model, optimizer, opt_level="O4", verbosity=0)
                assert fused_of(optimizer) == [None]
                amp.deactivate()
        outcomes.append(model.weight.detach().clone())
    torch.testing.assert_close(*outcomes, rtol=0, atol=0)


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
@pytest.mark.parametrize("level", LEVELS)
def test_a_group_that_names_a_parameter_twice_is_left_to_torch(amp: ModuleType, level: str) -> None:
    model = nn.Linear(4, 8)
    optimizer = AdamW([*model.parameters(), model.bias], lr=0.125)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    assert fused_of(optimizer) == [None]


def as_on_gpu(kernel: Any) -> Any:
    """Return torch's kernel with the look that it has on a GPU."""

    def looking(*lists: Any, **options: Any) -> Any:
        for row in zip(*lists[: 5 if options["amsgrad"] else 4], strict=True):
            if len({one.stride() for one in row}) != 1:
                raise RuntimeError("must have same dtype, device, and layout")
        return kernel(*lists, **options)

    return looking


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("level", ["O1", "O4", "O5"])
@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("kind", ["channels_last", "gradient"])
def test_another_order_of_memory_trains_on(
    amp: ModuleType, monkeypatch: pytest.MonkeyPatch, level: str, name: str, kind: str
) -> None:
    for kernel in ("_fused_adamw_", "_fused_adam_"):
        monkeypatch.setattr(torch, kernel, as_on_gpu(getattr(torch, kernel)))
    outcomes = []
    for is_reordered in (True, False):
        torch.manual_seed(0)
        model = nn.Conv2d(4, 8, 2)
        optimizer = MAKERS[name](model.parameters())
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        for _ in range(3):
            optimizer.zero_grad()
            # gradients that are the same in any order
            loss = sum((one.float() * one.numel()).sum() for one in model.parameters())
            scaled_backward(amp, loss, optimizer)
            if is_reordered and kind == "gradient":
                param = optimizer.param_groups[0]["params"][0]
                param.grad = param.grad.contiguous(memory_format=torch.channels_last)
            optimizer.step()
            assert fused_of(optimizer) == [True]
            if is_reordered and kind == "channels_last":
                model.to(memory_format=torch.channels_last)
        outcomes.append(optimizer.param_groups[0]["params"][0].detach().clone())
        amp.deactivate()
    torch.testing.assert_close(*outcomes, check_stride=False)


@pytest.mark.usefixtures("on_gpu")
def test_counters_of_a_capturable_group_stay_on_its_device() -> None:
    param = nn.Parameter(torch.ones(2, device="meta"))
    optimizer = AdamW([param], capturable=True)
    optimizer.state[param] = {"step": torch.ones((), device="meta")}
    by_default = fused_by_default.FusedByDefault(optimizer)
    assert fused_of(optimizer) == [True]
    assert optimizer.state_dict()["state"][0]["step"].is_meta
    by_default.remove()
    assert fused_of(optimizer) == [None]
    assert optimizer.state[param]["step"].is_meta


@pytest.mark.gpu
@pytest.mark.parametrize("level", LEVELS)
def test_on_a_gpu(amp: ModuleType, level: str) -> None:
    """Counters are on the device while it steps, and on the CPU in checkpoints and afterwards."""
    outcomes = []
    for options in ({}, {"fused": True}):
        model, optimizer = start(amp, level, MAKERS["adamw"], "cuda", **options)
        for factor in (1.0, torch.inf, 1.0):
            step(amp, model, optimizer, factor)
        outcomes.append(copy.deepcopy(model.state_dict()))
        if not options:
            saved = optimizer.state_dict()
            assert {s["step"].device.type for s in saved["state"].values()} == {"cpu"}
            assert {s["step"].device.type for s in optimizer.state.values()} == {"cuda"}
            optimizer.load_state_dict(saved)
            step(amp, model, optimizer)
        amp.deactivate()
        if not options:
            counts = [state["step"] for state in optimizer.state.values()]
            assert {one.device.type for one in counts} == {"cpu"}
            assert all(isinstance(one, Tensor) and one == 3 for one in counts)
    torch.testing.assert_close(outcomes[0], outcomes[1], rtol=0, atol=0)
