"""The CUDA text of lamb, run on the CPU, against its rule in float64."""

from dataclasses import dataclass

import cuda_on_cpu
import pytest
import torch
from cuda_on_cpu import CHUNK, THREADS, Argument, Kernels
from cuda_on_cpu.drawing import SEEDS, Drawn, tensor_lists
from cuda_on_cpu.kernel_names import PAIRS
from cuda_on_cpu.memory import chunk_ranges
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
    scalar,
    unscaled,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

SIZE = 48  # of Coefficients
COLUMNS = ("gradient", "master", "exp_avg", "exp_avg_sq", "weight")


@pytest.fixture(scope="module")
def kernels(pytestconfig: pytest.Config) -> Kernels:
    return cuda_on_cpu.compiled("lamb.cu", pytestconfig)


@dataclass(frozen=True)
class Rule:
    """Hyperparameters of a group; the defaults are apex's, but for lr."""

    lr: float = 0.125
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-6
    weight_decay: float = 0.01
    decoupled: bool = True
    bias_correction: bool = True
    gradient_averaging: bool = True
    adapt_always: bool = False
    maximize: bool = False
    lr_on_device: bool = False

    def arguments(self) -> list[Argument]:
        lr = [-1.0, torch.tensor(self.lr)] if self.lr_on_device else [self.lr, None]
        switches = (
            *(self.decoupled, self.bias_correction, self.gradient_averaging),
            *(self.adapt_always, self.maximize),
        )
        return [*lr, *self.betas, self.eps, self.weight_decay, *map(int, switches)]


class Lamb:
    """The rule, as You et al. and apex have it, in float64."""

    def __init__(self, rule: Rule, masters: list[Tensor]) -> None:
        self.rule, self.steps = rule, 0
        self.masters = [master.double() for master in masters]
        self.exp_avg = [torch.zeros_like(master) for master in self.masters]
        self.exp_avg_sq = [torch.zeros_like(master) for master in self.masters]

    def step(self, gradients: list[Tensor]) -> None:
        self.steps += 1
        for i, gradient in enumerate(gradients):
            update = self.update(i, -gradient if self.rule.maximize else gradient)
            self.masters[i] = self.masters[i] - self.ratio(self.masters[i], update) * update

    def update(self, i: int, gradient: Tensor) -> Tensor:
        rule, (beta1, beta2) = self.rule, self.rule.betas
        if not rule.decoupled:
            gradient = gradient + rule.weight_decay * self.masters[i]
        share = 1.0 - beta1 if rule.gradient_averaging else 1.0
        self.exp_avg[i] = beta1 * self.exp_avg[i] + share * gradient
        self.exp_avg_sq[i] = beta2 * self.exp_avg_sq[i] + (1.0 - beta2) * gradient**2
        first, second = self.exp_avg[i], self.exp_avg_sq[i]
        if rule.bias_correction:
            first, second = first / (1 - beta1**self.steps), second / (1 - beta2**self.steps)
        update = first / (second.sqrt() + rule.eps)
        return update + rule.weight_decay * self.masters[i] if rule.decoupled else update

    def ratio(self, master: Tensor, update: Tensor) -> float:
        norms = [tensor.square().sum().sqrt().item() for tensor in (master, update)]
        if 0.0 in norms or not (self.rule.adapt_always or self.rule.weight_decay):
            return self.rule.lr
        return self.rule.lr * norms[0] / norms[1]


RULES = st.builds(
    Rule,
    lr=st.sampled_from([2.0**-10, 2.0**-3]),
    betas=st.sampled_from([(0.9, 0.999), (0.5, 0.9)]),
    eps=st.sampled_from([1e-6, 1e-3]),
    weight_decay=st.sampled_from([0.0, 0.01, 0.5]),
    decoupled=st.booleans(),
    bias_correction=st.booleans(),
    gradient_averaging=st.booleans(),
    adapt_always=st.booleans(),
    maximize=st.booleans(),
    lr_on_device=st.booleans(),
)


def parameters_of(
    masters: list[Tensor], dtypes: Names, has_weight: bool = True, begins: Offsets | None = None
) -> Parameters:
    state = ["exp_avg", "exp_avg_sq"]
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
) -> Tensor:
    """Launch a step; return the ratios."""
    flag = scalar(found_inf)
    arguments = {rows: rule.arguments() for rows, rule in groups.items()}
    coefficients = parameters.prepare(kernels, "lamb", SIZE, arguments, flag)
    rows, chunks, memory = parameters.rows, parameters.chunks, parameters.memory
    norms = memory.empty(torch.uint8, len(chunks), 16)
    ratios = memory.empty(torch.float32, len(rows))
    tables = (rows, chunks, coefficients)
    factors = (scalar(scale), scalar(clip))
    gradient, weight = parameters.dtypes
    moments, grid = f"lamb_moments_{gradient}", len(chunks)
    kernels.launch(moments, grid, *tables, *factors, flag, norms, seed=seed)
    ranges = chunk_ranges(parameters.lengths)
    kernels.launch("lamb_ratios", len(rows), ranges, norms, coefficients, ratios, flag, seed=seed)
    kernels.launch(f"lamb_update_{weight}", grid, *tables, ratios, flag, seed=seed)
    return ratios


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
def test_three_steps_follow_the_rule_in_float64(
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
    masters = [one.values for one in drawn]
    parameters = parameters_of(masters, dtypes, has_weight, begins)
    expected, nearby = Lamb(rule, masters), Lamb(rule, masters)
    for i in range(3):
        parameters.receive([one.values.roll(i + 1) * (i - 1.5) for one in drawn])
        groups = {range(len(drawn)): rule}
        launch(kernels, parameters, groups, scale=scale, clip=clip, seed=seed + i)
        parameters.check()
        gradients = [unscaled(one, scale, clip) for one in parameters["gradient"]]
        nearby.step(perturbed(gradients, nearby.masters))
        expected.step(gradients)
        # the ratio makes a step as large as lr times the master's typical element
        largest = max([1.0, *(one.abs().max().item() for one in masters if len(one))])
        assert_stepped(
            parameters["master"],
            expected.masters,
            nearby.masters,
            lr=rule.lr * largest,
            steps=i + 1,
        )
    assert [one.item() for one in parameters["step"]] == [3.0] * len(drawn)
    for name in ("exp_avg", "exp_avg_sq"):
        lists = (parameters[name], getattr(expected, name), getattr(nearby, name))
        for ours, state, near in zip(*lists, strict=True):
            largest = state.abs().max().item() if state.numel() else 0.0
            assert_near(ours, state, near, 3e-6 * state.abs() + 1e-6 * largest)


@pytest.mark.parametrize(
    ("rule", "master", "gradient", "ratio"),
    [
        (Rule(weight_decay=0.0), 4.0, 1.0, 0.125),
        (Rule(weight_decay=0.0, adapt_always=True), 4.0, 1.0, 0.5),
        (Rule(weight_decay=0.5), 4.0, 1.0, 0.125 * 4 / 3),
        (Rule(weight_decay=0.5), 0.0, 1.0, 0.125),
        (Rule(weight_decay=0.5, decoupled=False), 4.0, 1.0, 0.5),
        (Rule(weight_decay=0.0, adapt_always=True), 4.0, 0.0, 0.125),
    ],
    ids=str,
)
def test_the_ratio_of_the_norms(
    kernels: Kernels, rule: Rule, master: float, gradient: float, ratio: float
) -> None:
    length = CHUNK + 2 * THREADS + 1
    parameters = parameters_of([torch.full((length,), master), torch.zeros(0)], PAIRS[2])
    parameters.receive([torch.full((length,), gradient), torch.zeros(0)])
    ratios = launch(kernels, parameters, {range(2): rule})
    torch.testing.assert_close(ratios, torch.tensor([ratio, 0.125]), rtol=3e-6, atol=0)


def one_tensor(begins: Offsets | None = None) -> Parameters:
    values = torch.randn(CHUNK + 9, generator=torch.Generator().manual_seed(1))
    parameters = parameters_of([values], PAIRS[1], begins=begins)
    parameters.receive([values.flip(0)])
    return parameters


def test_the_order_of_threads_has_no_influence_on_the_bits(kernels: Kernels) -> None:
    # sums are formed in another order where packs are, so alignments are compared each with itself
    for begins in [{}, *({name: 1} for name in COLUMNS)]:
        results = []
        for seed in (1, 3, 5):
            parameters = one_tensor(begins)
            for i in range(2):
                launch(kernels, parameters, {range(1): Rule()}, scale=3.0, clip=0.7, seed=seed + i)
            results.append(parameters.bits())
        assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("found_inf", [1.0, 2.0, torch.nan])
def test_a_skipped_step_changes_no_bit(kernels: Kernels, found_inf: float) -> None:
    parameters = one_tensor()
    launch(kernels, parameters, {range(1): Rule()}, found_inf=0.0)
    parameters.receive([torch.full((CHUNK + 9,), torch.nan)])
    before = parameters.bits()
    launch(kernels, parameters, {range(1): Rule()}, found_inf=found_inf)
    assert parameters.bits() == before
    parameters.check()


def test_groups_of_parameters_step_in_the_same_launches(kernels: Kernels) -> None:
    count = THREADS + 5
    masters = [torch.randn(3) for _ in range(count + 2)]
    groups = {
        range(count): Rule(lr=0.5),
        range(count, count + 2): Rule(lr=0.25, betas=(0.5, 0.6), weight_decay=0.3),
    }
    parameters = parameters_of(masters, PAIRS[0])
    parameters.receive([master.neg() for master in masters])
    launch(kernels, parameters, groups)
    parameters.check()
    for rows, rule in groups.items():
        expected = Lamb(rule, [masters[row] for row in rows])
        expected.step([parameters["gradient"][row].double() for row in rows])
        ours = [parameters["master"][row] for row in rows]
        assert_stepped(ours, expected.masters, expected.masters, lr=2.0, steps=1)
