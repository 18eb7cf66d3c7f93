"""A hook gets gradients that are multiplied by the loss scale: told where it is registered."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from training import batches, loss_of, make, prepared

from amp_patch import amp as core
from amp_patch.common.warn_once import warn_once

LEVELS = ("O1", "O2", "O5")


def clamp(grad: Any) -> Any:
    return grad.clamp(-0.01, 0.01)


REGISTER: dict[str, Callable[[Any], Any]] = {
    "parameter": lambda model: model.first.weight.register_hook(clamp),
    "after accumulation": lambda model: model.first.weight.register_post_accumulate_grad_hook(
        lambda p: p.grad.clamp_(-1, 1) and 0
    ),
    "module": lambda model: model.first.register_full_backward_hook(lambda *_: None),
    "output": lambda model: loss_of(model, next(batches())).register_hook(clamp),
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("on", REGISTER)
def test_it_is_told_once_where_there_is_a_scale(amp: ModuleType, level: str, on: str) -> None:
    model, _ = prepared(amp, level)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            REGISTER[on](model)
    assert len(caught) == (0 if level == "O5" else 1)
    for one in caught:
        assert "multiplied by the loss scale" in str(one.message)
        assert one.filename == __file__


@pytest.mark.parametrize("on", ["parameter", "after accumulation", "module"])
def test_one_from_before_initialize_is_told_there(amp: ModuleType, on: str) -> None:
    model, optimizer = make()
    REGISTER[on](model)
    with pytest.warns(UserWarning, match="a hook of a"):
        amp.initialize(model, optimizer, opt_level="O1", verbosity=0)


def test_a_mask_that_was_registered_while_amp_was_on_is_no_reason_to_warn(amp: ModuleType) -> None:
    prepared(amp, "O1")
    model, optimizer = make()
    mask = torch.ones_like(model.first.weight)
    model.first.weight.register_hook(lambda grad: grad * mask)
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0)


def test_what_the_warning_says_makes_the_hook_right(amp: ModuleType) -> None:
    """And is no reason to be warned."""
    (exact, plain), (model, optimizer) = make(), prepared(amp, "O1")
    exact.first.weight.register_hook(clamp)
    with pytest.warns(UserWarning, match="in the hook and multiply what it returns"):
        model.first.weight.register_hook(clamp).remove()
    warn_once.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.first.weight.register_hook(
            lambda grad: clamp(grad / core.loss_scale()) * core.loss_scale()
        )
    for inputs in batches():
        plain.zero_grad()
        optimizer.zero_grad()
        loss_of(exact, inputs).backward()
        with amp.scale_loss(loss_of(model, inputs), optimizer) as scaled_loss:
            scaled_loss.backward()
        plain.step()
        optimizer.step()
    torch.testing.assert_close(
        list(model.parameters()), list(exact.parameters()), rtol=2e-3, atol=2e-3
    )


@pytest.mark.parametrize("hook", [lambda g: g * 0.5, lambda g: -core.loss_scale() * g])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_hook_that_does_the_same_at_any_scale_is_not_told(
    amp: ModuleType, hook: Callable[[Any], Any], when: str
) -> None:
    """Of a parameter, which may be hooked before initialize, and of a result."""
    model, optimizer = make()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if when == "before":
            model.first.weight.register_hook(hook)
        amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
        if when == "after":
            loss_of(model, next(batches())).register_hook(hook)


@pytest.mark.parametrize(
    "importer", ["lightning_fabric.wrappers", "pyro.util", "captum._utils", "curvlinops.kfac"]
)
def test_a_hook_of_a_library_that_only_looks_is_not_told(amp: ModuleType, importer: str) -> None:
    """Lightning's Fabric registers one on each output of the model, Pyro on each value."""
    model, _ = prepared(amp, "O1")
    library: dict[str, Any] = {"__name__": importer, "clamp": clamp}
    library["output"] = loss_of(model, next(batches()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        exec("output.register_hook(clamp)", library)


@pytest.mark.parametrize("level", ["O0", "O2", "O5"])
@pytest.mark.parametrize("method", ["register_hook", "register_post_accumulate_grad_hook"])
def test_one_on_what_the_optimizer_steps_is_called(
    amp: ModuleType, level: str, method: str
) -> None:
    model, optimizer = prepared(amp, level)
    seen: list[Any] = []
    stepped = optimizer.param_groups[0]["params"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        handle = getattr(stepped[0], method)(seen.append)
    for calls in (1, 1):
        with amp.scale_loss(loss_of(model, next(batches())), optimizer) as scaled_loss:
            scaled_loss.backward()
        assert len(seen) == calls
        handle.remove()


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
@pytest.mark.parametrize("delays", [False, True])
def test_what_a_hook_sees_of_a_step_with_several_blocks(
    amp: ModuleType, level: str, delays: bool
) -> None:
    """All that was added up, as without amp; or a warning says how it does."""
    plain, _ = make()
    scale = 128.0 if level in ("O1", "O2") else 1.0
    model, optimizer = prepared(amp, level, loss_scale=scale)
    seen: dict[nn.Module, list[float]] = {plain: [], model: []}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for one, norms in seen.items():
            one.first.weight.register_post_accumulate_grad_hook(
                lambda p, norms=norms: norms.append(float(p.grad.norm()))
            )
        last = [*batches()][-1]
        for inputs in batches():
            is_left = delays and not torch.equal(inputs, last)
            with amp.scale_loss(loss_of(model, inputs), optimizer, delay_unscale=is_left) as loss:
                loss.backward()
            loss_of(plain, inputs).backward()
    expected = [norm * scale for norm in seen[plain]]
    is_right = seen[model] == pytest.approx(expected, rel=0.02)
    assert is_right == (delays or level in ("O0", "O4"))
    told = ["earlier ones wait aside" in str(one.message) for one in caught]
    assert told.count(True) == (0 if is_right else 1)
