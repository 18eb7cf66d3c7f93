"""Decorators and registered functions: what they cast at each level, what they refuse."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from casting_support import Product
from torch import Tensor, nn

from amp_patch.session import session

HALF = {"O1": torch.float16, "O4": torch.bfloat16}
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
#: What a rule makes of arguments of two dtypes, at a level.
CAST = {
    "half": lambda given, level: [HALF[level]] * 2,
    "float": lambda given, level: [F32] * 2,
    "promote": lambda given, level: list(given) if given[0] is given[1] else [F32] * 2,
    "bfloat16": lambda given, level: [BF16] * 2,
}


def dtypes(*tensors: Tensor) -> list[torch.dtype]:
    return [tensor.dtype for tensor in tensors]


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4"])
@pytest.mark.parametrize("way", ["decorated", "registered"])
@pytest.mark.parametrize("rule", CAST)
def test_arguments_come_as_the_rule_says_at_o1_and_o4_only(
    amp: ModuleType, rule: str, way: str, level: str
) -> None:
    library = types.SimpleNamespace(function=dtypes)
    if way == "decorated":
        library.function = getattr(amp, f"{rule}_function")(dtypes)
    else:
        getattr(amp, f"register_{rule}_function")(library, "function")
    model = amp.initialize(nn.Linear(1, 1), opt_level=level, verbosity=0)
    for given in [(F32, F32), (F32, F16), (BF16, BF16)]:
        expected = CAST[rule](given, level) if level in HALF else list(given)
        found = library.function(*(torch.ones(1, dtype=dtype) for dtype in given))
        assert found == expected, given
    amp.deactivate()
    assert library.function(torch.ones(1)) == [F32]
    del model


def test_a_registered_function_is_put_back_by_deactivate(amp: ModuleType) -> None:
    original = dtypes  # this module's global is another while the function is registered
    library = types.SimpleNamespace(function=original)
    model = amp.initialize(nn.Linear(1, 1), opt_level="O1", verbosity=0)
    amp.register_half_function(library, "function")
    assert library.function is not original
    amp.deactivate()
    assert library.function is original is dtypes
    del model


class Library:
    """Functions in a class, of each kind that has one."""

    def method(self, *tensors: Tensor) -> list[torch.dtype]:
        return dtypes(*tensors)

    @staticmethod
    def static(*tensors: Tensor) -> list[torch.dtype]:
        return dtypes(*tensors)

    @classmethod
    def of_class(cls, *tensors: Tensor) -> list[torch.dtype]:
        assert issubclass(cls, Library)
        return dtypes(*tensors)


class Heir(Library):
    pass


@pytest.mark.parametrize("owner", [Library, Heir])
@pytest.mark.parametrize("name", ["method", "static", "of_class"])
def test_functions_of_a_class_cast_however_they_are_called_and_are_put_back(
    amp: ModuleType, name: str, owner: type[Library]
) -> None:
    before = [dict(vars(kind)) for kind in (Library, Heir)]
    model = amp.initialize(nn.Linear(1, 1), opt_level="O1", verbosity=0)
    amp.register_half_function(owner, name)
    one = torch.ones(1)
    assert getattr(owner(), name)(one, one) == [F16, F16]
    assert getattr(Heir(), name)(one) == [F16]
    if name != "method":
        assert getattr(owner, name)(one, one) == [F16, F16]
    amp.deactivate()
    assert [dict(vars(kind)) for kind in (Library, Heir)] == before
    assert getattr(owner(), name)(one) == [F32]
    del model


@pytest.mark.parametrize("rule", ["half", "float", "promote"])
@pytest.mark.parametrize(
    ("owner", "name", "arguments"),
    [
        (Tensor, "index_put_", lambda of: ((torch.tensor([1]),), torch.full((1,), 5.0, dtype=of))),
        (Tensor, "masked_fill_", lambda of: (torch.tensor([True, False, True]), 1.5)),
        (Tensor, "index_add_", lambda of: (0, torch.tensor([2]), torch.ones(1, dtype=of))),
        (torch, "relu_", lambda of: ()),
        (nn.init, "constant_", lambda of: (0.25,)),
    ],
)
def test_a_function_of_torchs_that_writes_is_not_given_a_cast_to_write_to(
    amp: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    rule: str,
    owner: Any,
    name: str,
    arguments: Callable[..., tuple[Any, ...]],
) -> None:
    monkeypatch.setattr(session.functions, "_registered", {})  # other tests use torch's
    getattr(amp, f"register_{rule}_function")(owner, name)
    for dtype, other in ((F16, F32), (F32, F16), (torch.float64, torch.float64)):
        expected, target = (torch.tensor([-1.0, 2.0, 3.0], dtype=dtype) for _ in range(2))
        getattr(owner, name)(expected, *arguments(dtype))
        model = amp.initialize(nn.Linear(1, 1), opt_level="O1", verbosity=0)
        assert getattr(owner, name)(target, *arguments(other)) is target
        amp.deactivate()
        assert torch.equal(target, expected)
        del model


class Dtypes:
    def __call__(self, *tensors: Tensor) -> list[torch.dtype]:
        return dtypes(*tensors)


@pytest.mark.parametrize("function", [functools.partial(dtypes), Dtypes()])
@pytest.mark.parametrize("rule", CAST)
def test_a_function_needs_no_name(amp: ModuleType, rule: str, function: Any) -> None:
    library = types.SimpleNamespace(function=function)
    decorated = getattr(amp, f"{rule}_function")(function)
    getattr(amp, f"register_{rule}_function")(library, "function")
    model = amp.initialize(nn.Linear(1, 1), opt_level="O1", verbosity=2)
    tensors = torch.ones(2), torch.ones(2, dtype=F16)
    for wrapped in (decorated, library.function):
        assert wrapped(*tensors) == CAST[rule]((F32, F16), "O1")
    del model


class AppliedInC(Product):
    """As all autograd functions of torch 2.15 are."""

    apply = vars(torch._C._FunctionBase)["apply"]


@pytest.mark.parametrize("owner", [Product, AppliedInC])
def test_apply_of_an_autograd_function_casts_and_gives_gradients(
    amp: ModuleType, owner: type[torch.autograd.Function]
) -> None:
    """NVIDIA's Mask R-CNN registers that of its convolution."""
    before = dict(vars(owner))
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(4, 4, generator=generator, requires_grad=True) for _ in range(2))
    amp.register_half_function(owner, "apply")
    model = amp.initialize(nn.Linear(1, 1), opt_level="O1", verbosity=0)
    found = owner.apply(x, weight)
    assert found.dtype is F16
    found.float().sum().backward()
    exact = torch.ones(4, 4, dtype=torch.float64)
    expected = [exact @ weight.detach().double().t(), x.detach().double().t() @ exact]
    for leaf, grad in zip((x, weight), expected, strict=True):
        torch.testing.assert_close(leaf.grad.double(), grad, rtol=2e-3, atol=2e-3)
    amp.deactivate()
    assert dict(vars(owner)) == before
    assert owner.apply(x, weight).dtype is F32
    del model


@pytest.mark.parametrize(
    ("made", "got"),
    [((), "nothing"), ((nn.ReLU(),), "an object of type ReLU"), ((int,), "an object of type type")]
    + [((3,), "an object of type int")],
    ids=["nothing", "a layer", "a class", "a number"],
)
def test_what_is_no_function_is_not_decorated(amp: ModuleType, made: tuple[Any], got: str) -> None:
    with pytest.raises(TypeError, match=f"amp.float_function takes a function.*got {got}"):
        amp.float_function(*made)


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("absent", ValueError, "a registered function must exist; got 'absent'"),
        ("kind", TypeError, "is no class; got 'kind'"),
        ("number", TypeError, "is called, and is no class; got 'number'"),
        (dtypes, TypeError, r"call amp.register_half_function\(module, 'dtypes'\)"),
    ],
    ids=["absent", "a class", "a number", "no name"],
)
def test_what_cannot_be_registered_is_refused_and_nothing_is_kept(
    amp: ModuleType, name: Any, error: type[Exception], message: str
) -> None:
    library = types.SimpleNamespace(kind=int, number=3)
    with pytest.raises(error, match=message):
        amp.register_half_function(library, name)
    with pytest.raises(TypeError, match=r"call amp.register_half_function\(types, 'kind'\)"):
        amp.register_half_function("kind", types)  # the other way round
    model = amp.initialize(nn.Linear(1, 1), opt_level="O1", verbosity=0)
    assert vars(library) == {"kind": int, "number": 3}
    del model
