"""FusedLAMB: its rule in float64, apex's arguments and state, every level."""

import copy
import pickle
from types import ModuleType
from typing import Any

import pytest
import torch
from float64_lamb import Lamb
from hypothesis import given
from hypothesis import strategies as st
from support import exactly
from torch import Tensor, nn

from amp_patch.optimizers import FusedLAMB

F16, F32, F64 = torch.float16, torch.float32, torch.float64


OPTIONS = st.fixed_dictionaries(
    {
        "lr": st.sampled_from([2.0**-10, 2.0**-4]),
        "betas": st.sampled_from([(0.9, 0.999), (0.5, 0.9), (0.0, 0.0)]),
        "eps": st.sampled_from([1e-6, 1e-2]),
        "weight_decay": st.sampled_from([0.0, 0.01, 0.5]),
        "bias_correction": st.booleans(),
        "adam_w_mode": st.booleans(),
        "grad_averaging": st.booleans(),
        "use_nvlamb": st.booleans(),
    }
)
SHAPES = st.lists(
    st.sampled_from([(), (1,), (0,), (3, 4), (7,), (2, 3, 5)]), min_size=1, max_size=4
)


@given(
    options=OPTIONS,
    shapes=SHAPES,
    max_grad_norm=st.sampled_from([1.0, 100.0, 0.0, None]),
    missing=st.lists(st.integers(0, 3), max_size=3),
    seed=st.integers(0, 2**32),
)
def test_steps_follow_the_rule_in_float64(
    options: dict[str, Any],
    shapes: list[tuple[int, ...]],
    max_grad_norm: float | None,
    missing: list[int],
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    params = [torch.randn(shape, generator=generator, dtype=F64) for shape in shapes]
    expected = Lamb(params, max_grad_norm, **options)
    optimizer = FusedLAMB(params, max_grad_norm=max_grad_norm, **options)
    for which in [None, *missing]:
        for i, param in enumerate(params):
            value = torch.randn(param.shape, generator=generator, dtype=F64)
            param.grad = None if i == which else value
        optimizer.step()
        expected.step([param.grad for param in params])
        torch.testing.assert_close(params, expected.params, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [F32, F16, torch.bfloat16])
def test_other_dtypes_are_stepped_in_float32(dtype: torch.dtype) -> None:
    param = torch.linspace(-2, 2, 9).to(dtype)
    exact = param.float()
    optimizer = FusedLAMB([param], lr=0.125)
    exact_optimizer = FusedLAMB([exact], lr=0.125)
    for factor in (1.0, -0.5):
        param.grad = torch.linspace(-1, 1, 9).to(dtype) * factor
        exact.grad = param.grad.float()
        optimizer.step()
        exact_optimizer.step()
        assert torch.equal(param, exact.to(dtype))
        # what is stored between steps has the parameter's dtype
        exact.copy_(param)
        for name in ("exp_avg", "exp_avg_sq"):
            exact_state = exact_optimizer.state[exact][name]
            assert torch.equal(optimizer.state[param][name], exact_state.to(dtype))
            exact_state.copy_(optimizer.state[param][name])


def test_groups_are_clipped_together_and_stepped_apart() -> None:
    params = [torch.ones(2), torch.ones(3)]
    optimizer = FusedLAMB(
        [{"params": params[:1], "lr": 0.5, "weight_decay": 0.0}, {"params": params[1:]}], lr=0.25
    )
    options = dict.fromkeys(("bias_correction", "adam_w_mode", "grad_averaging"), True)
    options = {**options, "betas": (0.9, 0.999), "eps": 1e-6, "use_nvlamb": False}
    apart = [
        Lamb(params[:1], None, lr=0.5, weight_decay=0.0, **options),
        Lamb(params[1:], None, lr=0.25, weight_decay=0.01, **options),
    ]
    grads = [torch.full((2,), 3.0), torch.full((3,), 4.0)]
    norm = (2 * 9 + 3 * 16) ** 0.5
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.clone()
    optimizer.step()
    for one, grad in zip(apart, grads, strict=True):
        one.step([grad / norm])
    for param, one in zip(params, apart, strict=True):
        torch.testing.assert_close(param.double(), one.params[0], rtol=1e-6, atol=1e-6)
    assert torch.equal(params[0].grad, grads[0])


def stepped(steps: int = 2) -> tuple[Tensor, FusedLAMB]:
    param = torch.linspace(-1, 1, 5)
    optimizer = FusedLAMB([param], lr=0.125)
    for _ in range(steps):
        step(param, optimizer)
    return param, optimizer


def step(param: Tensor, optimizer: FusedLAMB) -> Tensor:
    param.grad = torch.arange(5.0) - 1.5
    optimizer.step()
    return param


def test_the_state_has_torchs_names_and_kinds() -> None:
    param, optimizer = stepped(3)
    state = optimizer.state[param]
    assert sorted(state) == ["exp_avg", "exp_avg_sq", "step"]
    assert state["step"].dtype is F32
    assert state["step"].shape == ()
    assert state["step"] == 3


def test_a_saved_state_goes_on_where_it_was() -> None:
    param, optimizer = stepped()
    resumed = param.clone()
    other = FusedLAMB([resumed])
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert torch.equal(step(resumed, other), step(param, optimizer))


def test_apexs_state_goes_on_where_it_was() -> None:
    param, optimizer = stepped()
    state = copy.deepcopy(optimizer.state_dict())
    (group,) = state["param_groups"]
    # as apex saves it: the count in the group, what is set for all groups on the optimizer
    group["step"] = int(state["state"][0].pop("step"))
    del group["adam_w_mode"], group["use_nvlamb"]
    resumed = param.clone()
    other = FusedLAMB([resumed])
    other.load_state_dict(state)
    assert "step" not in other.param_groups[0]
    assert torch.equal(step(resumed, other), step(param, optimizer))


def test_an_optimizer_is_pickled_with_all_it_needs() -> None:
    param, optimizer = stepped()
    other = pickle.loads(pickle.dumps(optimizer))
    (resumed,) = other.param_groups[0]["params"]
    assert torch.equal(step(resumed, other), step(param, optimizer))
    other.zero_grad()
    assert resumed.grad is None


def test_zero_grad_does_as_told_at_the_start_or_now() -> None:
    param = torch.ones(2)
    for at_start, now, left in [
        (True, None, False), (False, None, True), (True, False, True), (False, True, False),
    ]:  # fmt: skip
        optimizer = FusedLAMB([param], set_grad_none=at_start)
        param.grad = torch.ones(2)
        optimizer.zero_grad(*([] if now is None else [now]))
        assert (param.grad is not None) == left
        assert not left or not param.grad.any()


def test_a_closure_is_evaluated_with_gradients_and_returned() -> None:
    param = torch.ones(2, requires_grad=True)
    optimizer = FusedLAMB([param])

    def closure() -> Tensor:
        loss = param.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 2.0
    assert (param < 1).all()


def test_nothing_happens_without_gradients() -> None:
    param = torch.ones(2)
    optimizer = FusedLAMB([param])
    optimizer.step()
    assert torch.equal(param, torch.ones(2))
    assert not optimizer.state


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O4", "O5"])
def test_it_trains_at_every_level(amp: ModuleType, level: str) -> None:
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = FusedLAMB(model.parameters(), lr=0.02, eps=1e-3)
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=level, loss_scale=128.0, verbosity=0
    )
    inputs = torch.randn(64, 4)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = (model(inputs).float() - inputs.sum(1, keepdim=True)).square().mean()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]


# --- misuse ---


def test_amsgrad_is_refused() -> None:
    message = (
        "LAMB has no AMSGrad variant; got amsgrad=True. Leave it out, or use "
        "torch.optim.AdamW(..., amsgrad=True)."
    )
    with pytest.raises(RuntimeError, match=exactly(message)):
        FusedLAMB([torch.ones(2)], amsgrad=True)


@pytest.mark.parametrize(
    ("name", "default"),
    [("lr", "0.001"), ("eps", "1e-06"), ("weight_decay", "0.01"), ("max_grad_norm", "1.0")],
)
@pytest.mark.parametrize("value", [-1.0, float("nan")])
def test_a_negative_number_is_refused(name: str, default: str, value: float) -> None:
    message = f"{name} must be at least 0; got {value!r}; call FusedLAMB(..., {name}={default})."
    with pytest.raises(ValueError, match=exactly(message)):
        FusedLAMB([torch.ones(2)], **{name: value})


@pytest.mark.parametrize("betas", [(1.0, 0.5), (0.5, -0.1)])
def test_a_beta_out_of_range_is_refused(betas: tuple[float, float]) -> None:
    message = (
        f"betas must be at least 0 and below 1; got {betas!r}; call "
        "FusedLAMB(..., betas=(0.9, 0.999))."
    )
    with pytest.raises(ValueError, match=exactly(message)):
        FusedLAMB([torch.ones(2)], betas=betas)


def test_a_sparse_gradient_is_refused() -> None:
    param = torch.ones(2)
    param.grad = torch.ones(2).to_sparse()
    message = (
        "LAMB needs dense gradients; got a sparse one. Build the embedding with sparse=False, or "
        "give its weight to torch.optim.SparseAdam."
    )
    with pytest.raises(RuntimeError, match=exactly(message)):
        FusedLAMB([param]).step()


def test_steps_that_apex_has_counted_are_exact_whatever_the_default_dtype_is() -> None:
    param = nn.Parameter(torch.zeros(2))
    optimizer = FusedLAMB([param])
    state = optimizer.state_dict()
    state["param_groups"][0]["step"] = 1001  # bfloat16 has 1000 and 1004
    state["state"] = {0: {"exp_avg": torch.zeros(2), "exp_avg_sq": torch.zeros(2)}}
    torch.set_default_dtype(torch.bfloat16)
    try:
        optimizer.load_state_dict(state)
    finally:
        torch.set_default_dtype(torch.float32)
    assert optimizer.state[param]["step"].item() == 1001
