"""The public calls: apex's signatures, words and idioms; what is refused leaves all as it was."""

from __future__ import annotations

import copy
import inspect
import io
import re
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import hypothesis
import numpy
import pytest
import torch
import torch_snapshot
from hypothesis import strategies as st
from small_models import normed_pair as make
from support import exactly, scaled_backward
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DataParallel
from torch.optim import LBFGS, SGD, Adam, Optimizer
from torch.optim.lr_scheduler import StepLR

from amp_patch import amp as public
from amp_patch.casting.mode import process
from amp_patch.levels import describe
from amp_patch.requested_level import resolve
from amp_patch.session import session

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
CASTING = ("O1", "O4")
KEYWORDS = (
    "init_scale", "growth_factor", "backoff_factor", "growth_interval", "hysteresis", "rules",
    "norm_type", "fused_step", "process_group", "casts", "in_float",
    "tensorboard",
    "wandb",
    "logger",
    "trace_overflow",
)  # fmt: skip
# apex's signatures, in its order and with its defaults (no default: ``...``).
APEX = {
    "initialize": {
        "models": ..., "optimizers": None, "enabled": True, "opt_level": "O1",
        "cast_model_type": None, "patch_torch_functions": None, "keep_batchnorm_fp32": None,
        "master_weights": None, "loss_scale": None, "cast_model_outputs": None, "num_losses": 1,
        "verbosity": 1, "min_loss_scale": None, "max_loss_scale": 2.0**24,
    },
    "scale_loss": {
        "loss": ..., "optimizers": ..., "loss_id": 0, "model": None, "delay_unscale": False,
        "delay_overflow_check": False,
    },
    "disable_casts": {},
    "master_params": {"optimizer": ...},
    "state_dict": {"destination": None},
    "load_state_dict": {"state_dict": ...},
    "half_function": {"fn": ...},
    "float_function": {"fn": ...},
    "promote_function": {"fn": ...},
    "bfloat16_function": {"fn": ...},
    "register_half_function": {"module": ..., "name": ...},
    "register_float_function": {"module": ..., "name": ...},
    "register_promote_function": {"module": ..., "name": ...},
    "register_bfloat16_function": {"module": ..., "name": ...},
    # not apex's
    "register_library_function": {"module": ..., "name": ...},
    "register_forward_method": {"cls": ..., "name": ...},
    "deactivate": {},
    "overflow_report": {},
    "summary": {},
    "step_was_skipped": {"optimizer": ...},
    "loss_scale": {"loss_id": None},
    "clip_grad_norm_": {
        "optimizer": ..., "max_norm": ..., "norm_type": 2.0, "error_if_nonfinite": False,
    },
    "half_region": {},
    "float_region": {},
}  # fmt: skip


def train_plainly(model: nn.Module, optimizer: Optimizer, seed: int = 1) -> Tensor:
    inputs = torch.randn(16, 4, generator=torch.Generator().manual_seed(seed))
    optimizer.zero_grad()
    loss = model(inputs).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def train(model: nn.Module, optimizer: Optimizer, factor: float = 1.0, **options: Any) -> Tensor:
    inputs = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
    optimizer.zero_grad()
    loss = model(inputs).square().mean() * factor
    scaled_backward(public, loss, optimizer, **options)
    optimizer.step()
    return loss.detach()


def values(model: nn.Module) -> list[Tensor]:
    return [value.detach().clone() for value in (*model.parameters(), *model.buffers())]


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return [t.dtype for t in left] == [t.dtype for t in right] and all(
        map(torch.equal, left, right)
    )


# --- signatures ---


@pytest.mark.parametrize("name", APEX)
def test_signatures_are_apexs_and_what_is_new_is_keyword_only(name: str) -> None:
    parameters = inspect.signature(getattr(public, name)).parameters.values()
    positional = {
        p.name: ... if p.default is p.empty else p.default
        for p in parameters
        if p.kind is p.POSITIONAL_OR_KEYWORD
    }
    assert list(positional.items()) == list(APEX[name].items())
    new = [p.name for p in parameters if p.name not in positional]
    assert all(p.kind is p.KEYWORD_ONLY for p in parameters if p.name in new)
    assert set(new) <= set(KEYWORDS)


def test_every_public_name_has_its_signature_checked() -> None:
    assert sorted(APEX) == sorted(public.__all__)


# --- what comes back ---


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("of_optimizers", [None, "one", list, tuple])
@pytest.mark.parametrize("of_models", ["one", list, tuple])
def test_what_comes_back_mirrors_what_went_in(
    amp: ModuleType, of_models: Any, of_optimizers: Any, level: str
) -> None:
    model, optimizer = make()
    models = model if of_models == "one" else of_models([model])
    optimizers: Any = of_optimizers
    if of_optimizers is not None:
        optimizers = optimizer if of_optimizers == "one" else of_optimizers([optimizer])
    result = amp.initialize(models, optimizers, opt_level=level, verbosity=0)
    got_models, got_optimizers = (result, None) if optimizers is None else result
    assert type(got_models) is type(models)
    assert (got_models if of_models == "one" else got_models[0]) is model
    if of_optimizers is not None:
        assert type(got_optimizers) is type(optimizers)
        assert (got_optimizers if of_optimizers == "one" else got_optimizers[0]) is optimizer
        assert train(model, optimizer).isfinite()


def test_initialize_prints_what_apex_prints(
    amp: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    amp.initialize(*make(), loss_scale="128.0")
    assert capsys.readouterr().out == describe(resolve("O1", loss_scale=128.0)) + "\n"


@pytest.mark.parametrize("level", LEVELS)
def test_verbosity_0_is_silent_and_1_tells_of_a_skipped_step_in_apexs_words(
    amp: ModuleType, capsys: pytest.CaptureFixture[str], level: str
) -> None:
    run = amp.initialize(*make(), opt_level=level, loss_scale="dynamic", verbosity=0)
    train(*run, factor=float("inf"))
    assert amp.step_was_skipped(run[1]) is True
    assert capsys.readouterr().out == ""
    run = amp.initialize(*make(), opt_level=level, loss_scale="dynamic", verbosity=1)
    capsys.readouterr()
    train(*run, factor=float("inf"))
    assert capsys.readouterr().out == (
        "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 16384.0; "
        "not finite: 0.weight (NaN), 0.bias (NaN), 1.weight (NaN) and 3 more\n"
    )


def test_of_several_models_the_line_tells_which_overflowed(
    amp: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [amp.initialize(*make(), loss_scale="dynamic", verbosity="skips") for _ in range(2)]
    for run in runs:
        train(*run, factor=float("inf"))
    first, second = (line.partition("; ")[2] for line in capsys.readouterr().out.splitlines())
    assert first.startswith("not finite: Sequential 1: 0.weight (NaN), Sequential 1: 0.bias (NaN)")
    assert second.startswith("not finite: Sequential 2: 0.weight (NaN), Sequential 2: 0.bias (NaN)")


# --- refusals ---

Refused = Callable[[nn.Module, Optimizer], Any]


def initialize_with(**options: Any) -> Refused:
    return lambda model, optimizer: public.initialize(model, optimizer, **options)


REFUSALS: dict[str, tuple[Refused, type[Exception], str]] = {
    "level with a zero": (initialize_with(opt_level="02"), RuntimeError, "the digit zero"),
    "unknown level": (initialize_with(opt_level="O6"), RuntimeError, "opt_level must be one of"),
    "level as a number": (initialize_with(opt_level=1), TypeError, "of type int"),
    "override": (
        initialize_with(opt_level="O1", keep_batchnorm_fp32=True),
        RuntimeError,
        "keep_batchnorm_fp32 must be None at opt_level='O1'",
    ),
    "patching at O2": (
        initialize_with(opt_level="O2", patch_torch_functions=True),
        RuntimeError,
        "patch_torch_functions is True only at",
    ),
    "masters at O4": (
        initialize_with(opt_level="O4", master_weights=True),
        RuntimeError,
        "master_weights must be None at opt_level='O4'",
    ),
    "loss scale": (
        initialize_with(opt_level="O2", loss_scale=-1),
        ValueError,
        "loss_scale must be 'dynamic' or a finite number above 0",
    ),
    "floor above cap": (
        initialize_with(opt_level="O2", min_loss_scale=8, max_loss_scale=4),
        ValueError,
        "min_loss_scale must not be above max_loss_scale",
    ),
    "growth": (
        initialize_with(opt_level="O2", growth_factor=0.5),
        ValueError,
        "growth_factor must be above 1",
    ),
    "losses": (
        initialize_with(opt_level="O2", num_losses=0),
        ValueError,
        "num_losses must be an int of at least 1",
    ),
    "rules at O2": (
        initialize_with(opt_level="O2", rules={"softmax": "half"}),
        RuntimeError,
        "rules say how functions are cast",
    ),
    "rule": (
        initialize_with(opt_level="O1", rules={"softmax": "fp16"}),
        ValueError,
        "a rule must be one of 'half', 'half_out', 'float', 'promote', 'bfloat16', 'off'; got "
        "'fp16' for 'softmax'; did you mean 'half'? Call amp.initialize(..., rules={'softmax': "
        "'half'}).",
    ),
    "misspelled key of rules": (
        initialize_with(opt_level="O1", rules={"profil": "fast-norms"}),
        ValueError,
        "rules may have opt_level, profile, functions, modules and inputs; got 'profil'; did "
        "you mean 'profile'? Write profile in its place.",
    ),
    "module that is no string": (
        initialize_with(opt_level="O2", rules={"modules": {nn.Linear: "float"}}),
        TypeError,
        "modules in rules must be named by strings",
    ),
    "function": (
        initialize_with(opt_level="O1", rules={"softmaxx": "half"}),
        ValueError,
        "rules must name functions of torch",
    ),
    "optimizer twice": (
        lambda model, optimizer: public.initialize(model, [optimizer] * 2, opt_level="O2"),
        RuntimeError,
        "A given optimizer should only be passed through amp.initialize once",
    ),
    "half parameter": (
        lambda model, optimizer: public.initialize(
            [model, nn.Linear(1, 1).half()], optimizer, opt_level="O2"
        ),
        RuntimeError,
        "models must come in float32",
    ),
    "parallel wrapper": (
        lambda model, optimizer: public.initialize(
            [model, DataParallel(nn.Linear(1, 1))], optimizer, opt_level="O2"
        ),
        RuntimeError,
        "Parallel wrappers should only be applied to the model AFTER",
    ),
    "lazy model": (
        lambda model, optimizer: public.initialize(
            [model, nn.LazyLinear(1)], optimizer, opt_level="O5"
        ),
        RuntimeError,
        "got the lazy parameter 'weight'",
    ),
    "no model": (
        lambda model, optimizer: public.initialize([model, 3], optimizer, opt_level="O2"),
        TypeError,
        "models must be a torch.nn.Module",
    ),
    "no optimizer": (
        lambda model, optimizer: public.initialize(model, [optimizer, 3], opt_level="O2"),
        TypeError,
        "optimizers must be a torch.optim.Optimizer",
    ),
}


@pytest.mark.parametrize("others", [None, "O1", "O2"])
@pytest.mark.parametrize("case", REFUSALS)
def test_a_refusal_leaves_everything_as_it_was(
    amp: ModuleType, capsys: pytest.CaptureFixture[str], case: str, others: str | None
) -> None:
    call, error, words = REFUSALS[case]
    unpatched = torch_snapshot.take()
    other = make()
    if others is not None:
        amp.initialize(*other, opt_level=others, verbosity=0)
    patched = torch_snapshot.take()
    model, optimizer = make()
    before, reference = values(model), copy.deepcopy(model)
    methods, hooks = dict(vars(optimizer)), list(model._forward_hooks)
    with pytest.raises(error, match=re.escape(words)):
        call(model, optimizer)
    assert torch_snapshot.differences(patched) == []
    assert same(values(model), before)
    assert vars(optimizer) == methods
    assert list(model._forward_hooks) == hooks == []
    assert capsys.readouterr().out == ""
    if others is not None:
        train(*other)  # goes on, and silently so
        assert capsys.readouterr().out == ""
        amp.deactivate()
    assert torch_snapshot.differences(unpatched) == []
    expected = train_plainly(reference, SGD(reference.parameters(), lr=0.1))
    assert torch.equal(train_plainly(model, optimizer), expected)


NO_FLAG = ["yes", 2, 1.5, [], torch.ones(2)]
NO_NUMBER = ["1", [], float("nan"), -1.0, 0.0, True, None]
NO_COUNT = ["1", [], 0, -1, 1.5, float("nan"), True]
NO_DTYPE = [torch.int32, torch.complex64, "half", 16, True, float]
#: Values that no level takes, for each argument of initialize.
WRONG: dict[str, list[Any]] = {
    "models": [None, 3, "model", [3], {"model": nn.ReLU()}, nn.Linear, iter([nn.ReLU()])],
    "optimizers": [3, "SGD", [None], SGD, {"optimizer": 1}, nn.Linear(1, 1)],
    "enabled": ["False", "no", "O2", None, 2, 1.0, []],
    "opt_level": ["02", "o1", "O6", "", 1, None, torch.float16],
    "cast_model_type": [*NO_DTYPE, torch.float64],
    "patch_torch_functions": NO_FLAG,
    "keep_batchnorm_fp32": NO_FLAG,
    "master_weights": NO_FLAG,
    "loss_scale": [*NO_NUMBER[1:-1], "dynamo", float("inf")],
    "cast_model_outputs": [*NO_DTYPE, False],
    "num_losses": [*NO_COUNT, None],
    "verbosity": ["1", 1.0, None, [], torch.ones(2)],
    "min_loss_scale": [*NO_NUMBER[:-1], 2.0**25],
    "max_loss_scale": [*NO_NUMBER[:-1], float("inf")],
    "init_scale": [*NO_NUMBER[:-1], float("inf"), 2.0**25],
    "growth_factor": [*NO_NUMBER[:-1], 1.0],
    "backoff_factor": [*NO_NUMBER[:-1], 1.0],
    "growth_interval": NO_COUNT,
    "hysteresis": NO_COUNT,
    "rules": [3, ["softmax"], {1: "half"}, {"softmax": 3}, {"softmax": []}, {"zzz": "half"}],
    "fused_step": ["yes", 1, None, []],
    "process_group": ["world", 1, []],
    "tensorboard": [1, True, []],
    "wandb": [1, "run", []],
    "logger": [1, print, []],
    "trace_overflow": ["yes", 1, None, []],
}


def test_every_argument_of_initialize_has_wrong_values() -> None:
    assert list(WRONG) == list(inspect.signature(public.initialize).parameters)


def stand(model: nn.Module, optimizer: Optimizer) -> list[Any]:
    """What initialize could have changed; of hooks and methods, which are there."""
    return [
        [
            (id(tensor), tensor.dtype, tensor.data_ptr())
            for tensor in (*model.parameters(), *model.buffers())
        ],
        [list(map(id, group["params"])) for group in optimizer.param_groups],
        [
            list(hooks)
            for module in model.modules()
            for name, hooks in vars(module).items()
            if name.endswith("_hooks") and hooks
        ],
        list(vars(optimizer)),
        session.verbosity,
        session.initialized,
        session.lookup.disabled,
        process.save(),
        [(id(scaler), scaler.scale) for scaler in session.scalers],
    ]


@pytest.mark.parametrize("others", [None, "O2"])
@hypothesis.settings(suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@hypothesis.given(
    level=st.sampled_from(LEVELS),
    wrong=st.sampled_from([(name, value) for name in WRONG for value in WRONG[name]]),
)
def test_a_wrong_argument_is_refused_before_anything_changes(
    amp: ModuleType, others: str | None, level: str, wrong: tuple[str, Any]
) -> None:
    amp.deactivate()
    other = others and amp.initialize(*make(), opt_level=others, verbosity=0)
    model, optimizer = make()
    arguments: dict[str, Any] = {
        "models": model,
        "optimizers": optimizer,
        "opt_level": level,
        "verbosity": 3,
        wrong[0]: wrong[1],
    }
    torchs, before = torch_snapshot.take(), stand(model, optimizer)
    with pytest.raises((TypeError, ValueError, RuntimeError), match=r"got .*[Cc]all amp\.|call m"):
        amp.initialize(**arguments)
    assert stand(model, optimizer) == before
    assert torch_snapshot.differences(torchs) == []
    del other


def from_a_file(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_a_model_from_a_file_in_half_is_taken_after_float(amp: ModuleType, level: str) -> None:
    model, optimizer = amp.initialize(*make(), opt_level=level, verbosity=0)
    train(model, optimizer)
    twin = from_a_file(model)
    with pytest.raises(RuntimeError, match=r"of one from a file, call model\.float\(\) first\.$"):
        amp.initialize(twin, opt_level=level, verbosity=0)
    amp.deactivate()
    twin.float()
    exact = copy.deepcopy(twin.state_dict())
    twin, steps = amp.initialize(
        twin, SGD(twin.parameters(), lr=0.1), opt_level=level, loss_scale=1.0, verbosity=0
    )
    assert twin.state_dict().keys() == exact.keys()
    assert all(torch.equal(value, exact[key]) for key, value in twin.state_dict().items())
    again, plain = make()
    again.load_state_dict(exact)
    again, plain = amp.initialize(again, plain, opt_level=level, loss_scale=1.0, verbosity=0)
    for _ in range(2):
        assert torch.equal(train(twin, steps), train(again, plain))


@pytest.mark.parametrize(
    ("caller", "call"),
    [
        ("amp.master_params()", public.master_params),
        ("amp.clip_grad_norm_()", lambda given: public.clip_grad_norm_(given, 1.0)),
        ("amp.step_was_skipped()", public.step_was_skipped),
    ],
)
def test_calls_that_take_one_optimizer_refuse_anything_else(
    amp: ModuleType, caller: str, call: Any
) -> None:
    model, optimizer = amp.initialize(*make(), opt_level="O2", verbosity=0)
    kinds = [model, list(model.parameters()), model.parameters(), None, 3]
    if caller == "amp.step_was_skipped()":  # which names these as scale_loss does
        kinds = []
    for given in [*kinds, [optimizer]]:
        with pytest.raises(TypeError, match=re.escape(f"{caller} takes one optimizer")):
            call(given)


def test_options_of_a_dynamic_scale_beside_a_static_one_are_told(amp: ModuleType) -> None:
    moves = {"growth_interval": 5, "hysteresis": 2, "max_loss_scale": 2.0**20}
    with pytest.warns(
        UserWarning, match=r"got loss_scale=128\.0 and growth_interval, hysteresis\."
    ):
        amp.initialize(*make(), loss_scale=128.0, verbosity=0, **moves)


@pytest.mark.parametrize("scale", [{}, {"loss_scale": "dynamic"}])
@pytest.mark.parametrize("level", ["O2", "O4"])
def test_they_are_not_told_where_the_level_decides_or_the_scale_moves(
    amp: ModuleType, level: str, scale: dict[str, Any]
) -> None:
    amp.initialize(*make(), opt_level=level, growth_interval=5, verbosity=0, **scale)


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), "one", "1", None])
def test_a_wrong_norm_is_refused_before_a_gradient_changes(amp: ModuleType, wrong: Any) -> None:
    model, optimizer = amp.initialize(*make(), opt_level="O1", loss_scale=1.0, verbosity=0)
    model(torch.randn(4, 4)).float().sum().backward()
    before = [param.grad.clone() for param in model.parameters()]
    with pytest.raises((TypeError, ValueError), match="max_norm must be a number"):
        amp.clip_grad_norm_(optimizer, wrong)
    with pytest.raises((TypeError, ValueError), match="norm_type must be a number"):
        amp.clip_grad_norm_(optimizer, 1e-3, norm_type=wrong)
    assert same([param.grad for param in model.parameters()], before)


@pytest.mark.parametrize("state", [None, [], 3])
def test_a_state_that_is_none_is_refused(amp: ModuleType, state: Any) -> None:
    amp.initialize(*make(), opt_level="O2", verbosity=0)
    with pytest.raises(TypeError, match="a state of the loss scalers is a dict"):
        amp.load_state_dict(state)
    assert amp.loss_scale() == 2.0**16


@pytest.mark.parametrize("level", LEVELS)
def test_an_optimizer_is_refused_in_a_second_call(amp: ModuleType, level: str) -> None:
    model, optimizer = amp.initialize(*make(), opt_level=level, verbosity=0)
    with pytest.raises(RuntimeError, match="only be passed through amp.initialize once; got the"):
        amp.initialize(make()[0], optimizer, opt_level=level, verbosity=0)
    assert train(model, optimizer).isfinite()


# --- before initialize, and with enabled=False ---


def test_calls_that_need_no_state_work_before_initialize(amp: ModuleType) -> None:
    model, optimizer = make()
    before = torch_snapshot.take()
    amp.deactivate()
    assert list(amp.master_params(optimizer)) == list(model.parameters())
    with amp.disable_casts(), amp.half_region(), amp.float_region():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32
    for decorate in (amp.half_function, amp.float_function, amp.promote_function):
        assert decorate(lambda tensor: tensor.dtype)(torch.ones(1)) is torch.float32
    assert torch_snapshot.differences(before) == []


class NotTorchs:
    """An optimizer that is none of torch's, as some libraries wrap them."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.param_groups = optimizer.param_groups


@pytest.mark.parametrize("kind", [SGD, LBFGS, NotTorchs, list, None])
def test_enabled_false_makes_every_later_call_do_nothing(
    amp: ModuleType, capsys: pytest.CaptureFixture[str], kind: Any
) -> None:
    before = torch_snapshot.take()
    model, optimizer = make(LBFGS if kind is LBFGS else SGD)
    given = {NotTorchs: NotTorchs(optimizer), list: [optimizer], None: None}.get(kind, optimizer)
    state = values(model)
    result = amp.initialize(model, given, False, "nonsense", num_losses=0, rules=3)
    assert result is model if given is None else result == (model, given)
    given = given or optimizer
    loss = model(torch.randn(4, 4)).sum()
    for options in ({}, {"loss_id": 7}, {"delay_unscale": True}):
        with amp.scale_loss(loss, given, **options) as scaled_loss:
            assert scaled_loss is loss
    with amp.scale_loss(3.0, given) as scaled_loss:
        assert scaled_loss == 3.0
    destination: Any = {"kept": 1}
    assert amp.state_dict() == {}
    assert amp.state_dict(destination) is destination == {"kept": 1}
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 2.0, "unskipped": 0}})
    amp.load_state_dict({"nonsense": 1})
    assert amp.loss_scale() == amp.loss_scale(5) == 1.0
    assert amp.step_was_skipped(given) is False
    with amp.disable_casts(), amp.half_region(), amp.float_region():
        assert model(torch.randn(4, 4)).dtype is torch.float32
    if kind is not list:
        loss.backward()
        grads = [param.grad.clone() for param in amp.master_params(given)]
        norm = amp.clip_grad_norm_(given, 1e-3)
        assert norm == pytest.approx(torch.cat([grad.flatten() for grad in grads]).norm().item())
        clipped = torch.cat([param.grad.flatten() for param in model.parameters()])
        assert clipped.norm().item() == pytest.approx(1e-3, rel=1e-2)
    assert capsys.readouterr().out == ""
    assert torch_snapshot.differences(before) == []
    assert same(values(model)[:4], state[:4])
    assert "step" not in vars(optimizer)
    amp.deactivate()
    assert torch_snapshot.differences(before) == []


@pytest.mark.parametrize("level", ["O1", "O2", "O3", "O5"])
def test_a_norm_that_is_never_reached_is_told_and_clips_nothing(
    amp: ModuleType, level: str
) -> None:
    model, optimizer = amp.initialize(*make(), opt_level=level, loss_scale=8.0, verbosity=0)
    with amp.scale_loss(model(torch.randn(4, 4)).float().sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
    grads = [param.grad.clone() for param in amp.master_params(optimizer)]
    norm = amp.clip_grad_norm_(optimizer, float("inf"))
    exact = torch.cat([grad.flatten().double() for grad in grads]).norm()
    torch.testing.assert_close(norm.double(), exact, rtol=2e-3, atol=0)
    for param, grad in zip(amp.master_params(optimizer), grads, strict=True):
        assert torch.equal(param.grad, grad)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_overflow_is_an_error_of_a_norm_where_the_call_says_so(
    amp: ModuleType, level: str
) -> None:
    model, optimizer = amp.initialize(*make(), opt_level=level, loss_scale=128.0, verbosity=0)
    plain = SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    for factor in (1.0, torch.inf):
        with amp.scale_loss(model(torch.randn(4, 4)).float().sum() * factor, optimizer) as loss:
            loss.backward()
        plain.param_groups[0]["params"][0].grad = torch.ones(2) * factor
        for one, mend in ((optimizer, "as an overflow leaves it"), (plain, "for which no step is")):
            if factor == 1.0:
                assert amp.clip_grad_norm_(one, 1.0, 2.0, error_if_nonfinite=True) > 0.1
            else:
                with pytest.raises(RuntimeError, match=f"one that is not, {mend}"):
                    amp.clip_grad_norm_(one, 1.0, error_if_nonfinite=True)
        optimizer.step()
        optimizer.zero_grad()
    assert amp.step_was_skipped(optimizer)


@pytest.mark.parametrize(
    ("level", "options"),
    [("O1", {}), ("O2", {}), ("O2", {"fused_step": True}), (None, {})],
    ids=["O1", "O2", "O2 fused", "not prepared"],
)
def test_where_a_norm_is_an_error_nothing_is_clipped(
    amp: ModuleType, level: str | None, options: dict[str, bool]
) -> None:
    """As torch raises: what is finite keeps its numbers."""
    model, optimizer = make()
    if level is None:
        model(torch.randn(4, 4)).float().sum().backward()
    else:
        amp.initialize(model, optimizer, opt_level=level, loss_scale=128.0, verbosity=0, **options)
        scaled_backward(amp, model(torch.randn(4, 4)).float().sum(), optimizer)
    stepped = optimizer.param_groups[0]["params"] if level is None else amp.master_params(optimizer)
    grads = [param.grad for param in stepped]
    grads[0].view(-1)[0] = torch.nan
    before = [grad.clone() for grad in grads]
    with pytest.raises(RuntimeError, match="wants a finite norm"):
        amp.clip_grad_norm_(optimizer, 1e-3, error_if_nonfinite=True)
    for grad, old in zip(grads, before, strict=True):
        torch.testing.assert_close(grad, old, rtol=0, atol=0, equal_nan=True)


# --- scale_loss and what goes with it ---


@pytest.mark.parametrize("name", ["backward", "item"])
def test_the_block_used_as_the_loss_says_how_it_is_used(amp: ModuleType, name: str) -> None:
    _, optimizer = amp.initialize(*make(), opt_level="O2", verbosity=0)
    words = (
        "amp.scale_loss() returns a block, which yields the scaled loss; got a look-up of "
        f"{name!r} on the block; write `with amp.scale_loss(loss, optimizer) as scaled_loss: "
        "scaled_loss.backward()`."
    )
    with pytest.raises(AttributeError, match=exactly(words)):
        getattr(amp.scale_loss(torch.zeros(()), optimizer), name)


@pytest.mark.parametrize("level", LEVELS)
def test_one_optimizer_named_twice_is_unscaled_once(amp: ModuleType, level: str) -> None:
    def gradients(times: int) -> list[Tensor]:
        model, optimizer = amp.initialize(*make(), opt_level=level, verbosity=0)
        inputs = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
        for _ in range(3):
            loss = model(inputs).square().mean()
            with amp.scale_loss(loss, [optimizer] * times) as scaled_loss:
                scaled_loss.backward()
        return [param.grad for param in amp.master_params(optimizer)]

    assert same(gradients(2), gradients(1))


@pytest.mark.parametrize(
    ("loss_id", "mend"),
    [
        (2, "amp.initialize(..., num_losses=3)"),
        (9, "amp.initialize(..., num_losses=10)"),
        (-1, "amp.scale_loss(loss, optimizer, loss_id=1)"),
    ],
)
def test_an_unknown_loss_id_is_refused(amp: ModuleType, loss_id: int, mend: str) -> None:
    _, optimizer = amp.initialize(*make(), opt_level="O2", num_losses=2, verbosity=0)
    words = (
        f"loss_id must be at least 0 and below the number of losses (2); got {loss_id}; call "
        f"{mend}."
    )
    with pytest.raises(IndexError, match=exactly(words)):
        amp.scale_loss(torch.zeros(()), optimizer, loss_id=loss_id)
    with pytest.raises(IndexError, match=exactly(words)):
        amp.loss_scale(loss_id)


def test_a_loss_id_of_numpy_is_taken(amp: ModuleType) -> None:
    _, optimizer = amp.initialize(*make(), opt_level="O2", num_losses=2, verbosity=0)
    for loss_id in numpy.arange(2):
        amp.scale_loss(torch.zeros(()), optimizer, loss_id=loss_id)
        assert amp.loss_scale(loss_id) == 65536.0


def test_a_third_argument_that_was_to_delay_is_told_its_name(amp: ModuleType) -> None:
    _, optimizer = amp.initialize(*make(), opt_level="O2", verbosity=0)
    with pytest.raises(IndexError, match=r"got True; call .*optimizer, delay_unscale=True\)"):
        amp.scale_loss(torch.zeros(()), optimizer, True)


@pytest.mark.parametrize("loss_id", ["0", 1.0, None, make()[1]])
def test_a_loss_id_that_is_no_int_is_refused_by_its_type(amp: ModuleType, loss_id: Any) -> None:
    _, optimizer = amp.initialize(*make(), opt_level="O2", num_losses=2, verbosity=0)
    words = (
        f"loss_id must be an int, the number of a loss; got {type(loss_id).__name__}; call "
        "amp.scale_loss(loss, optimizer, loss_id=0), or amp.loss_scale(loss_id=0)."
    )
    with pytest.raises(TypeError, match=exactly(words)):
        amp.scale_loss(torch.zeros(()), optimizer, loss_id=loss_id)
    if loss_id is not None:  # which stands for the block that is open
        with pytest.raises(TypeError, match=exactly(words)):
            amp.loss_scale(loss_id)


def test_step_was_skipped_speaks_of_the_last_step_of_that_optimizer(amp: ModuleType) -> None:
    run = amp.initialize(*make(), opt_level="O2", verbosity=0)
    other = amp.initialize(*make(), opt_level="O2", verbosity=0)
    seen = []
    for factor in (1.0, float("inf"), 1.0):
        train(*run, factor=factor)
        seen.append((amp.step_was_skipped(run[1]), amp.step_was_skipped(other[1])))
    assert seen == [(False, False), (True, False), (False, False)]


@pytest.mark.parametrize("level", LEVELS)
def test_schedulers_see_a_skipped_first_step_as_a_step(amp: ModuleType, level: str) -> None:
    run = amp.initialize(*make(), opt_level=level, loss_scale="dynamic", verbosity=0)
    scheduler = StepLR(run[1], step_size=1, gamma=0.5)
    rates = []
    for factor in (float("inf"), 1.0, 1.0):
        train(*run, factor=factor)
        # A warning would be an error here.
        if not amp.step_was_skipped(run[1]):
            scheduler.step()
        rates.append(run[1].param_groups[0]["lr"])
    assert rates == [0.1, 0.05, 0.025]
    train(*run, factor=float("inf"))
    scheduler.step()
    assert run[1].param_groups[0]["lr"] == 0.0125


@pytest.mark.parametrize("level", LEVELS)
def test_a_scheduler_built_before_initialize_does_not_warn(amp: ModuleType, level: str) -> None:
    model, optimizer = make()
    scheduler = StepLR(optimizer, step_size=1)
    run = amp.initialize(model, optimizer, opt_level=level, loss_scale="dynamic", verbosity=0)
    for factor in (float("inf"), 1.0):
        train(*run, factor=factor)
        scheduler.step()


# --- master_params and clipping ---


@pytest.mark.parametrize("level", LEVELS)
def test_master_params_are_what_the_optimizer_steps_in_its_order(
    amp: ModuleType, level: str
) -> None:
    model, _ = make()
    first, second = list(model[0].parameters()), list(model[3].parameters())
    groups = [{"params": second}, {"params": first}, {"params": list(model[1].parameters())}]
    optimizer = SGD(groups, lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    masters = [param for param in amp.master_params(optimizer)]  # noqa: C416 - apex's idiom
    order = [model[3].weight, model[3].bias, model[0].weight, model[0].bias]
    order += [model[1].weight, model[1].bias]
    assert [m.shape for m in masters] == [p.shape for p in order]
    separate = level in ("O2", "O5")
    assert [m is p for m, p in zip(masters, order, strict=True)] == [not separate] * 4 + [True] * 2
    assert all(isinstance(m, nn.Parameter) and m.is_leaf for m in masters)
    assert masters == [p for group in optimizer.param_groups for p in group["params"]]
    nested = [[p for p in amp.master_params(o)] for o in [optimizer]]  # noqa: C416 - as above
    assert nested == [masters]


@pytest.mark.parametrize("level", LEVELS)
def test_what_is_written_to_masters_reaches_the_model_at_the_next_step(
    amp: ModuleType, level: str
) -> None:
    model, optimizer = amp.initialize(*make(lr=0.0), opt_level=level, verbosity=0)
    expected = [2 * param.detach() for param in model.parameters()]
    for master in amp.master_params(optimizer):
        master.data.mul_(2)  # leaves no trace, unlike a write under no_grad
    train(model, optimizer)
    assert same([param.detach() for param in model.parameters()], expected)


def clip_by_torch(optimizer: Optimizer, max_norm: float) -> Tensor:
    return nn.utils.clip_grad_norm_(public.master_params(optimizer), max_norm)


@pytest.mark.parametrize("clip", [public.clip_grad_norm_, clip_by_torch])
@pytest.mark.parametrize("level", LEVELS)
def test_clipping_acts_on_unscaled_gradients(
    amp: ModuleType, level: str, clip: Callable[[Optimizer, float], Tensor]
) -> None:
    inputs = torch.randn(16, 4)
    reference, _ = make()
    reference(inputs).square().mean().backward()
    expected = nn.utils.get_total_norm([p.grad for p in reference.parameters()])
    model, optimizer = amp.initialize(
        *make(), opt_level=level, loss_scale=1024.0 if level != "O3" else 1.0, verbosity=0
    )
    with amp.scale_loss(model(inputs).square().mean(), optimizer) as scaled_loss:
        scaled_loss.backward()
    before = [param.detach().float().clone() for param in amp.master_params(optimizer)]
    norm = clip(optimizer, expected.item() / 4)
    assert norm.item() == pytest.approx(expected.item(), rel=0.02)
    optimizer.step()
    after = [param.detach().float() for param in amp.master_params(optimizer)]
    moved = [new - old for new, old in zip(after, before, strict=True)]
    # SGD moves by lr * gradient.
    distance = nn.utils.get_total_norm(moved).item() / 0.1
    assert distance == pytest.approx(expected.item() / 4, rel=0.05)


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_scaled_gradients_are_neither_clipped_nor_stepped(amp: ModuleType, level: str) -> None:
    options = {"loss_scale": 128.0} if level == "O5" else {}  # at 1 they are true
    model, optimizer = amp.initialize(*make(), opt_level=level, verbosity=0, **options)
    state = values(model)[:4]
    loss = model(torch.randn(16, 4)).square().mean()
    with amp.scale_loss(loss, optimizer, delay_unscale=True) as scaled_loss:
        scaled_loss.backward()
    for caller, call in {
        "amp.clip_grad_norm_()": lambda: amp.clip_grad_norm_(optimizer, 1.0),
        "optimizer.step()": optimizer.step,
    }.items():
        words = (
            f"{caller} needs unscaled gradients; the last scale_loss(..., delay_unscale=True) or "
            "one under no_sync(), or a GradScaler's scale(), left them scaled. Leave both out in "
            "the last scale_loss() before it, or call scaler.unscale_(optimizer), or clear them "
            "with optimizer.zero_grad()."
        )
        with pytest.raises(RuntimeError, match=exactly(words)):
            call()
    assert same(values(model)[:4], state)


# --- deactivate ---


@pytest.mark.parametrize("kind", [SGD, Adam])
@pytest.mark.parametrize("level", LEVELS)
def test_after_deactivate_all_goes_on_as_plain_torch_from_there(
    amp: ModuleType, level: str, kind: type[Optimizer]
) -> None:
    before = torch_snapshot.take()
    options = {"momentum": 0.9} if kind is SGD else {"eps": 1e-4}
    model, optimizer = make(kind, **options)
    params, methods = list(model.parameters()), vars(optimizer).keys()
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    for _ in range(3):
        train(model, optimizer)
    masters = [param.detach().float().clone() for param in amp.master_params(optimizer)]
    amp.deactivate()
    amp.deactivate()
    assert torch_snapshot.differences(before) == []
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert all(not module._state_dict_hooks for module in model.modules())
    assert vars(optimizer).keys() == methods
    # The very same Parameters, holding what the optimizer stepped.
    assert all(map(lambda a, b: a is b, model.parameters(), params))
    assert [p for g in optimizer.param_groups for p in g["params"]] == params
    assert same([p.detach() for p in params], masters)
    assert all(b.dtype in (torch.float32, torch.int64) for b in model.buffers())
    assert set(optimizer.state) == set(params)

    reference, plain = make(kind, **options)
    reference.load_state_dict(model.state_dict())
    plain.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for seed in range(3):
        expected = train_plainly(reference, plain, seed)
        assert torch.equal(train_plainly(model, optimizer, seed), expected)
    assert same(values(model), values(reference))


@pytest.mark.parametrize("level", LEVELS)
def test_deactivate_leaves_no_scaled_or_overflowed_gradient(amp: ModuleType, level: str) -> None:
    def after(factor: float, **delay: bool) -> list[Tensor]:
        model, optimizer = amp.initialize(*make(), opt_level=level, loss_scale=1024.0, verbosity=0)
        inputs = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
        loss = model(inputs).square().mean() * factor
        with amp.scale_loss(loss, optimizer, **delay) as scaled_loss:
            scaled_loss.backward()
        amp.deactivate()
        optimizer.step()
        return [param.detach() for param in model.parameters()]

    expected = after(1.0)
    assert same(after(1.0, delay_unscale=True), expected)
    start = after(float("inf"))
    assert not same(start, expected)
    assert all(value.isfinite().all() for value in start)
    assert same(after(float("inf"), delay_unscale=True), start)
    assert same(after(float("inf"), delay_overflow_check=True), start)


@pytest.mark.parametrize("second", LEVELS)
@pytest.mark.parametrize("first", LEVELS)
def test_initialize_again_after_deactivate_is_as_the_first_time(
    amp: ModuleType, first: str, second: str
) -> None:
    def losses(run: tuple[nn.Module, Optimizer]) -> list[float]:
        return [train(*run).item() for _ in range(3)]

    model, optimizer = make()
    if first == "O3":  # it keeps no more of the weights than float16 holds
        model.half().float()
    expected = losses(amp.initialize(model, optimizer, opt_level=second, verbosity=0))
    amp.deactivate()
    model, optimizer = make()
    amp.initialize(model, optimizer, opt_level=first, verbosity=0)
    amp.deactivate()
    assert losses(amp.initialize(model, optimizer, opt_level=second, verbosity=0)) == expected


# --- several models, threads, copies ---


@pytest.mark.parametrize("second", LEVELS)
@pytest.mark.parametrize("first", CASTING)
def test_casts_hold_everywhere_but_in_the_forward_of_a_model_of_another_level(
    amp: ModuleType, first: str, second: str
) -> None:
    dtypes = {"O1": torch.float16, "O4": torch.bfloat16}
    seen: dict[str, torch.dtype] = {}

    class Probe(nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name
            self.linear = nn.Linear(2, 2)

        def forward(self, inputs: Tensor) -> Tensor:
            seen[self.name] = torch.mm(inputs.float(), inputs.float()).dtype
            return self.linear(inputs)

    one, two, never = Probe("one"), Probe("two"), Probe("never initialised")
    amp.initialize(one, opt_level=first, verbosity=0)
    amp.initialize(two, opt_level=second, verbosity=0)
    outside = dtypes.get(second, dtypes[first])
    inputs = torch.eye(2)
    for model in (one, two, never):
        model(inputs)
    assert seen == {
        "one": dtypes[first],
        "two": dtypes.get(second, torch.float32),
        "never initialised": outside,
    }
    assert torch.mm(inputs, inputs).dtype is outside
    del one, model
    amp.initialize(Probe("three"), opt_level="O0", verbosity=0)
    assert torch.mm(inputs, inputs).dtype is dtypes.get(second, torch.float32)


@pytest.mark.parametrize("level", LEVELS)
def test_the_second_half_of_a_gan_may_come_later(amp: ModuleType, level: str) -> None:
    together = amp.initialize(
        *zip(make(), make(), strict=True), opt_level=level, num_losses=1, verbosity=0
    )
    expected = [train(model, optimizer).item() for model, optimizer in zip(*together, strict=True)]
    amp.deactivate()
    first = amp.initialize(*make(), opt_level=level, verbosity=0)
    got = [train(*first).item()]
    second = amp.initialize(*make(), opt_level=level, verbosity=0)
    got.append(train(*second).item())
    assert got == expected
    assert train(*first).isfinite()


@pytest.mark.parametrize("level", LEVELS)
def test_models_train_in_threads_as_they_do_alone(amp: ModuleType, level: str) -> None:
    def losses(run: tuple[nn.Module, Optimizer]) -> list[float]:
        return [train(*run).item() for _ in range(10)]

    expected = losses(amp.initialize(*make(), opt_level=level, loss_scale=64.0, verbosity=0))
    runs = [
        amp.initialize(*make(), opt_level=level, loss_scale=64.0, verbosity=0) for _ in range(4)
    ]
    got: dict[int, list[float]] = {}
    threads = [
        threading.Thread(target=lambda n=n: got.update({n: losses(runs[n])})) for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == dict.fromkeys(range(4), expected)


@pytest.mark.parametrize("level", LEVELS)
def test_a_copy_of_a_model_computes_with_its_own_weights(amp: ModuleType, level: str) -> None:
    model, optimizer = amp.initialize(*make(), opt_level=level, verbosity=0)
    train(model, optimizer)
    twin = copy.deepcopy(model).eval()
    inputs = torch.randn(4, 4)
    expected = twin(inputs)
    train(model, optimizer)
    assert torch.equal(twin(inputs), expected)
    with torch.no_grad():
        for param in twin.parameters():
            param.zero_()
    assert not twin(inputs).any()
    assert model(inputs).any()
    assert twin(inputs).dtype is model(inputs).dtype


@pytest.mark.parametrize("level", CASTING)
def test_a_lazy_model_gets_its_weights_at_its_first_forward(amp: ModuleType, level: str) -> None:
    model = amp.initialize(nn.Sequential(nn.LazyLinear(3)), opt_level=level, verbosity=0)
    assert model(torch.ones(2, 4)).dtype is not torch.float32
    assert model[0].weight.shape == (3, 4)
    assert model[0].weight.dtype is torch.float32


DECORATORS = [name for name in public.__all__ if re.fullmatch("(?!register).*_function", name)]


@pytest.mark.parametrize("name", DECORATORS)
@pytest.mark.parametrize(
    ("given", "received"),
    [
        ((), "nothing"),
        ((3,), "an object of type int"),
        (("softmax",), "an object of type str"),
        ((F,), "an object of type module"),
        ((nn.Linear(1, 1),), "an object of type Linear"),
        ((nn.Linear,), "an object of type type"),
    ],
)
def test_what_is_no_function_is_not_decorated(
    amp: ModuleType, name: str, given: Any, received: str
) -> None:
    words = (
        f"amp.{name} takes a function, no class and no layer; got {received}; write @amp.{name} "
        f"above a function, without parentheses, or call amp.{name}(function); for a layer, "
        f"amp.{name}(layer.forward)."
    )
    with pytest.raises(TypeError, match=exactly(words)):
        getattr(amp, name)(*given)


def test_the_forward_of_a_layer_can_be_decorated_as_the_refusal_says(amp: ModuleType) -> None:
    model = amp.initialize(nn.Linear(1, 1), opt_level="O1", verbosity=0)
    layer = nn.Identity()
    assert layer(torch.zeros(2)).dtype is torch.float32
    assert amp.half_function(layer.forward)(torch.zeros(2)).dtype is torch.float16
    del model


@pytest.mark.parametrize(
    ("module", "shown"), [("torch", "'torch'"), (torch, "module")], ids=["name", "module"]
)
def test_registering_a_function_instead_of_its_name_is_refused(
    amp: ModuleType, module: Any, shown: str
) -> None:
    words = (
        f"a registered function is given by its name, a string; got {torch.add!r}; call "
        f"amp.register_promote_function({shown}, 'add')."
    )
    with pytest.raises(TypeError, match=exactly(words)):
        amp.register_promote_function(module, torch.add)


def test_registering_what_does_not_exist_is_refused(amp: ModuleType) -> None:
    words = (
        f"a registered function must exist; got 'lineer', which {F!r} does not have; call "
        "amp.register_half_function(module, name) with the name it has."
    )
    with pytest.raises(ValueError, match=exactly(words)):
        amp.register_half_function(F, "lineer")


@pytest.mark.parametrize("name", ["Linear", "__name__"])
def test_registering_a_class_or_what_is_not_called_is_refused(amp: ModuleType, name: str) -> None:
    words = (
        f"a registered function is called, and is no class; got {name!r}, which is "
        f"{getattr(nn, name)!r}; call amp.register_float_function(owner, name) with a function, or "
        "a method of a class: 'forward' of that class."
    )
    with pytest.raises(TypeError, match=exactly(words)):
        amp.register_float_function(nn, name)
    with pytest.raises(TypeError, match=exactly(words)):
        amp.register_float_function("torch.nn", name)


@pytest.mark.parametrize(
    ("name", "mend"),
    [
        ("_amp_state", "amp.loss_scale()"),
        ("GradScaler", "amp.scale_loss(loss, optimizer)"),
        ("autocast", "amp.initialize(model, optimizer)"),
        ("init", "amp.initialize(model, optimizer"),
        ("initialise", None),
    ],
)
def test_a_name_of_another_amp_is_told_what_takes_its_place(
    amp: ModuleType, name: str, mend: str | None
) -> None:
    assert not hasattr(amp, name)
    words = f"module 'amp_patch.amp' has no attribute '{name}'"
    with pytest.raises(AttributeError) as raised:
        getattr(amp, name)
    said, _, use = str(raised.value).partition("; use ")
    assert said == words
    assert use == "" if mend is None else mend in use
    assert (raised.value.name, raised.value.obj) == (name, amp)  # Python guesses by them
