"""A level from the environment takes the place of a script's."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from amp_patch import requested_level
from amp_patch.levels import OPT_LEVELS

EVERY_LEVEL = True  # here is what each level is


@pytest.fixture
def force(monkeypatch: pytest.MonkeyPatch):
    return lambda level: monkeypatch.setenv("AMP_PATCH_OPT_LEVEL", level)


def test_without_it_a_level_is_what_the_script_asks_for() -> None:
    resolved = requested_level.resolve_forced("O2", loss_scale=128.0)
    assert resolved == (requested_level.resolve("O2", loss_scale=128.0), None)


@pytest.mark.parametrize("forced", OPT_LEVELS)
@pytest.mark.parametrize("asked", OPT_LEVELS)
def test_a_forced_level_is_the_one_that_is_resolved(force, forced: str, asked: str) -> None:
    force(forced)
    level, message = requested_level.resolve_forced(asked)
    assert level == requested_level.resolve(forced)
    expected = f"amp-patch: opt_level {asked} of the script is run as {forced}."
    assert message == (None if asked == forced else expected)


@pytest.mark.parametrize(
    ("forced", "scale", "told"),
    [("O4", "dynamic", "'dynamic'"), ("O5", "128.0", "128.0"), ("O1", "dynamic", None)],
)
def test_a_loss_scale_is_told_where_the_forced_level_has_none_by_itself(
    force, forced: str, scale: str, told: str | None
) -> None:
    force(forced)
    level, message = requested_level.resolve_forced("O2", loss_scale=scale)
    own = "" if told is None else f", with the script's loss_scale={told}"
    assert message == f"amp-patch: opt_level O2 of the script is run as {forced}{own}."
    assert str(level.loss_scale) == scale


def test_overrides_that_it_takes_are_kept_and_others_dropped_in_one_line(force) -> None:
    force("O1")
    overrides = {"keep_batchnorm_fp32": "True", "loss_scale": "128.0", "master_weights": None}
    level, message = requested_level.resolve_forced("O2", **overrides)
    assert level == requested_level.resolve("O1", loss_scale=128.0)
    assert message == (
        "amp-patch: opt_level O2 of the script is run as O1, which refuses "
        "keep_batchnorm_fp32='True': dropped."
    )


def test_what_the_scripts_own_level_refuses_is_its_error_still(force) -> None:
    force("O2")
    with pytest.raises(RuntimeError, match="keep_batchnorm_fp32"):
        requested_level.resolve_forced("O1", keep_batchnorm_fp32=True)
    with pytest.raises(ValueError, match="loss_scale must be"):
        requested_level.resolve_forced("O1", loss_scale="much")


def test_a_level_that_there_is_not_is_refused(force) -> None:
    force("O9")
    with pytest.raises(RuntimeError, match=r"AMP_PATCH_OPT_LEVEL must be one of O0, .*; got 'O9'"):
        requested_level.resolve_forced("O1")


def test_initialize_trains_at_it(amp, force, capsys: pytest.CaptureFixture[str]) -> None:
    force("O5")
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O1", rules={"softmax": "half"})
    assert model.weight.dtype is torch.bfloat16
    out, err = capsys.readouterr()
    assert err.splitlines() == [
        "amp-patch: opt_level O1 of the script is run as O5.",
        "amp-patch: functions {'softmax': 'half'} of the rules has no effect at O5: dropped.",
    ]
    assert out.startswith("Selected optimization level O5:")


def test_a_fused_step_is_dropped_where_the_level_has_no_masters(amp, force) -> None:
    force("O1")
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O2", fused_step=True, verbosity=0)
    assert model.weight.dtype is torch.float32
