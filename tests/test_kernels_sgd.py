"""The CUDA text of sgd, run on the CPU, against torch's SGD in float64 and float32."""

from dataclasses import dataclass, replace

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
    offsets,
    reference,
    scalar,
    step,
    unscaled,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

SIZE = 32  # of Coefficients
COLUMNS = ("gradient", "master", "momentum_buffer", "weight")


@pytest.fixture(scope="module")
def kernels(pytestconfig: pytest.Config) -> Kernels:
    return cuda_on_cpu.compiled("sgd.cu", pytestconfig)


@dataclass(frozen=True)
class Rule:
    """Hyperparameters of a group."""

    lr: float = 0.125
    momentum: float = 0.9
    dampening: float = 0.0
    weight_decay: float = 0.1
    decoupled: bool = False
    nesterov: bool = False
    maximize: bool = False
    lr_on_device: bool = False

    def arguments(self) -> list[Argument]:
        lr = [-1.0, torch.tensor(self.lr)] if self.lr_on_device else [self.lr, None]
        numbers = [self.momentum, self.dampening, self.weight_decay]
        return [*lr, *numbers, int(self.decoupled), int(self.nesterov), int(self.maximize)]

    def optimizer(self, parameters: list[Tensor]) -> torch.optim.Optimizer:
        """Build torch's, which couples all decay."""
        return torch.optim.SGD(
            parameters,
            lr=self.lr,
            momentum=self.momentum,
            dampening=self.dampening,
            weight_decay=0.0 if self.decoupled else self.weight_decay,
            nesterov=self.nesterov,
            maximize=self.maximize,
            foreach=False,
        )

    def step(
        self, optimizer: torch.optim.Optimizer, masters: list[Tensor], gradients: list[Tensor]
    ) -> None:
        if self.decoupled:
            for master in masters:
                master.data.mul_(1.0 - self.lr * self.weight_decay)
        step(optimizer, masters, gradients)


RULES = st.builds(
    Rule,
    lr=st.sampled_from([2.0**-10, 2.0**-3, 1.0]),
    momentum=st.sampled_from([0.0, 0.9, 0.5]),
    dampening=st.sampled_from([0.0, 0.25]),
    weight_decay=st.sampled_from([0.0, 0.1]),
    decoupled=st.booleans(),
    maximize=st.booleans(),
    lr_on_device=st.booleans(),
) | st.builds(
    Rule,
    lr=st.sampled_from([2.0**-10, 2.0**-3, 1.0]),
    weight_decay=st.sampled_from([0.0, 0.1]),
    decoupled=st.booleans(),
    nesterov=st.just(True),
    maximize=st.booleans(),
)


def parameters_of(
    drawn: list[Drawn],
    dtypes: Names,
    momentum: bool = True,
    has_weight: bool = True,
    begins: Offsets | None = None,
) -> Parameters:
    masters = [one.values for one in drawn]
    state = ["momentum_buffer" if momentum else None]
    parameters = Parameters(masters, dtypes, state, has_weight=has_weight, offsets=begins)
    if momentum:
        for buffer in parameters["momentum_buffer"]:
            buffer.fill_(torch.nan)  # what it holds before the first step does not matter
    return parameters


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
    coefficients = parameters.prepare(kernels, "sgd", SIZE, arguments, flag)
    kernels.launch(
        "sgd_{}_to_{}".format(*parameters.dtypes),
        len(parameters.chunks),
        parameters.rows,
        parameters.chunks,
        coefficients,
        scalar(scale),
        scalar(clip),
        flag,
        seed=seed,
    )


def assert_equal(ours: Tensor, expected: Tensor, magnitude: float) -> None:
    """Compare with float64, up to float32's rounding of numbers of this magnitude."""
    assert_near(ours, expected, expected, torch.full_like(expected, 2e-6 * magnitude))


@given(
    drawn=tensor_lists(bad=False),
    rule=RULES,
    dtypes=st.sampled_from(PAIRS),
    has_weight=st.booleans(),
    scale=SCALES,
    clip=CLIPS,
    begins=offsets(*COLUMNS),
    skipped=st.lists(st.booleans(), min_size=4, max_size=4),
    seed=SEEDS,
)
def test_any_series_of_steps_is_torchs_in_float64(
    kernels: Kernels,
    drawn: list[Drawn],
    rule: Rule,
    dtypes: Names,
    has_weight: bool,
    scale: float | None,
    clip: float | None,
    begins: Offsets,
    skipped: list[bool],
    seed: int,
) -> None:
    has_momentum = rule.momentum != 0
    parameters = parameters_of(drawn, dtypes, has_momentum, has_weight, begins)
    optimizer, expected = reference(rule.optimizer, [one.values for one in drawn])
    magnitude = 0.0
    for i, skip in enumerate(skipped):
        parameters.receive([one.values.roll(i + 1) * (i - 1.5) for one in drawn])
        flag = float(skip)
        groups = {range(len(drawn)): rule}
        launch(kernels, parameters, groups, scale=scale, clip=clip, found_inf=flag, seed=seed + i)
        if not skip:
            parameters.check()
            gradients = [unscaled(one, scale, clip) for one in parameters["gradient"]]
            rule.step(optimizer, expected, gradients)
            numbers = torch.cat([*gradients, *expected]).abs()
            magnitude += numbers.max().item() if len(numbers) else 0.0
    for ours, theirs in zip(parameters["master"], expected, strict=True):
        assert_equal(ours, theirs.detach(), magnitude)
    if has_momentum and not all(skipped):
        for ours, theirs in zip(parameters["momentum_buffer"], expected, strict=True):
            assert_equal(ours, optimizer.state[theirs]["momentum_buffer"], magnitude)


@pytest.mark.parametrize(
    "rule",
    [Rule(), Rule(nesterov=True), Rule(dampening=0.5), Rule(momentum=0.0), Rule(maximize=True)],
    ids=str,
)
def test_many_steps_are_torchs_in_float32(kernels: Kernels, rule: Rule) -> None:
    drawn = [Drawn(torch.randn(1000), 0), Drawn(torch.randn(77), 0)]
    parameters = parameters_of(drawn, ("float32", "float16"), rule.momentum != 0)
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
    values = torch.randn(CHUNK + 9, generator=torch.Generator().manual_seed(1))
    parameters = parameters_of([Drawn(values, 0)], PAIRS[1], begins=begins)
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
    parameters.receive([torch.full((CHUNK + 9,), torch.nan)])
    before = parameters.bits()
    launch(kernels, parameters, {range(1): Rule()}, found_inf=found_inf)
    assert parameters.bits() == before
    parameters.check()


def test_a_buffer_that_was_loaded_is_kept(kernels: Kernels) -> None:
    parameters = one_tensor()
    parameters["momentum_buffer"][0].fill_(2.0)
    parameters["step"][0].fill_(1.0)
    launch(kernels, parameters, {range(1): Rule(weight_decay=0.0, momentum=0.5)})
    expected = 1.0 + parameters["gradient"][0].float()
    torch.testing.assert_close(parameters["momentum_buffer"][0], expected, rtol=0, atol=0)


def test_groups_of_parameters_step_in_one_launch(kernels: Kernels) -> None:
    count = THREADS + 5
    drawn = [Drawn(torch.randn(3), 0) for _ in range(count + 2)]
    groups = {
        range(count): Rule(lr=0.5),
        range(count, count + 2): Rule(lr=0.25, weight_decay=0.3, nesterov=True),
    }
    parameters = parameters_of(drawn, PAIRS[0])
    parameters.receive([one.values.neg() for one in drawn])
    launch(kernels, parameters, groups)
    parameters.check()
    for rows, rule in groups.items():
        optimizer, expected = reference(rule.optimizer, [drawn[row].values for row in rows])
        step(optimizer, expected, [parameters["gradient"][row].double() for row in rows])
        for row, theirs in zip(rows, expected, strict=True):
            assert_equal(parameters["master"][row], theirs.detach(), 4.0)


def test_without_momentum_no_step_counter_is_needed(kernels: Kernels) -> None:
    rule = replace(Rule(), momentum=0.0)
    with_counter, without = (
        parameters_of([Drawn(torch.arange(9.0), 0)], PAIRS[0], momentum=False) for _ in range(2)
    )
    without.rows[:, 4] = 0
    for parameters in (with_counter, without):
        parameters.receive([torch.ones(9)])
        launch(kernels, parameters, {range(1): rule})
    assert torch.equal(without["master"][0], with_counter["master"][0])
    assert not torch.equal(without["master"][0], torch.arange(9.0))
    assert (with_counter["step"][0].item(), without["step"][0].item()) == (1.0, 0.0)
