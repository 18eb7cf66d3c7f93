"""Which models are refused, and the words of each refusal."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from arguments_support import MEND, frozen, optimizer
from support import exactly
from torch import nn
from torch.nn import functional as F

from amp_patch import arguments
from amp_patch.levels import OPT_LEVELS


def with_buffer(dtype: torch.dtype) -> nn.Module:
    model = nn.Sequential(nn.Linear(1, 1))
    model[0].register_buffer("scale", torch.ones(1, dtype=dtype))
    return model


@pytest.mark.parametrize(
    ("models", "received"),
    [
        (None, "NoneType"),
        ("O1", "str"),
        ([nn.ReLU(), optimizer()], "SGD"),
        ({"model": nn.ReLU()}, "dict"),
        ([[nn.ReLU()]], "list"),
        (nn.Linear, "type"),
        (iter([nn.ReLU()]), "list_iterator"),
    ],
)
def test_what_is_no_model_is_refused(models: Any, received: str) -> None:
    rule = "models must be a torch.nn.Module or a list or tuple of them"
    with pytest.raises(TypeError, match=exactly(f"{rule}; got {received}; {MEND}")):
        arguments.models_of(models)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("model_of", "found"),
    [
        (lambda dtype: nn.Linear(1, 1).to(dtype), "weight"),
        (lambda dtype: nn.Sequential(nn.ReLU(), nn.Linear(1, 1).to(dtype)), "1.weight"),
        (lambda dtype: nn.Sequential(frozen(dtype), nn.Linear(1, 1).to(dtype)), "1.weight"),
    ],
)
def test_a_model_in_half_is_refused_by_the_name_of_the_tensor(
    model_of: Any, found: str, dtype: torch.dtype
) -> None:
    message = (
        f"models must come in float32, amp.initialize() casts them; got {found!r} in {dtype}, "
        "which requires a gradient. Leave out your own .half(), .bfloat16() or "
        "torch.set_default_dtype(), call .float() on its module, or freeze it by "
        "requires_grad_(False). Of a model that amp.initialize() cast, call amp.deactivate() "
        "first; of one from a file, call model.float() first."
    )
    with pytest.raises(RuntimeError, match=exactly(message)):
        arguments.models_of([nn.Linear(1, 1), model_of(dtype)])


def test_a_model_that_was_cast_is_refused_with_what_to_call() -> None:
    model = nn.Linear(1, 1).half()
    message = (
        "models must come in float32, amp.initialize() casts them; got 'weight' in torch.float16, "
        "which amp.initialize() has cast. Use what the first call returned, or call "
        "amp.deactivate() before you initialize the model anew. Models that share a layer go into "
        "one call, amp.initialize([one, other], optimizers)."
    )
    with pytest.raises(RuntimeError, match=exactly(message)):
        arguments.models_of(model, stored={id(model.weight)})


def test_a_model_that_was_cast_beside_an_optimizer_of_masters_is_told_to_make_one_anew() -> None:
    model = nn.Linear(1, 1).half()
    message = (
        "models must come in float32, amp.initialize() casts them; got 'weight' in torch.float16, "
        "which amp.initialize() has cast, and an optimizer made of its fp32 masters, as from "
        "optimizer.param_groups; call amp.deactivate(), make the optimizer of model.parameters(), "
        "and call model, optimizer = amp.initialize(model, optimizer, opt_level=...) anew, with "
        "every optimizer of the model."
    )
    stored = {id(model.weight)}
    with pytest.raises(RuntimeError, match=exactly(message)):
        arguments.models_of(model, stored=stored, beside_masters=True)
    with pytest.raises(RuntimeError, match="which requires a gradient"):
        arguments.models_of(model, beside_masters=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.int64, torch.float16])
def test_buffers_of_other_dtypes_are_taken(dtype: torch.dtype) -> None:
    model = with_buffer(dtype)
    assert arguments.models_of(model) == [model]


class Shell(nn.Parameter):
    """A parameter that has its numbers and its gradient in another one, as hypll's."""

    def __new__(cls, inner: nn.Parameter) -> Shell:
        return super().__new__(cls)

    def __init__(self, inner: nn.Parameter) -> None:
        self.inner = inner

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        args = tuple(one.inner if isinstance(one, Shell) else one for one in args)
        return func(*args, **(kwargs or {}))


def test_parameters_that_stand_for_others_are_refused(amp: ModuleType) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].weight = Shell(nn.Parameter(torch.ones(2, 2)))
    F.linear(torch.ones(1, 2), model[0].weight).sum().backward()
    assert model[0].weight.grad is model[0].weight.inner.grad is not None
    message = (
        "models must have parameters that get their gradients themselves, for amp.initialize() has "
        "these unscaled and cleared; got '0.weight' of type Shell, which stands for another "
        "tensor. Train this model without amp.initialize()."
    )
    for level in OPT_LEVELS:
        with pytest.raises(TypeError, match=exactly(message)):
            amp.initialize(model, opt_level=level, verbosity=0)


def test_parameters_that_stand_for_others_are_taken_where_they_are_frozen() -> None:
    model = nn.Linear(2, 2)
    model.weight = Shell(nn.Parameter(torch.ones(2, 2), requires_grad=False))
    assert isinstance(model.weight, Shell)
    assert not model.weight.requires_grad
    assert arguments.models_of(model) == [model]


class Own(nn.Parameter):
    """A parameter whose class is asked, and which is itself, as those of geoopt."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


def test_parameters_whose_class_is_asked_are_taken(amp: ModuleType) -> None:
    model = nn.Linear(2, 2)
    model.weight = Own(torch.ones(2, 2))
    assert arguments.models_of(model) == [model]
    assert amp.initialize(nn.LazyLinear(2), opt_level="O1", verbosity=0) is not None


def test_a_lazy_model_without_weights_is_refused() -> None:
    model = nn.Sequential(nn.ReLU(), nn.LazyLinear(2))
    message = (
        "models must have weights before amp.initialize() stores them in half precision; got the "
        "lazy parameter '1.weight', which has none yet. Call the model once on a batch, then "
        "amp.initialize(model, ...)."
    )
    with pytest.raises(RuntimeError, match=exactly(message)):
        arguments.refuse_unstorable([nn.Linear(1, 1), model])
    model(torch.ones(1, 3))
    arguments.refuse_unstorable([model])


def test_a_model_that_was_made_in_inference_mode_is_refused() -> None:
    with torch.inference_mode():
        model = nn.Linear(1, 1)
    message = (
        "models must be made outside of torch.inference_mode() for amp.initialize() to store them "
        "in half precision; got 'weight', an inference tensor. Call "
        "amp.initialize(copy.deepcopy(model), ...) outside of it."
    )
    with pytest.raises(RuntimeError, match=exactly(message)):
        arguments.refuse_unstorable([model])
    arguments.refuse_unstorable([copy.deepcopy(model)])


@pytest.mark.parametrize("level", ["O1", "O2", "O3", "O4", "O5"])
def test_optimizers_that_step_in_the_backward_are_refused_where_they_would_never_step(
    amp: ModuleType, level: str
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch compiles its functional optimizers by torch.jit
        from torch.distributed.optim import _apply_optimizer_in_backward
    model = nn.Linear(2, 2)
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 1.0})
    options = {"opt_level": level, "loss_scale": 1.0, "verbosity": 0}
    if level in ("O1", "O4"):
        amp.initialize(model, **options)
        before = model.bias.detach().clone()
        model(torch.ones(1, 2)).sum().backward()
        assert torch.equal(model.bias, before - 1)
        return
    message = (
        "models must come without optimizers that step in the backward, for these never hear of a "
        "parameter that amp.initialize() stores in half precision; got 'weight' after "
        "_apply_optimizer_in_backward(). Call amp.initialize(model, opt_level='O1'), or 'O4', or "
        "step after the backward."
    )
    with pytest.raises(RuntimeError, match=exactly(message)):
        amp.initialize(model, **options)
    assert model.weight.dtype is torch.float32
    norm = nn.BatchNorm1d(2)
    _apply_optimizer_in_backward(torch.optim.SGD, norm.parameters(), {"lr": 1.0})
    arguments.refuse_unstorable([nn.Sequential(nn.Linear(2, 2), norm)])  # which O2 keeps in float32


COMPILED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "script": torch.jit.script,
    "trace": lambda model: torch.jit.trace(model, torch.ones(2, 2)),
}


@pytest.mark.parametrize("by", COMPILED)
@pytest.mark.parametrize("is_part", [False, True])
@pytest.mark.parametrize("level", OPT_LEVELS)
def test_what_torch_jit_compiled_is_refused_before_anything_is_changed(
    amp: ModuleType, by: str, is_part: bool, level: str
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit's of itself
        compiled = COMPILED[by](nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    model = nn.Sequential(nn.ReLU(), compiled) if is_part else compiled
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if is_part and level in ("O0", "O1", "O4"):  # which leave it as it is
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        assert model(torch.ones(2, 2)).dtype is torch.float32
        return
    place = r"at '1'\." if is_part else r"as the model\."
    with pytest.raises(
        TypeError,
        match=f"models must be in Python .* got a torch.jit module of type .*{place} Call",
    ) as refused:
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    assert ("take opt_level 'O1'" in str(refused.value)) is is_part
    assert {t.dtype for t in model.state_dict().values()} == {torch.float32, torch.int64}
    model(torch.ones(2, 2)).sum().backward()
    optimizer.step()
