"""The CUDA text of the optimizers, run on the CPU, against their rules in float64 and float32."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import cuda_on_cpu
import pytest
import torch
from cuda_on_cpu import CHUNK, THREADS, Kernels
from cuda_on_cpu.drawing import SEEDS, tensor_lists
from cuda_on_cpu.kernel_names import PAIRS
from cuda_on_cpu.rules import RULES, AdamW, History, Lamb, Rule, Sgd
from cuda_on_cpu.stepping import Names, Offsets, Parameters, launch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

LoadKernels = Callable[[Rule], Kernels]
EXAMPLES = (AdamW(amsgrad=True), Sgd(), Lamb())
each_optimizer = pytest.mark.parametrize("rule", EXAMPLES, ids=lambda rule: rule.name)


@pytest.fixture(scope="module")
def kernels(pytestconfig: pytest.Config) -> LoadKernels:
    @functools.cache
    def load(name: str) -> Kernels:
        return cuda_on_cpu.compiled(f"{name}.cu", pytestconfig)

    return lambda rule: load(rule.name)


@dataclass(frozen=True)
class Case:
    """A group of parameters, and what its steps are to be.

    Attributes:
        skipped: for each step whether the flag is up.
    """

    rule: Rule
    masters: list[Tensor]
    dtypes: Names
    has_weight: bool
    offsets: Offsets
    scale: float | None
    clip: float | None
    skipped: list[bool]
    seed: int

    def parameters(self) -> Parameters:
        return Parameters(
            self.masters,
            self.rule,
            self.dtypes,
            has_weight=self.has_weight,
            offsets=self.offsets,
        )

    def gradients(self, step: int) -> list[Tensor]:
        return [master.roll(step + 1) * (step - 1.5) for master in self.masters]

    def unscaled(self, gradient: Tensor) -> Tensor:
        """Return in float64 what the rule is to be followed with."""
        factor = 1.0 if self.scale is None else (1.0 / torch.tensor(self.scale)).double().item()
        clip = 1.0 if self.clip is None else torch.tensor(self.clip).item()
        return gradient.double() * factor * clip


def columns_of(rule: Rule) -> list[str]:
    return ["gradient", "master", *rule.state(), "weight"]


@st.composite
def cases(draw: st.DrawFn, rules: st.SearchStrategy[Rule]) -> Case:
    rule = draw(rules)
    columns = columns_of(rule)
    skips = draw(st.sets(st.integers(0, 4), max_size=2))
    return Case(
        rule,
        [one.values for one in draw(tensor_lists(bad=False))],
        draw(st.sampled_from(PAIRS)),
        draw(st.booleans()),
        draw(
            st.sampled_from([0, 0, 1, 2]).map(lambda offset: dict.fromkeys(columns, offset))
            | st.sampled_from(columns).map(lambda name: {name: 1})
        ),
        draw(st.sampled_from([None, 2.0**16, 3.0, 0.25])),
        draw(st.sampled_from([None, 1.0, 0.3])),
        [step in skips for step in range(5)],
        draw(SEEDS),
    )


CASES = {name: cases(rules) for name, rules in RULES.items()}


def perturbed(gradients: Sequence[Tensor], masters: Sequence[Tensor]) -> list[Tensor]:
    """Return gradients that float32 could not tell from these once weight decay is added."""
    pairs = zip(gradients, masters, strict=True)
    return [gradient + 3e-7 * (gradient.abs() + master.abs()) for gradient, master in pairs]


def largest(tensors: Sequence[Tensor]) -> float:
    return max((one.abs().max().item() for one in tensors if len(one)), default=0.0)


def assert_near(one: Tensor, other: Tensor, near: Tensor, tolerance: Tensor) -> None:
    """Compare up to a tolerance per element, and twice as far as `near` is off.

    Where decay cancels the gradient its rounding error matters more: by as much as in `near`,
    which was stepped with `perturbed` gradients.
    """
    excess = (one.double() - other).abs() - tolerance - 2 * (near - other).abs()
    assert not (excess > 0).any(), f"off by {excess.max()} more than allowed"


@pytest.mark.parametrize("name", CASES)
@given(data=st.data())
def test_any_series_of_steps_follows_the_rule_in_float64(
    kernels: LoadKernels, name: str, data: st.DataObject
) -> None:
    case = data.draw(CASES[name])
    rule, parameters = case.rule, case.parameters()
    expected, nearby = (rule.reference(case.masters) for _ in range(2))
    history = History(start=largest(case.masters))
    for i, skip in enumerate(case.skipped):
        parameters.receive(case.gradients(i))
        launch(
            kernels(rule),
            parameters,
            {range(len(case.masters)): rule},
            scale=case.scale,
            clip=case.clip,
            found_inf=float(skip),
            seed=case.seed + i,
        )
        if not skip:
            parameters.check()
            gradients = [case.unscaled(one) for one in parameters["gradient"]]
            nearby.step(perturbed(gradients, nearby.masters))
            expected.step(gradients)
            total = history.total + largest([*gradients, *expected.masters])
            history = history._replace(total=total, steps=history.steps + 1)
        lists = (parameters["master"], expected.masters, nearby.masters)
        for ours, other, near in zip(*lists, strict=True):
            assert_near(ours, other, near, rule.tolerance(other, history))
    for column in (column for column, start in rule.state().items() if start is not None):
        lists = (parameters[column], expected.state(column), nearby.state(column))
        for ours, other, near in zip(*lists, strict=True):
            assert_near(ours, other, near, rule.state_tolerance(other, history))
    assert {one.item() for one in parameters["step"]} == {history.steps}


@pytest.mark.parametrize(
    "rule",
    [
        *(AdamW(), AdamW(decoupled=False), AdamW(amsgrad=True)),
        *(Sgd(), Sgd(nesterov=True), Sgd(dampening=0.5), Sgd(momentum=0.0), Sgd(maximize=True)),
    ],
    ids=str,
)
def test_many_steps_are_torchs_in_float32(kernels: LoadKernels, rule: Rule) -> None:
    masters = [torch.randn(1000), torch.randn(77)]
    parameters = Parameters(masters, rule, ("float32", "float16"))
    expected = rule.reference(masters, torch.float32)
    for _ in range(30):
        gradients = [torch.randn_like(master) for master in masters]
        parameters.receive(gradients)
        launch(kernels(rule), parameters, {range(2): rule})
        expected.step(gradients)
    parameters.check()
    torch.testing.assert_close(parameters["master"], expected.masters, rtol=1e-5, atol=1e-5)


def one_tensor(rule: Rule, offsets: Offsets | None = None) -> Parameters:
    values = torch.randn(CHUNK + 9, generator=torch.Generator().manual_seed(1))
    parameters = Parameters([values], rule, PAIRS[1], offsets=offsets)
    parameters.receive([values.flip(0)])
    return parameters


@each_optimizer
def test_order_and_alignment_have_no_influence_on_the_bits(
    kernels: LoadKernels, rule: Rule
) -> None:
    columns = columns_of(rule)
    results = []
    for offsets in [
        *(dict.fromkeys(columns, offset) for offset in (0, 1, 2, 4)),
        *({column: 1} for column in columns),
    ]:
        bits = []
        for seed in (1, 4):
            parameters = one_tensor(rule, offsets)
            for i in range(2):
                step = {range(1): rule}
                launch(kernels(rule), parameters, step, scale=3.0, clip=0.7, seed=seed + i)
            bits.append(parameters.bits())
        assert bits[0] == bits[1]
        results.append(bits[0])
    # LAMB's sums are formed in another order where packs are
    assert isinstance(rule, Lamb) or all(result == results[0] for result in results)


@each_optimizer
@pytest.mark.parametrize("found_inf", [1.0, 2.0, torch.nan])
def test_a_skipped_step_changes_no_bit(kernels: LoadKernels, rule: Rule, found_inf: float) -> None:
    parameters = one_tensor(rule)
    launch(kernels(rule), parameters, {range(1): rule}, found_inf=0.0)
    assert parameters["step"][0].item() == 1.0
    parameters.receive([torch.full((CHUNK + 9,), torch.nan)])
    before = parameters.bits()
    launch(kernels(rule), parameters, {range(1): rule}, found_inf=found_inf)
    assert parameters.bits() == before
    parameters.check()


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (
            AdamW(lr=0.5, weight_decay=0.2),
            AdamW(lr=0.25, betas=(0.5, 0.6), eps=0.1, decoupled=False),
        ),
        (Sgd(lr=0.5), Sgd(lr=0.25, weight_decay=0.3, nesterov=True)),
        (Lamb(lr=0.5), Lamb(lr=0.25, betas=(0.5, 0.6), weight_decay=0.3)),
    ],
    ids=lambda rule: rule.name,
)
def test_groups_of_parameters_step_in_the_same_launches(
    kernels: LoadKernels, first: Rule, second: Rule
) -> None:
    count = THREADS + 5
    masters = [torch.randn(3) for _ in range(count + 2)]
    groups = {range(count): first, range(count, count + 2): second}
    parameters = Parameters(masters, first, PAIRS[0])
    parameters.receive([master.neg() for master in masters])
    launch(kernels(first), parameters, groups)
    parameters.check()
    for rows, rule in groups.items():
        expected = rule.reference([masters[row] for row in rows])
        expected.step([parameters["gradient"][row].double() for row in rows])
        for row, other in zip(rows, expected.masters, strict=True):
            tolerance = rule.tolerance(other, History(start=4.0, total=4.0, steps=1))
            assert_near(parameters["master"][row], other, other, tolerance)


def test_the_gradient_is_rounded_as_if_unscaled_and_clipped_in_memory(
    kernels: LoadKernels,
) -> None:
    rule = AdamW(betas=(0.0, 0.0), weight_decay=0.0)
    values = torch.randn(CHUNK)
    apart, together = (Parameters([values], rule, PAIRS[8]) for _ in range(2))
    inverse = 1.0 / torch.tensor(3.0)
    apart.receive([values * inverse * torch.tensor(0.7)])
    together.receive([values])
    launch(kernels(rule), apart, {range(1): rule})
    launch(kernels(rule), together, {range(1): rule}, scale=3.0, clip=0.7)
    assert apart.bits()[1:] == together.bits()[1:]
    assert torch.equal(together["exp_avg"][0], apart["gradient"][0])


# --- what was written to the half weight or to the master since the last step ---


def scribbled(values: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """Write to about a share of the elements: other numbers, zeros of both signs, infinities."""
    chosen = torch.rand(values.shape, generator=generator) < share
    numbers = torch.randn(values.shape, generator=generator)
    for number in (0.0, -0.0, torch.inf):
        numbers[torch.rand(values.shape, generator=generator) < 0.1] = number
    return torch.where(chosen, numbers.to(values.dtype), values)


@pytest.mark.parametrize("name", CASES)
@given(data=st.data(), shares=st.tuples(*[st.sampled_from([0.0, 0.001, 0.5, 1.0])] * 2))
def test_a_step_sees_masters_and_weights_agree_first(
    kernels: LoadKernels, name: str, data: st.DataObject, shares: tuple[float, float]
) -> None:
    case = data.draw(CASES[name])
    count, rule = len(case.masters), case.rule
    wins = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    options: Any = {"has_weight": case.has_weight, "offsets": case.offsets}
    ours = Parameters(case.masters, rule, case.dtypes, wins=wins, **options)
    apart = Parameters(case.masters, rule, case.dtypes, **options)
    generator = torch.Generator().manual_seed(case.seed)
    for master, other in zip(ours["master"], apart["master"], strict=True):
        other.copy_(master.copy_(scribbled(master, shares[0], generator)))
    rows = zip(ours["weight"], apart["weight"], apart["master"], wins, strict=False)
    for weight, expected, master, win in rows:
        is_half = weight.dtype is not torch.float32
        expected.copy_(master)
        weight.copy_(scribbled(expected, shares[1], generator) if is_half else expected)
        if is_half and not win:
            same = bits_of(master.to(weight.dtype)) == bits_of(weight)
            master.copy_(torch.where(same, master, weight.float()))
            expected.copy_(weight)
    for parameters in (ours, apart):
        parameters.receive(case.gradients(0))
        step = {range(count): rule}
        flag = float(case.skipped[0])
        launch(kernels(rule), parameters, step, scale=case.scale, found_inf=flag, seed=case.seed)
        parameters.memory.check()
    assert ours.bits() == apart.bits()


@each_optimizer
@pytest.mark.parametrize("skipped", [False, True])
@pytest.mark.parametrize("wins", [False, True])
def test_the_loser_follows_whether_the_step_is_made_or_not(
    kernels: LoadKernels, rule: Rule, wins: bool, skipped: bool
) -> None:
    values = torch.arange(1.0, 80.0)
    ours, apart = (Parameters([values], rule, PAIRS[0], wins=[wins]) for _ in range(2))
    apart["weight"][0].copy_(values)
    ours["weight"][0].copy_(values)
    (apart if wins else ours)["weight"][0][7] = -3.0
    if wins:
        ours["master"][0][7] = apart["master"][0][7] = -3.0
    else:
        apart["master"][0][7] = -3.0
        apart["weight"][0][7] = -3.0
    for parameters in (ours, apart):
        parameters.receive([values.flip(0)])
        launch(kernels(rule), parameters, {range(1): rule}, found_inf=float(skipped))
    assert ours.bits() == apart.bits()
    assert torch.equal(ours["weight"][0], ours["master"][0].half())
    assert (ours["master"][0][7] == -3.0) == skipped


def bits_of(half: Tensor) -> Tensor:
    return half.view(torch.int16)


# --- what only one of them has ---


def test_a_momentum_buffer_that_was_loaded_is_kept(kernels: LoadKernels) -> None:
    rule = Sgd(weight_decay=0.0, momentum=0.5)
    parameters = one_tensor(rule)
    parameters["momentum_buffer"][0].fill_(2.0)
    parameters["step"][0].fill_(1.0)
    launch(kernels(rule), parameters, {range(1): rule})
    expected = 1.0 + parameters["gradient"][0].float()
    torch.testing.assert_close(parameters["momentum_buffer"][0], expected, rtol=0, atol=0)


def test_a_buffer_without_a_step_counter_holds_momentum(kernels: LoadKernels) -> None:
    rule = Sgd(weight_decay=0.0, momentum=0.5)
    parameters = one_tensor(rule)
    parameters["momentum_buffer"][0].fill_(2.0)
    parameters.rows[:, 4] = 0
    launch(kernels(rule), parameters, {range(1): rule})
    expected = 1.0 + parameters["gradient"][0].float()
    torch.testing.assert_close(parameters["momentum_buffer"][0], expected, rtol=0, atol=0)


def test_without_momentum_no_step_counter_is_needed(kernels: LoadKernels) -> None:
    rule = Sgd(momentum=0.0)
    with_counter, without = (Parameters([torch.arange(9.0)], rule, PAIRS[0]) for _ in range(2))
    without.rows[:, 4] = 0
    for parameters in (with_counter, without):
        parameters.receive([torch.ones(9)])
        launch(kernels(rule), parameters, {range(1): rule})
    assert torch.equal(without["master"][0], with_counter["master"][0])
    assert not torch.equal(without["master"][0], torch.arange(9.0))
    assert (with_counter["step"][0].item(), without["step"][0].item()) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("rule", "master", "gradient", "ratio"),
    [
        (Lamb(weight_decay=0.0), 4.0, 1.0, 0.125),
        (Lamb(weight_decay=0.0, adapt_always=True), 4.0, 1.0, 0.5),
        (Lamb(weight_decay=0.5), 4.0, 1.0, 0.125 * 4 / 3),
        (Lamb(weight_decay=0.5), 0.0, 1.0, 0.125),
        (Lamb(weight_decay=0.5, decoupled=False), 4.0, 1.0, 0.5),
        (Lamb(weight_decay=0.0, adapt_always=True), 4.0, 0.0, 0.125),
    ],
    ids=str,
)
def test_the_ratio_of_the_norms(
    kernels: LoadKernels, rule: Rule, master: float, gradient: float, ratio: float
) -> None:
    length = CHUNK + 2 * THREADS + 1
    masters = [torch.full((length,), master), torch.zeros(0)]
    parameters = Parameters(masters, rule, PAIRS[2])
    parameters.receive([torch.full((length,), gradient), torch.zeros(0)])
    ratios = launch(kernels(rule), parameters, {range(2): rule})
    torch.testing.assert_close(ratios, torch.tensor([ratio, 0.125]), rtol=3e-6, atol=0)


def test_the_norms_of_thousands_of_chunks_enter_the_ratio(kernels: LoadKernels) -> None:
    counts = torch.tensor([0, 3, 8 * THREADS + 1, 17 * THREADS + 9])
    ends = counts.cumsum(0)
    norms = torch.rand(int(ends[-1]), 2, dtype=torch.float64)
    coefficients = torch.full((len(counts), 12), 0.5)
    coefficients.view(torch.int32)[:, 11] = 1  # the ratio adapts
    ranges = torch.stack([ends - counts, ends], 1).int()
    ratios = torch.full((len(counts),), torch.nan)
    kernels(Lamb()).launch("lamb_ratios", 4, ranges, norms, coefficients, ratios, None)
    sums = torch.stack([part.sum(0) for part in norms.split(counts.tolist())])[1:]
    expected = 0.5 * (sums[:, 0] / sums[:, 1]).sqrt().float()
    torch.testing.assert_close(ratios, torch.cat([torch.tensor([0.5]), expected]))
