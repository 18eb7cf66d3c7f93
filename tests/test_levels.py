"""The table and its overrides against apex's documented behaviour, and every message."""

import argparse
import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import exactly, examples

from amp_patch.levels import OPT_LEVELS, OptLevel, describe, print_level
from amp_patch.requested_level import resolve

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
EVERY_LEVEL = True  # here is what each level is
CASTING = ("O1", "O4")
STORED = ("O0", "O2", "O3", "O5")

# Columns: cast_model_type, patch_torch_functions, its type, keep_batchnorm_fp32, master_weights,
# loss_scale, the half dtype of regions.
TABLE = {
    "O0": (F32, False, None, None, False, 1.0, F16),
    "O1": (None, True, F16, None, None, "dynamic", F16),
    "O2": (F16, False, None, True, True, "dynamic", F16),
    "O3": (F16, False, None, False, False, 1.0, F16),
    "O4": (None, True, BF16, None, None, 1.0, BF16),
    "O5": (BF16, False, None, True, True, 1.0, BF16),
}

DESCRIPTION_OF_O2 = """\
Selected optimization level O2:  FP16 training with FP32 batchnorm and FP32 master weights.

Defaults for this optimization level are:
enabled                : True
opt_level              : O2
cast_model_type        : torch.float16
patch_torch_functions  : False
keep_batchnorm_fp32    : True
master_weights         : True
loss_scale             : dynamic
Processing user overrides (additional kwargs that are not None)...
After processing overrides, optimization options are:
enabled                : True
opt_level              : O2
cast_model_type        : torch.float16
patch_torch_functions  : False
keep_batchnorm_fp32    : False
master_weights         : True
loss_scale             : 128.0"""

DESCRIPTION_OF_O5 = """\
Selected optimization level O5:  BFLOAT16 training with FP32 batchnorm and FP32 master weights.

Defaults for this optimization level are:
enabled                    : True
opt_level                  : O5
cast_model_type            : torch.bfloat16
patch_torch_functions      : False
patch_torch_functions_type : None
keep_batchnorm_fp32        : True
master_weights             : True
loss_scale                 : 1.0
Processing user overrides (additional kwargs that are not None)...
After processing overrides, optimization options are:
enabled                    : True
opt_level                  : O5
cast_model_type            : torch.bfloat16
patch_torch_functions      : False
patch_torch_functions_type : None
keep_batchnorm_fp32        : True
master_weights             : True
loss_scale                 : 1.0"""

BRIEFS = {
    "O0": "O0:  Pure FP32 training.",
    "O1": "O1:  Insert automatic casts around Pytorch functions and Tensor methods.",
    "O2": "O2:  FP16 training with FP32 batchnorm and FP32 master weights.",
    "O3": "O3:  Pure FP16 training.",
    "O4": "O4:  Insert automatic casts around Pytorch functions and Tensor methods.",
    "O5": "O5:  BFLOAT16 training with FP32 batchnorm and FP32 master weights.",
}


@pytest.mark.parametrize("name", TABLE)
def test_level_has_the_documented_settings(name: str) -> None:
    level = resolve(name)
    got = (
        level.cast_model_type,
        level.patch_torch_functions,
        level.patch_torch_functions_type,
        level.keep_batchnorm_fp32,
        level.master_weights,
        level.loss_scale,
        level.half_dtype,
    )
    assert got == TABLE[name]
    assert (level.name, level.brief, level.cast_model_outputs) == (name, BRIEFS[name], None)
    assert level.casts_functions is (name in CASTING)


def test_table_holds_the_six_levels_in_order_and_cannot_be_changed() -> None:
    assert list(OPT_LEVELS) == list(TABLE)
    with pytest.raises(dataclasses.FrozenInstanceError):
        OPT_LEVELS["O1"].loss_scale = 1.0


def test_options_keep_the_order_that_apex_prints() -> None:
    assert list(resolve("O1").options().items()) == [
        ("enabled", True),
        ("opt_level", "O1"),
        ("cast_model_type", None),
        ("patch_torch_functions", True),
        ("patch_torch_functions_type", F16),
        ("keep_batchnorm_fp32", None),
        ("master_weights", None),
        ("loss_scale", "dynamic"),
    ]


def test_description_is_what_apex_prints() -> None:
    assert describe(resolve("O2", keep_batchnorm_fp32="False", loss_scale=128)) == DESCRIPTION_OF_O2
    assert describe(resolve("O5")) == DESCRIPTION_OF_O5


@pytest.mark.parametrize("name", TABLE)
def test_description_shows_defaults_first_and_overrides_last(name: str) -> None:
    lines = describe(resolve(name, loss_scale="64")).splitlines()
    width = 26 if name in ("O4", "O5") else 22
    default = f"{'loss_scale':{width}} : {TABLE[name][5]}"
    assert lines[:2] == [f"Selected optimization level {BRIEFS[name]}", ""]
    assert [line for line in lines if line.startswith("loss_scale")] == [
        default,
        f"{'loss_scale':{width}} : 64.0",
    ]


ACCEPTED = [
    *((name, "cast_model_type", False, None) for name in TABLE),
    *((name, "cast_model_type", F32, F32) for name in TABLE),
    *((name, "cast_model_type", dtype, dtype) for name in STORED for dtype in (F16, BF16)),
    *((name, "patch_torch_functions", False, False) for name in TABLE),
    *((name, "patch_torch_functions", True, True) for name in CASTING),
    ("O1", "patch_torch_functions", 0, False),
    *((name, "keep_batchnorm_fp32", flag, flag) for name in STORED for flag in (True, False)),
    *((name, "keep_batchnorm_fp32", "True", True) for name in STORED),
    *((name, "keep_batchnorm_fp32", "False", False) for name in STORED),
    ("O2", "keep_batchnorm_fp32", 0, False),
    *((name, "master_weights", flag, flag) for name in STORED for flag in (True, False)),
    ("O2", "master_weights", 1, True),
    *((name, "loss_scale", "dynamic", "dynamic") for name in TABLE),
    *((name, "loss_scale", "128.0", 128.0) for name in TABLE),
    ("O1", "loss_scale", 128, 128.0),
    ("O1", "loss_scale", torch.tensor(8.0), 8.0),
    *((name, "cast_model_outputs", F16, F16) for name in TABLE),
    ("O2", "cast_model_outputs", torch.float64, torch.float64),
]


@pytest.mark.parametrize(("name", "option", "value", "stored"), ACCEPTED)
def test_accepted_override_changes_its_own_setting_only(
    name: str, option: str, value: object, stored: object
) -> None:
    level = resolve(name, **{option: value})
    assert getattr(level, option) == stored
    assert type(getattr(level, option)) is type(stored)
    assert (
        dataclasses.replace(level, **{option: getattr(OPT_LEVELS[name], option)})
        == (OPT_LEVELS[name])
    )


def test_overrides_that_are_none_are_no_overrides() -> None:
    options = [field.name for field in dataclasses.fields(OptLevel)]
    nothing = {
        option: None
        for option in options
        if option not in ("name", "brief", "patch_torch_functions_type")
    }
    assert resolve("O2", **nothing) == OPT_LEVELS["O2"]


@pytest.mark.parametrize(
    ("overrides", "half", "casts"),
    [
        ({"opt_level": "O0", "cast_model_type": BF16}, BF16, False),
        ({"opt_level": "O2", "cast_model_type": BF16}, BF16, False),
        ({"opt_level": "O5", "cast_model_type": F16}, F16, False),
        ({"opt_level": "O5", "cast_model_type": False}, F16, False),
        ({"opt_level": "O1", "cast_model_type": F32}, F16, True),
        ({"opt_level": "O1", "patch_torch_functions": False}, F16, False),
        ({"opt_level": "O4", "patch_torch_functions": False}, BF16, False),
    ],
)
def test_derived_settings_follow_the_overrides(
    overrides: dict[str, object], half: torch.dtype, casts: bool
) -> None:
    level = resolve(**overrides)
    assert level.half_dtype is half
    assert level.casts_functions is casts


@pytest.mark.parametrize("rank", [None, 0, 1])
def test_a_level_is_printed_on_the_first_rank_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rank: int | None
) -> None:
    if rank is not None:
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
    print_level(OPT_LEVELS["O2"])
    assert capsys.readouterr().out == ("" if rank == 1 else describe(OPT_LEVELS["O2"]) + "\n")


def stays_float32(name: str, got: str, stored: str) -> str:
    return (
        f"cast_model_type at opt_level='{name}' must be None, False or torch.float32, because the "
        f"weights stay float32 there; got {got}. Leave it out, or call "
        f"amp.initialize(..., opt_level='{stored}') to store the model in half precision."
    )


def not_castable(got: str, half: str) -> str:
    return (
        "cast_model_type must be torch.float16, torch.bfloat16 or torch.float32, or False for a "
        f"model that is not cast; got {got}. Call amp.initialize(..., cast_model_type={half})."
    )


def not_a_flag(option: str, got: str) -> str:
    return (
        f"{option} must be True, False or None; got {got}. "
        f"Call amp.initialize(..., {option}=True), or leave {option} out."
    )


def no_patches(name: str, casting: str) -> str:
    return (
        "patch_torch_functions is True only at opt_level='O1' and 'O4'; got True at "
        f"opt_level='{name}'. Call amp.initialize(..., opt_level='{casting}')."
    )


def stored_by_itself(option: str, name: str, why: str, got: object) -> str:
    return (
        f"{option} must be None at opt_level='{name}', where {why}; got {got!r}. "
        f"Call amp.initialize(..., opt_level='{name}') without it."
    )


BATCHNORM = ("keep_batchnorm_fp32", "batch norms keep their float32 weights by themselves")
MASTERS = ("master_weights", "the model's own weights are float32")


def no_output_type(got: str) -> str:
    return (
        f"cast_model_outputs must be a floating point torch.dtype or None; got {got}. "
        "Call amp.initialize(..., cast_model_outputs=torch.float32)."
    )


REFUSED = [
    ("O1", "cast_model_type", F16, stays_float32("O1", "torch.float16", "O2")),
    ("O4", "cast_model_type", BF16, stays_float32("O4", "torch.bfloat16", "O5")),
    ("O1", "cast_model_type", True, stays_float32("O1", "True", "O2")),
    ("O2", "cast_model_type", torch.float64, not_castable("torch.float64", "torch.float16")),
    ("O0", "cast_model_type", torch.int32, not_castable("torch.int32", "torch.float16")),
    ("O5", "cast_model_type", "bfloat16", not_castable("'bfloat16'", "torch.bfloat16")),
    ("O3", "cast_model_type", True, not_castable("True", "torch.float16")),
    *((name, "patch_torch_functions", True, no_patches(name, "O1")) for name in ("O0", "O2", "O3")),
    ("O5", "patch_torch_functions", True, no_patches("O5", "O4")),
    ("O1", "patch_torch_functions", "no", not_a_flag("patch_torch_functions", "'no'")),
    *(
        (name, option, value, stored_by_itself(option, name, why, value))
        for option, why in (BATCHNORM, MASTERS)
        for name in CASTING
        for value in (True, False, "True")
    ),
    ("O2", "keep_batchnorm_fp32", "yes", not_a_flag("keep_batchnorm_fp32", "'yes'")),
    ("O2", "keep_batchnorm_fp32", 2, not_a_flag("keep_batchnorm_fp32", "2")),
    ("O2", "keep_batchnorm_fp32", [True], not_a_flag("keep_batchnorm_fp32", "[True]")),
    ("O2", "master_weights", "False", not_a_flag("master_weights", "'False'")),
    ("O2", "cast_model_outputs", torch.int64, no_output_type("torch.int64")),
    ("O2", "cast_model_outputs", "half", no_output_type("'half'")),
]


@pytest.mark.parametrize(("name", "option", "value", "message"), REFUSED)
def test_refused_override_says_why_and_what_to_call(
    name: str, option: str, value: object, message: str
) -> None:
    with pytest.raises(RuntimeError, match=exactly(message)):
        resolve(name, **{option: value})


NOT_A_SCALE = [
    "Dynamic", "", "nan", [], torch.ones(2), True, False,
    0, 0.0, -1, "-2", float("nan"), float("inf"), 10**400,
]  # fmt: skip


@pytest.mark.parametrize("value", NOT_A_SCALE, ids=repr)
@pytest.mark.parametrize("name", ["O0", "O1", "O5"])
def test_loss_scale_that_cannot_scale_is_refused(name: str, value: object) -> None:
    message = (
        f"loss_scale must be 'dynamic' or a finite number above 0; got {value!r}. Call "
        "amp.initialize(..., loss_scale='dynamic') or amp.initialize(..., loss_scale=128.0)."
    )
    with pytest.raises(ValueError, match=exactly(message)):
        resolve(name, loss_scale=value)


NAMES = "opt_level must be one of the strings 'O0', 'O1', 'O2', 'O3', 'O4', 'O5'"
ZERO = ", which starts with the digit zero, not the capital letter O"
LOWER = ", which starts with a lower-case letter o, not the capital letter O"


@pytest.mark.parametrize(
    ("opt_level", "slip", "guess"),
    [
        ("02", ZERO, "O2"),
        ("00", ZERO, "O0"),
        ("o2", LOWER, "O2"),
        ("o5", LOWER, "O5"),
        ("O6", "", "O1"),
        ("07", "", "O1"),
        ("x2", "", "O1"),
        ("fp16", "", "O1"),
        ("", "", "O1"),
    ],
)
def test_unknown_level_is_named_with_the_slip(opt_level: str, slip: str, guess: str) -> None:
    message = f"{NAMES}; got {opt_level!r}{slip}. Call amp.initialize(..., opt_level='{guess}')."
    with pytest.raises(RuntimeError, match=exactly(message)):
        resolve(opt_level)


@pytest.mark.parametrize(
    ("opt_level", "got", "guess"),
    [
        (2, "2 of type int", "O2"),
        (7, "7 of type int", "O1"),
        (None, "None of type NoneType", "O1"),
        (["O2"], "['O2'] of type list", "O1"),
    ],
)
def test_level_that_is_no_string_is_refused(opt_level: object, got: str, guess: str) -> None:
    message = f"{NAMES}; got {got}. Call amp.initialize(..., opt_level='{guess}')."
    with pytest.raises(TypeError, match=exactly(message)):
        resolve(opt_level)


def test_strings_from_a_command_line_are_understood() -> None:
    parser = argparse.ArgumentParser()
    for option in ("--opt-level", "--keep-batchnorm-fp32", "--loss-scale"):
        parser.add_argument(option, type=str, default=None)
    line = ["--opt-level", "O3", "--keep-batchnorm-fp32", "True", "--loss-scale", "128.0"]
    level = resolve(**vars(parser.parse_args(line)))
    assert level == dataclasses.replace(
        OPT_LEVELS["O3"], keep_batchnorm_fp32=True, loss_scale=128.0
    )
    assert resolve(**vars(parser.parse_args(line[:2]))) == OPT_LEVELS["O3"]


@examples(2)
@given(
    name=st.sampled_from(list(TABLE)),
    overrides=st.dictionaries(
        st.sampled_from(
            ["cast_model_type", "patch_torch_functions", "keep_batchnorm_fp32", "master_weights"]
        ),
        st.sampled_from([True, False, "True", "False", F16, BF16, F32, torch.float64, 3, None]),
    ),
)
def test_any_overrides_together_pass_exactly_when_each_passes_alone(
    name: str, overrides: dict[str, object]
) -> None:
    def outcome(**options: object) -> dict[str, object] | None:
        try:
            level = resolve(name, **options)
        except RuntimeError:
            return None
        return {option: getattr(level, option) for option in options}

    alone = [outcome(**{option: value}) for option, value in overrides.items()]
    expected: dict[str, object] | None = {}
    for one in alone:
        expected = None if one is None or expected is None else {**expected, **one}
    assert outcome(**overrides) == expected
