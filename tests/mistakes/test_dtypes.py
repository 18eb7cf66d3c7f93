"""Two dtypes that meet: torch's exception, with a note that says where and what mends it."""

from __future__ import annotations

import contextlib
import copy
import re
import sys
import traceback
import types
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch
from support import scaled_backward
from torch import Tensor, nn
from torch.nn import functional as F
from training import Choosy, Net, make, prepared

from amp_patch import amp as core
from amp_patch.levels import OPT_LEVELS
from amp_patch.mistakes import dtype_notes, error_places
from amp_patch.session import session

HALF = ("O2", "O3", "O5")
DTYPES = {"O2": "torch.float16", "O3": "torch.float16", "O5": "torch.bfloat16"}


class Masked(nn.Module):
    """A block that makes a tensor in its forward, and may give it to what takes one dtype."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.fc = nn.Linear(4, 4)
        self.weight = nn.Parameter(torch.eye(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x)
        mask = torch.ones(4, 4)
        if self.kind == "mask":
            return torch.ops.aten.lerp(h, mask, 0.5)
        if self.kind == "inline":
            return torch.ops.aten.lerp(h, torch.ones(4, 4), 0.5)
        if self.kind == "layer":
            return self.fc(h + mask)
        if self.kind == "function":
            return F.linear(h + mask, self.fc.weight)
        if self.kind == "operation":  # past the functions that are patched
            return torch.convolution(
                (h + mask)[..., None], self.fc.weight[..., None], None, [1], [0], [1], False, [0], 1
            )[..., 0]
        if self.kind == "index":
            out = torch.zeros_like(x, dtype=torch.float32)
            torch.ops.aten.index_put_(out, [torch.arange(len(x))], h)
            return out
        return h.add(h, alpha=-1e9)


class Outer(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4), Masked(kind)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def told(error: BaseException) -> str:
    """Return the note, of which there is one."""
    notes = getattr(error, "__notes__", None)
    text = str(error) if notes is None else "\n".join(notes)
    assert text.count("amp_patch: ") == 1
    return text


def fail(call: Callable[[], Any], ends_script: bool = False) -> str:
    with pytest.raises((RuntimeError, TypeError, ValueError)) as error:
        call()
    if ends_script:
        sys.excepthook(error.type, error.value, error.tb)
    return told(error.value)


X = torch.ones(4, 4)


@pytest.mark.parametrize("level", HALF)
@pytest.mark.parametrize(
    ("kind", "operands"),
    [
        ("mask", ["h {}", "mask torch.float32"]),
        ("inline", ["h {}"]),
        ("index", ["out torch.float32", "h {}"]),
    ],
)
def test_a_tensor_made_inside_of_forward(
    amp: ModuleType, level: str, kind: str, operands: list[str]
) -> None:
    model = amp.initialize(Outer(kind), opt_level=level, verbosity=0)
    note = fail(lambda: model(X))
    assert f"at opt_level {level} the model is stored in {DTYPES[level]}" in note
    assert "module 'blocks.1' (Masked)" in note
    assert all(operand.format(DTYPES[level]) in note for operand in operands)
    assert "mask.to(x.dtype)" in note
    assert "amp.float_region()" in note
    assert (
        "or all of the module by amp.initialize(..., rules={'modules': {'blocks.1': 'float'}})"
        in note
    )
    assert "'O1'" in note


class InFloat(nn.LayerNorm):
    """Casts up by itself, for it knows of float32 weights."""

    def forward(self, x: Tensor) -> Tensor:
        norm = F.layer_norm(x.float(), self.normalized_shape)
        return torch.ops.aten.lerp(self.bias, norm, self.weight).to(x.dtype)


@pytest.mark.parametrize("level", HALF)
def test_the_rule_that_a_note_names_mends_a_module_that_casts_up(
    amp: ModuleType, level: str
) -> None:
    def make_model() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), InFloat(4))

    model = amp.initialize(make_model(), opt_level=level, verbosity=0)
    assert "rules={'modules': {'1': 'float'}}" in fail(lambda: model(X))
    core.deactivate()
    rules = {"modules": {"1": "float"}}
    model = core.initialize(make_model(), opt_level=level, rules=rules, verbosity=0)
    model(X).sum().backward()


class Normed(Masked):
    """Has a batch norm, which stays in float32."""

    def __init__(self) -> None:
        super().__init__("mask")
        self.norm = nn.BatchNorm1d(4)


class Bare(nn.Module):
    """Has no weights at all."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.aten.lerp(x, torch.ones(4, 4), 0.5)


@pytest.mark.parametrize("make_block", [Normed, Bare])
def test_neither_batch_norms_nor_no_weights_are_blamed(amp: ModuleType, make_block: Any) -> None:
    model = amp.initialize(nn.Sequential(make_block()), opt_level="O2", verbosity=0)
    assert "mask.to(x.dtype)" in fail(lambda: model(X))


def test_a_layer_that_another_module_calls(amp: ModuleType) -> None:
    model = amp.initialize(Outer("mask"), opt_level="O2", verbosity=0)
    other = nn.Sequential(model.blocks[0])
    assert "module 'blocks.0' (Linear)" in fail(lambda: other(X), ends_script=True)


@pytest.mark.parametrize("level", HALF)
def test_a_mask_that_reaches_an_operation(amp: ModuleType, level: str) -> None:
    model = amp.initialize(Outer("operation"), opt_level=level, verbosity=0)
    note = fail(lambda: model(X))
    assert f"module 'blocks.1' (Masked), with x {DTYPES[level]}, h {DTYPES[level]}, mask" in note
    assert "mask.to(x.dtype)" in note


@pytest.mark.parametrize("kind", ["layer", "function"])
@pytest.mark.parametrize("level", HALF)
def test_a_mask_that_reaches_a_layer_or_its_function_is_no_mistake(
    amp: ModuleType, level: str, kind: str
) -> None:
    model = amp.initialize(Outer(kind), opt_level=level, verbosity=0)
    assert model(X).dtype is torch.float32


def test_a_number_that_half_cannot_hold(amp: ModuleType) -> None:
    model = amp.initialize(Outer("number"), opt_level="O2", verbosity=0)
    assert "write torch.finfo(x.dtype).min in the place of -1e9" in fail(lambda: model(X))


@pytest.mark.parametrize("level", HALF)
@pytest.mark.parametrize(
    "make_model", [Net, lambda: nn.Linear(4, 4), lambda: nn.LSTM(4, 4), lambda: nn.Conv1d(4, 4, 1)]
)
def test_forward_called_directly(amp: ModuleType, level: str, make_model: Any) -> None:
    model = amp.initialize(make_model(), opt_level=level, verbosity=0)
    if amp.__name__ == "apex.amp":  # which casts there, too
        model.forward(X)
    else:
        note = fail(lambda: model.forward(X), ends_script=True)
        assert "call model(x)" in note


def test_a_module_whose_methods_call_it_otherwise_than_self(amp: ModuleType) -> None:
    class Other(nn.Module):
        def __init__(this) -> None:
            super().__init__()
            this.fc = nn.Linear(4, 4)

        def forward(this, x: torch.Tensor) -> torch.Tensor:
            return torch.ops.aten.lerp(this.fc.weight, x.float(), 0.5)

    model = amp.initialize(nn.Sequential(Other()), opt_level="O2", verbosity=0)
    assert "module '0' (Other)" in fail(lambda: model(X))


def test_a_function_that_takes_the_model_is_no_method_of_it(amp: ModuleType) -> None:
    model = amp.initialize(nn.Sequential(nn.Linear(4, 4)), opt_level="O2", verbosity=0)

    def outside(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return net(x) @ net[0].weight  # float32 and half: no module's affair

    with pytest.raises(RuntimeError) as error:
        outside(model, X)
    assert error_places.innermost(error.value, session.models.levels) is None


@pytest.mark.parametrize("level", HALF)
def test_a_layer_called_by_itself(amp: ModuleType, level: str) -> None:
    model = amp.initialize(Outer("mask"), opt_level=level, verbosity=0)
    for call, path in ((model.blocks[0], "blocks.0"), (model.blocks[1], "blocks.1.fc")):
        note = fail(lambda call=call: call(X), ends_script=True)
        assert f"module {path!r} (Linear)" in note
        assert f"pass x.to({DTYPES[level]}) to the module" in note


@pytest.mark.parametrize("level", HALF)
def test_a_layer_replaced_later(amp: ModuleType, level: str) -> None:
    model, _ = prepared(amp, level)
    model.last = nn.Linear(8, 3)
    note = fail(lambda: model(X))
    assert "'last' holds float32 weights, as `weight.data = tensor` or a layer that was" in note
    model.last = nn.Sequential(nn.Linear(8, 3))
    assert "'last.0' holds float32 weights" in fail(lambda: model(X))


@pytest.mark.parametrize("level", HALF)
def test_a_weight_that_was_multiplied_by_a_mask_in_float32(amp: ModuleType, level: str) -> None:
    """As who prunes by hand writes it; what the note says instead of it trains."""
    model, optimizer = prepared(amp, level)
    mask = torch.rand_like(model.last.weight, dtype=torch.float32).gt(0.5).float()
    stored, masked = model.last.weight.data, model.last.weight.data * mask
    stored_values = stored.clone()
    model.last.weight.data = masked
    note = fail(lambda: model(X))
    assert "'last' holds float32 weights, as `weight.data = tensor`" in note
    assert "write tensor.to(weight.dtype)" in note
    model.last.weight.data = masked.to(stored.dtype)
    scaled_backward(amp, 0.01 * model(X).float().square().mean(), optimizer)
    optimizer.step()
    (stepped,) = (p for p in core.master_params(optimizer) if p.shape == mask.shape)
    assert stepped[mask == 0].abs().max() < 1e-3 < stored_values[mask == 0].abs().max()


class Mean(nn.Module):
    """Takes a mean with its weight, by a function that takes one dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.aten.lerp(self.weight, x, 0.5)


def test_a_layer_whose_weights_were_replaced_by_float32_ones(amp: ModuleType) -> None:
    model = nn.Sequential(nn.Embedding(5, 4), Mean())
    model = amp.initialize(model, opt_level="O2", verbosity=0)
    model[0].weight.data = torch.ones(5, 4)
    note = fail(lambda: model(torch.tensor([1, 2])))
    assert "this came from module '1' (Mean)" in note
    assert "'0' holds float32 weights, as `weight.data = tensor`" in note
    assert "write tensor.to(weight.dtype)" in note
    model[1].weight.data = torch.ones(4)
    model.append(Mean().half())
    assert "'0' holds float32 weights" in fail(lambda: model(torch.tensor([1, 2])))


class Listed(nn.Module):
    """Keeps a layer where the model does not know it."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias)
        self.layers = [nn.Sequential(nn.Linear(4, 4, bias))]

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](self.first(x))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("level", HALF)
def test_a_layer_in_a_plain_list(amp: ModuleType, level: str, bias: bool) -> None:
    """Two layers without a bias share nothing by that."""
    model = amp.initialize(Listed(bias), opt_level=level, verbosity=0)
    note = fail(lambda: model(X))
    assert "this came from the model itself (Listed)" in note
    assert "a module of type Linear with torch.float32 weights that is no part of the model" in note
    assert "nn.ModuleList" in note


@pytest.mark.parametrize("level", HALF)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_a_state_in_half_for_a_recurrent_layer_in_float(
    amp: ModuleType, level: str, kind: Any
) -> None:
    """Of which torch says on a CPU that it "could not create a primitive descriptor"."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.layer = nn.Embedding(4, 4), kind(4, 4)

        def forward(self, ids: Tensor, state: Any) -> Tensor:
            return self.layer(self.embed(ids), state)[0]

    model = amp.initialize(Recurrent(), opt_level=level, verbosity=0)
    state = torch.zeros(1, 3, 4)
    model.float()
    note = fail(
        lambda: model(
            torch.zeros(2, 3, dtype=torch.long), (state, state) if kind is nn.LSTM else state
        )
    )
    assert "as model.float() leaves them" in note


@pytest.mark.parametrize("level", HALF)
def test_the_model_in_float_again(amp: ModuleType, level: str) -> None:
    model, _ = prepared(amp, level)
    model.float()
    note = fail(lambda: model(X))
    assert "as model.float() leaves them: leave that call out, or call amp.deactivate()" in note


@pytest.mark.parametrize("level", HALF)
def test_an_average_in_float32_that_takes_the_place_of_the_weights(
    amp: ModuleType, level: str
) -> None:
    """As a class of many scripts does for an evaluation; what the note says puts it there."""
    model, optimizer = prepared(amp, level)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    average = {name: value + 0.5 for name, value in before.items()}
    backup = {name: param.data for name, param in model.named_parameters()}
    for name, param in model.named_parameters():
        param.data = average[name]
    assert "write `param.data = tensor.to(param.dtype)`" in fail(lambda: model(X))
    for name, param in model.named_parameters():
        param.data = average[name].to(backup[name].dtype)
    expected = copy.deepcopy(model).float()
    expected.load_state_dict(average)
    found = model(X)
    assert torch.allclose(found, expected(X), rtol=0.05, atol=0.05)
    for name, param in model.named_parameters():
        param.data = backup[name]
    assert not torch.allclose(model(X), found, rtol=0.05, atol=0.05)
    optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(("level", "name"), [("O2", "bfloat16"), ("O5", "half")])
def test_the_model_in_another_half_dtype(amp: ModuleType, level: str, name: str) -> None:
    model, _ = prepared(amp, level)
    with pytest.warns(UserWarning, match=name):
        getattr(model, name)()
    note = fail(lambda: model(X))
    assert f"as model.{name}() leaves them: leave that call out." in note


@pytest.mark.parametrize("level", HALF)
def test_the_model_in_float64(amp: ModuleType, level: str) -> None:
    model, _ = prepared(amp, level)
    with pytest.warns(UserWarning, match="double"):
        model.double()
    note = fail(lambda: model(X))
    assert "as model.double() or torch.set_default_dtype(torch.float64) leaves them" in note


@pytest.mark.parametrize("level", HALF)
def test_inputs_in_float64(amp: ModuleType, level: str) -> None:
    model = amp.initialize(nn.Sequential(nn.Linear(4, 4)), opt_level=level, verbosity=0)
    note = fail(lambda: model(X.double()))
    half = DTYPES[level]
    assert f"with input torch.float64, self.weight {half}, self.bias {half}. " in note
    assert "A float64 tensor is never cast: pass x.float()" in note


@pytest.mark.parametrize("level", HALF)
def test_autocast_around_the_model(amp: ModuleType, level: str) -> None:
    other = {"O5": torch.float16}.get(level, torch.bfloat16)
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    model = amp.initialize(model, opt_level=level, verbosity=0)
    with torch.autocast("cpu", dtype=other), pytest.warns(UserWarning, match="casts once more"):
        note = fail(lambda: model(X))
    assert "module '1' (LayerNorm)" in note
    assert "torch.autocast is on, and casts by a list of its own: remove it" in note


class Residual(nn.Module):
    """Adds what a layer gives to its own input: in two half dtypes the sum is float32."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.aten.lerp(self.norm.bias, self.linear(x) + x, 0.5)


@pytest.mark.parametrize("level", HALF)
@pytest.mark.parametrize(
    "make", [Residual, lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))]
)
def test_autocast_that_a_library_wraps_around_forward(
    amp: ModuleType, make: Callable[[], nn.Module], level: str
) -> None:
    model = amp.initialize(make(), opt_level=level, verbosity=0)
    other = {"O5": torch.float16}.get(level, torch.bfloat16)
    model.forward = torch.autocast("cpu", dtype=other)(model.forward)  # as accelerate prepares it
    note = fail(lambda: model(X))
    assert "torch.autocast inside of forward casts by a list of its own" in note


@pytest.mark.parametrize("level", HALF)
def test_autocast_that_is_off_within_forward_is_not_blamed(amp: ModuleType, level: str) -> None:
    model = amp.initialize(nn.Sequential(Bare()), opt_level=level, verbosity=0)
    model.forward = torch.autocast("cpu", enabled=False)(model.forward)
    assert "mask.to(x.dtype)" in fail(lambda: model(X))


class InOther(nn.Module):
    """Casts to the other half dtype in its forward, and gives that to a layer."""

    def __init__(self, other: torch.dtype) -> None:
        super().__init__()
        self.other, self.linear = other, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.other)
        return x @ self.linear.weight


@pytest.mark.parametrize("level", HALF)
def test_a_cast_to_another_half_dtype_within_forward(amp: ModuleType, level: str) -> None:
    other = {"O5": torch.float16}.get(level, torch.bfloat16)
    model = amp.initialize(InOther(other), opt_level=level, verbosity=0)
    assert "A cast in forward does the same: write x.to(y.dtype)" in fail(lambda: model(X))


class Joined(nn.Module):
    """Joins two tensors, which autocast to another half dtype refuses without naming a dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 4)

    def forward(self, i: Tensor) -> Tensor:
        found = self.embedding(i)
        return torch.cat([found, found])


@pytest.mark.filterwarnings("ignore:a model that amp.initialize")  # the drop-in sees the call
@pytest.mark.parametrize("level", HALF)
def test_autocast_to_another_half_dtype_that_is_to_join_tensors(
    amp: ModuleType, level: str
) -> None:
    model = amp.initialize(Joined(), opt_level=level, verbosity=0)
    other = {"O5": torch.float16}.get(level, torch.bfloat16)

    def call() -> None:
        with torch.autocast("cpu", dtype=other):
            model.forward(torch.tensor([0, 1]))

    note = fail(call, ends_script=True)  # autocast is over by then
    assert "torch.autocast is on, and casts by a list of its own: remove it" in note


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_other_errors_and_other_models_get_no_note(amp: ModuleType, level: str) -> None:
    model, _ = prepared(amp, level)
    for call in (
        lambda: model(torch.ones(3, 3)),
        lambda: nn.Linear(4, 4).double()(X.cfloat()),
        lambda: nn.Linear(4, 4)(torch.ones(3, 3)),
    ):
        with pytest.raises(RuntimeError) as error:
            call()
        assert "amp_patch: " not in "".join(traceback.format_exception_only(error.value))


def test_an_old_python_gets_the_note_in_the_message() -> None:
    class Old(RuntimeError):
        add_note = None

        def __getattribute__(self, name: str) -> Any:
            if name == "add_note":
                raise AttributeError(name)
            return super().__getattribute__(name)

    error = Old("mat1 and mat2 must have the same dtype")
    dtype_notes._add_note(error, "amp_patch: at opt_level O2")
    assert str(error) == "mat1 and mat2 must have the same dtype\namp_patch: at opt_level O2"


def test_what_shows_errors_is_as_before_after_deactivate(amp: ModuleType) -> None:
    before = sys.excepthook
    prepared(amp, "O0")
    assert sys.excepthook is before
    prepared(amp, "O1")
    assert sys.excepthook is not before
    prepared(amp, "O2")
    prepared(amp, "O5")
    assert sys.excepthook is not before
    core.deactivate()
    assert sys.excepthook is before


def test_a_script_that_ends_by_a_forward_called_directly_is_told(amp: ModuleType) -> None:
    model = amp.initialize(Masked("operation"), opt_level="O2", verbosity=0)
    with pytest.raises(RuntimeError) as error:
        model.forward(X)
    shown = []
    hook = dtype_notes.explaining(
        lambda *args: shown.append(told(args[1])), {model: OPT_LEVELS["O2"]}
    )
    hook(error.type, error.value, error.tb)
    assert len(shown) == 1


class Held(nn.Module):
    """Has the parameters of a layer, which is no part of it: as losses that call a model's copy."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.params = nn.ParameterList(layer.parameters())


@pytest.mark.parametrize("level", HALF)
def test_a_layer_whose_parameters_are_those_of_a_model(amp: ModuleType, level: str) -> None:
    layer = nn.Linear(4, 4)
    model = amp.initialize(Held(layer), opt_level=level, verbosity=0)
    note = fail(lambda: layer(X), ends_script=True)
    assert "this came from module 'params' (Linear)" in note
    assert "called by itself, and only the model casts its inputs" in note
    assert f"pass x.to({DTYPES[level]}) to the module" in note
    assert "register_forward_method" not in note  # every Linear of the process would cast
    del model


class Backbone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Methods(nn.Module):
    """Has a method beside `forward`, and a part of a class of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = Backbone()

    def features(self, x: Tensor) -> Tensor:
        return self.backbone(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.features(x)


@pytest.mark.parametrize("level", HALF)
def test_a_method_or_a_part_is_told_of_with_the_call_that_mends_it(
    amp: ModuleType, level: str
) -> None:
    model = amp.initialize(Methods(), opt_level=level, verbosity=0)
    note = fail(lambda: model.features(X), ends_script=True)
    assert "Methods.features() was called by itself, and only the model casts its inputs" in note
    assert "once amp.register_forward_method(Methods, 'features'), or pass x.to(" in note
    note = fail(lambda: model.backbone(X), ends_script=True)
    assert "This module was called by itself" in note
    assert "once amp.register_forward_method(Backbone, 'forward'), or pass x.to(" in note
    core.register_forward_method(Methods, "features")
    core.register_forward_method(Backbone, "forward")
    try:
        assert model.features(X).dtype is torch.float32
        assert model.backbone(X).dtype is torch.float32
    finally:
        session.methods._registered.clear()


class OwnCall(Methods):
    """Calls `forward` without torch's hooks, as a Gaussian process of gpytorch does."""

    def __call__(self, x: Tensor) -> Tensor:
        return self.forward(x)


@pytest.mark.parametrize("level", HALF)
def test_a_call_of_the_class_s_own_is_told_of_with_the_registration_that_mends_it(
    amp: ModuleType, level: str
) -> None:
    model = amp.initialize(OwnCall(), opt_level=level, verbosity=0)
    if amp is not core:  # the drop-in casts in `forward`, which such a call calls
        assert model(X).dtype is torch.float32
        return
    note = fail(lambda: model(X), ends_script=True)
    assert "OwnCall.__call__() is not torch's" in note
    assert "once amp.register_forward_method(OwnCall, 'forward')" in note
    assert "call model(x)" not in note
    core.register_forward_method(OwnCall, "forward")
    try:
        assert model(X).dtype is torch.float32
    finally:
        session.methods._registered.clear()


class Trained(Methods):
    """Calls its own step through methods around it, as a LightningModule does."""

    def optimizer_step(self, epoch: int, closure: Callable[[], Tensor]) -> Tensor:
        return closure()

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        return self.backbone(batch[0]).float().square().mean()


@pytest.mark.parametrize("level", HALF)
def test_the_method_that_is_told_of_is_the_one_with_tensors_to_cast(
    amp: ModuleType, level: str
) -> None:
    model = amp.initialize(Trained(), opt_level=level, verbosity=0)

    def step() -> Tensor:
        return model.optimizer_step(0, lambda: model.training_step([X], 0))

    note = fail(step, ends_script=True)
    assert "Trained.training_step() was called by itself" in note
    assert "once amp.register_forward_method(Trained, 'training_step'), or pass x.to(" in note
    core.register_forward_method(Trained, "training_step")
    try:
        assert step().isfinite()
    finally:
        session.methods._registered.clear()


class Shell:
    """What IPython shows errors with."""

    def __init__(self) -> None:
        self.shown: list[str] = []

    def showtraceback(self, exc_tuple: Any = None, **options: Any) -> None:
        error = (exc_tuple or sys.exc_info())[1]
        # Python 3.10 has no notes: what is told stands in the message
        self.shown += getattr(error, "__notes__", [str(error)])


def test_a_cell_of_a_notebook_is_told(amp: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    shell = Shell()
    ipython = types.SimpleNamespace(get_ipython=lambda: shell)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    model = amp.initialize(Masked("layer"), opt_level="O2", verbosity=0)
    for given in (False, True):
        try:
            model.fc(X)
        except RuntimeError as error:
            if given:
                shell.showtraceback((type(error), error, error.__traceback__), tb_offset=1)
            else:
                shell.showtraceback(running_compiled_code=True)
    assert ["called by itself" in note for note in shell.shown] == [True, True]
    core.deactivate()
    assert "showtraceback" not in vars(shell)


# --- conversions ---


CONVERSIONS: dict[str, Callable[[nn.Module], Any]] = {
    "half()": lambda model: model.half(),
    "bfloat16()": lambda model: model.bfloat16(),
    "to()": lambda model: model.to(torch.float16),
    "to() of a part": lambda model: model.first.to("cpu", torch.bfloat16),
    "double()": lambda model: model.double(),
    "half() around": lambda model: nn.Sequential(model).half(),
}


@pytest.mark.parametrize("level", ["O1", "O4", "O0"])
@pytest.mark.parametrize("call", CONVERSIONS)
def test_a_conversion_after_initialize_is_told_of(amp: ModuleType, level: str, call: str) -> None:
    model, _ = prepared(amp, level)
    name = re.escape(call.partition(" ")[0])
    with pytest.warns(UserWarning, match=rf"got \w+\.{name} afterwards, which stores") as caught:
        CONVERSIONS[call](model)
    assert [one.filename for one in caught] == [__file__]


def test_at_o2_another_half_dtype_is_told_of(amp: ModuleType) -> None:
    model, _ = prepared(amp, "O2")
    with pytest.warns(UserWarning, match="which stores them in torch.bfloat16. Leave"):
        model.bfloat16()


@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.parametrize("call", ["all of it", "the norm", "to()"])
def test_a_batch_norm_in_half_is_told_of(amp: ModuleType, level: str, call: str) -> None:
    half = torch.float16 if level == "O2" else torch.bfloat16
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
    model, _ = amp.initialize(
        model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level=level, verbosity=0
    )
    calls = {
        "all of it": model.half if level == "O2" else model.bfloat16,
        "the norm": model[1].half if level == "O2" else model[1].bfloat16,
        "to()": lambda: model.to("cpu", half),
    }
    with pytest.warns(UserWarning, match=rf"in float32, .* in {half}, where .*=False\)\."):
        calls[call]()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_float64_after_initialize_is_not_said_to_be_half(amp: ModuleType, level: str) -> None:
    model, _ = prepared(amp, level)
    with pytest.warns(UserWarning, match=r"torch.float64. Leave .* call amp.deactivate\(\)"):
        model.double()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_conversions_that_change_nothing_are_not_told_of(amp: ModuleType, level: str) -> None:
    model, _ = prepared(amp, level)
    other, _ = make()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other.half()
        model.to("cpu")
        model.half() if level == "O2" else model.float()


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_a_layer_that_comes_later_is_cast_without_a_word(amp: ModuleType, level: str) -> None:
    half = torch.bfloat16 if level == "O5" else torch.float16
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    model.append(nn.Linear(8, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model[2].to(half)
        optimizer.add_param_group({"params": model[2].parameters()})
        assert model(X).dtype is torch.float32


class Router(nn.Module):
    """Casts a layer of its own in each forward, as that of Hugging Face's Switch Transformers."""

    def __init__(self, dtype: torch.dtype, whole: bool = False) -> None:
        super().__init__()
        self.classifier = nn.Linear(4, 3)
        self.dtype, self.whole = dtype, whole

    def forward(self, x: Tensor) -> Tensor:
        (self if self.whole else self.classifier).to(self.dtype)
        return self.classifier(x.to(self.dtype)).float().log_softmax(-1)


def train_a_router(amp: ModuleType | None, level: str) -> Tensor:
    """Return how far the router's weights went, by updates that half weights would round away."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(4, 4), Router(torch.float32))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    if amp is not None:
        model, optimizer = amp.initialize(
            model, optimizer, opt_level=level, verbosity=0, loss_scale=128.0
        )
    name = "1.classifier.weight"
    model(X)  # from now on the weights are float32, and begin as the half ones that they were
    before = model.state_dict()[name].float().clone()
    for _ in range(20):
        optimizer.zero_grad()
        loss = -model(X)[:, 0].mean()
        with (
            contextlib.nullcontext(loss) if amp is None else amp.scale_loss(loss, optimizer) as one
        ):
            one.backward()
        optimizer.step()
    assert model.get_parameter(name).dtype is torch.float32
    return (model.state_dict()[name] - before) * 1e5


@pytest.mark.parametrize("level", ["O1", "O2", "O3", "O4", "O5"])
def test_a_layer_that_its_model_keeps_in_float32_trains_in_it_without_a_word(
    amp: ModuleType, level: str
) -> None:
    expected = train_a_router(None, level)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        moved = train_a_router(amp, level)
    torch.testing.assert_close(moved, expected, rtol=0.05, atol=0.01)


@pytest.mark.parametrize(
    ("level", "router"),
    [
        ("O1", Router(torch.float16)),  # whose small updates are rounded away
        ("O4", Router(torch.bfloat16)),
        ("O2", Router(torch.float64)),
        ("O2", Router(torch.float32, whole=True)),
    ],
)
def test_another_conversion_in_a_forward_is_told_of(
    amp: ModuleType, level: str, router: Router
) -> None:
    router = copy.deepcopy(router)
    optimizer = torch.optim.SGD(router.parameters(), lr=0.1)
    amp.initialize(router, optimizer, opt_level=level, verbosity=0)
    with pytest.warns(UserWarning, match=r"\.to\(\) afterwards, which stores them in"):
        router(X)


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_layer_cast_outside_of_a_forward_is_told_of(amp: ModuleType, level: str) -> None:
    model, _ = prepared(amp, level)
    with pytest.warns(UserWarning, match=r"Linear.to\(\) afterwards, which stores them in"):
        model.first.to(torch.float32)


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_a_half_tensor_that_an_error_prints_is_no_complaint_about_dtypes(
    amp: ModuleType, level: str
) -> None:
    """torch.jit cannot trace parameters that are not those of the state, and prints one."""
    model = prepared(amp, level)[0]
    with pytest.raises(RuntimeError, match=r"\[ torch\.HalfTensor\{") as raised:
        torch.jit._get_trace_graph(model, (torch.randn(2, 4),))
    assert not getattr(raised.value, "__notes__", None)
    assert "amp_patch: " not in str(raised.value)


class Choice(torch.distributions.Distribution):
    """A distribution of a script's own, that takes probabilities as they are."""

    arg_constraints: ClassVar = {"probs": torch.distributions.constraints.simplex}

    def __init__(self, probs: Tensor, validate_args: bool) -> None:
        self.probs = probs
        super().__init__(probs.shape[:-1], validate_args=validate_args)

    def log_prob(self, value: Tensor) -> Tensor:
        return self.probs.log().gather(-1, value[..., None])


class Policy(nn.Module):
    """A head whose probabilities go to a distribution.

    It asks for their check, which torch.compile switches off in the whole process.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor, kind: str) -> Tensor:
        scores = self.fc(x)
        probs = {
            "half": scores.softmax(-1),
            "float": scores.float().softmax(-1),
            "nan": scores.softmax(-1) * torch.nan,
        }[kind]
        return Choice(probs, validate_args=True).log_prob(probs.argmax(-1))


@pytest.mark.parametrize("level", HALF)
def test_the_note_on_half_probabilities_mends(amp: ModuleType, level: str) -> None:
    """In half they are off by more than torch.distributions takes; masks have no part in it."""
    torch.manual_seed(0)
    model, inputs = Policy(), torch.randn(8192, 4) * 10
    amp.initialize(model, opt_level=level, verbosity=0)
    with pytest.raises(ValueError, match=r"constraint Simplex") as raised:
        model(inputs, "half")
    told = "\n".join([str(raised.value), *getattr(raised.value, "__notes__", [])])
    assert f"Probabilities of {DTYPES[level]} do not add up to 1 within 1e-6" in told
    assert "mask" not in told
    assert model(inputs, "float").isfinite().all()
    with pytest.raises(ValueError, match=r"constraint Simplex") as raised:
        model(inputs, "nan")
    told = "\n".join([str(raised.value), *getattr(raised.value, "__notes__", [])])
    assert "amp_patch: " not in told


class Asked(nn.Module):
    """A head whose probabilities are asked for their density."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor, in_float: bool) -> Tensor:
        scores = self.fc(x).float() if in_float else self.fc(x)
        prior = torch.distributions.Dirichlet(torch.ones(4), validate_args=True)
        return prior.log_prob(scores.softmax(-1))


@pytest.mark.parametrize("level", HALF)
def test_the_note_on_half_probabilities_whose_density_is_asked_for_mends(
    amp: ModuleType, level: str
) -> None:
    torch.manual_seed(0)
    model, inputs = Asked(), torch.randn(8192, 4)
    amp.initialize(model, opt_level=level, verbosity=0)
    with pytest.raises(ValueError, match=r"support \(Simplex") as raised:
        model(inputs, False)
    told = "\n".join([str(raised.value), *getattr(raised.value, "__notes__", [])])
    assert "within 1e-6: give torch.distributions softmax(x.float())." in told
    assert model(inputs, True).isfinite().all()


@pytest.mark.parametrize("level", HALF)
def test_a_convolution_of_another_dtype_is_explained(amp: ModuleType, level: str) -> None:
    """Torch names the type of its weights: torch.HalfTensor, and CPUBFloat16Type."""

    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(4, 4, 3, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            noise = torch.randn(x.shape)
            return torch.convolution(
                x + noise, self.conv.weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1
            )

    model = Noisy()
    amp.initialize(model, opt_level=level, verbosity=0)
    with pytest.raises(RuntimeError, match="should be the same") as raised:
        model(torch.randn(2, 4, 16, 16))
    told = "\n".join([str(raised.value), *getattr(raised.value, "__notes__", [])])
    assert f"the model itself (Noisy), with x {DTYPES[level]}, noise torch.float32" in told


@pytest.mark.parametrize("kind", ["type", "bare", "said"])
@pytest.mark.parametrize("level", HALF)
def test_code_that_refuses_half_targets_is_told_how_they_stay(
    amp: ModuleType, level: str, kind: str
) -> None:
    targets = [{"boxes": torch.ones(1, 4), "labels": torch.ones(1, dtype=torch.long)}]
    model = amp.initialize(Choosy(kind), opt_level=level, verbosity=0)
    with pytest.raises((TypeError, AssertionError)) as raised:
        model(torch.ones(2, 4), targets)
    assert told(raised.value).endswith(
        "This takes no half numbers: give it x.float(); or leave an argument of the model's call "
        "as it is, by amp.initialize(..., rules={'inputs': {'targets': 'off'}})."
    )
    core.deactivate()
    rules = {"inputs": {"targets": "off"}}  # what the note says
    core.initialize(model, opt_level=level, verbosity=0, rules=rules)
    assert torch.equal(model(torch.ones(2, 4), targets), targets[0]["boxes"])


@pytest.mark.parametrize("kind", ["type of head", "bare head", "said of head"])
@pytest.mark.parametrize("level", ["O1", "O4"])
def test_where_functions_cast_it_is_told_how_to_widen(
    amp: ModuleType, level: str, kind: str
) -> None:
    model = amp.initialize(Choosy(kind), opt_level=level, verbosity=0)
    with pytest.raises((TypeError, AssertionError)) as raised:
        model(torch.ones(2, 4), [])
    assert told(raised.value).endswith(
        "This takes no half numbers: give it x.float(), or compute this part in "
        "`with amp.float_region():`."
    )


@pytest.mark.parametrize("kind", ["rank", "keyword"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_other_refusals_are_as_they_are(amp: ModuleType, level: str, kind: str) -> None:
    model = amp.initialize(Choosy(kind), opt_level=level, verbosity=0)
    with pytest.raises((TypeError, AssertionError)) as raised:
        model(torch.ones(2, 4), [{"boxes": torch.ones(1, 4)}])
    assert not getattr(raised.value, "__notes__", None)
