"""The scale's rule against torch's own kernel and references by hand, and its checkpoints."""

import dataclasses
import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import exactly, examples

from amp_patch.scaling.loss_scaler import LossScaler, load_state_dict, state_dict
from amp_patch.scaling.scale_rule import ScaleRule

TRANSIENT = {"skipped", "reduced", "overflows_at_floor"}
SCALE = "a number from 2**-126 to 2**126"
COUNT = "a whole number of at least 1"
NAN, INF = float("nan"), float("inf")
EVENTS = st.lists(st.booleans(), max_size=60)


def scaler_after(rule: ScaleRule, events: Sequence[bool]) -> LossScaler:
    scaler = LossScaler(rule)
    for overflow in events:
        scaler.update(overflow)
    return scaler


def events_of(spelled: str) -> list[bool]:
    """'..x' is two finite passes, then an overflow."""
    return [mark == "x" for mark in spelled]


def fields_of(scaler: LossScaler) -> dict[str, Any]:
    return {field.name: getattr(scaler, field.name) for field in dataclasses.fields(scaler)}


@st.composite
def rules(draw: st.DrawFn) -> ScaleRule:
    low, init, high = sorted(draw(st.tuples(*[st.integers(-24, 24)] * 3)))
    return ScaleRule(
        dynamic=draw(st.booleans()),
        init_scale=2.0**init,
        growth_factor=draw(st.sampled_from([2.0, 4.0, 1.5])),
        backoff_factor=draw(st.sampled_from([0.5, 0.25, 0.75])),
        growth_interval=draw(st.integers(1, 6)),
        hysteresis=draw(st.integers(1, 4)),
        min_loss_scale=2.0**low,
        max_loss_scale=2.0**high,
    )


# --- the rule, by hand ---


@pytest.mark.parametrize(
    ("keywords", "passes", "scale", "unskipped"),
    [
        ({}, "", 65536, 0),
        ({}, "xxxx", 4096, 0),
        ({}, "." * 1999, 65536, 1999),
        ({}, "." * 2000, 131072, 0),
        ({}, "." * 2001, 131072, 1),
        ({}, "." * 1999 + "x" + "." * 1999, 32768, 1999),
        ({}, "." * 2000 * 9, 2.0**24, 0),
        ({"growth_interval": 2}, "........", 2.0**20, 0),
        ({"growth_interval": 3}, "..x...", 65536, 0),
        ({"growth_factor": 4, "growth_interval": 1}, "...", 2.0**22, 0),
        ({"backoff_factor": 0.25}, "xx", 4096, 0),
        ({"max_loss_scale": 100.0, "growth_interval": 1}, "x..", 100, 0),
        ({"min_loss_scale": 60000.0}, "x", 60000, 0),
        ({"min_loss_scale": 60000.0}, "xx.", 60000, 1),
        ({"hysteresis": 2}, "x", 65536, 0),
        ({"hysteresis": 2}, "xx", 32768, 0),
        ({"hysteresis": 2}, "xxx", 16384, 0),
        ({"hysteresis": 2}, "x.x", 32768, 0),
        ({"hysteresis": 3}, "x.x.x", 32768, 0),
        ({"hysteresis": 2, "growth_interval": 2}, "xx..x", 65536, 0),
        ({"hysteresis": 2, "growth_interval": 2}, "xx..xx", 32768, 0),
        ({"hysteresis": 2, "growth_interval": 2}, "x.x..", 65536, 0),
    ],
)
def test_scale_by_hand(keywords: dict[str, Any], passes: str, scale: float, unskipped: int) -> None:
    scaler = scaler_after(ScaleRule.resolve("dynamic", **keywords), events_of(passes))
    assert (scaler.loss_scale(), scaler.unskipped) == (scale, unskipped)


@given(events=EVENTS, scale=st.sampled_from([1.0, 128.0, 0.1]), hysteresis=st.integers(1, 3))
def test_static_scale_never_moves_and_every_overflow_skips(
    events: list[bool], scale: float, hysteresis: int
) -> None:
    scaler = LossScaler(ScaleRule.resolve(scale, growth_interval=2, hysteresis=hysteresis))
    since = 0
    for overflow in events:
        assert scaler.update(overflow) is overflow
        since = 0 if overflow else since + 1
        assert scaler.loss_scale() == torch.tensor(scale, dtype=torch.float32).item()
        assert (scaler.unskipped, scaler.exhausted) == (since, False)
        assert scaler.hysteresis_left == hysteresis


@pytest.mark.parametrize("overflow", [torch.tensor(True), torch.tensor(1.0), np.bool_(True), 1])
def test_update_answers_with_a_bool(overflow: Any) -> None:
    scaler = LossScaler(ScaleRule())
    assert scaler.update(overflow) is True
    assert scaler.skipped is True
    assert scaler.update(not overflow) is False
    assert scaler.skipped is False


# --- the rule, against independent references ---


@examples(2)
@given(
    events=st.lists(st.booleans(), max_size=200),
    init=st.integers(0, 16),
    growth=st.sampled_from([2.0, 1.1, 3.7]),
    backoff=st.sampled_from([0.5, 0.3, 0.9]),
    interval=st.integers(1, 8),
)
def test_rule_is_bit_for_bit_that_of_torch(
    events: list[bool], init: int, growth: float, backoff: float, interval: int
) -> None:
    scaler = LossScaler(
        ScaleRule(
            init_scale=2.0**init,
            growth_factor=growth,
            backoff_factor=backoff,
            growth_interval=interval,
            min_loss_scale=2.0**-126,
            max_loss_scale=2.0**126,
        )
    )
    scale = torch.full((), 2.0**init)
    tracker = torch.zeros((), dtype=torch.int32)
    for overflow in events:
        moved = torch._amp_update_scale_(
            scale.clone(), tracker, torch.tensor(float(overflow)), growth, backoff, interval
        )
        if not 2.0**-126 <= moved.item() <= 2.0**126:
            break  # torch has neither a floor nor a cap
        scale = moved
        scaler.update(overflow)
        assert (scaler.loss_scale(), scaler.unskipped) == (scale.item(), tracker.item())


def reference_scales(rule: ScaleRule, events: Sequence[bool]) -> list[float]:
    """Megatron-LM's formulation: a tracker that may go below 0, reset by growth alone."""
    scale, good, tracker, scales = rule.init_scale, 0, rule.hysteresis, []
    for overflow in events:
        good = 0 if overflow else good + 1
        tracker -= overflow
        if overflow and tracker <= 0:
            scale = float(np.float32(scale * rule.backoff_factor))
        if good == rule.growth_interval:
            good, tracker = 0, rule.hysteresis
            scale = float(np.float32(scale * rule.growth_factor))
        scale = float(np.clip(scale, rule.min_loss_scale, rule.max_loss_scale))
        scales.append(scale)
    return scales


@examples(3)
@given(rule=rules(), events=EVENTS)
def test_bounded_scale_with_hysteresis_matches_the_reference(
    rule: ScaleRule, events: list[bool]
) -> None:
    scaler = LossScaler(dataclasses.replace(rule, dynamic=True))
    scales = []
    for overflow in events:
        scaler.update(overflow)
        scales.append(scaler.loss_scale())
    assert scales == reference_scales(rule, events)


@examples(3)
@given(rule=rules(), events=EVENTS)
def test_scale_stays_in_its_bounds_and_moves_the_right_way(
    rule: ScaleRule, events: list[bool]
) -> None:
    scaler = LossScaler(rule)
    for overflow in events:
        before = scaler.loss_scale()
        assert scaler.update(overflow) is overflow is scaler.skipped
        after = scaler.loss_scale()
        assert after <= before if overflow else after >= before
        assert scaler.reduced is (after < before)
        assert 0 < rule.min_loss_scale <= after <= rule.max_loss_scale
        assert 1 <= scaler.hysteresis_left <= rule.hysteresis
        assert scaler.unskipped >= 0
        assert not (overflow and scaler.unskipped)


@given(events=st.lists(st.booleans(), max_size=400))
def test_default_scales_are_powers_of_two(events: list[bool]) -> None:
    scaler = LossScaler(ScaleRule.resolve("dynamic", growth_interval=3))
    for overflow in events:
        scaler.update(overflow)
        assert math.frexp(scaler.loss_scale())[0] == 0.5


# --- the floor ---


def test_scale_stops_at_the_floor_where_apex_reached_zero() -> None:
    scaler = LossScaler(ScaleRule())
    for _ in range(40):
        assert not scaler.exhausted
        scaler.update(True)
    assert scaler.loss_scale() == 2.0**-24  # 40 halvings of 2**16
    scaler.update(True)
    assert not scaler.exhausted
    scaler.update(True)
    assert scaler.exhausted
    assert scaler.loss_scale() == 2.0**-24


@pytest.mark.parametrize(
    ("passes", "hysteresis", "exhausted"),
    [
        ("x", 1, False),  # reaches the floor, did not start there
        ("xx", 1, False),  # the first one at the floor is forgiven
        ("xxx", 1, True),
        ("xx.x", 1, False),  # not in a row
        ("xx.xx", 1, True),
        ("xxx.", 1, False),
        ("xxxxx", 3, True),  # two tolerated, one lowers, two at the floor
        ("xxxx", 3, False),
        ("xx....xx", 1, False),  # grown off the floor, and back to it once
    ],
)
def test_exhausted_needs_two_overflows_in_a_row_at_the_floor(
    passes: str, hysteresis: int, exhausted: bool
) -> None:
    rule = ScaleRule(init_scale=2.0, min_loss_scale=1.0, growth_interval=4, hysteresis=hysteresis)
    assert scaler_after(rule, events_of(passes)).exhausted is exhausted


@pytest.mark.parametrize(
    ("rule", "overflows", "lost"),
    [
        ({"init_scale": 2.0}, 1, False),
        ({"init_scale": 2.0}, 2, True),
        ({"init_scale": 4.0, "min_loss_scale": 4.0}, 1, False),
        ({"init_scale": 4.0, "min_loss_scale": 4.0}, 2, True),
        ({"dynamic": False, "init_scale": 0.5}, 2, False),
    ],
)
def test_a_scale_is_lost_below_1_or_where_its_floor_was_met_twice(
    rule: dict[str, Any], overflows: int, lost: bool
) -> None:
    scaler = LossScaler(ScaleRule(**rule))
    for _ in range(overflows):
        scaler.update(True)
    assert scaler.is_lost() is lost


def test_floor_counts_overflows_that_hysteresis_would_tolerate() -> None:
    rule = ScaleRule(init_scale=1.0, min_loss_scale=1.0, hysteresis=5)
    assert scaler_after(rule, events_of("xx")).exhausted


def test_scale_set_by_hand_starts_the_count_at_the_floor_again() -> None:
    scaler = scaler_after(ScaleRule(init_scale=1.0, min_loss_scale=1.0), events_of("x"))
    scaler.scale = 2.0  # scripts written for apex do so
    for exhausted in (False, False, True):
        scaler.update(True)
        assert scaler.exhausted is exhausted


# --- messages ---


@pytest.mark.parametrize(
    ("rule", "passes", "tail"),
    [
        (ScaleRule(), "x", "reducing loss scale to 32768.0"),
        (ScaleRule(), "xx", "reducing loss scale to 16384.0"),
        (ScaleRule(hysteresis=2), "x", "keeping loss scale at 65536.0"),
        (ScaleRule(hysteresis=2), "xx", "reducing loss scale to 32768.0"),
        (ScaleRule(min_loss_scale=65536.0), "x", "keeping loss scale at 65536.0"),
        (ScaleRule(min_loss_scale=50000.0), "x", "reducing loss scale to 50000.0"),
        (ScaleRule(dynamic=False, init_scale=128), "x", "keeping loss scale at 128.0"),
    ],
)
@pytest.mark.parametrize("loss_id", [0, 3])
def test_skip_message_tells_what_happened_to_the_scale(
    rule: ScaleRule, passes: str, tail: str, loss_id: int
) -> None:
    message = scaler_after(rule, events_of(passes)).skip_message(loss_id)
    assert message == f"Gradient overflow.  Skipping step, loss scaler {loss_id} {tail}"


# --- checkpoints ---


@examples(2)
@given(rule=rules(), before=EVENTS, after=EVENTS)
def test_loaded_scaler_goes_on_as_if_never_stopped(
    rule: ScaleRule, before: list[bool], after: list[bool]
) -> None:
    saved = scaler_after(rule, before)
    loaded = scaler_after(rule, [True, False, True])
    loaded.load_state_dict(saved.state_dict())
    for name, value in fields_of(saved).items():
        assert name in TRANSIENT or getattr(loaded, name) == value, name
    for overflow in after:
        assert loaded.update(overflow) is saved.update(overflow)
        assert fields_of(loaded) | {"overflows_at_floor": 0} == fields_of(saved) | {
            "overflows_at_floor": 0
        }


def test_loading_forgets_the_pass_before_it() -> None:
    rule = ScaleRule(init_scale=1.0, min_loss_scale=1.0)
    scaler = scaler_after(rule, events_of("xx"))
    scaler.load_state_dict({"loss_scale": 4.0, "unskipped": 1})
    assert (scaler.skipped, scaler.reduced, scaler.exhausted) == (False, False, False)
    reduced = scaler_after(ScaleRule(), events_of("x"))
    reduced.load_state_dict(reduced.state_dict())
    assert (reduced.skipped, reduced.reduced) == (False, False)


@pytest.mark.parametrize(
    ("rule", "state"),
    [
        (ScaleRule(), {"loss_scale": 32768.0, "unskipped": 1}),
        (ScaleRule(hysteresis=3), {"loss_scale": 65536.0, "unskipped": 1, "hysteresis": 2}),
        (ScaleRule(dynamic=False, init_scale=128), {"loss_scale": 128.0, "unskipped": 1}),
    ],
)
def test_state_has_the_keys_of_apex(rule: ScaleRule, state: dict[str, float]) -> None:
    got = scaler_after(rule, events_of("x.")).state_dict()
    assert got == state
    assert list(got) == list(state)
    assert [type(value) for value in got.values()] == [float, int, int][: len(got)]


@pytest.mark.parametrize(
    "state",
    [
        {"loss_scale": 512.0, "unskipped": 7},
        {"loss_scale": torch.tensor(512.0), "unskipped": torch.tensor(7, dtype=torch.int32)},
        {"loss_scale": 512, "unskipped": 7.0, "hysteresis": 2},
        {"scale": 512.0, "_growth_tracker": 7},
    ],
)
def test_states_of_apex_and_torch_load_as_python_numbers(state: dict[str, Any]) -> None:
    scaler = scaler_after(ScaleRule(hysteresis=2), events_of("xx"))
    scaler.load_state_dict(state)
    got = (scaler.loss_scale(), scaler.unskipped, scaler.hysteresis_left)
    assert got == (512.0, 7, 2)
    assert [type(value) for value in got] == [float, int, int]


def test_state_of_a_real_grad_scaler_loads_without_its_factors() -> None:
    source = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_factor=8.0, growth_interval=3)
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for factor in (1.0, math.inf, 1.0, 1.0):
        source.scale((weight * factor).sum()).backward()
        source.step(optimizer)
        source.update()
        optimizer.zero_grad()
    scaler = LossScaler(ScaleRule())
    scaler.load_state_dict(source.state_dict())
    assert (scaler.loss_scale(), scaler.unskipped, scaler.rule) == (2.0**9, 2, ScaleRule())


@pytest.mark.parametrize(("saved", "left"), [(1, 1), (2, 2), (9, 2)])
def test_saved_hysteresis_is_at_most_the_rules(saved: int, left: int) -> None:
    scaler = LossScaler(ScaleRule(hysteresis=2))
    scaler.load_state_dict({"loss_scale": 8.0, "unskipped": 0, "hysteresis": saved})
    assert scaler.hysteresis_left == left


@pytest.mark.parametrize(
    ("loaded", "passes", "scales"),
    [
        (64.0, "x", [32.0]),  # above the cap: comes down by overflows
        (64.0, ".", [64.0]),  # and is not lowered by a growth
        (1.0, "x", [1.0]),  # below the floor: an overflow does not raise it
        (1.0, "..", [2.0, 4.0]),
        (1.0, "xx", [1.0, 1.0]),
    ],
)
def test_loaded_scale_beyond_the_bounds_is_kept(
    loaded: float, passes: str, scales: list[float]
) -> None:
    rule = ScaleRule(init_scale=8.0, min_loss_scale=4.0, max_loss_scale=16.0, growth_interval=1)
    scaler = LossScaler(rule)
    scaler.load_state_dict({"loss_scale": loaded, "unskipped": 0})
    assert scaler.loss_scale() == loaded
    for overflow, scale in zip(events_of(passes), scales, strict=True):
        scaler.update(overflow)
        assert scaler.loss_scale() == scale


def test_count_saved_under_a_longer_interval_still_leads_to_growth() -> None:
    scaler = LossScaler(ScaleRule(growth_interval=5))
    scaler.load_state_dict({"loss_scale": 8.0, "unskipped": 1500})
    scaler.update(False)
    assert (scaler.loss_scale(), scaler.unskipped) == (16.0, 0)


def test_static_scale_keeps_its_value_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    scaler = LossScaler(ScaleRule.resolve(1.0))
    scaler.load_state_dict({"loss_scale": 1.0, "unskipped": 3})
    assert caplog.messages == []
    scaler.load_state_dict({"loss_scale": 65536.0, "unskipped": 4})
    assert (scaler.loss_scale(), scaler.unskipped) == (1.0, 4)
    assert caplog.messages == [
        "The loss scale is static and stays 1.0; the saved 65536.0 is not taken. "
        "Call amp.initialize(..., loss_scale='dynamic') to go on from it."
    ]


def test_a_dynamic_scale_tells_that_it_goes_on_from_what_other_levels_save(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scaler = LossScaler(ScaleRule(init_scale=1024.0))
    scaler.load_state_dict({"loss_scale": 2.0, "unskipped": 0})
    assert caplog.messages == []
    scaler.load_state_dict(LossScaler(ScaleRule.resolve(1.0)).state_dict())
    assert scaler.loss_scale() == 1.0
    assert caplog.messages == [
        "The loss scale is dynamic, and goes on from the saved 1.0, at which small gradients are 0 "
        "in half. Levels without a loss scale save 1.0: of a checkpoint of one leave "
        "amp.load_state_dict() out, to begin at 2.0."
    ]


STATE_RULE = (
    "a loss scaler's state must be a dict with 'loss_scale' and 'unskipped', or GradScaler's with "
    "'scale' and '_growth_tracker'"
)
STATE_MEND = "Call amp.load_state_dict() with what amp.state_dict() returned."


@pytest.mark.parametrize(
    ("state", "error", "got"),
    [
        ({}, ValueError, "the keys []"),
        ({"loss_scale": 8.0}, ValueError, "the keys ['loss_scale']"),
        ({"unskipped": 0}, ValueError, "the keys ['unskipped']"),
        ({"scale": 8.0, "unskipped": 0}, ValueError, "the keys ['scale', 'unskipped']"),
        (8.0, TypeError, "an object of type float"),
        ([8.0, 0], TypeError, "an object of type list"),
    ],
)
def test_state_of_another_shape_is_refused(state: Any, error: type[Exception], got: str) -> None:
    with pytest.raises(error, match=exactly(f"{STATE_RULE}; got {got}. {STATE_MEND}")):
        LossScaler(ScaleRule()).load_state_dict(state)


@pytest.mark.parametrize(
    ("entry", "words", "value"),
    [
        *(
            ("loss_scale", SCALE, v)
            for v in (0.0, -1.0, NAN, INF, "much", None, torch.ones(2), 10**400)
        ),
        *(("unskipped", "a whole number of at least 0", v) for v in (-1, 0.5, NAN, INF, "x")),
        *(("hysteresis", COUNT, v) for v in (0, 1.5, None)),
    ],
)
def test_saved_number_out_of_range_is_refused(entry: str, words: str, value: object) -> None:
    message = (
        f"a saved {entry!r} must be {words}; got {value!r}. "
        "Correct that entry, then call amp.load_state_dict() again."
    )
    scaler = LossScaler(ScaleRule())
    before = fields_of(scaler)
    with pytest.raises(ValueError, match=exactly(message)):
        scaler.load_state_dict({"loss_scale": 8.0, "unskipped": 1, entry: value})
    assert fields_of(scaler) == before


# --- the list of scalers ---


def scalers_at(*scales: float) -> list[LossScaler]:
    return [LossScaler(ScaleRule(init_scale=scale)) for scale in scales]


def scales_of(scalers: Sequence[LossScaler]) -> list[float]:
    return [scaler.loss_scale() for scaler in scalers]


def entry(scale: float, unskipped: int = 0) -> dict[str, float]:
    return {"loss_scale": scale, "unskipped": unskipped}


def test_state_dict_names_the_scalers_in_order() -> None:
    state = state_dict(scalers_at(*[2.0**k for k in range(12)]))
    assert type(state) is OrderedDict
    assert list(state.items()) == [(f"loss_scaler{k}", entry(2.0**k)) for k in range(12)]


@pytest.mark.parametrize("weights_only", [True, False])
def test_state_survives_a_file(tmp_path: Any, weights_only: bool) -> None:
    saved = scalers_at(8.0, 32.0)
    saved[1].update(False)
    torch.save(state_dict(saved), tmp_path / "amp.pt")
    loaded = scalers_at(1.0, 1.0)
    load_state_dict(loaded, torch.load(tmp_path / "amp.pt", weights_only=weights_only))
    assert state_dict(loaded) == {"loss_scaler0": entry(8.0), "loss_scaler1": entry(32.0, 1)}


def test_matching_load_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    scalers = scalers_at(1.0, 1.0)
    load_state_dict(scalers, {"loss_scaler0": entry(2.0), "loss_scaler1": entry(4.0)})
    assert scales_of(scalers) == [2.0, 4.0]
    assert capsys.readouterr() == ("", "")


def test_entries_match_by_position_as_in_apex() -> None:
    scalers = scalers_at(1.0, 1.0)
    load_state_dict(scalers, {"loss_scaler7": entry(2.0), "loss_scaler0": entry(4.0)})
    assert scales_of(scalers) == [2.0, 4.0]


@pytest.mark.parametrize(
    ("entries", "scales", "printed"),
    [
        (0, [1.0, 1.0], "Warning: state_dict contains 0 entries, while 2 loss_scalers are used\n"),
        (1, [8.0, 1.0], "Warning: state_dict contains 1 entries, while 2 loss_scalers are used\n"),
        (
            4,
            [8.0, 16.0],
            "Warning: state_dict contains 4 entries, while 2 loss_scalers are used\n"
            "Skipping loss_scaler[2], since num_losses was set to 2\n"
            "Skipping loss_scaler[3], since num_losses was set to 2\n",
        ),
    ],
)
def test_other_number_of_entries_warns_as_apex(
    entries: int, scales: list[float], printed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    state = {f"loss_scaler{k}": entry(2.0 ** (3 + k)) for k in range(entries)}
    scalers = scalers_at(1.0, 1.0)
    load_state_dict(scalers, state)
    assert scales_of(scalers) == scales
    assert capsys.readouterr().out == printed
    announced: list[str] = []
    load_state_dict(scalers, state, announced.append)
    assert announced == printed.splitlines()
    assert capsys.readouterr().out == ""


def test_a_state_without_entries_is_told_in_words(caplog: pytest.LogCaptureFixture) -> None:
    scalers = scalers_at(4.0)
    load_state_dict(scalers, {})
    assert scales_of(scalers) == [4.0]
    assert caplog.messages == [
        "The state of the loss scalers is empty, as that of a run with enabled=False; no loss "
        "scale was loaded. Call amp.load_state_dict() with what amp.state_dict() returned of a "
        "run with amp, or leave it out."
    ]
    load_state_dict(scalers, {"loss_scaler0": entry(2.0)})
    assert len(caplog.messages) == 1


def test_entry_beyond_the_scalers_is_skipped_unread() -> None:
    scalers = scalers_at(1.0)
    load_state_dict(scalers, {"loss_scaler0": entry(2.0), "loss_scaler1": entry(0.0)})
    assert scales_of(scalers) == [2.0]


def test_scalers_in_the_same_state_are_still_two() -> None:
    assert len(set(scalers_at(1.0, 1.0))) == 2


def test_grad_scaler_state_loads_into_every_scaler(capsys: pytest.CaptureFixture[str]) -> None:
    scalers = scalers_at(1.0, 1.0)
    source = torch.amp.GradScaler("cpu", init_scale=64.0)
    load_state_dict(scalers, source.state_dict())
    assert scales_of(scalers) == [64.0, 64.0]
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("extra", "keys"),
    [
        ({"model": 1}, '"model"'),
        ({"model": 1, "optimizer": 2}, '"model", "optimizer"'),
        ({3: 1}, '"3"'),
    ],
)
def test_unexpected_keys_are_refused_before_anything_changes(
    extra: Mapping[Any, object], keys: str, capsys: pytest.CaptureFixture[str]
) -> None:
    message = (
        f"Error(s) in loading state_dict. Unexpected key(s) in state_dict: {keys}. Keys must be "
        "'loss_scaler0', 'loss_scaler1', ...; call amp.load_state_dict() with what "
        "amp.state_dict() or GradScaler.state_dict() returned."
    )
    scalers = scalers_at(1.0)
    with pytest.raises(RuntimeError, match=exactly(message)):
        load_state_dict(scalers, {"loss_scaler0": entry(2.0), **extra})
    assert scales_of(scalers) == [1.0]
    assert capsys.readouterr().out == ""


def test_bad_entry_leaves_every_scaler_as_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    scalers = scalers_at(1.0, 1.0, 1.0)
    with pytest.raises(ValueError, match="a saved 'loss_scale' must be"):
        load_state_dict(scalers, {"loss_scaler0": entry(2.0), "loss_scaler1": entry(0.0)})
    assert scales_of(scalers) == [1.0, 1.0, 1.0]
    assert capsys.readouterr().out == ""
