"""The search finds the fastest setting that keeps the metric, whatever the times and losses are.

Trials are played by a model of a script: which modules must be in fp32 at which level, how long a
step takes, how noisy its time is.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import examples

from amp_patch.tools.compare.comparison import Comparison, ModuleError
from amp_patch.tools.tune import explanation
from amp_patch.tools.tune.mending import smallest_set
from amp_patch.tools.tune.outcome import Outcome
from amp_patch.tools.tune.search import OWN_FILES, Search, TooFar
from amp_patch.tools.tune.setting import Setting
from amp_patch.tools.tune.speed import chance_of, race, seconds_per_step
from amp_patch.tools.tune.trials import OutOfBudget

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
MODULES = tuple(f"blocks.{i}.{name}" for i in range(4) for name in ("norm", "proj"))


@dataclass
class Played:
    """A script as the search sees it.

    Attributes:
        times: seconds of a step, by level.
        culprits: level -> modules that must be in fp32 there; None where nothing mends it.
        gains: function -> factor on the time of O1 and O4 with it in half.
        breaks: function -> rules that it must not have.
        noise: the largest share by which a time is off.
        order: the modules as the comparison orders them; else as they are.
        budget: trials until `OutOfBudget`.
        overflows: what the comparison says of them.
    """

    times: dict[str, float]
    culprits: dict[str, frozenset[str] | None] = field(default_factory=dict)
    gains: dict[str, float] = field(default_factory=dict)
    breaks: Mapping[str, Sequence[str]] = field(default_factory=dict)
    noise: float = 0.0
    order: Sequence[str] = MODULES
    budget: float = float("inf")
    overflows: Sequence[Mapping[str, object]] = ()
    trials: int = 0
    chance: random.Random = field(default_factory=lambda: random.Random(0))

    def metric(self, setting: Setting) -> Outcome:
        self._count()
        return Outcome((1.0 if self.keeps(setting) else 2.0,))

    def seconds(self, setting: Setting) -> float | None:
        self._count()
        return self.true_time(setting) * (1 + self.noise * self.chance.uniform(-1, 1))

    def errors(self, setting: Setting, steps: int) -> Comparison | None:
        self._count()
        errors = [ModuleError(module, 1, 1, 0.1, 0.0, 1.0) for module in self.order]
        functions = {"blocks": {name: [1, 10] for name in self.gains}}
        return Comparison(setting.level, errors, [], [], [], functions, self.overflows)

    def progress(self) -> float | None:
        return 0.5

    def keeps(self, setting: Setting) -> bool:
        needed = self.culprits.get(setting.level, frozenset())
        is_broken = any(rule in self.breaks.get(name, ()) for name, rule in setting.functions)
        return needed is not None and needed <= set(setting.floats) and not is_broken

    def true_time(self, setting: Setting) -> float:
        time = self.times[setting.level] * (1 + 0.02 * len(setting.floats))
        for name, _ in setting.functions:
            time *= self.gains[name]
        return time

    def _count(self) -> None:
        self.trials += 1
        if self.trials > self.budget:
            raise OutOfBudget


def searched(played: Played, levels: Sequence[str] = LEVELS) -> Search:
    search = Search(played, levels, 0.01)
    search.run()
    return search


TIMES_OF_ALL = dict.fromkeys(LEVELS, 1.0)
TIMES = st.fixed_dictionaries({level: st.floats(0.1, 10) for level in LEVELS})
CULPRITS = st.dictionaries(
    st.sampled_from(LEVELS[1:]), st.none() | st.frozensets(st.sampled_from(MODULES), max_size=3)
)


@given(TIMES, CULPRITS, st.permutations(MODULES))
@examples(1)
def test_without_noise_the_fastest_setting_that_keeps_the_metric_is_found(
    times, culprits, order
) -> None:
    played = Played(times, culprits, order=order)
    found = searched(played).result()
    assert played.keeps(found.setting)
    mended = [
        Setting(level, floats=tuple(culprits.get(level, ())))
        for level in LEVELS
        if culprits.get(level, frozenset()) is not None
    ]
    fastest = min(map(played.true_time, mended))
    # What is not faster by a gain that counts, or was clearly slower before it was mended, may win.
    assert played.true_time(found.setting) <= fastest * 1.021


@given(TIMES, CULPRITS, st.permutations(MODULES))
@examples(1)
def test_no_module_is_in_fp32_without_need(times, culprits, order) -> None:
    found = searched(Played(times, culprits, order=order)).result()
    needed = culprits.get(found.setting.level, frozenset())
    assert set(found.setting.floats) == needed


@given(TIMES, CULPRITS, st.integers(0, 60))
@examples(1)
def test_the_best_so_far_is_kept_when_the_time_is_over(times, culprits, budget) -> None:
    played = Played(times, culprits, budget=budget)
    search = Search(played, LEVELS, 0.01)
    try:
        search.run()
    except OutOfBudget:
        assert played.trials == budget + 1
    assert played.keeps(search.result().setting)


def test_a_set_that_works_is_kept_while_a_smaller_one_is_looked_for() -> None:
    times, culprits = {"O0": 1.0, "O1": 3.0}, {"O1": frozenset({MODULES[-1]})}
    played = Played(times, culprits)
    searched(played, ("O1",))
    found = []
    for budget in range(played.trials):
        search = Search(Played(times, culprits, budget=budget), ("O1",), 0.01)
        with pytest.raises(OutOfBudget):
            search.run()
        result = search.result()
        found.append(None if result is None else len(result.setting.floats))
    sizes = list(dict.fromkeys(found))
    assert sizes[0] is None  # nothing is found yet
    assert sizes[1:] == sorted(sizes[1:], reverse=True)
    assert len(sizes) > 3


class Failing(Played):
    """A level ends in an error as it is; times that were measured are in `measured`."""

    nonfinite: Sequence[tuple[str, str]] = ()

    def seconds(self, setting: Setting) -> float | None:
        seconds = super().seconds(setting) if self.keeps(setting) else self._count()
        self.measured = {**getattr(self, "measured", {}), setting: seconds}
        return seconds

    def keeps(self, setting: Setting) -> bool:
        mended = [name for name, rule in setting.functions if rule == "float"]
        return bool(mended) if self.nonfinite and setting.level != "O0" else super().keeps(setting)

    def errors(self, setting: Setting, steps: int) -> Comparison | None:
        return replace(super().errors(setting, steps), nonfinite=self.nonfinite)


@pytest.mark.parametrize("levels", [("O1",), ("O0", "O1")])
@pytest.mark.parametrize("function", [None, "exp"])
def test_a_setting_that_nobody_has_timed_has_no_time_and_beats_no_fp32(levels, function) -> None:
    def played(budget: float) -> Failing:
        gains = {"exp": 1.0}
        culprits = {"O1": frozenset({MODULES[2]})}
        one = Failing({"O0": 3.0, "O1": 2.0}, culprits, gains=gains, budget=budget)
        one.nonfinite = [("blocks", function)] if function else ()
        return one

    whole = played(float("inf"))
    assert searched(whole, levels).result().seconds == pytest.approx(2.04 if not function else 2.0)
    untimed = 0
    for budget in range(5, whole.trials):
        script = played(budget)
        search = Search(script, levels, 0.01)
        with pytest.raises(OutOfBudget):
            search.run()
        found = search.result()
        if found is None or found.setting.level == "O0":
            continue
        if found.seconds:
            assert found.seconds == script.measured[found.setting]
        else:
            untimed += 1
            assert "fp32), not timed." in explanation.text("tune", search, found, None)
    assert bool(untimed) == ("O0" not in levels)


def test_noise_is_seldom_taken_for_a_gain() -> None:
    """A level as fast as fp32 wins about as often as the test allows by chance, and no more."""
    wins = 0
    for seed in range(400):
        played = Played({"O0": 1.0, "O4": 1.0}, noise=0.1, chance=random.Random(seed))
        wins += searched(played, ("O0", "O4")).result().setting.level == "O4"
    assert wins <= 400 * 0.08  # the runs of the second look are a second chance


@pytest.mark.parametrize(
    ("floats", "words"),
    [
        ((), "O1"),
        (("head",), "O1, head in fp32"),
        (("", "a", "b"), "O1, (model) and 2 more in fp32"),
    ],
)
def test_a_setting_in_words(floats: tuple[str, ...], words: str) -> None:
    assert str(Setting("O1", floats=floats)) == words


def test_a_gain_beyond_noise_is_taken() -> None:
    played = Played({"O0": 1.0, "O4": 0.8}, noise=0.05)
    search = searched(played, ("O0", "O4"))
    assert search.result().setting == Setting("O4")
    assert "p = 0.05" in search.result().reasons["opt_level"][0]


def test_without_o0_among_the_levels_the_best_of_them_wins() -> None:
    played = Played({"O0": 1.0, "O1": 3.0, "O2": 4.0}, {"O1": frozenset({"blocks.2.proj"})})
    found = searched(played, ("O1", "O2")).result()
    assert found.setting == Setting("O1", floats=("blocks.2.proj",))
    assert "Without this line" in found.reasons["blocks.2.proj"][-1]


@pytest.mark.parametrize("budget", [0, 3, float("inf")])
def test_fp32_is_no_result_where_it_does_not_compete(budget: float) -> None:
    played = Played(dict.fromkeys(LEVELS, 1.0), {"O1": None, "O2": None}, budget=budget)
    search = Search(played, ["O1", "O2"], 0.01)
    with contextlib.suppress(OutOfBudget):
        search.run()
    assert search.result() is None


@pytest.mark.parametrize("eps", [None, 1e-8])
def test_what_no_module_mends_is_told_with_the_weight_that_is_not_finite(eps) -> None:
    overflow = {"where": "weight", "module": "a", "title": "`a`: its weight holds inf", "fits": 1.0}
    overflow |= {"zero_eps": eps, "advice": "Give the optimizer eps=1e-4."}
    played = Played(dict.fromkeys(LEVELS, 1.0), {"O3": None}, overflows=[overflow])
    said: list[str] = []
    Search(played, ["O0", "O3"], 0.01, said.append).run()
    (line,) = [one for one in said if one.startswith("O3 is out")]
    assert line.endswith("; `a`: its weight holds inf. Give the optimizer eps=1e-4.")
    tried = [one for one in said if one.startswith("no  O3")]
    assert ("also with every suspected module" in line) == (len(tried) > 1) == (eps is None)


def test_what_is_left_with_all_suspects_in_fp32_is_told() -> None:
    """The loss is finite then, and more steps or a larger tolerance may do."""

    class NotFinite(Played):
        def metric(self, setting: Setting) -> Outcome:
            if setting == Setting("O2"):
                return Outcome((), failure="the loss is not finite")
            return super().metric(setting)

    said: list[str] = []
    Search(NotFinite(TIMES_OF_ALL, {"O2": None}), ["O0", "O2"], 0.01, said.append).run()
    (line,) = [one for one in said if one.startswith("O2 is out")]
    assert line == (
        "O2 is out: the loss is not finite, with every suspected module in fp32: "
        "2 (100.00% from fp32)"
    )


def test_rules_of_functions_are_kept_where_they_gain() -> None:
    gains = {"layer_norm": 0.9, "softmax": 0.8, "gelu": 0.5, "log_softmax": 1.0}
    breaks = {"softmax": ("half", "half_out")}
    played = Played({"O0": 2.0, "O1": 1.0}, gains=gains, breaks=breaks)
    found = searched(played, ("O0", "O1")).result()
    # softmax would break it, log_softmax gains nothing, and gelu is in half already
    assert found.setting == Setting("O1", functions=(("layer_norm", "half"),))
    assert "1.11 x as fast" in found.reasons["layer_norm"][0]


@pytest.mark.parametrize(("gain", "kept"), [(0.8, (("softmax", "half_out"),)), (1.0, ())])
def test_a_function_that_must_not_compute_in_half_may_hand_on_half(gain: float, kept) -> None:
    gains = {"softmax": gain}
    played = Played({"O0": 2.0, "O1": 1.0}, gains=gains, breaks={"softmax": ("half",)})
    assert searched(played, ("O0", "O1")).result().setting == Setting("O1", functions=kept)


def test_one_that_may_compute_in_half_is_tried_with_no_other_rule() -> None:
    said: list[str] = []
    played = Played({"O0": 2.0, "O1": 1.0}, gains={"softmax": 1.0})
    Search(played, ("O0", "O1"), 0.01, said.append).run()
    assert any("softmax = half:" in line for line in said)
    assert not any("half_out" in line for line in said)


def test_fp32_that_fails_ends_the_search() -> None:
    class Fails(Played):
        def metric(self, setting: Setting) -> Outcome:
            return Outcome(failure="NameError")

    with pytest.raises(TooFar, match="fp32 cannot be measured: NameError"):
        searched(Fails({"O0": 1.0}))


@pytest.mark.parametrize(
    ("outcome", "is_told"),
    [(Outcome(failure="NameError"), True), (Outcome((0.4,)), True), (Outcome((0.95,)), False)],
)
def test_a_script_may_go_on_from_what_its_first_run_has_saved(outcome, is_told: bool) -> None:
    """The second run fails, for no step is left, or is far from the first."""

    class GoesOn(Played):
        def metric(self, setting: Setting) -> Outcome:
            first = super().metric(setting)
            return first if self.trials == 1 else outcome

    said: list[str] = []
    with pytest.raises(TooFar) if outcome.failure else contextlib.nullcontext() as error:
        Search(GoesOn({"O0": 1.0}), ("O0",), 0.01, said.append).run()
    if error is not None:
        said.append(str(error.value))
        assert said == [f"fp32 cannot be measured twice: NameError; {OWN_FILES}"]
    assert any(OWN_FILES in line for line in said) is is_told


def test_a_script_that_does_not_repeat_widens_the_tolerance() -> None:
    class Noisy(Played):
        def metric(self, setting: Setting) -> Outcome:
            return Outcome((1.0 + 0.05 * self.trials + 0 * super().metric(setting).values[0],))

    search = searched(Noisy({"O0": 1.0, "O4": 0.5}), ("O0", "O4"))
    assert search.tolerance > 0.05


@given(st.frozensets(st.sampled_from(MODULES), min_size=1), st.permutations(MODULES))
@examples(1)
def test_the_smallest_set_is_exactly_the_culprits(culprits, suspects) -> None:
    tried = []

    def works(modules: Sequence[str]) -> bool:
        tried.append(tuple(modules))
        return culprits <= set(modules)

    assert set(smallest_set(suspects, works) or ()) == culprits
    assert all(tried)


def test_a_culprit_in_front_is_found_in_few_trials() -> None:
    suspects, trials = [f"m{i}" for i in range(1000)], []
    found = smallest_set(suspects, lambda modules: trials.append(1) or "m0" in modules)
    assert found == ["m0"]
    assert len(trials) == 1
    trials.clear()
    found = smallest_set(suspects, lambda modules: trials.append(1) or "m20" in modules)
    assert found == ["m20"]
    assert len(trials) < 40


def test_nothing_mends_it() -> None:
    assert smallest_set(["a", "b"], lambda modules: False) is None


def test_a_module_is_taken_rather_than_the_one_around_it() -> None:
    suspects = ["block.proj", "block", "other.proj"]

    def works(modules: Sequence[str]) -> bool:
        return {"block.proj", "block"} & set(modules) != set() and "other.proj" in modules

    assert smallest_set(suspects, works) == ["block.proj", "other.proj"]


@given(st.lists(st.floats(1, 2), min_size=3, max_size=4), st.lists(st.floats(1, 2), min_size=3))
@examples(1)
def test_the_chance_is_that_of_the_exact_test(lower, higher) -> None:
    stats = pytest.importorskip("scipy.stats")
    higher = higher[:4]
    if len({*lower, *higher}) == len(lower) + len(higher):
        exact = stats.mannwhitneyu(lower, higher, alternative="less", method="exact").pvalue
        assert chance_of(lower, higher) == pytest.approx(exact)


def test_three_runs_each_that_do_not_overlap_are_one_in_twenty() -> None:
    assert chance_of([1, 2, 3], [4, 5, 6]) == pytest.approx(1 / 20)
    assert chance_of([1, 2, 4], [3, 5, 6]) == pytest.approx(2 / 20)
    assert chance_of([1, 1, 1], [1, 1, 1]) == 1


def test_settings_run_in_turns() -> None:
    order = []
    race(lambda: order.append("A") or 1.0, lambda: order.append("B") or 0.5)
    assert "".join(order) == "ABABAB"


def test_warm_up_and_what_a_script_does_between_steps_are_left_out() -> None:
    times = [9.0] * 4 + [1.0] * 14 + [7.0] + [1.0]
    moments = [sum(times[:i]) for i in range(1, 21)]
    assert seconds_per_step(moments) == pytest.approx(1.0)
    assert seconds_per_step(moments[:3]) is None
