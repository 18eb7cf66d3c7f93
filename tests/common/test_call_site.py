"""Errors end at the user's line, and one model that is unpacked is refused."""

from __future__ import annotations

import traceback
import weakref
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import amp_patch.apex
from amp_patch.common import call_site


def frames(error: BaseException) -> list[str]:
    return [frame.filename for frame in traceback.extract_tb(error.__traceback__)]


@pytest.mark.parametrize(
    "options",
    [
        {"opt_level": None},
        {"opt_level": "o1"},
        {"loss_scale": "large"},
        {"rules": {1: "half"}},
        {"min_loss_scale": -1.0},
        {"optimizers": "adam"},
    ],
    ids=str,
)
def test_an_error_shows_the_users_line_and_one_of_ours(
    amp: ModuleType, options: dict[str, Any]
) -> None:
    with pytest.raises((TypeError, RuntimeError, ValueError)) as caught:
        amp.initialize(nn.Linear(1, 1), **options)
    assert frames(caught.value) == [__file__, call_site.__file__]
    assert "amp.initialize(" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "mend"),
    [
        ("optlevel", r"call amp.initialize\(opt_level=\.\.\.\)"),
        ("optimizer", r"call amp.initialize\(optimizers=\.\.\.\)"),
        ("keep_batchnorm_float32", r"call amp.initialize\(keep_batchnorm_fp32=\.\.\.\)"),
        ("dtype", r"call help\(amp.initialize\)"),
    ],
)
def test_an_argument_of_another_name_is_told_with_the_one_that_was_meant(
    amp: ModuleType, name: str, mend: str
) -> None:
    model = nn.Linear(1, 1)
    with pytest.raises(TypeError, match=rf"got {name!r}, .*{mend}") as caught:
        amp.initialize(model, **{name: "O1"})
    assert frames(caught.value) == [__file__, call_site.__file__]
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_so_it_does_for_apex(amp: ModuleType) -> None:
    with amp_patch.apex.install(force=True):
        from apex import amp as apex_amp

        with pytest.raises(TypeError, match="got None of type NoneType") as caught:
            apex_amp.initialize(nn.Linear(1, 1), opt_level=None)
    assert frames(caught.value) == [__file__, call_site.__file__]


def test_apex_is_told_what_takes_more_arguments(amp: ModuleType) -> None:
    with amp_patch.apex.install(force=True):
        from apex import amp as apex_amp

        rule = r"got 'rules', .*; call amp_patch\.amp\.initialize\(rules=\.\.\.\)"
        with pytest.raises(TypeError, match=rule):
            apex_amp.initialize(nn.Linear(1, 1), rules={})
        with pytest.raises(TypeError, match=r"got 'opt_levl', .* amp\.initialize\(opt_level="):
            apex_amp.initialize(nn.Linear(1, 1), opt_levl="O1")


def test_the_traceback_that_a_notebook_keeps_holds_no_model(amp: ModuleType) -> None:
    model = nn.Linear(1, 1)
    dead = weakref.ref(model)
    with pytest.raises(RuntimeError, match="got 'O9'") as caught:
        amp.initialize(model, opt_level="O9")
    kept = caught.value.__traceback__.tb_next  # the test's own frame holds it
    assert kept is not None
    del caught, model
    assert dead() is None


@pytest.mark.parametrize("what", ["torch's", "a defect"])
def test_an_error_that_we_did_not_raise_keeps_its_traceback(what: str) -> None:
    def fails() -> None:
        torch.ones(2) @ torch.ones(3) if what == "torch's" else {}["key"]

    function = call_site.errors_at_the_call(fails)
    with pytest.raises((RuntimeError, KeyError)) as caught:
        function()
    assert frames(caught.value)[1:] == [call_site.__file__, __file__]


def test_a_folder_whose_name_begins_like_ours_is_the_users() -> None:
    path = f"{Path(call_site.__file__).parents[1]}_experiments/model.py"
    scope: dict[str, Any] = {}
    exec(compile("def fails():\n    raise KeyError('his own')", path, "exec"), scope)
    with pytest.raises(KeyError) as caught:
        call_site.errors_at_the_call(scope["fails"])()
    assert frames(caught.value)[-1] == path


def test_a_small_letter_is_told_as_the_capital_one(amp: ModuleType) -> None:
    with pytest.raises(RuntimeError, match=r"got 'o1', .*Call .*opt_level='O1'"):
        amp.initialize(nn.Linear(1, 1), opt_level="o1")


@pytest.mark.parametrize("model", [nn.Linear(1, 1), nn.Sequential(nn.Tanh(), nn.Tanh())])
@pytest.mark.parametrize("enabled", [True, False])
def test_one_model_that_is_unpacked_is_refused(
    amp: ModuleType, model: nn.Module, enabled: bool
) -> None:
    with pytest.raises(TypeError, match=r"got one model, and a line that unpacks it") as caught:
        model, optimizer = amp.initialize(model, enabled=enabled)
    assert frames(caught.value) == [__file__, call_site.__file__]
    with pytest.raises(TypeError, match=r"got one model"):
        first, *rest = amp.initialize(
            model,
            enabled=enabled,
        )


def test_so_it_is_for_apex(amp: ModuleType) -> None:
    with amp_patch.apex.install(force=True):
        from apex import amp as apex_amp

        with pytest.raises(TypeError, match="got one model"):
            model, optimizer = apex_amp.initialize(nn.Linear(1, 1))


def test_what_is_no_mistake_goes_through(amp: ModuleType) -> None:
    def quiet(model: nn.Module) -> nn.Module:
        return amp.initialize(model, verbosity=0)

    a, b = nn.Tanh(), nn.Sigmoid()
    assert amp.initialize(a, verbosity=0) is a
    first, second = amp.initialize([a, b], verbosity=0)
    assert (first, second) == (a, b)
    first, second = list(map(quiet, [a, b]))
    assert (first, second) == (a, b)
    first, second = [amp.initialize(one, verbosity=0) for one in (a, b)]
    assert (first, second) == (a, b)
    first, second = amp.initialize(a, verbosity=0), 2
    assert (first, second) == (a, 2)
    (only,) = [amp.initialize(a, verbosity=0)]
    assert only is a
    first, second = list(map(amp.initialize, [a, b]))
    assert (first, second) == (a, b)
