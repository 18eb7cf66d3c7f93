"""Methods that a script calls in the place of a model cast as the model's call does."""

import copy
import functools
import gc
import pickle
import traceback
import types
import weakref
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from amp_patch.casting.mode import mode
from amp_patch.session import session

X = torch.linspace(-1.0, 1.0, 32).view(8, 4)
STORED = {"O0": torch.float32, "O2": torch.float16, "O3": torch.float16, "O5": torch.bfloat16}


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.got = x.dtype
        return self.linear(x)


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part, self.decoder = Part(), nn.Linear(4, 4)

    def encode(self, x: Tensor, *, factor: Tensor | None = None) -> Tensor:
        """Return codes."""
        codes = self.part(x)
        return codes if factor is None else codes * factor

    def decode(self, codes: Tensor) -> Tensor:
        return self.decoder(codes)

    def both(self, x: Tensor) -> tuple[Tensor, Tensor]:
        codes = self.encode(x)
        return codes, self(x)

    def fail(self, x: Tensor) -> None:
        raise KeyError(str(x.dtype))

    def masked(self, x: Tensor) -> Tensor:
        found: Tensor = self.part(x)
        return torch.ops.aten.lerp(found, torch.ones(4, 4), 0.5)  # type: ignore[no-any-return]  # untyped

    def look(self, x: Tensor) -> None:
        self.seen = x.dtype

    def forward(self, x: Tensor) -> Tensor:
        self.inner = self.encode(x)
        self.look(x.float())
        return self.decode(self.inner)

    def stream(self, x: Tensor) -> Iterator[Tensor]:
        yield self.part(x)

    async def wait(self, x: Tensor) -> Tensor:
        return self.part(x)

    size = property(lambda self: 4)


class Derived(Autoencoder):
    def encode(self, x: Tensor, *, factor: Tensor | None = None) -> Tensor:
        return super().encode(x, factor=factor) + 1


@pytest.fixture(autouse=True)
def unregistered() -> Any:
    """Forget what a test has registered, which nothing but the end of a process does."""
    yield
    session.methods._registered.clear()


def start(amp: ModuleType, level: str, kind: type = Autoencoder) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = kind()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return amp.initialize(model, optimizer, opt_level=level, verbosity=0)


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("level", STORED)
def test_a_method_computes_in_half_and_returns_float32(
    amp: ModuleType, level: str, is_late: bool
) -> None:
    if not is_late:
        amp.register_forward_method(Autoencoder, "encode")
    model, _ = start(amp, level)
    if is_late:
        amp.register_forward_method(Autoencoder, "encode")
    codes = model.encode(X, factor=torch.full((4,), 2.0))
    assert model.part.got is STORED[level]
    assert codes.dtype is torch.float32
    expected = model.part.linear(X.to(STORED[level])) * 2
    torch.testing.assert_close(codes, expected, check_dtype=False, rtol=0, atol=0)


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_methods_train_as_the_call_of_the_model(amp: ModuleType, level: str) -> None:
    for name in ("encode", "decode"):
        amp.register_forward_method(Autoencoder, name)

    def train(output: Any) -> list[Tensor]:
        model, optimizer = start(amp, level)
        for _ in range(3):
            optimizer.zero_grad()
            with amp.scale_loss((output(model) - X).square().mean(), optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
        stepped = [master.detach().clone() for master in amp.master_params(optimizer)]
        amp.deactivate()
        return stepped

    by_call = train(lambda model: model(X))
    by_methods = train(lambda model: model.decode(model.encode(X)))
    assert all(map(torch.equal, by_call, by_methods))


def test_within_a_call_nothing_is_different(amp: ModuleType) -> None:
    for name in ("encode", "decode", "both", "look"):
        amp.register_forward_method(Autoencoder, name)
    model, _ = start(amp, "O2")
    assert model(X).dtype is torch.float32
    assert model.inner.dtype is torch.float16
    assert model.seen is torch.float32
    model.look(X)
    assert model.seen is torch.float16
    codes, outputs = model.both(X)
    assert (codes.dtype, outputs.dtype) == (torch.float32, torch.float32)
    assert mode.models == ()


def test_a_part_is_cast_as_its_model(amp: ModuleType) -> None:
    amp.register_forward_method(Part, "forward")
    model, _ = start(amp, "O5")
    other, _ = start(amp, "O2")
    for _ in range(2):
        assert model.part(X).dtype is torch.float32
        assert model.part.got is torch.bfloat16
        other.part(X)
        assert other.part.got is torch.float16
    assert Part()(X).dtype is torch.float32  # one of no model
    model(X)
    assert model.inner.dtype is torch.bfloat16


def bound(model: Autoencoder) -> Any:
    """Return what torch's `register_fsdp_forward_method` sets at a module: the method of before."""
    original = model.encode

    def wrapped(self: Autoencoder, *args: Any, **kwargs: Any) -> Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        return original(*args, **kwargs)

    return types.MethodType(functools.wraps(original)(wrapped), model)


@pytest.mark.parametrize(
    "order", ["wrap register start", "wrap start register", "start wrap register"]
)
def test_what_a_script_sets_at_the_model_itself_casts_in_each_order(
    amp: ModuleType, order: str
) -> None:
    model = Autoencoder()
    steps = {
        "wrap": lambda: setattr(model, "encode", bound(model)),
        "register": lambda: amp.register_forward_method(Autoencoder, "encode"),
        "start": lambda: amp.initialize(model, opt_level="O2", verbosity=0),
    }
    for step in order.split():
        steps[step]()
    amp.initialize(nn.Linear(2, 2), opt_level="O2", verbosity=0)  # another call changes nothing
    codes = model.encode(X, factor=torch.full((4,), 2.0))
    assert (model.part.got, codes.dtype) == (torch.float16, torch.float32)
    assert torch.equal(codes, (model.part.linear(X.half()) * 2).float())
    assert mode.models == ()


def test_what_is_set_at_the_model_itself_is_there_again_after_deactivate(amp: ModuleType) -> None:
    def encode(self: Any, x: Tensor) -> Tensor:
        codes: Tensor = self.part(x)
        return codes

    amp.register_forward_method(Autoencoder, "encode")
    model: Any = Autoencoder()
    model.encode = own = types.MethodType(encode, model)
    amp.initialize(model, opt_level="O2", verbosity=0)
    copied = copy.deepcopy(model)
    nn.init.zeros_(model.part.linear.weight)
    assert torch.equal(model.encode(X), model.part.linear.bias.float().expand(8, -1))
    assert not torch.equal(copied.encode(X), model.encode(X))  # it has its own weights
    amp.deactivate()
    assert vars(model)["encode"] is own
    reference = weakref.ref(model)
    amp.initialize(model, opt_level="O2", verbosity=0)
    del model, copied, own
    gc.collect()
    assert reference() is None


def test_what_is_set_at_the_model_itself_is_wrapped_once(amp: ModuleType) -> None:
    for kind in (Autoencoder, Derived):
        amp.register_forward_method(kind, "encode")
    model = Derived()
    own: Any = bound(model)
    model.encode = own  # type: ignore[method-assign]  # as torch does
    amp.initialize(model, opt_level="O1", verbosity=0)
    first: Any = model.encode
    amp.initialize(model, opt_level="O1", verbosity=0)
    assert model.encode is first
    amp.deactivate()
    assert vars(model)["encode"] is own


def test_a_class_that_inherits_or_extends_a_method(amp: ModuleType) -> None:
    amp.register_forward_method(Derived, "encode")
    amp.register_forward_method(Derived, "decode")
    amp.register_forward_method(Autoencoder, "encode")
    model, _ = start(amp, "O2", Derived)
    codes = model.encode(X)
    assert codes.dtype is torch.float32
    assert torch.equal(codes, (model.part.linear(X.half()) + 1).float())
    assert model.decode(X).dtype is torch.float32
    amp.deactivate()
    assert "decode" not in vars(Derived)


@pytest.mark.parametrize(
    "make", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_copies_cast_to_the_dtype_of_their_weights(amp: ModuleType, make: Any) -> None:
    amp.register_forward_method(Autoencoder, "encode")
    model, _ = start(amp, "O2")
    copied = make(model)
    copied.encode(X)
    assert copied.part.got is copied.part.linear.weight.dtype


def test_a_method_that_raises_leaves_nothing(amp: ModuleType) -> None:
    amp.register_forward_method(Autoencoder, "fail")
    model, _ = start(amp, "O2")
    with pytest.raises(KeyError, match=r"torch\.float16"):
        model.fail(X)
    assert mode.models == ()
    assert model(X).dtype is torch.float32


def test_what_a_method_raises_is_explained_as_what_the_call_raises(amp: ModuleType) -> None:
    amp.register_forward_method(Autoencoder, "masked")
    model, _ = start(amp, "O2")
    with pytest.raises(RuntimeError) as error:
        model.masked(X)
    told = "".join(traceback.format_exception(error.value))
    assert "a tensor made inside of forward is not: write mask.to(x.dtype)" in told


def test_the_class_is_as_it_was_after_deactivate(amp: ModuleType) -> None:
    original = Autoencoder.encode
    amp.register_forward_method(Autoencoder, "encode")
    amp.register_forward_method(Autoencoder, "encode")
    model, _ = start(amp, "O2")
    assert model.encode.__doc__ == "Return codes."
    amp.deactivate()
    assert Autoencoder.encode is original
    model, _ = start(amp, "O2")  # it is still registered
    assert model.encode(X).dtype is torch.float32


def test_a_dropped_model_is_not_kept(amp: ModuleType) -> None:
    amp.register_forward_method(Part, "forward")
    model, optimizer = start(amp, "O2")
    model.part(X)
    reference = weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert reference() is None


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_it_compiles_whole(amp: ModuleType, level: str) -> None:
    amp.register_forward_method(Autoencoder, "decode")
    model, _ = start(amp, level)
    whole = torch.__version__ >= (2, 7)  # before, the graph ends at the method
    compiled = torch.compile(lambda x: model.decode(x), backend="eager", fullgraph=whole)
    assert torch.equal(compiled(X), model.decode(X))


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ((Autoencoder(), "encode"), TypeError, r"got \('Autoencoder object', 'encode'\); call"),
        (
            (Autoencoder, Autoencoder.encode),
            TypeError,
            r"call amp.register_forward_method\(Autoencoder, 'encode'\)",
        ),
        ((dict, "get"), TypeError, "a class of modules"),
        ((Autoencoder, "encod"), ValueError, "got 'encod', which Autoencoder does not have"),
        ((Autoencoder, "stream"), TypeError, "got 'stream' of Autoencoder, which yields or awaits"),
        ((Autoencoder, "wait"), TypeError, "got 'wait' of Autoencoder, which yields or awaits"),
        ((Autoencoder, "size"), TypeError, "got 'size' of Autoencoder, which is of type property"),
    ],
)
def test_what_is_no_method_is_refused(
    amp: ModuleType, given: tuple[Any, Any], kind: type[Exception], message: str
) -> None:
    before = dict(session.methods._registered)  # a snippet of the docs may have registered one
    with pytest.raises(kind, match=message):
        amp.register_forward_method(*given)
    assert session.methods._registered == before


def of_its_own(x: Tensor) -> Tensor:
    return x * 0.0 + 7.0


def test_a_plain_function_at_the_model_itself_is_left_and_pickled_as_it_is(amp: ModuleType) -> None:
    amp.register_forward_method(Autoencoder, "encode")
    model: Any = Autoencoder()
    model.encode = of_its_own
    amp.initialize(model, opt_level="O1", verbosity=0)
    assert model.encode is of_its_own
    assert pickle.loads(pickle.dumps(model)).encode is of_its_own
