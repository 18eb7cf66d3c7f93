"""Calls in the wrong place, around and inside of ``scale_loss``: refused, told of, or right."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from training import (
    LEVELS,
    assert_equal,
    batches,
    loss_of,
    make,
    prepared,
    trained_rightly,
    weights,
)

from amp_patch import amp as core
from amp_patch.gradients.passes import Passes

INPUTS = next(batches())


def one_pass(amp: ModuleType, model: nn.Module, optimizer: Any) -> None:
    with amp.scale_loss(loss_of(model, INPUTS), optimizer) as scaled_loss:
        scaled_loss.backward()


def train(amp: ModuleType, model: nn.Module, optimizer: Any) -> None:
    for inputs in batches():
        optimizer.zero_grad()
        with amp.scale_loss(loss_of(model, inputs), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()


# --- refused, with the place ---


def plain_backward(amp: Any, model: Any, optimizer: Any) -> None:
    loss = loss_of(model, INPUTS)
    with amp.scale_loss(loss, optimizer):
        loss.backward()


def late_backward(amp: Any, model: Any, optimizer: Any) -> None:
    with amp.scale_loss(loss_of(model, INPUTS), optimizer) as scaled_loss:
        pass
    scaled_loss.backward()


def delayed_clip(amp: Any, model: Any, optimizer: Any) -> None:
    with amp.scale_loss(loss_of(model, INPUTS), optimizer, delay_unscale=True) as scaled_loss:
        scaled_loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def between_delayed(amp: Any, model: Any, optimizer: Any) -> None:
    with amp.scale_loss(loss_of(model, INPUTS), optimizer, delay_unscale=True) as scaled_loss:
        scaled_loss.backward()
    other = torch.nn.Linear(4, 2)
    loss_of(other, INPUTS).backward()  # which is right
    optimizer.zero_grad()
    loss_of(model, INPUTS).backward()  # so is this
    optimizer.zero_grad()
    with amp.scale_loss(loss_of(model, INPUTS), optimizer, delay_unscale=True) as scaled_loss:
        scaled_loss.backward()
    loss_of(model, INPUTS).backward()


def late_with_auxiliary(amp: Any, model: Any, optimizer: Any) -> None:
    for _ in range(20):
        one_pass(amp, model, optimizer)
        optimizer.zero_grad()
    plain_backward(amp, model, optimizer)


def late_behind(amp: Any, model: Any, optimizer: Any) -> None:
    for _ in range(20):
        one_pass(amp, model, optimizer)
        optimizer.zero_grad()
    late_backward(amp, model, optimizer)


def with_penalty(model: Any, scaled_loss: Any) -> None:
    (scaled_loss + sum(param.float().square().sum() for param in model.parameters())).backward()


def with_penalty_in_place(model: Any, scaled_loss: Any) -> None:
    scaled_loss += sum(param.float().square().sum() for param in model.parameters())
    scaled_loss.backward()


def beside_penalty(model: Any, scaled_loss: Any) -> None:
    scaled_loss.backward()
    torch.autograd.backward([param.float().square().sum() for param in model.parameters()])


def again_behind_clip(model: Any, scaled_loss: Any) -> None:
    scaled_loss.backward(retain_graph=True)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaled_loss.backward()


def clip_before_backward(model: Any, scaled_loss: Any) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaled_loss.backward()


def with_scaled(act: Callable[[Any, Any], None]) -> Callable[..., None]:
    def run(amp: Any, model: Any, optimizer: Any) -> None:
        with amp.scale_loss(loss_of(model, INPUTS), optimizer) as scaled_loss:
            act(model, scaled_loss)

    return run


def around_forward(amp: Any, model: Any, optimizer: Any) -> None:
    with amp.scale_loss(model(INPUTS), optimizer) as outputs:
        nn.functional.cross_entropy(outputs, torch.zeros(len(INPUTS), dtype=torch.long)).backward()


def of_a_scaled_loss(amp: Any, model: Any, optimizer: Any) -> None:
    with amp.scale_loss(loss_of(model, INPUTS), optimizer) as scaled_loss:
        pass
    with amp.scale_loss(scaled_loss, optimizer) as scaled_loss:
        scaled_loss.backward()


ANOTHER, LATE = "must be that of the loss it yields", "must run inside of its scale_loss"
REFUSED: dict[str, tuple[Callable[..., None], str, tuple[str, ...]]] = {
    "clip before backward": (with_scaled(clip_before_backward), "Move it after", LEVELS),
    "an unscaled term": (with_scaled(with_penalty), ANOTHER, ("O1", "O2")),
    "an unscaled term in place": (with_scaled(with_penalty_in_place), ANOTHER, ("O1", "O2")),
    "an unscaled loss beside": (with_scaled(beside_penalty), ANOTHER, ("O1", "O2")),
    "backward after clip": (with_scaled(again_behind_clip), LATE, ("O1", "O2")),
    "loss.backward() late": (late_with_auxiliary, ANOTHER, ("O1", "O2")),
    "backward outside late": (late_behind, LATE, ("O1", "O2")),
    "clipping of scaled gradients": (
        delayed_clip,
        "or one under no_sync",
        ("O1", "O2"),
    ),
    "loss.backward() between blocks": (between_delayed, "for the last block", ("O1", "O2")),
    "loss.backward()": (plain_backward, ANOTHER, ("O1", "O2")),
    "backward outside": (late_backward, LATE, ("O1", "O2")),
    "a scaled loss scaled again": (of_a_scaled_loss, "a loss must be scaled once", ("O1", "O2")),
    "a loss of scaled outputs": (around_forward, "of what LogSoftmax made of it", ("O1", "O2")),
}


@pytest.mark.parametrize(
    ("mistake", "level"), [(name, level) for name, row in REFUSED.items() for level in row[2]]
)
def test_refused(amp: ModuleType, mistake: str, level: str) -> None:
    run, words, _ = REFUSED[mistake]
    model, optimizer = prepared(amp, level)
    before = weights(model)
    with pytest.raises(RuntimeError, match=words):
        run(amp, model, optimizer)
    optimizer.zero_grad()
    assert_equal(weights(model), before)
    train(amp, model, optimizer)
    torch.testing.assert_close(weights(model), trained_rightly(level))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_blocks_for_the_optimizers_of_a_loss_inside_each_other_are_refused(
    amp: ModuleType, level: str
) -> None:
    """The inner one would scale what the outer one has scaled."""
    model, _ = make()
    both = [torch.optim.SGD(part.parameters(), lr=0.05) for part in model.children()]
    amp.initialize(model, both, opt_level=level, verbosity=0)
    with (
        pytest.raises(RuntimeError, match=r"a loss must be scaled once.*\[first, second\]"),
        amp.scale_loss(loss_of(model, INPUTS), both[0]) as outer,
        amp.scale_loss(outer, both[1]) as inner,
    ):
        inner.backward()
    for inputs in batches():
        with amp.scale_loss(loss_of(model, inputs), both) as scaled_loss:
            scaled_loss.backward()
        for optimizer in both:
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(weights(model), trained_rightly(level))


# --- told of once ---


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize(
    "divide",
    [
        lambda scaled_loss, scale: scaled_loss / scale,
        lambda scaled_loss, scale: torch.tensor(1.0 / scale) * scaled_loss,
    ],
    ids=["quotient", "product"],
)
def test_a_scaled_loss_that_is_divided_by_the_scale(
    amp: ModuleType, level: str, divide: Callable[[torch.Tensor, float], torch.Tensor]
) -> None:
    """It is no error: the number may be one of tokens, which the scale equals by chance."""
    model, optimizer = prepared(amp, level)
    scale = core.loss_scale()
    warns = pytest.warns(UserWarning, match=rf"{scale:g}, as much as .* next to nothing")
    with warns, amp.scale_loss(loss_of(model, INPUTS), optimizer) as scaled_loss:
        divide(scaled_loss, scale).backward()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("where", ["after the block", "in the block"])
@pytest.mark.parametrize("by", ["optimizer", "model"])
def test_cleared_between_backward_and_step(
    amp: ModuleType, level: str, where: str, by: str
) -> None:
    model, optimizer = prepared(amp, level)
    owner = model if by == "model" else optimizer
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for inputs in batches():
            with amp.scale_loss(loss_of(model, inputs), optimizer) as scaled_loss:
                scaled_loss.backward()
                if where == "in the block":
                    owner.zero_grad()
            if where == "after the block":
                owner.zero_grad()
            optimizer.step()
    told = [str(one.message)[:37] for one in caught if one.filename == __file__]
    assert told == ["gradients must last until the step; g"]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("by", ["optimizer", "model"])
def test_a_batch_that_the_script_leaves_out_is_no_mistake(
    amp: ModuleType, level: str, by: str
) -> None:
    """As where the norm of its gradients is too large."""
    model, optimizer = prepared(amp, level)
    owner = model if by == "model" else optimizer
    for number, inputs in enumerate(batches()):
        owner.zero_grad()
        with amp.scale_loss(loss_of(model, inputs), optimizer) as scaled_loss:
            scaled_loss.backward()
        if number == 1:
            owner.zero_grad()
        before = weights(model)
        optimizer.step()
        assert all(map(torch.equal, before, weights(model))) is (number == 1)


@pytest.mark.parametrize("level", LEVELS)
def test_a_block_that_fails_is_no_step_behind_which_gradients_may_be_cleared(
    amp: ModuleType, level: str
) -> None:
    model, optimizer = prepared(amp, level)
    with (
        contextlib.suppress(ValueError),
        amp.scale_loss(loss_of(model, INPUTS), optimizer),
    ):
        raise ValueError("of the script")
    with amp.scale_loss(loss_of(model, INPUTS), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.zero_grad()
    with pytest.warns(UserWarning, match="gradients must last until the step"):
        optimizer.step()


@pytest.mark.parametrize("level", LEVELS)
def test_cleared_by_hand_between_backward_and_step(amp: ModuleType, level: str) -> None:
    model, optimizer = prepared(amp, level)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for inputs in batches():
            with amp.scale_loss(loss_of(model, inputs), optimizer) as scaled_loss:
                scaled_loss.backward()
            for param in model.parameters():
                param.grad = None
            optimizer.step()
    told = [str(one.message)[:85] for one in caught if one.filename == __file__]
    assert told == [
        "gradients must last until the step; got an optimizer.step() after `p.grad = None` has"
    ]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("is_cleared", [False, True])
def test_a_step_behind_a_block_that_an_exception_has_ended(
    amp: ModuleType, level: str, is_cleared: bool
) -> None:
    """Who clears the gradients means to go on without them."""
    model, optimizer = prepared(amp, level)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for inputs in batches():
            optimizer.zero_grad()
            block = amp.scale_loss(loss_of(model, inputs), optimizer)
            with contextlib.suppress(ZeroDivisionError), block as scaled_loss:
                scaled_loss.backward()
                raise ZeroDivisionError
            if is_cleared:
                optimizer.zero_grad()
            optimizer.step()
    told = [str(one.message)[:45] for one in caught if one.filename == __file__]
    assert told == ["a scale_loss() block that an exception ends, "][is_cleared:]


@pytest.mark.parametrize("level", LEVELS)
def test_a_step_behind_a_block_whose_unscaling_failed(
    amp: ModuleType, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = prepared(amp, level)
    monkeypatch.setattr(Passes, "receive_alone", out_of_memory)
    block = amp.scale_loss(loss_of(model, INPUTS), optimizer)
    with pytest.raises(torch.OutOfMemoryError), block as scaled_loss:
        scaled_loss.backward()
    with pytest.warns(UserWarning, match=r"call optimizer\.zero_grad\(\) where you catch it"):
        optimizer.step()


def out_of_memory(*_: object) -> None:
    raise torch.OutOfMemoryError


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("by", ["optimizer", "model"])
@pytest.mark.parametrize("before", [True, False])
def test_clearing_elsewhere_is_right(amp: ModuleType, level: str, by: str, before: bool) -> None:
    expected = trained_rightly(level)
    model, optimizer = prepared(amp, level)
    owner = model if by == "model" else optimizer
    for number, inputs in enumerate(batches()):
        if before:
            owner.zero_grad()
        if before and number > 0:  # a batch that is thrown away
            one_pass(amp, model, optimizer)
            if number == 1:
                owner.zero_grad()
        with amp.scale_loss(loss_of(model, inputs), optimizer) as scaled_loss:
            owner.zero_grad()
            scaled_loss.backward()
        optimizer.step()
    assert_equal(weights(model), expected)


@pytest.mark.parametrize(
    ("level", "fused_step"), [*((level, False) for level in LEVELS), ("O2", True), ("O5", True)]
)
def test_a_layer_cleared_in_the_block_keeps_the_gradients_of_the_others(
    level: str, fused_step: bool
) -> None:
    found = []
    for in_block in (True, False):
        model, optimizer = prepared(core, level, fused_step=fused_step)
        one_pass(core, model, optimizer)
        if not in_block:
            next(model.children()).zero_grad()
        with core.scale_loss(loss_of(model, INPUTS), optimizer) as scaled_loss:
            if in_block:
                next(model.children()).zero_grad()
            scaled_loss.backward()
        optimizer.step()
        found.append(weights(model))
        core.deactivate()
    assert_equal(*found)


# --- right ---


def clip(model: nn.Module, optimizer: Any) -> None:
    core.clip_grad_norm_(optimizer, 0.1)


def clip_value(model: nn.Module, optimizer: Any) -> None:
    for param in core.master_params(optimizer):
        param.grad.clamp_(-0.01, 0.01)


IN_BLOCK: dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any, Any], Any]]] = {
    "clip_grad_norm_": (clip, lambda m, _: nn.utils.clip_grad_norm_(m.parameters(), 0.1)),
    "amp.clip_grad_norm_": (clip, clip),
    "of masters": (clip, lambda _, o: nn.utils.clip_grad_norm_(core.master_params(o), 0.1)),
    "clip_grad_value_": (clip_value, lambda m, _: nn.utils.clip_grad_value_(m.parameters(), 0.01)),
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("call", IN_BLOCK)
@pytest.mark.parametrize("steps", ["after", "inside"])
def test_what_needs_unscaled_gradients_in_the_block(
    amp: ModuleType, level: str, call: str, steps: str
) -> None:
    expected_clip, act = IN_BLOCK[call]
    expected = trained_rightly(level, expected_clip)
    model, optimizer = prepared(amp, level)
    for inputs in batches():
        optimizer.zero_grad()
        with amp.scale_loss(loss_of(model, inputs), optimizer) as scaled_loss:
            scaled_loss.backward()
            act(model, optimizer)
            if steps == "inside":
                optimizer.step()
                optimizer.zero_grad()
        if steps == "after":
            optimizer.step()
    torch.testing.assert_close(weights(model), expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_overflow_is_skipped_where_the_step_is_in_the_block(amp: ModuleType, level: str) -> None:
    model, optimizer = prepared(amp, level)
    before = weights(model)
    with amp.scale_loss(loss_of(model, INPUTS) * float("inf"), optimizer) as scaled_loss:
        scaled_loss.backward()
        optimizer.step()
    assert_equal(weights(model), before)
    assert core.step_was_skipped(optimizer)
    assert core.loss_scale() == 2.0**15


@pytest.mark.parametrize("level", LEVELS)
def test_backwards_of_other_things_in_a_block_are_not_refused(amp: ModuleType, level: str) -> None:
    model, optimizer = prepared(amp, level)
    other = nn.Linear(4, 1)
    inputs = INPUTS.clone().requires_grad_()
    loss = loss_of(model, inputs)
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        other(INPUTS).sum().backward()
        loss.backward(inputs=[inputs], retain_graph=True)
        (scaled_loss / 2 + other(INPUTS).sum()).backward(retain_graph=True)
        for part in (scaled_loss / 64, scaled_loss * 3, scaled_loss * scaled_loss.detach()):
            part.backward(retain_graph=True)
        scaled_loss += other(INPUTS).sum()
        scaled_loss /= 2
        scaled_loss.backward()
    assert all(param.grad is not None for param in model.parameters())


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("fused_step", [False, True])
def test_torchs_clipping_behind_the_block_reaches_the_masters(
    amp: ModuleType, level: str, fused_step: bool
) -> None:
    if fused_step and (level == "O1" or amp is not core):
        return
    expected = trained_rightly(level, clip)
    model, optimizer = prepared(amp, level, **({"fused_step": True} if fused_step else {}))
    for inputs in batches():
        optimizer.zero_grad()
        with amp.scale_loss(loss_of(model, inputs), optimizer) as scaled_loss:
            scaled_loss.backward()
        before = nn.utils.get_total_norm([param.grad for param in model.parameters()])
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        torch.testing.assert_close(before, norm)
        assert 0.1 < norm < 10.0
        optimizer.step()
    torch.testing.assert_close(weights(model), expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("level", LEVELS)
def test_clipping_of_other_parameters_is_torchs(amp: ModuleType, level: str) -> None:
    model, optimizer = prepared(amp, level)
    loss = loss_of(model, next(batches()))
    with amp.scale_loss(loss, optimizer, delay_unscale=True) as scaled_loss:
        scaled_loss.backward()
    param = nn.Parameter(torch.ones(3))
    param.grad = torch.full((3,), 2.0)
    assert nn.utils.clip_grad_norm_(iter([param]), 1.0) == torch.full((3,), 2.0).norm()
    nn.utils.clip_grad_value_(param, 0.1)
    assert param.grad.tolist() == pytest.approx([0.1] * 3)
    source = inspect.getsource(torch.nn.utils.clip_grad)
    warns = "empty generator" in source  # not in torch 2.6
    expected = pytest.warns(UserWarning, match="empty generator")
    with expected if warns else contextlib.nullcontext():
        assert nn.utils.clip_grad_norm_((one for one in []), 1.0) == 0


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("of", ["model", "masters"])
def test_clipping_values_behind_the_step_does_nothing(amp: ModuleType, level: str, of: str) -> None:
    model, optimizer = prepared(amp, level)
    one_pass(amp, model, optimizer)
    optimizer.step()
    before = weights(model)
    given = model.parameters() if of == "model" else core.master_params(optimizer)
    nn.utils.clip_grad_value_(given, 0.1)
    assert_equal(weights(model), before)


@pytest.mark.parametrize("level", LEVELS)
def test_an_old_checkpoint_loaded_afterwards(amp: ModuleType, level: str) -> None:
    other, _ = make()
    state = {name: value * 1.0001 for name, value in other.state_dict().items()}
    results = []
    for when in ("before", "after"):
        model, optimizer = make()
        if when == "before":
            model.load_state_dict(state)
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        if when == "after":
            model.load_state_dict(state)
        train(amp, model, optimizer)
        results.append(weights(model))
        core.deactivate()
    assert_equal(*results)


@pytest.mark.parametrize("level", LEVELS)
def test_parameters_that_are_added_or_unfrozen_later(amp: ModuleType, level: str) -> None:
    expected = trained_rightly(level)
    model, _ = make()
    optimizer = torch.optim.SGD(model.first.parameters(), lr=0.05)
    model.last.requires_grad_(False)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    model.last.requires_grad_()
    optimizer.add_param_group({"params": list(model.last.parameters())})
    train(amp, model, optimizer)
    # of what nothing trained at first there was no second copy in fp32
    rough = {"O1": 1e-6, "O2": 2e-3, "O5": 2e-2}[level]
    torch.testing.assert_close(weights(model), expected, rtol=rough, atol=rough)


@pytest.mark.parametrize("level", LEVELS)
def test_mistakes_of_initialize_are_refused(amp: ModuleType, level: str) -> None:
    model, optimizer = prepared(amp, level)
    late = torch.optim.SGD(model.parameters(), lr=0.05)
    twin, copied = copy.deepcopy((model, optimizer))
    for mistake, words in (
        (lambda: amp.initialize(model, optimizer, opt_level=level), "initialize"),
        (lambda: amp.initialize(*make(), opt_level=level.lower()), "a lower-case letter o"),
        (lambda: amp.initialize(nn.DataParallel(make()[0]), opt_level="O2"), "AFTER the model"),
        (lambda: one_pass(amp, model, late), "got an optimizer that amp.initialize"),
        (lambda: one_pass(amp, twin, copied), "got an optimizer that amp.initialize"),
    ):
        with pytest.raises(RuntimeError, match=words):
            mistake()
    train(amp, model, optimizer)
    assert_equal(weights(model), trained_rightly(level))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("by_name", [True, False])
def test_a_graph_of_scaled_gradients_is_told_of_once(
    amp: ModuleType, level: str, by_name: bool
) -> None:
    model, optimizer = prepared(amp, level)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for inputs in batches():
            with amp.scale_loss(loss_of(model, inputs), optimizer) as scaled_loss:
                if by_name:
                    torch.autograd.backward(scaled_loss, create_graph=True)
                else:
                    scaled_loss.backward(None, None, True)
            optimizer.step()
            for param in model.parameters():
                param.grad = None  # it holds the graph, which holds the parameter
    told = [one for one in caught if "differentiated again" in str(one.message)]
    assert len(told) == (level != "O5")
    assert {one.filename for one in told} <= {__file__}


class Hutchinson(torch.optim.Optimizer):
    """Steps by the gradient and an estimate of the Hessian's diagonal, as AdaHessian and Sophia."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:
        params = self.param_groups[0]["params"]
        grads = [param.grad for param in params]
        signs = [torch.ones_like(param) for param in params]
        curved = torch.autograd.grad(grads, params, grad_outputs=signs, retain_graph=True)
        with torch.no_grad():
            for param, grad, hessian in zip(params, grads, curved, strict=True):
                param.sub_(0.1 * grad / (1 + hessian.abs()))


@pytest.mark.filterwarnings(r"ignore:Using backward\(\) with create_graph=True")  # torch's, once
def test_what_a_graph_of_scaled_gradients_is_told_mends_it(amp: ModuleType) -> None:
    """The level that the warning names steps by the Hessian that float32 has."""

    def trained(level: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = Hutchinson(model.parameters())
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        for inputs in batches():
            optimizer.zero_grad()
            with amp.scale_loss(loss_of(model, inputs), optimizer) as scaled_loss:
                scaled_loss.backward(create_graph=True)
            optimizer.step()
        optimizer.zero_grad()  # gradients hold the graph, which holds the parameters
        core.deactivate()
        return weights(model)

    with pytest.warns(UserWarning, match="opt_level='O4'"):
        scaled = trained("O1")
    plain, named = trained("O0"), trained("O4")
    for one, other in zip(named, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=0.02, atol=2e-3)
    assert not all(map(functools.partial(torch.allclose, atol=2e-3), scaled, plain))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("options", [{}, {"delay_overflow_check": True}], ids=["", "delayed"])
def test_a_norm_that_must_be_finite_knows_of_overflows(
    amp: ModuleType, level: str, options: dict[str, bool]
) -> None:
    model, optimizer = prepared(amp, level)
    loss = loss_of(model, INPUTS) * float("inf")
    with amp.scale_loss(loss, optimizer, **options) as scaled_loss:
        scaled_loss.backward()
    of_overflow = pytest.raises(RuntimeError, match=r"Leave it out: optimizer.step\(\) then skips")
    of_script = pytest.raises(RuntimeError, match="amp-patch diagnose -- SCRIPT")
    with of_script if level == "O5" else of_overflow:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    optimizer.step()
    optimizer.zero_grad()
    one_pass(amp, model, optimizer)
    next(core.master_params(optimizer)).grad.fill_(float("nan"))
    with of_script:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
