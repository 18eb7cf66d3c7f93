"""A mend is tried out through the later calls, of other models or parts, that take its result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from plants import WIDTH, square, the_cause
from support import scaled_backward
from torch import Tensor, nn
from torch.optim import SGD

from amp_patch.debug.cause import Cause


class Encoder(nn.Module):
    """Returns what float16 cannot hold."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x) * 3e5


class Normed(nn.Module):
    """A head that takes such: in fp32 its norm brings it back."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(x))


class Linear(nn.Module):
    """A head whose layer casts it to half."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x) * 1e-6


class HandsOn(nn.Module):
    """A neck that does nothing to it."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


class Divides(nn.Module):
    """A head that makes inf in every precision."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(x) * 1e-3) / (x * 0.0)


Joined = Callable[[Tensor], Tensor]


def step(
    amp: Any,
    level: str,
    parts: list[nn.Module],
    *,
    in_one: bool = False,
    between: Joined = lambda hidden: hidden,
    **options: Any,
) -> bool:
    """Make one step of models, or parts of one, that are called in turn; return whether it was.

    Args:
        between: what the script makes of what each returns.
    """
    torch.manual_seed(0)
    for part in parts:
        part.apply(lambda one: getattr(one, "reset_parameters", lambda: None)())
    whole = nn.ModuleList(parts)
    optimizer = SGD(whole.parameters(), lr=0.01)
    options = {"verbosity": 0, "loss_scale": 8.0, **options}
    amp.initialize(whole if in_one else parts, optimizer, opt_level=level, **options)
    hidden = torch.randn(4, WIDTH).half() if in_one else torch.randn(4, WIDTH)
    for part in parts[:-1]:
        hidden = between(part(hidden))
    scaled_backward(amp, square(parts[-1](hidden)), optimizer)
    optimizer.step()
    made = not amp.step_was_skipped(optimizer)
    if options.get("trace_overflow") is None:
        amp.deactivate()
    return made


def found(amp: Any, level: str, parts: list[nn.Module], **more: Any) -> Cause:
    assert not step(amp, level, parts, trace_overflow=True, **more)
    cause = the_cause(amp)
    amp.deactivate()
    return cause


BETWEEN: dict[str, Joined] = {
    "as it is": lambda hidden: hidden,
    "detached": lambda hidden: hidden.detach(),
    "reshaped": lambda hidden: hidden.reshape(2, 2, WIDTH),
    "copied": lambda hidden: hidden.clone(),
    "cast": lambda hidden: hidden.float(),
}


@pytest.mark.parametrize("between", BETWEEN)
def test_a_head_that_casts_what_it_takes_gets_a_rule_as_well(amp, between: str) -> None:
    more = {"between": BETWEEN[between]}
    cause = found(amp, "O1", [Encoder(), Linear()], **more)
    assert (cause.model, cause.operator) == ("Encoder", "mul")
    assert cause.rule == {"0:": "float", "1:out": "float"}
    assert "`0:` alone is not enough: compute `1:out`, to which its" in cause.advice()
    assert "rules=" not in cause.advice()  # that of the function is not enough either
    alone = {"modules": {"0:": "float"}}
    assert not step(amp, "O1", [Encoder(), Linear()], rules=alone, **more)
    assert step(amp, "O1", [Encoder(), Linear()], rules={"modules": cause.rule}, **more)


@pytest.mark.parametrize("head", [Normed, Linear])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_of_parts_that_are_called_by_themselves_all_that_need_it_get_rules(
    amp, level: str, head: type[nn.Module]
) -> None:
    cause = found(amp, level, [Encoder(), head()], in_one=True)
    inner = "out" if head is Linear else "norm"
    is_needed = head is Linear or level == "O2"  # whose norm has half weights
    assert cause.rule == {"0": "float", **({f"1.{inner}": "float"} if is_needed else {})}
    assert ("Leave its result in float32" in cause.advice()) == (level == "O2")
    rules = {"modules": cause.rule}
    assert step(amp, level, [Encoder(), head()], in_one=True, rules=rules)
    alone = {"modules": {"0": "float"}}
    assert step(amp, level, [Encoder(), head()], in_one=True, rules=alone) != is_needed


def test_a_head_that_bears_it_in_float32_needs_no_rule(amp) -> None:
    cause = found(amp, "O1", [Encoder(), Normed()])
    assert cause.rule == {"0:": "float"}
    assert "alone is not enough" not in str(cause)
    assert "not tried" not in str(cause)
    assert 'rules={"mul": "float"}' in cause.advice()
    assert step(amp, "O1", [Encoder(), Normed()], rules={"modules": cause.rule})


def test_what_is_handed_on_is_followed_to_its_end(amp) -> None:
    parts = Encoder, HandsOn, Linear
    cause = found(amp, "O1", [part() for part in parts])
    assert cause.rule == {"0:": "float", "2:out": "float"}
    assert step(amp, "O1", [part() for part in parts], rules={"modules": cause.rule})


@pytest.mark.parametrize("first", [Normed, Linear])
def test_the_rules_are_those_that_all_steps_need(amp, first: type[nn.Module]) -> None:
    encoder, *heads = Encoder(), first(), Linear()
    optimizer = SGD(nn.ModuleList([encoder, *heads]).parameters(), lr=0.01)
    options = {"verbosity": 0, "loss_scale": 8.0, "trace_overflow": True}
    amp.initialize([encoder, *heads], optimizer, opt_level="O1", **options)
    for head in heads:
        optimizer.zero_grad()
        hidden = encoder(torch.randn(64, WIDTH))
        scaled_backward(amp, square(head(hidden)), optimizer)
        optimizer.step()
    ((cause, count),) = amp.overflow_report().causes
    needed = ["0:", "2:out"] if first is Normed else ["0:", "1:out", "2:out"]
    assert (count, cause.rule) == (2, dict.fromkeys(needed, "float"))
    assert "rules=" not in cause.advice()


def test_a_model_that_is_fed_its_own_result_is_followed(amp) -> None:
    def made(**options: Any) -> bool:
        torch.manual_seed(0)
        model = nn.Sequential(Linear(), Encoder())
        model[1].proj.bias.data.fill_(1.0)
        optimizer = SGD(model.parameters(), lr=0.01)
        options = {"verbosity": 0, "loss_scale": 8.0, **options}
        amp.initialize(model, optimizer, opt_level="O1", **options)
        hidden = model(torch.randn(4, WIDTH))
        scaled_backward(amp, square(model(hidden) * 1e-6), optimizer)
        optimizer.step()
        return not amp.step_was_skipped(optimizer)

    assert not made(trace_overflow=True)
    cause = the_cause(amp)
    amp.deactivate()
    assert cause.rule == {"1": "float", "0.out": "float"}
    assert "`1` alone is not enough: compute `0.out`" in cause.advice()
    assert not made(rules={"modules": {"1": "float"}})
    amp.deactivate()
    assert made(rules={"modules": cause.rule})


def test_a_head_whose_level_casts_what_it_is_given_is_told_with_no_rule(amp) -> None:
    cause = found(amp, "O2", [Encoder(), Normed()])
    assert (cause.mended_by, cause.rule) == ("level", {})
    advice = cause.advice()
    assert advice.startswith("`0:` alone is not enough, for `1:` is given its result. Float16, to")
    assert "take O5: bfloat16" in advice
    rules = {"modules": {"0:": "float", "1:": "float"}}
    assert not step(amp, "O2", [Encoder(), Normed()], rules=rules)
    assert step(amp, "O5", [Encoder(), Normed()], loss_scale=1.0)


def test_a_head_that_is_not_finite_in_any_precision_is_named(amp) -> None:
    cause = found(amp, "O1", [Encoder(), Divides()])
    assert (cause.mended_by, cause.rule) == ("nothing", {})
    assert "`0:` alone is not enough, for `1:` is given its result. Float32 does" in cause.advice()


MADE: dict[str, Joined] = {
    "halved": lambda hidden: hidden * 0.5,
    "with others": lambda hidden: torch.cat([hidden, torch.zeros_like(hidden)]),
}


@pytest.mark.parametrize("between", MADE)
def test_what_the_script_makes_of_a_result_is_not_tried_and_the_report_says_so(
    amp, between: str
) -> None:
    cause = found(amp, "O1", [Encoder(), Linear()], between=MADE[between])
    assert cause.rule == {"0:": "float"}
    words = "Whether `1:` bears the mended result was not tried: it was given inf or NaN that no"
    assert words in cause.note


class HalfOnly(Linear):
    """A head that refuses a mended result."""

    def forward(self, x: Tensor) -> Tensor:
        assert x.dtype is torch.float16
        return super().forward(x)


class WithMask(HandsOn):
    """A head with a second result that is inf in any precision, and that no loss uses."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * 1e-6, 1.0 / torch.zeros(WIDTH)


@pytest.mark.parametrize(("head", "is_tried"), [(HalfOnly, False), (WithMask, True)])
def test_the_mend_of_the_first_call_stands_whatever_a_later_one_does(
    amp, head: type[nn.Module], is_tried: bool
) -> None:
    parts = [Encoder(), head(), HandsOn()]
    cause = found(amp, "O1", parts, between=lambda one: one[0] if type(one) is tuple else one)
    assert (cause.mended_by, cause.rule) == ("module", {"0:": "float"})
    assert ("was not tried" in cause.note) is not is_tried


class Differs(Encoder):
    """Returns NaN in float16: the difference of two inf."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y - y * 0.5


class Masked(Linear):
    """A head that is given a mask of -inf as well."""

    def forward(self, given: Any) -> Tensor:
        x, mask = given
        return super().forward(x) + mask.exp()


class NeedsGraph(Linear):
    """A head that refuses what has no graph, as a penalty on gradients does."""

    def forward(self, x: Tensor) -> Tensor:
        assert x.requires_grad
        return super().forward(x)


def with_mask(hidden: Tensor) -> Any:
    return hidden, torch.full((WIDTH,), -torch.inf)


@pytest.mark.parametrize(
    ("encoder", "head", "between"),
    [
        (Differs, Linear, BETWEEN["as it is"]),
        (Encoder, Masked, with_mask),
        (Encoder, NeedsGraph, BETWEEN["as it is"]),
    ],
)
def test_a_result_is_recognized_and_replaced_as_it_was_given(
    amp, encoder: type[nn.Module], head: type[nn.Module], between: Joined
) -> None:
    cause = found(amp, "O1", [encoder(), head()], between=between)
    assert cause.rule == {"0:": "float", "1:out": "float"}
    assert "not tried" not in cause.note
    rules = {"modules": cause.rule}
    assert step(amp, "O1", [encoder(), head()], between=between, rules=rules)


class Enlarges(Linear):
    """A neck that float16 cannot hold the result of, either."""

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x)


def test_what_a_further_mended_call_returns_is_handed_on(amp) -> None:
    parts = Encoder, Enlarges, Linear
    cause = found(amp, "O1", [part() for part in parts])
    assert cause.rule == {"0:": "float", "1:out": "float", "2:out": "float"}
    assert "not tried" not in cause.note
    assert step(amp, "O1", [part() for part in parts], rules={"modules": cause.rule})


class Small(Linear):
    """A head that bears what is not too large."""

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x * 1e-3)


@pytest.mark.parametrize("calls", [1, 2])
def test_of_results_of_the_same_numbers_the_last_is_handed_on(amp, calls: int) -> None:
    """In float16 each is inf everywhere; in float32 the second is a million times the first."""
    encoder, head = Encoder(), Small()
    nn.init.constant_(encoder.proj.weight, 0.1)
    nn.init.constant_(encoder.proj.bias, 1.0)
    optimizer = SGD(nn.ModuleList([encoder, head]).parameters(), lr=0.01)
    options = {"verbosity": 0, "loss_scale": 8.0, "trace_overflow": True}
    amp.initialize([encoder, head], optimizer, opt_level="O1", **options)
    hidden = torch.ones(4, WIDTH)
    for _ in range(calls):
        hidden = encoder(hidden)
    scaled_backward(amp, square(head(hidden)), optimizer)
    optimizer.step()
    needed = ["0:", "1:out"] if calls == 2 else ["0:"]
    assert the_cause(amp).rule == dict.fromkeys(needed, "float")


def test_what_a_cause_without_a_graph_says_of_later_calls_is_told_with_the_rest(amp) -> None:
    between = MADE["halved"]
    cause = found(amp, "O1", [Encoder(), Linear()], between=lambda one: between(one.detach()))
    assert cause.model == "Encoder"
    first, rest = cause.note.split(". ", 1)
    assert first == "Linear was given it, or what was made of it"
    assert rest.startswith("Whether `1:` bears the mended result was not tried")
