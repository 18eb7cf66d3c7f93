"""What `amp.initialize` may ask of a loss scale, and the words in which the rest is refused."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from support import exactly

from amp_patch.scaling.loss_scaler import LossScaler
from amp_patch.scaling.scale_rule import ScaleRule


def test_rule_defaults_are_those_of_apex_with_a_floor() -> None:
    expected = {
        "dynamic": True,
        "init_scale": 65536.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 2000,
        "hysteresis": 1,
        "min_loss_scale": 1 / 16777216,
        "max_loss_scale": 16777216.0,
    }
    assert dataclasses.asdict(ScaleRule.resolve("dynamic")) == expected
    assert dataclasses.asdict(ScaleRule()) == expected


@pytest.mark.parametrize(
    ("keywords", "init"),
    [
        ({"max_loss_scale": 1024.0}, 1024.0),
        ({"max_loss_scale": 1.0}, 1.0),
        ({"min_loss_scale": 2.0**20}, 2.0**20),
        ({"min_loss_scale": 1.0, "max_loss_scale": 2.0**30}, 65536.0),
        ({"min_loss_scale": 4.0, "max_loss_scale": 4.0}, 4.0),
    ],
)
def test_dynamic_scale_starts_within_its_bounds(keywords: dict[str, float], init: float) -> None:
    rule = ScaleRule.resolve("dynamic", **keywords)  # type: ignore[arg-type]
    assert (rule.dynamic, rule.init_scale, LossScaler(rule).loss_scale()) == (True, init, init)


def test_dynamic_scale_starts_where_it_is_told() -> None:
    assert ScaleRule.resolve("dynamic", init_scale=3000).init_scale == 3000.0
    assert ScaleRule.resolve(128.0, init_scale=3000.0) == ScaleRule.resolve(128.0)
    for outside, mend in (({"max_loss_scale": 2048.0}, 2048), ({"min_loss_scale": 4096.0}, 4096)):
        with pytest.raises(ValueError, match=rf"init_scale must lie from.*init_scale={mend}\.0\)"):
            ScaleRule.resolve("dynamic", init_scale=3000.0, **outside)
    with pytest.raises(ValueError, match="init_scale must be a number from"):
        ScaleRule.resolve("dynamic", init_scale=float("nan"))


def test_static_scale_starts_at_its_value_even_beyond_the_bounds() -> None:
    rule = ScaleRule.resolve(2.0**30, max_loss_scale=8.0)
    assert rule == ScaleRule(dynamic=False, init_scale=2.0**30, max_loss_scale=8.0)


def test_every_keyword_reaches_its_field() -> None:
    keywords: dict[str, Any] = {
        "growth_factor": 4.0,
        "backoff_factor": 0.25,
        "growth_interval": 7,
        "hysteresis": 3,
        "min_loss_scale": 0.5,
        "max_loss_scale": 2.0**18,
    }
    assert ScaleRule.resolve("dynamic", **keywords) == ScaleRule(**keywords)


def test_numpy_numbers_become_python_numbers() -> None:
    rule = ScaleRule.resolve(np.float32(8), growth_interval=np.int64(5), hysteresis=np.int64(2))  # type: ignore[arg-type]
    assert {type(value) for value in dataclasses.astuple(rule)} == {bool, float, int}
    assert (rule.init_scale, rule.growth_interval, rule.hysteresis) == (8.0, 5, 2)


SCALE = "a number from 2**-126 to 2**126"
COUNT = "a whole number of at least 1"
NAN, INF = float("nan"), float("inf")
BAD_RULES: list[tuple[str, str, str, list[object]]] = [
    ("growth_factor", "above 1 and at most 2**126", "2.0", [1, 1.0, 0.5, -2.0, NAN, INF, "2"]),
    (
        "backoff_factor",
        "from 2**-126 to below 1",
        "0.5",
        [0, 1.0, 2.0, -0.5, NAN, INF, True, 2.0**-127],
    ),
    ("growth_interval", COUNT, "2000", [0, -1, 1.5, NAN, INF, True, "10"]),
    ("hysteresis", COUNT, "2", [0, -1, 1.5, NAN, INF, True]),
    ("min_loss_scale", SCALE, str(2.0**-24), [0, -1.0, NAN, INF, 2.0**-127, True]),
    ("max_loss_scale", SCALE, str(2.0**24), [0, -1.0, NAN, INF, 2.0**127, 10**400, "16"]),
]


@pytest.mark.parametrize(
    ("keyword", "words", "example", "value"),
    [(keyword, words, example, v) for keyword, words, example, vs in BAD_RULES for v in vs],
)
@pytest.mark.parametrize("loss_scale", ["dynamic", 8.0])
def test_bad_rule_is_refused(
    loss_scale: Any, keyword: str, words: str, example: str, value: Any
) -> None:
    message = (
        f"{keyword} must be {words}; got {value!r}. Call amp.initialize(..., {keyword}={example})."
    )
    with pytest.raises(ValueError, match=exactly(message)):
        ScaleRule.resolve(loss_scale, **{keyword: value})


@pytest.mark.parametrize("value", [0, -1.0, NAN, INF, 2.0**127, 2.0**-127, "Dynamic", True])
def test_bad_static_scale_is_refused(value: Any) -> None:
    message = (
        f"loss_scale must be 'dynamic' or {SCALE}; got {value!r}. "
        "Call amp.initialize(..., loss_scale=128.0)."
    )
    with pytest.raises(ValueError, match=exactly(message)):
        ScaleRule.resolve(value)


@pytest.mark.parametrize(
    ("given", "received", "mend"),
    [
        (
            {"min_loss_scale": 8, "max_loss_scale": 4},
            "8.0 and 4.0",
            {"min_loss_scale": 4.0, "max_loss_scale": 8.0},
        ),
        (
            {"min_loss_scale": 2.0**30},
            "1073741824.0 and 16777216.0",
            {"min_loss_scale": 2.0**30, "max_loss_scale": 2.0**30},
        ),
        (
            {"max_loss_scale": 2.0**-30},
            f"{2.0**-24} and {2.0**-30}",
            {"min_loss_scale": 2.0**-30, "max_loss_scale": 2.0**-30},
        ),
    ],
)
def test_floor_above_the_cap_is_refused_and_a_default_makes_way(
    given: dict[str, Any], received: str, mend: dict[str, float]
) -> None:
    words = ", ".join(f"{keyword}={value}" for keyword, value in mend.items())
    more = {"min_loss_scale": " or with a higher cap", "max_loss_scale": " or with a lower floor"}
    message = (
        f"min_loss_scale must not be above max_loss_scale; got {received}. "
        f"Call amp.initialize(..., {words}){'' if len(given) == 2 else more[next(iter(given))]}."
    )
    with pytest.raises(ValueError, match=exactly(message)):
        ScaleRule.resolve("dynamic", **given)
    ScaleRule.resolve("dynamic", **mend)  # type: ignore[arg-type]


@pytest.mark.parametrize("bound", [2.0**-126, 2.0**126])
def test_extreme_scales_and_their_inverses_are_normal_float32(bound: float) -> None:
    rule = ScaleRule.resolve(bound, min_loss_scale=bound, max_loss_scale=bound)
    tiny = torch.finfo(torch.float32).tiny
    pair = torch.tensor([rule.init_scale, 1 / rule.init_scale], dtype=torch.float32)
    assert bool((torch.isfinite(pair) & (pair >= tiny)).all())


@pytest.mark.parametrize(
    ("wanted", "count"), [(2.0**16, 1), (2.0**15, 2), (2.0**14, 3), (2.0**10, 7), (2.0**9, None)]
)
def test_how_many_overflows_bring_a_scale_down_to_another(wanted: float, count: int | None) -> None:
    rule = ScaleRule(hysteresis=2, min_loss_scale=2.0**10)
    assert rule.overflows_until(2.0**16, wanted) == count


def test_scales_are_float32_numbers_as_a_device_has_them() -> None:
    rule = ScaleRule(init_scale=0.3, min_loss_scale=0.1, max_loss_scale=0.7, growth_factor=1.1)
    scales = rule.init_scale, rule.min_loss_scale, rule.max_loss_scale
    assert scales == tuple(np.array([0.3, 0.1, 0.7], np.float32).astype(float))
    assert rule.growth_factor == 1.1
