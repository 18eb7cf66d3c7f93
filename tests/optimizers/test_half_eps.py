"""The warning of an eps that is 0 in float16, against what torch's optimizers then do."""

from __future__ import annotations

import collections
import inspect
import math
import warnings
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Adam, AdamW, Optimizer, RMSprop, SparseAdam

from amp_patch import amp as core
from amp_patch.optimizers import half_eps

KINDS = sorted(
    (
        kind
        for kind in vars(torch.optim).values()
        if inspect.isclass(kind) and issubclass(kind, Optimizer) and kind is not Optimizer
        if kind.__name__ not in ("LBFGS", "Muon")  # need a closure, and matrices
    ),
    key=lambda kind: kind.__name__,
)


def becomes_nan(kind: type[Optimizer], **options: object) -> bool:
    """Step float16 weights by gradients of 0 and of little more, in torch alone."""
    params = [nn.Parameter(torch.ones(2, dtype=torch.float16)) for _ in range(2)]
    optimizer = kind(params, **options)
    for _ in range(10):
        for param, grad in zip(params, (0.0, 1e-4), strict=True):
            param.grad = torch.full_like(param, grad)
            if kind is SparseAdam:
                places = torch.arange(2)[None]
                param.grad = torch.sparse_coo_tensor(places, param.grad, (2,))
        optimizer.step()
    return not all(param.isfinite().all() for param in params)


def warns(amp: ModuleType, kind: type[Optimizer], level: str, **options: object) -> bool:
    model = nn.Linear(2, 2)
    optimizer = kind(model.parameters(), **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    amp.deactivate()
    return any("which is 0 there" in str(one.message) for one in caught)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_it_warns_of_the_optimizers_that_make_nan(amp: ModuleType, kind: type[Optimizer]) -> None:
    assert warns(amp, kind, "O3") == becomes_nan(kind)
    assert not warns(amp, kind, "O2")
    assert not warns(amp, kind, "O4")
    parameters = inspect.signature(kind).parameters
    if "eps" in parameters and isinstance(parameters["eps"].default, float):
        assert warns(amp, kind, "O3", eps=1e-4) is becomes_nan(kind, eps=1e-4) is False


@pytest.mark.parametrize("kind", [Adam, AdamW])
def test_fused_kernels_add_eps_in_float32(amp: ModuleType, kind: type[Optimizer]) -> None:
    assert warns(amp, kind, "O3", fused=True) is becomes_nan(kind, fused=True) is False


def test_it_names_the_optimizer_and_what_mends_it(amp: ModuleType) -> None:
    model = nn.Linear(2, 2)
    message = r"got RMSprop with eps=1e-08, which is 0 there.*optim\.RMSprop\(\.\.\., eps=1e-4\)"
    message += r".*That eps keeps NaN out, and no more.* lr \* gradient / eps"
    with pytest.warns(UserWarning, match=message):
        amp.initialize(model, RMSprop(model.parameters()), opt_level="O3", verbosity=0)


class Own(Optimizer):
    """Adam's division, with state in the parameters' dtype or in another."""

    def __init__(self, params: Any, state_dtype: torch.dtype | None = None) -> None:
        super().__init__(params, {"eps": 1e-8})
        self.state_dtype = state_dtype

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # torch overloads it
        for param in self.param_groups[0]["params"]:
            grad = param.grad.to(self.state_dtype or param.dtype)
            square = self.state[param].setdefault("square", torch.zeros_like(grad))
            square += grad * grad
            param.data -= 0.1 * (grad / (square.sqrt() + 1e-8)).to(param.dtype)


@pytest.mark.parametrize("state_dtype", [None, torch.float32])
def test_of_an_optimizer_that_is_not_torchs_its_state_tells(
    amp: ModuleType, monkeypatch: pytest.MonkeyPatch, state_dtype: torch.dtype | None
) -> None:
    """After the first step that is not skipped; the others are no longer looked at."""
    looks: list[Optimizer] = []
    look = half_eps.warn_of_eps
    monkeypatch.setattr(half_eps, "warn_of_eps", lambda one: (looks.append(one), look(one)))
    model = nn.Linear(2, 2)
    optimizer = Own(model.parameters(), state_dtype)
    amp.initialize(model, optimizer, opt_level="O3", loss_scale="dynamic", verbosity=0)
    steps: list[Any] = []
    optimizer.register_step_post_hook(lambda *_: steps.append(1))  # torch goes through both
    told = []
    for factor in (math.inf, 0.0, 0.0):
        with amp.scale_loss(model(torch.ones(1, 2)).sum() * factor, optimizer) as scaled_loss:
            scaled_loss.backward()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        optimizer.zero_grad()
        told.append(any("got Own with eps=1e-08, which is 0" in str(one.message) for one in caught))
    becomes_nan = not all(param.isfinite().all() for param in model.parameters())
    assert becomes_nan is (state_dtype is None)
    assert told == [False, becomes_nan, False]
    assert looks == [optimizer]
    assert len(steps) == 2


class Wrapper(Optimizer):
    """Steps by another, as Lookahead of timm does: that one keeps the state."""

    def __init__(self, base: Optimizer) -> None:
        self.base, self.param_groups, self.defaults = base, base.param_groups, base.defaults
        self.state = collections.defaultdict(dict)
        for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
            setattr(self, name, collections.OrderedDict())

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]  # torch overloads it
        return self.base.step(closure)


@pytest.mark.parametrize("kind", [Adam, RMSprop])
def test_it_warns_of_what_a_wrapper_steps_by(amp: ModuleType, kind: type[Optimizer]) -> None:
    def wrapped(params: Any, **options: Any) -> Optimizer:
        return Wrapper(kind(params, **options))

    model = nn.Linear(2, 2)
    with pytest.warns(UserWarning, match=rf"got {kind.__name__} with eps=1e-08, which is 0 there"):
        amp.initialize(model, wrapped(model.parameters()), opt_level="O3", verbosity=0)
    amp.deactivate()
    assert not warns(amp, wrapped, "O3", eps=1e-4)  # type: ignore[arg-type]  # makes one
    assert not warns(amp, wrapped, "O2")  # type: ignore[arg-type]  # makes one


@pytest.mark.parametrize("state_dtype", [None, torch.float32])
def test_of_one_in_a_wrapper_that_is_not_torchs_its_state_tells(
    amp: ModuleType, state_dtype: torch.dtype | None
) -> None:
    model = nn.Linear(2, 2)
    optimizer = Wrapper(Own(model.parameters(), state_dtype))
    amp.initialize(model, optimizer, opt_level="O3", verbosity=0)
    with amp.scale_loss(model(torch.ones(1, 2)).sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
    told = [one for one in caught if "got Own with eps=1e-08" in str(one.message)]
    assert len(told) == (state_dtype is None)


class Listing(Own):
    """Keeps no dict for a parameter."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # torch overloads it
        for param in self.param_groups[0]["params"]:
            self.state[param] = [param.grad]


def test_state_that_is_no_dict_is_left_alone(amp: ModuleType) -> None:
    model = nn.Linear(2, 2)
    optimizer = Listing(model.parameters())
    amp.initialize(model, optimizer, opt_level="O3", verbosity=0)
    with amp.scale_loss(model(torch.ones(1, 2)).sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    core.deactivate()


def test_a_deactivated_optimizer_is_watched_no_more(amp: ModuleType) -> None:
    model = nn.Linear(2, 2)
    optimizer = Own(model.parameters())
    before = dict(optimizer._optimizer_step_post_hooks)
    amp.initialize(model, optimizer, opt_level="O3", verbosity=0)
    amp.deactivate()
    assert optimizer._optimizer_step_post_hooks == before


@pytest.mark.parametrize("by", ["load_state_dict", "add_param_group"])
def test_it_warns_of_an_eps_that_comes_later(amp: ModuleType, by: str) -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = Adam(model.parameters(), eps=1e-4)
    amp.initialize([model, other], optimizer, opt_level="O3", verbosity=0)
    state = Adam(nn.Linear(2, 2).parameters()).state_dict()
    group = {"params": list(other.parameters()), "eps": 1e-8}
    with pytest.warns(UserWarning, match=r"got Adam with eps=1e-08, which is 0 there"):
        optimizer.load_state_dict(state) if by == "load_state_dict" else (
            optimizer.add_param_group(group)
        )
    assert len(optimizer.param_groups) == (1 if by == "load_state_dict" else 2)


@pytest.mark.parametrize(
    ("kind", "gradient"), [(Adam, 5e-3), (RMSprop, 1.6e-3), (torch.optim.Adagrad, 1.6e-4)]
)
def test_the_eps_that_is_advised_keeps_nan_out_and_no_more(
    kind: type[Optimizer], gradient: float
) -> None:
    """As the warning says: a step by gradient / eps where the square is 0, but not in float32."""
    steps = []
    for dtype in (torch.float16, torch.float32):
        weight = nn.Parameter(torch.ones(1, dtype=dtype))
        weight.grad = torch.full((1,), gradient, dtype=dtype)
        kind([weight], lr=2.0**-10, eps=1e-4).step()
        steps.append((1.0 - weight.item()) * 2**10)
    assert steps[0] == pytest.approx(gradient / 1e-4, abs=0.5)  # float16's next weight
    assert steps[0] > 2 * steps[1]
