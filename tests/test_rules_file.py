"""A rules file is read, or refused by a message that says how to mend it, and changes nothing."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from amp_patch import rules_file
from amp_patch.casting.rules import PROFILES
from amp_patch.levels import OPT_LEVELS
from amp_patch.rules_file import Rules

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
            f"profile in rules must be one of 'fast-norms'; got {given!r}; write profile = "
            '"fast-norms".'
        )
    with pytest.raises(ValueError, match="may have opt_level, profile, .*; got 'softmax'"):
        read({"profile": "fast-norms", "softmax": "float"})


def test_a_mapping_of_functions_means_what_it_did() -> None:
    assert read({"softmax": "half"}) == Rules(functions={"softmax": "half"})
    assert read(None) == read({}) == Rules()


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
    'opt_level = "02"': "opt_level in .* must be one of 'O0', .*; got '02'; write opt_level",
    "opt_level = 2": "got 2; write",
    'opt_level = ["O1"]': "got .'O1'.; write",
    'profile = "fast"': "profile in .* must be one of 'fast-norms'; got 'fast'; write profile =",
    'opt_levl = "O1"': "may have opt_level, profile, .*got 'opt_levl'; did you mean 'opt_level'?",
    'softmax = "half"': r"got 'softmax'; Write the rule of a function below a line \[functions\]",
    'functions = "half"': "functions in .* must be a table; got 'half'",
    '[modules]\nhead = "bfloat16"': "is 'float' or 'half'; got 'bfloat16' for 'head'; write",
    '[modules]\nblocks.2 = "float"': r"must stand in quotes .*; got blocks.2; write \"blocks.2\" =",
    "[modules]\nblocks.2 = float": "must be TOML; got .*line 2",
    '[modules]\nblocks.* = "float"': "must be TOML; .*with dots or stars in quotes",
}


@pytest.mark.parametrize(("text", "message"), BAD.items(), ids=range(len(BAD)))
def test_what_a_file_cannot_say_is_refused(written, text: str, message: str) -> None:
    path = written(text)
    with pytest.raises(ValueError, match=re.compile(message, re.DOTALL)) as raised:
        read(path)
    assert str(path) in str(raised.value)


def test_a_folder_and_bytes_are_no_file_of_rules(tmp_path: Path, written) -> None:
    with pytest.raises(IsADirectoryError, match="must name a file that can be read"):
        read(tmp_path)
    path = written("")
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="must be TOML"):
        read(path)


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="got '.*none.toml'.*amp-patch tune --out"):
        read(tmp_path / "none.toml")


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


REFUSED = {
    'opt_level = "O2"\n[functions]\nsoftmax = "half"': (RuntimeError, "opt_level 'O2' does not do"),
    '[functions]\nsoftmaxx = "half"': (ValueError, "got 'softmaxx'; did you mean .*'softmax'"),
    '[functions]\nsoftmax = "fast"': (ValueError, "a rule must be one of .*got 'fast'"),
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
