"""Calls before initialize, with ``enabled=False``, and with optimizers that nobody prepared."""

from __future__ import annotations

import gc
import re
from types import ModuleType
from typing import Any

import pytest
import torch
from linear_training import train_step
from small_models import normed_pair
from support import exactly, scaled_backward
from torch import nn
from torch.optim import Adam

from amp_patch import amp as public

NO_STATE = (
    "internal Amp state has not been initialized, or amp.deactivate() has ended it for all models"
)
MEND = "call model, optimizer = amp.initialize(model, optimizer, opt_level=...) first."


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda optimizer: public.scale_loss(torch.zeros(()), optimizer),
            f"Invoked 'with amp.scale_loss(loss, optimizer)', but {NO_STATE}; "
            f"got an optimizer (SGD); {MEND}",
        ),
        (
            lambda optimizer: public.step_was_skipped(optimizer),
            f"Invoked 'amp.step_was_skipped(optimizer)', but {NO_STATE}; "
            f"got an optimizer (SGD); {MEND}",
        ),
        (
            lambda optimizer: public.loss_scale(),
            f"Invoked 'amp.loss_scale()', but {NO_STATE}; {MEND}",
        ),
        (
            lambda optimizer: public.state_dict(),
            f"Invoked 'amp.state_dict()', but {NO_STATE}; {MEND}",
        ),
        (
            lambda optimizer: public.load_state_dict({}),
            f"Invoked 'amp.load_state_dict()', but {NO_STATE}; {MEND}",
        ),
    ],
)
def test_calls_before_initialize_say_so(amp: ModuleType, call: Any, words: str) -> None:
    _, optimizer = normed_pair()
    with pytest.raises(RuntimeError, match=exactly(words)):
        call(optimizer)


@pytest.mark.parametrize("initialized", [False, True])
@pytest.mark.parametrize(
    ("optimizers", "received"),
    [
        ([], "an empty list"),
        ((), "an empty tuple"),
        (None, "NoneType"),
        (nn.Linear(1, 1), "Linear"),
        ([normed_pair()[1], torch.zeros(())], "Tensor"),
    ],
)
@pytest.mark.parametrize(
    ("call", "given"),
    [
        ("amp.scale_loss(loss, optimizer)", lambda what: public.scale_loss(torch.zeros(()), what)),
        ("amp.step_was_skipped(optimizer)", public.step_was_skipped),
    ],
)
def test_what_stands_in_an_optimizers_place_is_named_and_the_call_shown(
    amp: ModuleType, call: str, given: Any, optimizers: Any, received: str, initialized: bool
) -> None:
    if initialized:
        amp.initialize(*normed_pair(), opt_level="O2", verbosity=0)
    words = (
        f"{call} takes what amp.initialize() returned for its optimizers; got {received} in their "
        f"place; call {call}."
    )
    with pytest.raises(TypeError, match=exactly(words)):
        given(optimizers)


def test_scale_loss_refuses_an_optimizer_it_does_not_know(amp: ModuleType) -> None:
    _, optimizer = amp.initialize(*normed_pair(), opt_level="O2", verbosity=0)
    words = (
        "amp.scale_loss(loss, optimizer) got an optimizer that amp.initialize() did not return "
        f"(Adam); {MEND}"
    )
    with pytest.raises(RuntimeError, match=exactly(words)):
        amp.scale_loss(torch.zeros(()), [optimizer, normed_pair(Adam)[1]])


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
@pytest.mark.parametrize("of", ["model", "groups", "gone"])
def test_a_later_optimizer_of_a_model_in_half_is_told_what_to_do_in_one_message(
    amp: ModuleType, level: str, of: str
) -> None:
    model, optimizer = amp.initialize(*normed_pair(), opt_level=level, loss_scale=64.0, verbosity=0)
    masters = optimizer.param_groups[0]["params"]
    params = {"model": list(model.parameters()), "groups": masters[:1], "gone": masters}
    if of == "gone":  # as `optimizer = Adam(optimizer.param_groups)` has it
        del optimizer
        gc.collect()
    later = Adam(params[of], eps=1e-3)
    with pytest.raises(RuntimeError, match=r"; call amp.deactivate\(\), make the optimizer of"):
        amp.scale_loss(torch.zeros(()), later)
    amp.deactivate()  # as it says
    later = Adam(model.parameters(), eps=1e-3)
    model, later = amp.initialize(model, later, opt_level=level, loss_scale=64.0, verbosity=0)
    before = [param.detach().clone() for param in model.parameters()]
    scaled_backward(amp, model(torch.randn(16, 4)).float().square().mean(), later)
    later.step()
    assert not all(map(torch.equal, before, model.parameters()))


MEND_ANEW = (
    "call amp.deactivate(), make the optimizer of model.parameters(), and call model, optimizer = "
    "amp.initialize(model, optimizer, opt_level=...) anew, with every optimizer of the model."
)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.parametrize("made", ["groups", "parameters", "named", "second", "master_params"])
def test_an_optimizer_of_masters_is_told_the_same_at_every_call(
    amp: ModuleType, level: str, made: str, fused: bool
) -> None:
    """Also where the optimizer whose masters they are is gone, whose place it took."""
    options = {"opt_level": level, "fused_step": fused, "verbosity": 0}
    model, optimizer = amp.initialize(*normed_pair(), **options)
    masters = list(amp.master_params(optimizer))
    given = {
        "groups": optimizer.param_groups,
        "parameters": masters,
        "named": [{"params": masters[:1]}, {"params": masters[1:], "lr": 0.5}],
        "second": masters[-1:],
        "master_params": amp.master_params(optimizer),
    }
    optimizer = Adam(given.pop(made), lr=0.1)
    given.clear()
    gc.collect()
    for call in (
        lambda: amp.scale_loss(torch.zeros(()), optimizer),
        lambda: amp.step_was_skipped([optimizer]),
        lambda: amp.initialize(model, optimizer, opt_level=level),
        lambda: amp.initialize([model], [optimizer], opt_level="O1"),
    ):
        with pytest.raises(RuntimeError, match=re.escape(MEND_ANEW) + "$"):
            call()


@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.parametrize("kind", ["prepared", "wrapper", "model's", "other's"])
def test_a_second_initialize_without_masters_of_others_says_to_use_the_first(
    amp: ModuleType, level: str, kind: str
) -> None:
    model, optimizer = amp.initialize(*normed_pair(), opt_level=level, verbosity=0)
    again: Any = {
        "prepared": optimizer,
        "wrapper": Adam([torch.zeros(2)], lr=0.1),
        "model's": Adam(model.parameters(), lr=0.1),
        "other's": normed_pair(Adam)[1],
    }[kind]
    if kind == "wrapper":  # as frameworks' own, which share the groups
        again.param_groups = optimizer.param_groups
    with pytest.raises(RuntimeError, match="Use what the first call returned"):
        amp.initialize(model, again, opt_level=level)


# --- beside a pair with enabled=False ---


def test_a_disabled_pair_stays_plain_beside_an_enabled_one(
    amp: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = amp.initialize(*normed_pair(), enabled=False)
    run = amp.initialize(*normed_pair(), opt_level="O2", verbosity=0)
    loss = plain[0](torch.randn(4, 4)).sum()
    with amp.scale_loss(loss, plain[1]) as scaled_loss:
        assert scaled_loss is loss
    assert amp.step_was_skipped(plain[1]) is False
    train_step(amp, *run)
    assert amp.state_dict()["loss_scaler0"]["unskipped"] == 1
    amp.initialize(*normed_pair(), enabled=False)
    assert capsys.readouterr().out == ""
    train_step(amp, *run, torch.inf)
    assert amp.state_dict()["loss_scaler0"]["unskipped"] == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_beside_a_disabled_pair_other_optimizers_are_refused_as_ever(
    amp: ModuleType, level: str
) -> None:
    def pair(**options: Any) -> Any:
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return amp.initialize(model, optimizer, verbosity=0, **options) if options else optimizer

    _, disabled = pair(enabled=False)
    kept, prepared = pair(opt_level=level)
    unknown = pair()
    loss = torch.ones((), requires_grad=True) * 1
    for given in (unknown, [disabled, unknown], [disabled, prepared]):
        with pytest.raises(RuntimeError, match="did not return"), amp.scale_loss(loss, given):
            pass
    with amp.scale_loss(loss, disabled) as same:
        assert same.item() == 1.0
    del kept
