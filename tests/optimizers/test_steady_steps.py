"""What a step by kernels keeps for the next one is noticed to be out of date.

A training whose steps keep what was looked up is compared, bit for bit, with one that forgets it
before each step, while users change what it depends on. The kernels run as the CPU runs their text.
"""

import copy
import functools
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from cuda_on_cpu.fake_gpu import Gpu
from hypothesis import given
from hypothesis import strategies as st
from support import nightly_but, scaled_backward
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from amp_patch.kernels import cuda_optimizers, dense_rows
from amp_patch.optimizers import FusedLAMB
from amp_patch.optimizers.cuda_step import _Launches

RULES: dict[str, Callable[..., Optimizer]] = {
    "adamw": functools.partial(AdamW, lr=0.05, eps=1e-3),
    "amsgrad": functools.partial(Adam, lr=0.05, eps=1e-3, amsgrad=True),
    "sgd": functools.partial(SGD, lr=0.05),
    "momentum": functools.partial(SGD, lr=0.05, momentum=0.9),
    "lamb": functools.partial(FusedLAMB, lr=0.05, eps=1e-3),
}


class Model(nn.Module):
    """Parameters whose gradients a test gives; those of the norm stay in float32."""

    def __init__(self) -> None:
        super().__init__()
        shapes = [(3, 3), (2, 2), (17,), (0,)]
        self.weights = nn.ParameterList(torch.randn(shape) for shape in shapes)
        self.norm = nn.BatchNorm1d(4)


class Training:
    """A training at O2 by kernels.

    Args:
        keeps: whether a step may keep anything for the next one.
    """

    def __init__(self, amp: ModuleType, rule: str, keeps: bool) -> None:
        torch.manual_seed(0)
        self.amp, self.keeps = amp, keeps
        model = Model()
        params = list(model.parameters())
        self.model, self.optimizer = amp.initialize(
            model, RULES[rule]([{"params": params[:3]}, {"params": params[3:]}]),
            opt_level="O2", loss_scale=64.0, verbosity=0, fused_step=True,
        )  # fmt: skip
        self.params = list(self.model.parameters())

    def step(self, missing: int, clips: bool = False) -> None:
        if not self.keeps:
            self.forget()
        loss: Any = sum(
            (
                param.float() * torch.linspace(-1, place + 1, param.numel()).reshape(param.shape)
            ).sum()
            for place, param in enumerate(self.params)
            if place != missing
        )
        self.optimizer.zero_grad()
        scaled_backward(self.amp, loss, self.optimizer)
        if clips:
            self.amp.clip_grad_norm_(self.optimizer, 0.5)
        self.optimizer.step()

    def forget(self) -> None:
        (step,) = [s for o, s in self.amp.session.optimizers.steps.items() if o is self.optimizer]
        cuda_step = step._fused._cuda_step
        for name in ("_scaled", "_unscaled"):
            kernels = cuda_step._update_type.kernels
            setattr(cuda_step, name, _Launches(cuda_step._update_type, kernels))
        step.backward.gradients.passes.forget_buffers()

    def bits(self) -> list[Any]:
        tensors = [*self.params, *self.stepped()]
        for param in self.stepped():
            for name, value in sorted(self.optimizer.state[param].items()):
                tensors += [value] if name != "step" else []
                tensors += [torch.as_tensor(value, dtype=torch.float32)] if name == "step" else []
        return [None if one is None else one.detach().contiguous().tolist() for one in tensors]

    def stepped(self) -> list[Tensor]:
        return [param for group in self.optimizer.param_groups for param in group["params"]]

    def states(self) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
        """Iterate over state tensors of parameters' shapes."""
        for param in self.stepped():
            state = self.optimizer.state[param]
            for name, value in list(state.items()):
                if isinstance(value, Tensor) and value.shape == param.shape:
                    yield state, name, value

    # --- what users do between steps ---

    def nothing(self) -> None:
        """Steps may follow each other."""

    def give_parameters_other_memory(self) -> None:
        for param in self.params:
            param.data = param.data.clone()

    def write_to_a_parameter(self) -> None:
        with torch.no_grad():
            self.params[0].fill_(0.25)
        self.params[-1].data.fill_(0.5)

    def give_masters_other_memory(self) -> None:
        for master in self.amp.master_params(self.optimizer):
            master.data = master.data * 0.5

    def give_states_other_memory(self) -> None:
        """As a widely copied function does that moves an optimizer to another device."""
        for _, _, value in self.states():
            value.data = value.data * 0.5

    def replace_states(self) -> None:
        for state, name, value in self.states():
            state[name] = value * 0.5

    def replace_one_state(self) -> None:
        for state, name, value in list(self.states())[-1:]:
            state[name] = value * 0.5

    def clear_states(self) -> None:
        self.optimizer.state.clear()

    def take_a_state_away(self) -> None:
        self.optimizer.state.pop(next(iter(self.stepped())), None)

    def count_steps_in_another_dtype(self) -> None:
        for state in self.optimizer.state.values():
            if "step" in state:
                state["step"] = state["step"].double() + 1

    def move_counters(self) -> None:
        for state in self.optimizer.state.values():
            if "step" in state:
                state["step"].data = state["step"].data + 3

    def load_the_state_of_the_optimizer(self) -> None:
        state = copy.deepcopy(self.optimizer.state_dict())
        for one in state["state"].values():
            one.update({k: v * 0.5 for k, v in one.items() if k.startswith(("exp", "mom"))})
        self.optimizer.load_state_dict(state)

    def load_the_model(self) -> None:
        state = {name: value * 0.5 for name, value in self.model.state_dict().items()}
        self.model.load_state_dict(state)

    def schedule(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.5

    def schedule_on_the_device(self) -> None:
        self.optimizer.param_groups[0]["lr"] = torch.tensor(0.01)

    def change_options(self) -> None:
        group = self.optimizer.param_groups[-1]
        group["weight_decay"] = 0.25
        if "betas" in group:
            group["betas"] = (0.5, 0.75)

    def move_a_parameter_to_the_next_group(self) -> None:
        first, second = self.optimizer.param_groups
        if first["params"]:
            first["lr"] = 0.025
            second["params"].insert(0, first["params"].pop())

    def add_a_group(self) -> None:
        if len(self.params) == 6:
            new = nn.Parameter(torch.linspace(-1, 1, 5).half())
            self.model.extra = new
            self.params.append(new)
            self.optimizer.add_param_group({"params": [new], "lr": 0.01})
            self.optimizer.param_groups[1:] = [
                {**self.optimizer.param_groups[1], "params": [
                    param for group in self.optimizer.param_groups[1:] for param in group["params"]
                ]}
            ]  # fmt: skip

    def swap_two_columns(self) -> None:
        """The same tensors at the same addresses, in each other's place."""
        for state in self.optimizer.state.values():
            if "exp_avg" in state:
                state["exp_avg"], state["exp_avg_sq"] = state["exp_avg_sq"], state["exp_avg"].abs()

    def hold_parameters_in_bfloat16(self) -> None:
        for param in self.params:
            if param.dtype is torch.float16:
                param.data = param.data.bfloat16()

    def hold_a_state_in_bfloat16(self) -> None:
        for state, name, value in list(self.states())[-1:]:
            state[name] = value.bfloat16()

    def lay_states_out_otherwise(self) -> None:
        for state, name, value in self.states():
            state[name] = value.t().contiguous().t()

    def lay_masters_out_otherwise(self) -> None:
        for master in self.amp.master_params(self.optimizer):
            master.data = master.data.t().contiguous().t()

    def lay_a_parameter_out_otherwise(self) -> None:
        """The same memory with other strides: its gradient comes with these."""
        self.params[0].data = self.params[0].data.t()


ACTIONS = [
    name
    for name, value in vars(Training).items()
    if callable(value) and name not in ("__init__", "step", "forget", "bits", "stepped", "states")
]


Program = list[tuple[str, int, bool]]
PROGRAMS = st.lists(
    st.tuples(st.sampled_from(ACTIONS), st.integers(0, 9), st.booleans()), max_size=4
)


def run(training: Training, program: Program) -> list[Any]:
    seen = []
    training.step(9)
    training.step(9)
    for action, missing, clips in program:
        getattr(training, action)()
        training.step(missing, clips)
        seen.append(training.bits())
    return seen


@pytest.mark.filterwarnings("ignore:fused_step=True")
@pytest.mark.parametrize("rule", nightly_but(["adamw"], ["adamw", "momentum"]))
@pytest.mark.parametrize("action", ACTIONS)
def test_each_change_is_noticed(amp: ModuleType, gpu: Gpu, rule: str, action: str) -> None:
    program: Program = [(action, 9, False), ("nothing", 1, True), ("nothing", 9, False)]
    kept = Training(amp, "sgd", True)  # torch stays patched while it lives
    forgets = run(Training(amp, rule, False), program)
    assert run(Training(amp, rule, True), program) == forgets
    del kept


def test_any_changes_are_noticed(amp: ModuleType, gpu: Gpu) -> None:
    kept = Training(amp, "sgd", True)

    @given(st.sampled_from(list(RULES)), PROGRAMS)
    def check(rule: str, program: Program) -> None:
        forgets = run(Training(amp, rule, False), program)
        assert run(Training(amp, rule, True), program) == forgets

    check()
    del kept


def test_a_parameter_that_leaves_the_gpu_takes_the_step_to_torch(amp: ModuleType, gpu: Gpu) -> None:
    training = Training(amp, "adamw", True)
    training.step(9)
    for state in training.optimizer.state.values():
        state["step"] = state["step"].double()  # as a float64 default has it, loaded
    param = training.stepped()[1]
    param.data = param.data.clone()  # elsewhere, as on another device
    gpu.on_cpu.append(param)
    gpu.modules.launched.clear()
    training.step(9)
    # torch's step leaves what it counts in, where kernels would have taken it in before they knew
    assert {state["step"].dtype for state in training.optimizer.state.values()} == {torch.float64}
    assert not [name for name in gpu.modules.launched if name.startswith("adamw")]
    gpu.on_cpu.clear()
    param.data = param.data.clone()
    training.step(9)
    assert "adamw_prepare" in gpu.modules.launched


def test_nothing_is_looked_up_where_nothing_has_changed(
    amp: ModuleType, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(amp, "adamw", True)
    training.step(9)
    training.step(9, clips=True)
    looked_up: list[str] = []

    def note(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: looked_up.append(name) or original(*args)

    for owner, name in (
        (cuda_optimizers.KernelStep, "_look_up"),
        (dense_rows.DenseRows, "split_anew"),
        (dense_rows, "_make_split"),
    ):
        monkeypatch.setattr(owner, name, note(name, getattr(owner, name)))
    training.schedule()
    training.step(9, clips=True)
    assert looked_up == []
    training.give_states_other_memory()
    training.step(9)
    assert looked_up == ["_look_up", "split_anew"] * 2  # half weights, and the norm's
