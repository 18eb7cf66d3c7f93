"""The short way to the backward of a scalar: taken for a plain loss alone, and to the bit."""

from __future__ import annotations

import logging
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode

from amp_patch.step import scalar_backward

#: torch's own; amp_patch has not replaced it yet.
TORCHS = torch.autograd.backward


class Ways:
    """The replacement of torch's function, and how often it took the short way."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.short = 0
        self._run = scalar_backward._run
        monkeypatch.setattr(scalar_backward, "_run", self._counted)
        self.backward = scalar_backward.short_for_scalars(TORCHS)

    def _counted(self, *args: Any, **kwargs: Any) -> Any:
        self.short += 1
        assert self._run is not None
        return self._run(*args, **kwargs)


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> Ways:
    return Ways(monkeypatch)


def weight(dtype: torch.dtype = torch.float32) -> nn.Parameter:
    torch.manual_seed(0)
    return nn.Parameter(torch.randn(4, 3).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("keywords", [{}, {"inputs": None}])
def test_a_loss_takes_the_short_way_to_the_bits_of_torchs(
    ways: Ways, dtype: torch.dtype, keywords: dict[str, Any]
) -> None:
    ours, theirs = weight(dtype), weight(dtype)
    ways.backward((ours.sin() ** 2).sum(), None, None, False, **keywords)
    TORCHS((theirs.sin() ** 2).sum())
    assert ways.short == 1
    assert ours.grad is not None
    assert torch.equal(ours.grad, theirs.grad)


@pytest.mark.parametrize("retain", [True, False, None])
@pytest.mark.parametrize("create", [True, False])
@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
def test_a_graph_is_kept_where_torch_keeps_it(
    ways: Ways, retain: bool | None, create: bool
) -> None:
    def is_kept(backward: Callable[..., Any]) -> tuple[bool, bool]:
        param = weight()
        loss = (param**3).sum()
        backward(loss, None, retain, create)
        assert param.grad is not None
        has_graph = param.grad.grad_fn is not None
        param.grad = None  # a graph that it is part of ends here
        try:
            TORCHS(loss)
        except RuntimeError:
            return False, has_graph
        return True, has_graph

    assert is_kept(ways.backward) == is_kept(TORCHS)
    assert ways.short == 1


def _two(param: Tensor) -> list[Tensor]:
    return [param.sum(), (param * 2).sum()]


OTHERS: dict[str, Callable[[Tensor], tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "a gradient": lambda p: ((p.sum(), torch.tensor(3.0)), {}),
    "inputs": lambda p: ((p.sum(),), {"inputs": [p]}),
    "a matrix with a gradient": lambda p: ((p * 2, torch.ones(4, 3)), {}),
    "one number of two dimensions": lambda p: (((p * 2).sum().reshape(1, 1),), {}),
    "several losses": lambda p: ((_two(p),), {}),
    "float64": lambda p: ((p.double().sum(),), {}),
    "edges of a graph": lambda p: (([get_gradient_edge(p.sum())],), {}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_every_other_call_is_torchs(ways: Ways, name: str) -> None:
    ours, theirs = weight(), weight()
    for param, backward in ((ours, ways.backward), (theirs, TORCHS)):
        args, keywords = OTHERS[name](param)
        backward(*args, **keywords)
    assert ways.short == 0
    assert ours.grad is not None
    assert torch.equal(ours.grad, theirs.grad)


def test_an_edge_of_a_graph_alone_is_torchs(ways: Ways) -> None:
    def gradient(backward: Callable[..., Any]) -> Tensor | None:
        param = weight()
        try:
            backward(get_gradient_edge(param.sum()))
        except AssertionError:  # torch 2.6 takes them in a sequence alone, 2.13 does not
            return None
        return param.grad

    theirs = gradient(TORCHS)
    assert theirs is not None or torch.__version__ < (2, 13)
    torch.testing.assert_close(gradient(ways.backward), theirs, rtol=0, atol=0)
    assert ways.short == 0


REFUSED: dict[str, Callable[[], Any]] = {
    "a matrix": lambda: weight() * 2,
    "no graph": lambda: torch.tensor(1.0),
    "complex": lambda: (weight() * 1j).sum(),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_torch_refuses_is_refused_in_its_words(ways: Ways, name: str) -> None:
    messages = []
    for backward in (ways.backward, TORCHS):
        with pytest.raises(RuntimeError) as refusal:
            backward(REFUSED[name]())
        messages.append(str(refusal.value))
    assert messages[0] == messages[1]


def test_a_transform_refuses_it(ways: Ways) -> None:
    param = weight()

    def backward(x: Tensor) -> Tensor:
        loss = (x * param).sum()
        ways.backward(loss)
        return loss

    with pytest.raises(RuntimeError, match="inside a functorch transform"):
        torch.func.vmap(backward)(torch.ones(2, 4, 3))


def test_a_class_and_a_mode_of_the_users_are_asked(ways: Ways) -> None:
    class Mine(Tensor):
        seen: list[Any] = []

        @classmethod
        def __torch_function__(
            cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            cls.seen.append(function)
            return super().__torch_function__(function, types, args, kwargs or {})

    class Mode(TorchFunctionMode):
        seen: list[Any] = []

        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.seen.append(function)
            return function(*args, **(kwargs or {}))

    def seen(backward: Callable[..., Any]) -> tuple[list[Any], list[Any]]:
        Mine.seen, Mode.seen = [], []
        backward(weight().sum().as_subclass(Mine))
        loss = weight().sum()
        with Mode():
            backward(loss)
        return Mine.seen, Mode.seen

    ours, theirs = seen(ways.backward), seen(TORCHS)
    assert ours == theirs
    assert all(theirs)
    assert ways.short == 0
    if torch.__version__ >= (2, 13):  # torch 2.6 asks them about what it calls inside alone
        assert all(TORCHS in functions for functions in ours)


def test_torchs_log_of_a_backward_is_written(ways: Ways, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="torch.autograd.graph"):
        ways.backward((weight() * 2).sum())
    assert ways.short == 1
    assert "SumBackward0" in caplog.text


def test_somebody_elses_function_is_left_as_it_is() -> None:
    def backward(*args: Any, **kwargs: Any) -> None:
        """Not torch's."""

    nowhere = types.FunctionType(backward.__code__, {})  # as unittest.mock makes them
    for function in (backward, nowhere):
        assert scalar_backward.short_for_scalars(function) is function


def test_a_torch_that_calls_another_function_is_left_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scalar_backward, "_run", None)
    assert scalar_backward.short_for_scalars(TORCHS) is TORCHS


def test_a_training_step_takes_it(amp: Any, ways: Ways) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    loss = model(torch.ones(2, 3)).float().sum()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    assert ways.short == 1
    assert model.weight.grad is not None
