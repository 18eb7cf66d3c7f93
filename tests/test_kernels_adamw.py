"""The CUDA text of adamw, run on the CPU, against torch's AdamW and Adam in float64 and float32."""

from dataclasses import dataclass

import cuda_on_cpu
import pytest
import torch
from cuda_on_cpu import CHUNK, THREADS, Argument, Kernels
from cuda_on_cpu.drawing import SEEDS, Drawn, tensor_lists
from cuda_on_cpu.kernel_names import PAIRS
from cuda_on_cpu.stepping import (
    CLIPS,
    SCALES,
    Names,
    Offsets,
    Parameters,
    assert_near,
    assert_stepped,
    offsets,
    perturbed,
    reference,
    scalar,
    step,
    unscaled,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

SIZE = 36  # of Coefficients
MAX = "max_exp_avg_sq"
COLUMNS = ("gradient", "master", "exp_avg", "exp_avg_sq", MAX, "weight")


@pytest.fixture(scope="module")
def kernels(pytestconfig: pytest.Config) -> Kernels:
    return cuda_on_cpu.compiled("adamw.cu", pytestconfig)


@dataclass(frozen=True)
class Rule:
    """Hyperparameters of a group."""

    lr: float = 0.125
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.1
    decoupled: bool = True
    amsgrad: bool = False
    maximize: bool = False
    lr_on_device: bool = False

    def arguments(self) -> list[Argument]:
        lr = [-1.0, torch.tensor(self.lr)] if self.lr_on_device else [self.lr, None]
        numbers = [*self.betas, self.eps, self.weight_decay]
        return [*lr, *numbers, int(self.decoupled), int(self.maximize)]

    def optimizer(self, parameters: list[Tensor]) -> torch.optim.Optimizer:
        kind = torch.optim.AdamW if self.decoupled else torch.optim.Adam
        return kind(
            parameters,
            lr=self.lr,
            betas=self.betas,
            eps=self.eps,
            weight_decay=self.weight_decay,
            amsgrad=self.amsgrad,
            maximize=self.maximize,
            foreach=False,
        )


RULES = st.builds(
    Rule,
    lr=st.sampled_from([2.0**-10, 2.0**-3, 1.0]),
    betas=st.sampled_from([(0.9, 0.999), (0.5, 0.9), (0.0, 0.99)]),
    eps=st.sampled_from([1e-8, 1e-3]),
    weight_decay=st.sampled_from([0.0, 0.1]),
    decoupled=st.booleans(),
    amsgrad=st.booleans(),
    maximize=st.booleans(),
    lr_on_device=st.booleans(),
)


def parameters_of(
    drawn: list[Drawn],
    dtypes: Names,
    amsgrad: bool,
    has_weight: bool = True,
    begins: Offsets | None = None,
) -> Parameters:
    state = ["exp_avg", "exp_avg_sq", MAX if amsgrad else None]
    masters = [one.values for one in drawn]
    return Parameters(masters, dtypes, state, has_weight=has_weight, offsets=begins)


def launch(
    kernels: Kernels,
    parameters: Parameters,
    groups: dict[range, Rule],
    *,
    scale: float | None = None,
    clip: float | None = None,
    found_inf: float | None = None,
    seed: int = 0,
) -> None:
    flag = scalar(found_inf)
    arguments = {rows: rule.arguments() for rows, rule in groups.items()}
    coefficients = parameters.prepare(kernels, "adamw", SIZE, arguments, flag)
    kernels.launch(
        "adamw_{}_to_{}".format(*parameters.dtypes),
        len(parameters.chunks),
        parameters.rows,
        parameters.chunks,
        coefficients,
        scalar(scale),
        scalar(clip),
        flag,
        seed=seed,
    )


@given(
    drawn=tensor_lists(bad=False),
    rule=RULES,
    dtypes=st.sampled_from(PAIRS),
    has_weight=st.booleans(),
    scale=SCALES,
    clip=CLIPS,
    begins=offsets(*COLUMNS),
    seed=SEEDS,
)
def test_three_steps_are_torchs_in_float64(
    kernels: Kernels,
    drawn: list[Drawn],
    rule: Rule,
    dtypes: Names,
    has_weight: bool,
    scale: float | None,
    clip: float | None,
    begins: Offsets,
    seed: int,
) -> None:
    parameters = parameters_of(drawn, dtypes, rule.amsgrad, has_weight, begins)
    masters = [one.values for one in drawn]
    optimizer, expected = reference(rule.optimizer, masters)
    nearby_optimizer, nearby = reference(rule.optimizer, masters)
    for i in range(3):
        parameters.receive([one.values.roll(i + 1) * (i - 1.5) for one in drawn])
        launch(
            kernels, parameters, {range(len(drawn)): rule}, scale=scale, clip=clip, seed=seed + i
        )
        parameters.check()
        gradients = [unscaled(one, scale, clip) for one in parameters["gradient"]]
        step(nearby_optimizer, nearby, perturbed(gradients, nearby))
        step(optimizer, expected, gradients)
        assert_stepped(parameters["master"], expected, nearby, lr=rule.lr, steps=i + 1)
    assert [one.item() for one in parameters["step"]] == [3.0] * len(drawn)
    names = ["exp_avg", "exp_avg_sq"] + [MAX] * rule.amsgrad
    for name in names:
        for ours, theirs, other in zip(parameters[name], expected, nearby, strict=True):
            state, near = optimizer.state[theirs][name], nearby_optimizer.state[other][name]
            largest = state.abs().max().item() if state.numel() else 0.0
            assert_near(ours, state, near, 3e-6 * state.abs() + 1e-6 * largest)


@pytest.mark.parametrize("rule", [Rule(), Rule(decoupled=False), Rule(amsgrad=True)], ids=str)
def test_many_steps_are_torchs_in_float32(kernels: Kernels, rule: Rule) -> None:
    drawn = [Drawn(torch.randn(1000), 0), Drawn(torch.randn(77), 0)]
    parameters = parameters_of(drawn, ("float32", "float16"), rule.amsgrad)
    expected = [one.values.clone().requires_grad_() for one in drawn]
    optimizer = rule.optimizer(expected)
    for _ in range(30):
        gradients = [torch.randn_like(one.values) for one in drawn]
        parameters.receive(gradients)
        launch(kernels, parameters, {range(2): rule})
        step(optimizer, expected, gradients)
    parameters.check()
    for ours, theirs in zip(parameters["master"], expected, strict=True):
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-5, atol=1e-5)


def one_tensor(begins: Offsets | None = None) -> Parameters:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(CHUNK + 9, generator=generator)
    parameters = parameters_of([Drawn(values, 0)], PAIRS[1], amsgrad=True, begins=begins)
    parameters.receive([values.flip(0)])
    return parameters


def test_order_and_alignment_have_no_influence_on_the_bits(kernels: Kernels) -> None:
    results = []
    begins = [dict.fromkeys(COLUMNS, offset) for offset in (0, 1, 2, 4)]
    for i, begin in enumerate([*begins, *({name: 1} for name in COLUMNS)]):
        parameters = one_tensor(begin)
        for seed in (2 * i, 2 * i + 1):
            launch(kernels, parameters, {range(1): Rule()}, scale=3.0, clip=0.7, seed=seed)
        results.append(parameters.bits())
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize("found_inf", [1.0, 2.0, torch.nan])
def test_a_skipped_step_changes_no_bit(kernels: Kernels, found_inf: float) -> None:
    parameters = one_tensor()
    launch(kernels, parameters, {range(1): Rule()}, found_inf=0.0)
    assert parameters["step"][0].item() == 1.0
    parameters.receive([torch.full((CHUNK + 9,), torch.nan)])
    before = parameters.bits()
    launch(kernels, parameters, {range(1): Rule()}, found_inf=found_inf)
    assert parameters.bits() == before
    parameters.check()


def test_groups_of_parameters_step_in_one_launch(kernels: Kernels) -> None:
    count = THREADS + 5
    drawn = [Drawn(torch.randn(3), 0) for _ in range(count + 2)]
    groups = {
        range(count): Rule(lr=0.5, weight_decay=0.2),
        range(count, count + 2): Rule(lr=0.25, betas=(0.5, 0.6), eps=0.1, decoupled=False),
    }
    parameters = parameters_of(drawn, PAIRS[0], False)
    parameters.receive([one.values.neg() for one in drawn])
    launch(kernels, parameters, groups)
    parameters.check()
    for rows, rule in groups.items():
        masters = [drawn[row].values for row in rows]
        optimizer, expected = reference(rule.optimizer, masters)
        step(optimizer, expected, [parameters["gradient"][row].double() for row in rows])
        masters = [parameters["master"][row] for row in rows]
        assert_stepped(masters, expected, expected, lr=1.0, steps=1)


def test_the_gradient_is_rounded_as_if_unscaled_and_clipped_in_memory(kernels: Kernels) -> None:
    rule = Rule(betas=(0.0, 0.0), weight_decay=0.0)
    values = torch.randn(CHUNK)
    apart, together = (parameters_of([Drawn(values, 0)], PAIRS[8], False) for _ in range(2))
    inverse = 1.0 / torch.tensor(3.0)
    apart.receive([values * inverse * torch.tensor(0.7)])
    together.receive([values])
    launch(kernels, apart, {range(1): rule})
    launch(kernels, together, {range(1): rule}, scale=3.0, clip=0.7)
    assert apart.bits()[1:] == together.bits()[1:]
    assert torch.equal(together["exp_avg"][0], apart["gradient"][0])
