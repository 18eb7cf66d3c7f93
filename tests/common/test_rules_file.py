"""A rules file is read, or refused by a message that says how to mend it, and changes nothing."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from amp_patch.casting.rules import PROFILES
from amp_patch.common import rules_file
from amp_patch.common.rules_file import Rules
from amp_patch.levels import OPT_LEVELS

FILE = """
# written by hand
opt_level = "O1"
profile = "fast-norms"
[functions]
softmax = "half"
"torch.nn.functional.gelu" = "float"
[modules]
"blocks.2.proj" = "float"
"blocks.*.norm" = "half"
"""
READ = Rules(
    "O1",
    {"softmax": "half", "torch.nn.functional.gelu": "float"},
    {"blocks.2.proj": "float", "blocks.*.norm": "half"},
    profile="fast-norms",
)


@pytest.fixture
def written(tmp_path: Path):
    def write(text: str) -> Path:
        path = tmp_path / "rules.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def read(given: object) -> Rules:
    return rules_file.rules_of(given, OPT_LEVELS, PROFILES)


@pytest.mark.parametrize("kind", [str, Path])
def test_a_file_holds_a_level_functions_and_modules(written, kind: type) -> None:
    path = written(FILE)
    assert read(kind(path)) == replace(READ, file=path)


def test_what_a_file_holds_may_come_as_a_mapping() -> None:
    given = {"functions": READ.functions, "modules": READ.modules}
    assert read({"opt_level": "O1", "profile": "fast-norms", **given}) == READ


def test_the_name_of_a_profile_wins_and_any_other_path_is_that_of_a_file(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("fast-norms").write_text('opt_level = "O4"')
    assert read("fast-norms") == read({"profile": "fast-norms"}) == Rules(profile="fast-norms")
    for given in ("./fast-norms", Path("fast-norms"), tmp_path / "fast-norms"):
        assert read(given) == Rules("O4", file=Path(given))


def test_the_environment_may_name_a_profile(monkeypatch) -> None:
    monkeypatch.setenv("AMP_PATCH_RULES", "fast-norms")
    assert read({"gelu": "half"}) == Rules(profile="fast-norms")


def test_the_environment_leaves_the_inputs_of_the_script(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "rules.toml"
    path.write_text('opt_level = "O5"\n[inputs]\nboxes = "off"')
    monkeypatch.setenv("AMP_PATCH_RULES", str(path))
    of_the_script = {"modules": {"head": "float"}, "inputs": {"targets": "off"}}
    inputs = {"targets": "off", "boxes": "off"}
    assert read(of_the_script) == Rules("O5", file=path, inputs=inputs)
    assert read("no_such_file.toml") == Rules("O5", file=path, inputs={"boxes": "off"})


INPUTS = {
    "of": ({"targets": "of"}, ValueError, "an input in rules is 'off', .* got 'of' for 'targets'"),
    "a list": (["targets"], ValueError, "must be a table of arguments .*; got \\['targets'\\]"),
    "a number": ({3: "off"}, TypeError, "must be named by strings, .*; got int in the place"),
    "no key": ({"targets": {}}, ValueError, "got {} for 'targets'"),
    "an index": ({"targets": {3: "off"}}, ValueError, "got {3: 'off'} for 'targets'"),
}


@pytest.mark.parametrize(("inputs", "kind", "words"), INPUTS.values(), ids=INPUTS)
def test_inputs_that_mean_nothing_are_told_with_what_would(inputs, kind, words) -> None:
    with pytest.raises(kind, match=words) as raised:
        read({"inputs": inputs})
    assert str(raised.value).endswith("rules={'inputs': {'targets': 'off'}}).")


@pytest.mark.parametrize("line", ['batch.boxes = "off"', '"batch.boxes" = "off"'])
def test_a_part_of_an_input_is_a_name_with_dots(tmp_path: Path, line: str) -> None:
    path = tmp_path / "rules.toml"
    path.write_text(f"[inputs]\n{line}\nbatch.at.time = 'off'")
    inputs = {"batch.boxes": "off", "batch.at.time": "off"}
    assert read(path) == Rules(file=path, inputs=inputs)
    with pytest.raises(ValueError, match="got 'of' for 'batch.boxes'"):
        read({"inputs": {"batch": {"boxes": "of"}}})


def test_a_profile_that_is_none_is_told_with_those_that_are(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError) as raised:
        read("fast_norms")
    assert str(raised.value) == (
        "rules must name a file that can be read, or a profile ('fast-norms'); got 'fast_norms', "
        f"looked for in {tmp_path}: No such file or directory; did you mean 'fast-norms'?"
    )
    for given in ("fast_norms", 3, ["fast-norms"]):
        with pytest.raises(ValueError, match="profile in rules must be") as raised:
            read({"profile": given})
        assert str(raised.value) == (
            f"profile in rules must be one of 'fast-norms'; got {given!r}. Call "
            "amp.initialize(..., rules={'profile': 'fast-norms'})."
        )
    with pytest.raises(ValueError, match="may have opt_level, profile, .*; got 'softmax'"):
        read({"profile": "fast-norms", "softmax": "float"})


@pytest.mark.parametrize("given", [Path("fast-norms"), "./fast-norms"], ids=["Path", "str"])
def test_a_path_that_reads_like_a_profile_is_told_how_that_is_given(
    tmp_path: Path, monkeypatch, given: str | Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError) as raised:
        read(given)
    assert str(raised.value) == (
        "rules must name a file that can be read, or a profile ('fast-norms'); got "
        f"'{given}', looked for in {tmp_path}: No such file or directory; the name of a profile is "
        "given as a string, without a folder: call amp.initialize(..., rules='fast-norms')."
    )


MISSPELLED = {
    "profile": ("profil", "Profile", "profiles", "proflie"),
    "opt_level": ("opt_levl", "opt-level", "optlevel", "OPT_LEVEL"),
    "functions": ("function", "funtions", "Functions"),
    "modules": ("module", "Modules", "modlues"),
    "inputs": ("input", "Inputs", "inptus"),
}


@pytest.mark.parametrize(
    ("meant", "key"), [(meant, key) for meant, keys in MISSPELLED.items() for key in keys]
)
@pytest.mark.parametrize("beside", [{}, {"softmax": "half"}, {"modules": {}}])
def test_a_misspelled_key_is_told_with_the_one_that_was_meant(
    meant: str, key: str, beside: dict[str, object]
) -> None:
    for value in ("fast-norms", "O2", "maybe", {"softmax": "half"}):
        with pytest.raises(ValueError, match="rules may have") as raised:
            read({**beside, key: value})
        assert str(raised.value) == (
            f"rules may have opt_level, profile, functions, modules and inputs; got {key!r}; did "
            f"you mean {meant!r}? Write {meant} in its place."
        )


@pytest.mark.parametrize(
    "given", [{"level": "O2"}, {"rules": {"softmax": "half"}}, {"norms": "fast-norms"}]
)
def test_a_key_that_is_none_is_told_by_what_it_holds(given: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=f"rules may have .*; got {next(iter(given))!r}; "):
        read(given)


def test_a_mapping_of_functions_means_what_it_did() -> None:
    assert read({"softmax": "half"}) == Rules(functions={"softmax": "half"})
    for name in ("mode", "from_file"):  # of torch's functions those most like a key
        assert read({name: "half"}) == Rules(functions={name: "half"})
    assert read(None) == read({}) == Rules()


def test_the_mark_that_editors_of_windows_write_first_is_passed_over(written) -> None:
    path = written("\ufeff" + FILE)
    assert read(path) == replace(READ, file=path)


def test_an_empty_file_says_nothing(written) -> None:
    path = written("")
    assert read(path) == Rules(file=path)


@pytest.mark.parametrize("given", [["softmax"], 3, nn.ReLU()])
def test_what_is_no_mapping_and_no_path_is_refused(given: object) -> None:
    kind = type(given).__name__
    message = f"rules must map functions to rules; got {kind}; call amp.initialize"
    with pytest.raises(TypeError, match=message):
        read(given)


def test_the_environments_file_takes_the_place_of_what_is_given(written, monkeypatch) -> None:
    path = written(FILE)
    monkeypatch.setenv("AMP_PATCH_RULES", str(path))
    for given in (None, {"gelu": "half"}, "another.toml"):
        assert read(given) == read(path)


BAD = {
    'opt_level = "02"': "a level in .* is one of 'O0', .*; got '02'. Write opt_level = \"O2\", ",
    "opt_level = 2": 'got 2. Write opt_level = "O2"',
    'opt_level = "o4 "': "got 'o4 '. Write opt_level = \"O4\"",
    'opt_level = ["O1"]': "got .'O1'.. Write",
    'profile = "fast"': "profile in .* must be one of 'fast-norms'; got 'fast'. Write profile =",
    'opt_levl = "O1"': "may have opt_level, profile, .*got 'opt_levl'; did you mean 'opt_level'?",
    'softmax = "half"': r"got 'softmax'; a function has its .*Write .* below a line \[functions\]",
    'softmax = "half"\n[module]\nhead = "half"': "got 'module'; did you mean 'modules'?",
    'functions = "half"': "functions in .* must be a table of names and rules; got 'half'",
    '[modules]\nhead = "bfloat16"': "is 'float' or .*; got 'bfloat16' for 'head'; .* 'half'?",
    '[modules]\nhead = "flaot"': 'did you mean \'float\'. Write "head" = "float" below a line',
    "[modules]\nhead = false": 'got False for \'head\'. Write "head" = "float" below a line',
    '[modules]\nblocks.2.b = "float"': "in quotes if it has dots.* table for 'blocks'. Write "
    '"blocks.2.b" =',
    "[functions.softmax]": "its rule is one word; got a table for 'softmax'. Write \"softmax\" =",
    '[functions]\nexp = "half"\nopt_level = "O2"': "opt_level must stand beside functions in .*, "
    "not in it; got 'O2' .* Write opt_level = \"O2\", above the first line in brackets",
    '[modules]\nhead = "half"\nprofile = "fast-norms"': "profile must stand beside modules",
    "[modules]\nblocks.2 = float": "must be TOML; got .*line 2",
    '[modules]\nblocks.* = "float"': "must be TOML; .*with dots or stars, in quotes",
}


@pytest.mark.parametrize(("text", "message"), BAD.items(), ids=range(len(BAD)))
def test_what_a_file_cannot_say_is_refused(written, text: str, message: str) -> None:
    path = written(text)
    with pytest.raises(ValueError, match=re.compile(message, re.DOTALL)) as raised:
        read(path)
    assert str(path) in str(raised.value)


def test_a_module_named_like_a_key_has_a_rule(written) -> None:
    assert read(written('[modules]\nprofile = "float"')).modules == {"profile": "float"}


@pytest.mark.parametrize("name", [nn.Linear, nn.Linear(1, 1), 3])
def test_modules_are_named_by_strings(name: object) -> None:
    known = getattr(name, "__name__", type(name).__name__)
    with pytest.raises(TypeError) as raised:
        read({"modules": {name: "float"}})
    assert str(raised.value) == (
        "modules in rules must be named by strings, their paths in the model or patterns of them; "
        f"got {known} in the place of one. Call amp.initialize(..., rules={{'modules': "
        "{'blocks.*.norm': 'float'}})."
    )


def test_of_a_mapping_an_error_says_how_one_is_written() -> None:
    given: dict[str, object]
    for given, call in (
        ({"functions": "softmax"}, {"functions": {"softmax": "float"}}),
        ({"functions": {"torch": {"exp": "half"}}}, {"functions": {"torch.exp": "float"}}),
        ({"functions": {"profile": "fast-norms"}}, {"profile": "fast-norms"}),
        ({"modules": {"head": "haf"}}, {"modules": {"head": "half"}}),
        ({"profile": None, "exp": "half"}, {"functions": {"softmax": "half"}}),
    ):
        with pytest.raises(ValueError, match="rules") as raised:
            read(given)
        assert str(raised.value).endswith(f" Call amp.initialize(..., rules={call}).")


def test_a_folder_and_bytes_are_no_file_of_rules(tmp_path: Path, written, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for given in (tmp_path, ""):
        with pytest.raises(
            IsADirectoryError, match="must name a file that can be .*; got"
        ) as raised:
            read(given)
        assert f"; got '{given}', looked for in" in str(raised.value)
        assert str(raised.value).endswith("; name a file in this folder, or leave rules out.")
    path = written("")
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="must be TOML"):
        read(path)


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="got '.*none.toml'.*amp-patch tune --out"):
        read(tmp_path / "none.toml")


def test_a_level_is_not_given_as_rules(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="; call amp.initialize.*, opt_level='O1'"):
        read("O1")


@pytest.mark.parametrize("given", ["none.toml", "fast_norms", "bad.toml"])
def test_of_what_the_environment_names_an_error_says_so(
    tmp_path: Path, monkeypatch, given: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.toml").write_text("functions = 1")
    monkeypatch.setenv("AMP_PATCH_RULES", given)
    with pytest.raises((FileNotFoundError, ValueError)) as raised:
        read({"softmax": "half"})
    assert str(raised.value).endswith(
        f" This is of AMP_PATCH_RULES={given}, which takes the place of the script's own rules."
    )


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def test_initialize_trains_by_a_file(amp, written, capsys) -> None:
    path = written('opt_level = "O4"\n[functions]\nsoftmax = "half"\n[modules]\nhead = "float"')
    model = amp.initialize(Net(), opt_level="O2", keep_batchnorm_fp32=True, rules=path)
    assert capsys.readouterr().err == (
        "amp-patch: opt_level O2 of the script is run as O4, which refuses "
        "keep_batchnorm_fp32=True: dropped.\n"
    )
    x = torch.randn(3, 4)
    assert model(x).dtype is torch.float32
    assert model.body(x).dtype is torch.bfloat16
    assert F.softmax(model.body(x), -1).dtype is torch.bfloat16


def test_the_environments_level_stands_above_the_files(amp, written, monkeypatch) -> None:
    path = written('opt_level = "O4"\n[functions]\nsoftmax = "half"\n[modules]\nhead = "float"')
    monkeypatch.setenv("AMP_PATCH_OPT_LEVEL", "O2")
    model = amp.initialize(Net(), rules=path, verbosity=0)
    assert model.body[0].weight.dtype is torch.float16


CASTING_LEVELS = "call amp.initialize(..., rules=...) at opt_level='O1' or 'O4'."


@pytest.mark.parametrize("modules", [{}, {"head": "float"}])
@pytest.mark.parametrize(
    ("rules", "told"),
    [
        ({"profile": "fast-norms"}, "profile 'fast-norms'"),
        ({"functions": {"exp": "half"}}, "functions {'exp': 'half'}"),
        (
            {"functions": {"exp": "half"}, "profile": "fast-norms"},
            "profile 'fast-norms' and functions {'exp': 'half'}",
        ),
    ],
)
def test_all_that_has_no_effect_at_a_level_is_told(
    amp, rules: dict[str, object], told: str, modules: dict[str, str]
) -> None:
    model, rules = Net(), {**rules, "modules": modules}
    rule = "rules say how functions are cast, which opt_level '{}' does not do"
    for options, begin, end in (
        ({"opt_level": "O0"}, rule.format("O0"), CASTING_LEVELS),
        ({"opt_level": "O2"}, rule.format("O2"), CASTING_LEVELS),
        (
            {"opt_level": "O4", "patch_torch_functions": False},
            rule.format("O4").replace("'O4'", "'O4' with patch_torch_functions=False"),
            "call amp.initialize(..., rules=...) without patch_torch_functions=False.",
        ),
        (
            {"opt_level": "O1", "rules": {**rules, "opt_level": "O5"}},
            rule.format("O5"),
            "call amp.initialize(..., rules=...) with 'O1' or 'O4' for their opt_level.",
        ),
    ):
        with pytest.raises(RuntimeError) as raised:
            amp.initialize(model, verbosity=0, **{"rules": rules, **options})
        assert str(raised.value) == f"{begin}; got {told}, without effect there; {end}"
        assert model.head.weight.dtype is torch.float32


def test_rules_that_have_no_effect_at_a_forced_level_are_checked_and_told(
    amp, monkeypatch, capsys
) -> None:
    monkeypatch.setenv("AMP_PATCH_OPT_LEVEL", "O2")
    for functions in ({"softmaxx": "half"}, {"softmax": "haf"}):
        with pytest.raises(ValueError, match="did you mean"):
            amp.initialize(Net(), opt_level="O1", rules=functions)
    amp.initialize(Net(), opt_level="O1", rules="fast-norms")
    assert capsys.readouterr().err.splitlines() == [
        "amp-patch: opt_level O1 of the script is run as O2.",
        "amp-patch: profile 'fast-norms' of the rules has no effect at O2: dropped.",
    ]
    monkeypatch.setenv("AMP_PATCH_RULES", "fast-norms")
    amp.initialize(Net(), opt_level="O2", rules={"exp": "half"})
    line = "amp-patch: profile 'fast-norms' of the rules has no effect at O2: dropped.\n"
    assert capsys.readouterr().err == line


def test_a_rule_of_the_environments_profile_is_told_as_such(amp, monkeypatch) -> None:
    monkeypatch.setenv("AMP_PATCH_RULES", "fast-norms")
    with pytest.raises(RuntimeError, match="This is of AMP_PATCH_RULES=fast-norms, which takes"):
        amp.initialize(Net(), opt_level="O2", verbosity=0)


REFUSED = {
    'opt_level = "O2"\n[functions]\nsoftmax = "half"': (RuntimeError, "opt_level 'O2' does not do"),
    '[functions]\nsoftmaxx = "half"': (ValueError, "got 'softmaxx'; did you mean .*'softmax'"),
    '[functions]\nsoftmax = "fast"': (ValueError, "a rule must be one of .*got 'fast'"),
    '[functions]\nsoftmax = "haf"': (ValueError, "got 'haf' for 'softmax'; did you mean 'half'"),
    '[functions]\nhead = "half"': (ValueError, "for a module of the model .*'modules': {'head': "),
    '[modules]\n"body.3" = "float"': (ValueError, "got 'body.3'; did you mean 'body"),
    '[modules]\n"haed" = "float"': (ValueError, "got 'haed'; did you mean 'head'"),
}


@pytest.mark.parametrize(("text", "refused"), REFUSED.items(), ids=range(len(REFUSED)))
def test_a_name_that_means_nothing_is_refused_before_anything_changes(
    amp, written, text: str, refused: tuple[type[Exception], str]
) -> None:
    path = written(text)
    model, linear = Net(), F.linear
    error, message = refused
    with pytest.raises(error, match=message) as raised:
        amp.initialize(model, rules=path, verbosity=0)
    assert str(raised.value).endswith(f"This is of the rules file {path}.")
    assert F.linear is linear
    assert not model.head._forward_pre_hooks
    with pytest.raises(RuntimeError, match="has not been initialized"):
        amp.loss_scale()
