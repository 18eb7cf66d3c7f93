"""The checks of what users pass, and the words in which each refusal is put."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import LBFGS, SGD, Adam
from torch.optim.lr_scheduler import StepLR

from amp_patch import arguments
from amp_patch.levels import OPT_LEVELS

MEND = "call model, optimizer = amp.initialize(model, optimizer, opt_level=...)."


def exactly(message: str) -> str:
    return f"^{re.escape(message)}$"


def optimizer(kind: type = SGD) -> Any:
    return kind([nn.Parameter(torch.zeros(1))], lr=0.1)


def with_buffer(dtype: torch.dtype) -> nn.Module:
    model = nn.Sequential(nn.Linear(1, 1))
    model[0].register_buffer("scale", torch.ones(1, dtype=dtype))
    return model


def frozen(dtype: torch.dtype) -> nn.Module:
    return nn.Linear(1, 1).to(dtype).requires_grad_(False)


@pytest.mark.parametrize("container", [list, tuple])
def test_models_and_optimizers_become_lists_in_their_order(container: type) -> None:
    models = [nn.Linear(1, 1), nn.Linear(1, 1)]
    optimizers = [optimizer(), optimizer(Adam)]
    assert arguments.models_of(container(models)) == models
    assert arguments.models_of(models[0]) == models[:1]
    assert arguments.optimizers_of(container(optimizers)) == optimizers
    assert arguments.optimizers_of(optimizers[0]) == optimizers[:1]
    assert arguments.optimizers_of(None) == []


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


class Numbers(nn.Module):
    """Compares what is in it, as ``TensorDictParams`` of tensordict does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))

    def __eq__(self, other: object) -> Any:
        return self.weight == other.weight if isinstance(other, Numbers) else False

    def __hash__(self) -> int:
        return id(self)


def test_a_model_that_no_dictionary_finds_is_refused_before_anything_is_patched(
    amp: ModuleType,
) -> None:
    linear, model = F.linear, Numbers()
    rule = (
        "models must be equal to themselves, for amp.initialize() looks them up by ==; got a "
        "Numbers, whose == says something else. Make it an attribute of a torch.nn.Module of your "
        "own, and pass that."
    )
    with pytest.raises(TypeError, match=exactly(rule)):
        amp.initialize(model, SGD(model.parameters(), lr=0.1), opt_level="O1")
    assert F.linear is linear
    assert arguments.models_of([nn.Sequential(model)])[0][0] is model


@pytest.mark.parametrize(
    ("optimizers", "received"),
    [
        (nn.Linear(1, 1), "Linear"),
        ([optimizer(), None], "NoneType"),
        ({"optimizer": optimizer()}, "dict"),
        (SGD, "type"),
        ("SGD", "str"),
        (StepLR(optimizer(), 5), "StepLR, which holds one to pass: its .optimizer"),
        (type("Optimizer", (), {"__module__": "fastai.optimizer"})(), "fastai.optimizer.Optimizer"),
    ],
)
def test_what_is_no_optimizer_is_refused(optimizers: Any, received: str) -> None:
    rule = "optimizers must be a torch.optim.Optimizer or a list or tuple of them"
    with pytest.raises(TypeError, match=exactly(f"{rule}; got {received}; {MEND}")):
        arguments.optimizers_of(optimizers)


def test_optimizers_for_a_call_become_a_list_without_repetition() -> None:
    first, second = optimizer(), optimizer(Adam)
    assert arguments.optimizers_for("call(optimizer)", first) == [first]
    given = (second, first, second)
    assert arguments.optimizers_for("call(optimizer)", given) == [second, first]


@pytest.mark.parametrize(
    ("given", "received"),
    [
        (None, "NoneType"),
        ([], "an empty list"),
        ((), "an empty tuple"),
        ([optimizer(), nn.Linear(1, 1)], "Linear"),
        (torch.zeros(()), "Tensor"),
        (SGD, "type"),
        (StepLR(optimizer(), 5), "StepLR, which holds one to pass: its .optimizer"),
    ],
)
def test_what_stands_for_optimizers_is_refused_with_the_call(given: Any, received: str) -> None:
    message = (
        f"call(optimizer) takes what amp.initialize() returned for its optimizers; got {received} "
        "in their place; call call(optimizer)."
    )
    with pytest.raises(TypeError, match=exactly(message)):
        arguments.optimizers_for("call(optimizer)", given)


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
        "which requires a gradient. Leave out your own .half() or .bfloat16(), call .float() on "
        "its module, or freeze it by requires_grad_(False). Of a model that amp.initialize() cast, "
        "call amp.deactivate() first; of one from a file, call model.float() first."
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


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.int64, torch.float16])
def test_buffers_of_other_dtypes_are_taken(dtype: torch.dtype) -> None:
    model = with_buffer(dtype)
    assert arguments.models_of(model) == [model]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_parameters_are_taken_where_they_are_frozen(dtype: torch.dtype) -> None:
    base = frozen(dtype)
    model = nn.Sequential(base, nn.Linear(1, 1))
    assert arguments.models_of(model) == [model]
    arguments.refuse_half_steps([optimizer(), Adam(model.parameters())])
    base.requires_grad_(True)
    message = (
        "optimizers of amp.initialize() train float32 parameters, for small updates are rounded "
        f"away in half precision; got 2 in {dtype} in the Adam that require a gradient. Call "
        ".float() on their layers before amp.initialize(), or freeze them by requires_grad_(False)."
    )
    with pytest.raises(RuntimeError, match=exactly(message)):
        arguments.refuse_half_steps([optimizer(), Adam(model.parameters())])


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
        "these unscaled and cleared; got '0.weight', a Shell which stands for another tensor. "
        "Train this model without amp.initialize()."
    )
    for level in OPT_LEVELS:
        with pytest.raises(TypeError, match=exactly(message)):
            amp.initialize(model, opt_level=level, verbosity=0)


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
        TypeError, match=f"models must be in Python .* of torch.jit {place} Call"
    ) as refused:
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    assert ("take opt_level 'O1'" in str(refused.value)) is is_part
    assert {t.dtype for t in model.state_dict().values()} == {torch.float32, torch.int64}
    model(torch.ones(2, 2)).sum().backward()
    optimizer.step()


def test_lbfgs_is_refused() -> None:
    message = (
        "optimizers must evaluate the loss before they change anything; got LBFGS, whose line "
        "search evaluates it between changes, where a step that is not finite cannot be skipped. "
        "Train with LBFGS in float32, without amp.initialize()."
    )
    with pytest.raises(TypeError, match=exactly(message)):
        arguments.optimizers_of([optimizer(), optimizer(LBFGS)])


@pytest.mark.parametrize("known_before", [False, True])
def test_an_optimizer_given_twice_is_refused(known_before: bool) -> None:
    message = (
        "A given optimizer should only be passed through amp.initialize once; got the same Adam "
        "again. Use the optimizer that the first call returned, or call amp.deactivate() before "
        "you initialize it anew."
    )
    first, twice = optimizer(), optimizer(Adam)
    given, known = ([first, twice], [twice]) if known_before else ([twice, first, twice], [])
    with pytest.raises(RuntimeError, match=exactly(message)):
        arguments.refuse_twice(given, known)
    arguments.refuse_twice([first, twice], [optimizer()])


def test_one_state_of_two_optimizers_of_the_same_parameters_is_refused() -> None:
    message = (
        "at a level with fp32 masters each optimizer steps masters of its own, and its state goes "
        "by them; got SGD and Adam of the same parameters with one state. Give each a state of "
        "its own, or call amp.initialize(..., opt_level='O1')."
    )
    first, second, other = optimizer(), optimizer(Adam), optimizer()
    second.param_groups[0]["params"] = list(first.param_groups[0]["params"])
    arguments.refuse_shared_state([first, second, other])
    second.state = other.state = first.state
    with pytest.raises(RuntimeError, match=exactly(message)):
        arguments.refuse_shared_state([other, first, second])
    arguments.refuse_shared_state([other, first])


@pytest.mark.parametrize(
    ("loss", "received"),
    [
        (1.0, "float"),
        (None, "NoneType"),
        ([torch.zeros(1)], "list"),
        (torch.zeros(1, dtype=torch.int64), "torch.int64"),
        (torch.zeros(1, dtype=torch.complex64), "torch.complex64"),
    ],
)
def test_what_is_no_loss_is_refused(loss: Any, received: str) -> None:
    message = (
        f"scale_loss() scales a floating tensor; got {received}; call it with the loss itself, "
        "not with loss.item(), once per loss or with the sum of the losses."
    )
    with pytest.raises(TypeError, match=exactly(message)):
        arguments.loss_of(loss)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_floating_loss_is_taken_as_it_is(dtype: torch.dtype) -> None:
    loss = torch.zeros(3, dtype=dtype)
    assert arguments.loss_of(loss) is loss


@pytest.mark.parametrize("count", [0, -1, 1.0, "1", None, True])
def test_a_wrong_number_of_losses_is_refused(count: Any) -> None:
    message = (
        f"num_losses must be an int of at least 1; got {count!r}; call "
        "amp.initialize(..., num_losses=1)."
    )
    with pytest.raises(ValueError, match=exactly(message)):
        arguments.count_of(count)


def test_a_number_of_losses_is_taken() -> None:
    assert [arguments.count_of(count) for count in (1, 3)] == [1, 3]


def test_rules_are_copied() -> None:
    rules = {"softmax": "half"}
    taken = arguments.function_rules_of(rules)
    assert taken == rules
    assert taken is not rules


@pytest.mark.parametrize(
    ("given", "name", "mended"),
    [
        (torch.nn.functional.gelu, "gelu", "{'softmax': 'half'}"),
        (3, "int", "{'softmax': 'half'}"),
        (nn.LayerNorm, "LayerNorm", "{'modules': {'blocks.*.norm': 'half'}}"),
        (nn.Linear(1, 1), "Linear", "{'modules': {'blocks.*.norm': 'half'}}"),
    ],
)
def test_functions_are_named_by_strings(given: Any, name: str, mended: str) -> None:
    message = (
        "rules must name functions by strings, and modules of the model by their paths in it; got "
        f"{name} in the place of one; call amp.initialize(..., rules={mended})."
    )
    with pytest.raises(TypeError, match=exactly(message)):
        arguments.function_rules_of({"exp": "half", given: "half"})


@pytest.mark.parametrize("given", [None, nn.Linear(1, 1), [optimizer()], iter([]), "SGD", SGD])
def test_what_is_not_one_optimizer_is_refused(given: Any) -> None:
    message = (
        "amp.master_params() takes one optimizer, as amp.initialize() returned it; got "
        f"{type(given).__name__}; call amp.master_params(optimizer), once for each optimizer."
    )
    with pytest.raises(TypeError, match=exactly(message)):
        arguments.optimizer_of(given, "amp.master_params()")
    known = optimizer()
    assert arguments.optimizer_of(known, "amp.master_params()") is known


@pytest.mark.parametrize(
    ("norms", "error", "message"),
    [
        (
            (-1.0, 2.0),
            ValueError,
            "max_norm must be a number of at least 0; got -1.0; call "
            "amp.clip_grad_norm_(optimizer, max_norm=1.0).",
        ),
        (
            (float("nan"), 2.0),
            ValueError,
            "max_norm must be a number of at least 0; got nan; call "
            "amp.clip_grad_norm_(optimizer, max_norm=1.0).",
        ),
        (
            ("one", 2.0),
            TypeError,
            "max_norm must be a number; got str; call "
            "amp.clip_grad_norm_(optimizer, max_norm=1.0).",
        ),
        (
            ("1.0", 2.0),
            TypeError,
            "max_norm must be a number; got str; call "
            "amp.clip_grad_norm_(optimizer, max_norm=1.0).",
        ),
        (
            (b"1", 2.0),
            TypeError,
            "max_norm must be a number; got bytes; call "
            "amp.clip_grad_norm_(optimizer, max_norm=1.0).",
        ),
        (
            (1.0, "2"),
            TypeError,
            "norm_type must be a number; got str; call "
            "amp.clip_grad_norm_(optimizer, 1.0, norm_type=2.0).",
        ),
        (
            (torch.ones(2), 2.0),
            TypeError,
            "max_norm must be a number; got Tensor; call "
            "amp.clip_grad_norm_(optimizer, max_norm=1.0).",
        ),
        (
            (1.0, 0),
            ValueError,
            "norm_type must be a number above 0, or inf; got 0; call "
            "amp.clip_grad_norm_(optimizer, 1.0, norm_type=2.0).",
        ),
        (
            (1.0, float("nan")),
            ValueError,
            "norm_type must be a number above 0, or inf; got nan; call "
            "amp.clip_grad_norm_(optimizer, 1.0, norm_type=2.0).",
        ),
        (
            (1.0, None),
            TypeError,
            "norm_type must be a number; got NoneType; call "
            "amp.clip_grad_norm_(optimizer, 1.0, norm_type=2.0).",
        ),
    ],
)
def test_wrong_norms_are_refused(norms: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=exactly(message)):
        arguments.norms_of(*norms)


def test_norms_come_as_floats() -> None:
    inf = float("inf")
    assert arguments.norms_of(0, 1) == (0.0, 1.0)
    assert arguments.norms_of(torch.tensor(0.5), "inf") == (0.5, inf)
    assert arguments.norms_of(inf, 0.5) == (inf, 0.5)


@pytest.mark.parametrize("state", [None, [], "amp", 3])
def test_what_is_no_state_is_refused(state: Any) -> None:
    message = (
        "a state of the loss scalers is a dict, as amp.state_dict() returned it; got "
        f"{type(state).__name__}; call amp.load_state_dict(checkpoint['amp']) with what was saved."
    )
    with pytest.raises(TypeError, match=exactly(message)):
        arguments.refuse_no_state(state)
    arguments.refuse_no_state({})


@pytest.mark.parametrize("enabled", ["False", None, 2, 1.0, []])
def test_what_neither_enables_nor_disables_is_refused(enabled: Any) -> None:
    message = (
        f"enabled must be True or False; got {enabled!r}; call amp.initialize(..., "
        "enabled=False) to leave models and optimizers alone."
    )
    with pytest.raises(TypeError, match=exactly(message)):
        arguments.enabled_of(enabled)
    assert [arguments.enabled_of(given) for given in (True, False, 1, 0)] == [True, False] * 2


@pytest.mark.parametrize(
    ("given", "meant"), [("O2", "O2"), ("O9", "O9"), ("o1", "O1"), ("05", "O5")]
)
def test_a_level_in_the_place_of_enabled_is_told_its_own(given: str, meant: str) -> None:
    message = (
        f"enabled, the third argument, must be True or False; got the opt_level {given!r}; call "
        f"amp.initialize(models, optimizers, opt_level='{meant}')."
    )
    with pytest.raises(TypeError, match=exactly(message)):
        arguments.enabled_of(given)


@pytest.mark.parametrize("verbosity", ["1", "skip", None, 1.0, []])
def test_a_wrong_verbosity_is_refused(verbosity: Any) -> None:
    message = (
        "verbosity must be an int, of which 0 prints nothing, or 'skips' for the lines of skipped "
        f"steps alone; got {verbosity!r}; call amp.initialize(..., verbosity=0)."
    )
    with pytest.raises(TypeError, match=exactly(message)):
        arguments.verbosity_of(verbosity)
    given = [0, 1, 2, "skips"]
    assert [arguments.verbosity_of(one) for one in given] == given
