"""Models stored in half: what goes in and out, and what outlives a copy."""

import copy
import dataclasses
import io
import pickle
import sys
from collections import OrderedDict, UserDict
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import processes
import pytest
import torch
from torch import Tensor, nn

from amp_patch.casting.mode import ALL_DEVICES, OFF, mode, process
from amp_patch.levels import HALVES
from amp_patch.weights import half_model

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
HALF_OF = {"O2": F16, "O3": F16, "O5": BF16}
LEVELS = sorted(HALF_OF)


class Echo(nn.Module):
    """Hands its arguments back, and notes the dtypes that reached it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.seen = (args, kwargs)
        return args if len(args) > 1 else args[0]


def prepared(amp: ModuleType, model: nn.Module, level: str = "O2", **options: Any) -> nn.Module:
    return amp.initialize(model, opt_level=level, verbosity=0, **options)


# --- inputs and outputs ---


class Point(NamedTuple):
    x: Tensor
    label: str


@dataclasses.dataclass
class Batch:
    x: Tensor
    mask: Tensor
    name: str = "batch"


@dataclasses.dataclass(frozen=True)
class FrozenBatch:
    x: Tensor


class ModelOutput(OrderedDict[str, Any]):
    """A dict whose entries are attributes as well, as libraries of models return it."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)


class Graph:
    """A batch of the user's own, which knows how to convert itself."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def to(self, dtype: torch.dtype) -> "Graph":
        return Graph(self.x.to(dtype))


def ones(dtype: torch.dtype = F32) -> Tensor:
    return torch.ones(2, 4, dtype=dtype)


CONTAINERS = {
    "list": [ones(), 1],
    "tuple": (ones(), "text"),
    "dict": {"x": ones(), "n": None},
    "nested": {"a": [(ones(), {"b": ones()})]},
    "ordered": OrderedDict(x=ones()),
    "user dict": UserDict(x=ones()),
    "model output": ModelOutput(x=ones()),
    "named tuple": Point(ones(), "p"),
    "dataclass": Batch(ones(), torch.ones(2, dtype=torch.bool)),
    "frozen dataclass": FrozenBatch(ones()),
    "object with to": Graph(ones()),
}


def tensors_in(value: Any) -> list[Tensor]:
    """Return the floating tensors in any of the containers above."""
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    if isinstance(value, Graph) or dataclasses.is_dataclass(value):
        value = vars(value)
    if hasattr(value, "values"):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in tensors_in(item)]
    return []


@pytest.mark.parametrize("kind", CONTAINERS)
@pytest.mark.parametrize("level", LEVELS)
def test_containers_keep_their_type_both_ways(amp: ModuleType, kind: str, level: str) -> None:
    model = prepared(amp, Echo(), level)
    given = CONTAINERS[kind]
    returned = model(given)
    (seen,), _ = model.seen
    assert type(seen) is type(returned) is type(given)
    for value, dtype in ((seen, HALF_OF[level]), (returned, F32), (given, F32)):
        found = tensors_in(value)
        assert len(found) == len(tensors_in(given)) > 0
        assert {tensor.dtype for tensor in found} == {dtype}


def test_what_stands_beside_tensors_is_kept(amp: ModuleType) -> None:
    model = prepared(amp, Echo())
    model(CONTAINERS["named tuple"], CONTAINERS["dataclass"], CONTAINERS["model output"])
    (point, batch, output), _ = model.seen
    assert point.label == "p"
    assert (batch.name, batch.mask.dtype) == ("batch", torch.bool)
    assert output.x is output["x"]


def test_keyword_arguments_are_cast(amp: ModuleType) -> None:
    model = prepared(amp, Echo())
    given = {"x": [ones()]}
    model(1, mask=ones(), batch=given)
    _, seen = model.seen
    assert seen["mask"].dtype is F16
    assert seen["batch"]["x"][0].dtype is F16
    assert given["x"][0].dtype is F32


@pytest.mark.parametrize(
    "dtype", [F64, torch.complex64, torch.int64, torch.int32, torch.uint8, torch.bool]
)
def test_inputs_of_other_dtypes_pass_as_they_are(amp: ModuleType, dtype: torch.dtype) -> None:
    model = prepared(amp, Echo())
    given = ones(dtype)
    assert model(given) is given
    assert model.seen[0][0] is given


@pytest.mark.parametrize(
    "given", ["text", b"bytes", 3, 2.5, None, torch.float32, torch.device("cpu"), nn.Linear, Point]
)
def test_what_is_no_tensor_passes_as_it_is(amp: ModuleType, given: Any) -> None:
    model = prepared(amp, Echo())
    assert model(given) is given


def test_modules_passed_as_arguments_are_untouched(amp: ModuleType) -> None:
    model, other = prepared(amp, Echo()), nn.Linear(2, 2)
    assert model([other])[0] is other
    assert other.weight.dtype is F32


@pytest.mark.parametrize("given", [F16, BF16, F32])
def test_any_half_input_becomes_the_models_dtype(amp: ModuleType, given: torch.dtype) -> None:
    model = prepared(amp, Echo(), "O5")
    model(ones(given))
    assert model.seen[0][0].dtype is BF16


def test_o0_brings_half_inputs_to_fp32(amp: ModuleType) -> None:
    model = prepared(amp, nn.Linear(4, 3), "O0")
    assert model(ones(F16)).dtype is F32
    assert model.weight.dtype is F32


def test_gradients_reach_the_callers_inputs(amp: ModuleType) -> None:
    model = prepared(amp, nn.Linear(4, 3))
    inputs = ones().requires_grad_()
    model(inputs).sum().backward()
    torch.testing.assert_close(inputs.grad, model.weight.float().sum(0).expand(2, 4), rtol=1e-3,
                               atol=1e-3)  # fmt: skip
    assert inputs.grad.dtype is F32


@pytest.mark.parametrize("level", ["O1", *LEVELS])
@pytest.mark.parametrize("dtype", [F16, BF16, F64])
def test_cast_model_outputs_decides_what_comes_out(
    amp: ModuleType, level: str, dtype: torch.dtype
) -> None:
    model = prepared(amp, nn.Linear(4, 3), level, cast_model_outputs=dtype)
    assert model(ones()).dtype is dtype


@pytest.mark.parametrize(("level", "half"), [("O2", F16), ("O5", BF16)])
def test_an_output_in_half_is_what_the_other_was_computed_from(
    amp: ModuleType, level: str, half: torch.dtype
) -> None:
    class Both(nn.Linear):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            hidden = super().forward(x)
            return hidden.sin(), hidden

    model = Both(4, 4)
    amp.initialize(model, opt_level=level, verbosity=0)
    found, hidden = model(torch.ones(4))
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        torch.autograd.grad(found.sum(), hidden)
    amp.deactivate()
    amp.initialize(model, opt_level=level, verbosity=0, cast_model_outputs=half)
    found, hidden = model(torch.ones(4))
    (grad,) = torch.autograd.grad(found.sum(), hidden)
    assert torch.equal(grad, hidden.cos())


def test_cast_model_type_false_leaves_model_and_inputs_alone(amp: ModuleType) -> None:
    model = prepared(amp, Echo(), cast_model_type=False)
    given = ones()
    assert model(given) is given
    assert model.linear.weight.dtype is F32


@pytest.mark.parametrize(("level", "dtype"), [("O2", BF16), ("O3", BF16), ("O5", F16)])
def test_cast_model_type_overrides_the_level(
    amp: ModuleType, level: str, dtype: torch.dtype
) -> None:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=level, cast_model_type=dtype, loss_scale=4.0, verbosity=0
    )
    before = model.state_dict()["weight"].clone()
    assert model.weight.dtype is dtype
    with amp.scale_loss(model(ones()).sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    torch.testing.assert_close(model.state_dict()["weight"], before - 0.25, rtol=0.01, atol=0.01)


# --- copies, pickles, replicas ---


@pytest.mark.parametrize("level", LEVELS)
def test_a_deep_copy_runs_its_own_weights(amp: ModuleType, level: str) -> None:
    model = prepared(amp, nn.Linear(4, 3), level)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for param in twin.parameters():
            param.fill_(2.0)
    assert torch.equal(twin(ones()), torch.full((2, 3), 10.0))
    assert not torch.equal(model(ones()), twin(ones()))
    assert twin(ones()).dtype is F32


def test_a_copy_outlives_its_original_and_deactivate_leaves_it_usable(amp: ModuleType) -> None:
    model = prepared(amp, nn.Linear(4, 3))
    twin = copy.deepcopy(model)
    expected = twin(ones())
    amp.deactivate()
    del model
    assert torch.equal(twin(ones()), expected)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("how", ["pickle", "torch.save"])
def test_a_pickled_model_casts_as_before(amp: ModuleType, level: str, how: str) -> None:
    model = prepared(amp, nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).eval(), level)
    expected = model(ones())
    if how == "pickle":
        loaded = pickle.loads(pickle.dumps(model))
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
    assert loaded[0].weight.dtype is HALF_OF[level]
    assert torch.equal(loaded(ones()), expected)
    assert loaded(ones()).dtype is F32


@pytest.mark.parametrize("level", ["O1", *LEVELS])
def test_a_pickled_model_runs_in_a_process_that_never_initialized(
    amp: ModuleType, level: str, tmp_path: Path
) -> None:
    model = prepared(amp, nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3)), level)
    with torch.no_grad():
        model[0].weight.copy_(torch.arange(12.0).reshape(3, 4) / 8)
    torch.save(model, tmp_path / "model.pt")
    script = (
        "import sys, torch\n"
        "model = torch.load(sys.argv[1], weights_only=False)\n"
        "output = model(torch.ones(2, 4))\n"
        "print(model[0].weight.dtype, output.dtype, model.state_dict()['0.weight'].dtype)\n"
        "torch.save(output, sys.argv[2])\n"
    )
    command = [sys.executable, "-c", script, tmp_path / "model.pt", tmp_path / "output.pt"]
    run = processes.run(command, cwd=Path(__file__).parents[2])
    assert run.stderr == ""
    assert run.stdout.split() == [str(HALF_OF.get(level, F32)), str(F32), str(F32)]
    there = torch.load(tmp_path / "output.pt")
    with amp.disable_casts():
        assert torch.equal(there, model(ones()))


@pytest.mark.parametrize("level", LEVELS)
def test_a_data_parallel_replica_runs_its_own_weights(amp: ModuleType, level: str) -> None:
    model = prepared(amp, nn.Linear(4, 3), level)
    replica = model._replicate_for_data_parallel()
    for name in ("weight", "bias"):
        setattr(replica, name, torch.full_like(getattr(model, name), 2.0))
    assert torch.equal(replica(ones()), torch.full((2, 3), 10.0))
    assert replica(ones()).dtype is F32


#: methods of a model -> the dtype that they store it in
CONVERSIONS = {"float": F32, "half": F16, "bfloat16": BF16, "double": F64, "eval": None}


class Mixed(nn.Module):
    """What speaks for the weights comes after a batch norm and a parameter in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((4,), 2.0, dtype=F64))
        self.norm = nn.BatchNorm1d(4)
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.linear(x * self.scale.to(x.dtype))


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
def test_which_pickles_can_be_loaded_without_amp_patch(amp: ModuleType, level: str) -> None:
    """As the pages say of `torch.save(model)`: those of a new model, and after `deactivate`."""
    model = prepared(amp, nn.Sequential(nn.Linear(4, 3), nn.Tanh()), level)
    fresh = nn.Sequential(nn.Linear(4, 3), nn.Tanh())
    fresh.load_state_dict(model.state_dict())
    copied = copy.deepcopy(model)
    assert [_needs_us(one) for one in (model, copied, fresh)] == [True, True, False]
    amp.deactivate()
    assert [_needs_us(one) for one in (model, copied, fresh)] == [False, True, False]


def _needs_us(model: nn.Module) -> bool:
    return b"amp_patch" in pickle.dumps(model)


def from_a_pickle(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("level", ["O0", *LEVELS])
@pytest.mark.parametrize("ended", [False, True], ids=["live", "ended"])
@pytest.mark.parametrize("copied", [from_a_pickle, copy.deepcopy])
@pytest.mark.parametrize("name", CONVERSIONS)
def test_a_copy_takes_any_inputs(
    amp: ModuleType, level: str, ended: bool, copied: Any, name: str
) -> None:
    torch.manual_seed(0)
    twin = copied(prepared(amp, Mixed().eval(), level))
    x = torch.randn(2, 4).bfloat16().float()  # which no cast changes
    weight, bias = twin.linear.weight.double(), twin.linear.bias.double()
    expected = nn.functional.linear(x.double() / (1 + 1e-5) ** 0.5 * 2, weight, bias)
    if ended:
        amp.deactivate()
    getattr(twin, name)()
    dtype = twin.linear.weight.dtype
    assert dtype is CONVERSIONS[name] or name == "eval"
    close = {F32: 1e-6, F64: 1e-6, F16: 4e-3, BF16: 4e-2}[dtype]
    for given in (x, x.to(dtype)):
        got = twin(given)
        assert got.dtype is (F64 if dtype is F64 else F32)
        torch.testing.assert_close(got.double(), expected, rtol=close, atol=close)


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_a_copy_of_a_batch_norm_alone_casts_to_its_weights(amp: ModuleType, level: str) -> None:
    model = prepared(amp, nn.Sequential(nn.BatchNorm1d(4)).eval(), level)
    for twin in (from_a_pickle(model), from_a_pickle(model).half(), copy.deepcopy(model)):
        torch.testing.assert_close(twin(ones()), ones(), rtol=1e-3, atol=1e-3)


class Quantized(nn.Module):
    """A layer without floating weights, which takes float32 only."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.ones(3, 4, dtype=torch.int8))

    def forward(self, x: Tensor) -> Tensor:
        assert x.dtype is F32
        return x @ self.weight.float().t()


def test_a_copy_whose_weights_were_quantized_keeps_its_inputs(amp: ModuleType) -> None:
    model = prepared(amp, nn.Sequential(nn.Linear(4, 3)))
    for twin in (copy.deepcopy(model), from_a_pickle(model)):
        twin[0] = Quantized()
        assert torch.equal(twin(ones()), torch.full((2, 3), 4.0))


@pytest.mark.skipif(
    torch.__version__ < (2, 12),
    reason="torch keeps its graph when the weights' dtype changes, without amp too",
)
def test_a_copy_that_was_compiled_follows_its_weights(amp: ModuleType) -> None:
    twin = from_a_pickle(prepared(amp, nn.Sequential(nn.Linear(4, 3), nn.Tanh())))

    @torch.compile(backend="aot_eager", fullgraph=True)
    def run(x: Tensor) -> Tensor:
        return twin(x)

    for _ in range(2):
        assert torch.equal(run(ones()), twin(ones()))
        assert run(ones()).dtype is F32
        twin.float()
    plain = nn.functional.linear(ones(), twin[0].weight, twin[0].bias).tanh()
    torch.testing.assert_close(run(ones()), plain)


def test_a_replica_of_a_copy_follows_its_weights(amp: ModuleType) -> None:
    twin = from_a_pickle(prepared(amp, nn.Linear(4, 3)))
    for dtype in (F16, F32):
        replica = twin.to(dtype)._replicate_for_data_parallel()
        replica._former_parameters = {}
        for name, param in twin.named_parameters():  # as torch.nn.parallel.replicate does
            replica._former_parameters[name] = param.detach()
            setattr(replica, name, param.detach())
        assert torch.equal(replica(ones()), twin(ones()))


@pytest.mark.parametrize("level", LEVELS)
def test_the_model_itself_is_no_copy(amp: ModuleType, level: str) -> None:
    """Of its masters nobody knows what else to do than to say so."""
    model = prepared(amp, nn.Linear(4, 3), level)
    copy.deepcopy(model)
    model.float()
    with pytest.raises(RuntimeError, match="dtype") as raised:
        model(ones())
    notes = getattr(raised.value, "__notes__", raised.value)  # Python 3.10 has none
    assert "as model.float() leaves them: leave that call out" in str(notes)


def test_initialize_again_replaces_the_hooks(amp: ModuleType) -> None:
    model = prepared(amp, Echo(), "O0")
    prepared(amp, model, "O2")
    model(ones())
    assert model.seen[0][0].dtype is F16
    assert len(model._forward_pre_hooks) == len(model._forward_hooks) == 1


def test_attach_replaces_what_was_attached() -> None:
    model = nn.Linear(4, 3)
    casts = half_model.ForwardCasts(level=OFF, region_dtype=F16, inputs=F16, outputs=F32)
    for _ in range(2):
        casts.attach(model)
    hooks = [value for name, value in vars(model).items() if "forward" in name]
    assert len(model._forward_pre_hooks) == len(model._forward_hooks) == 1
    half_model.detach(model)
    assert not any(hooks)


def test_detach_removes_our_hooks_and_no_others(amp: ModuleType) -> None:
    model = Echo()
    model.register_forward_pre_hook(lambda *_: None)
    model.register_forward_hook(lambda *_: None, with_kwargs=False)
    before = {name: dict(value) for name, value in vars(model).items() if "hooks" in name}
    prepared(amp, model)
    amp.deactivate()
    assert {name: dict(value) for name, value in vars(model).items() if "hooks" in name} == before


# --- the mode during a forward ---


class Nest(nn.Module):
    """Runs another model inside, and notes the mode around that."""

    def __init__(self, inner: nn.Module, fails: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self._inner = [inner]  # not a submodule: it is initialized by itself
        self._fails = fails
        self.modes: list[torch.dtype | None] = []

    def forward(self, x: Tensor) -> Tensor:
        self.modes.append(mode.dtype)
        try:
            x = self._inner[0](x)
        finally:
            self.modes.append(mode.dtype)
        if self._fails:
            raise ArithmeticError("outer")
        return x


class Failing(nn.Module):
    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self._fails = fails

    def forward(self, x: Tensor) -> Tensor:
        self.mode = mode.dtype
        if self._fails:
            raise ArithmeticError("inner")
        return self.linear(x)


IN_MODEL = {"O0": OFF, "O1": F16, "O2": OFF, "O3": OFF, "O4": BF16, "O5": OFF}


@pytest.mark.parametrize("inner", IN_MODEL)
@pytest.mark.parametrize("outer", IN_MODEL)
@pytest.mark.parametrize("fails", ["inner", "outer", None])
def test_nested_models_restore_the_mode_also_when_one_raises(
    amp: ModuleType, outer: str, inner: str, fails: str | None
) -> None:
    within = prepared(amp, Failing(fails == "inner"), inner)
    around = prepared(amp, Nest(within, fails == "outer"), outer)
    before = (mode.save(), mode.models, mode.region_dtype)
    if fails is None:
        around(ones())
    else:
        with pytest.raises(ArithmeticError, match=fails):
            around(ones())
    assert (mode.save(), mode.models, mode.region_dtype) == before
    assert around.modes == [IN_MODEL[outer]] * 2
    assert within.mode == IN_MODEL[inner]


@pytest.mark.parametrize("level", LEVELS)
def test_autocast_around_a_model_is_told_of_where_casts_act_on_every_device(
    amp: ModuleType, level: str
) -> None:
    model = prepared(amp, Echo(), level)
    process.devices = ALL_DEVICES  # as `amp.init()` of apex leaves it; torch does not know all
    with torch.autocast("cpu"), pytest.warns(UserWarning, match=r"torch\.autocast\('cpu'\)"):
        assert model(ones()).dtype is F32


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_autocast_that_is_switched_off_around_a_training_call_is_told_of(
    amp: ModuleType, level: str
) -> None:
    model = prepared(amp, nn.Linear(4, 3), level)
    with (
        torch.autocast("cpu", enabled=False),
        pytest.warns(UserWarning, match="of type Linear in one"),
    ):
        assert model(ones()).dtype is F32


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_autocast_that_is_switched_off_for_a_part_or_an_evaluation_is_as_it_should_be(
    amp: ModuleType, level: str
) -> None:
    within = prepared(amp, nn.Linear(4, 4), level)

    class Around(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                return within(x)

    model = prepared(amp, Around(), level)
    assert model(ones()).dtype is F32
    with torch.autocast("cpu", enabled=False), torch.no_grad():
        assert model(ones()).dtype is F32
    with torch.autocast("cpu", enabled=False):
        assert within.eval()(ones()).dtype is F32


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_autocast_that_is_switched_off_and_a_region_say_together_what_is_meant(
    amp: ModuleType, level: str
) -> None:
    model = prepared(amp, nn.Linear(4, 3), level)
    with torch.autocast("cpu", enabled=False), amp.half_region():
        assert model(ones()).dtype in HALVES  # which is not computed in float32
    for region in (amp.disable_casts, amp.float_region):
        with region(), torch.autocast("cpu", enabled=False):
            assert model(ones()).dtype is F32


def test_a_failing_hook_of_the_user_restores_the_mode(amp: ModuleType) -> None:
    def fail(*_: Any) -> None:
        raise ArithmeticError("hook")

    for register in ("register_forward_pre_hook", "register_forward_hook"):
        model = prepared(amp, nn.Linear(4, 3), "O1")
        handle = getattr(model, register)(fail)
        before = (mode.save(), mode.models)
        with pytest.raises(ArithmeticError, match="hook"):
            model(ones())
        assert (mode.save(), mode.models) == before
        handle.remove()


class Tree(nn.Module):
    """Calls itself for each branch; a leaf may be interrupted, after which torch calls no hook."""

    def __init__(self) -> None:
        super().__init__()
        self.leaf, self.join = nn.Linear(4, 4), nn.Linear(8, 4)

    def forward(self, tree: Any) -> Tensor:
        if tree is None:
            raise KeyboardInterrupt
        if isinstance(tree, Tensor):
            return torch.tanh(self.leaf(tree))
        return torch.tanh(self.join(torch.cat([self(branch) for branch in tree], dim=-1)))


@pytest.mark.parametrize("level", LEVELS)
def test_a_model_may_call_itself(amp: ModuleType, level: str) -> None:
    torch.manual_seed(0)
    model, tree = Tree(), [[ones(), -ones()], ones()]
    expected = copy.deepcopy(model).to(HALF_OF[level])
    prepared(amp, model, level)
    to_half = [[branch.to(HALF_OF[level]) for branch in tree[0]], tree[1].to(HALF_OF[level])]
    assert torch.equal(model(tree), expected(to_half).float())
    assert model(tree).dtype is F32


def test_after_an_interrupt_a_model_does_not_count_as_calling_itself(amp: ModuleType) -> None:
    model = prepared(amp, Tree())
    with pytest.raises(KeyboardInterrupt):
        model([ones(), None])
    assert model([ones(), ones()]).dtype is F32


# --- weights that a copy meets more than once ---


class TiedHead(nn.Module):
    """Multiplies by a weight of another module, that it holds without registering it."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.held = [weight]

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.held[0].t()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        embedding = nn.Linear(8, 8)
        self.head, self.embedding = TiedHead(embedding.weight), embedding

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embedding(x))


class Trainer:
    """Has some weights before the model that they are of."""

    def __init__(self, model: nn.Module) -> None:
        self.decayed = [param for param in model.parameters() if param.ndim > 1]
        self.model = model


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
@pytest.mark.parametrize("is_held", [False, True])
def test_a_copy_is_in_fp32_wherever_its_weights_are_met_first(
    amp: ModuleType, level: str, is_held: bool
) -> None:
    model = nn.Sequential(Tied(), nn.Linear(8, 8), nn.Linear(8, 2))
    amp.initialize(model, opt_level=level, verbosity=0)
    copied = copy.deepcopy(Trainer(model)).model if is_held else copy.deepcopy(model)
    assert {param.dtype for param in copied.parameters()} == {torch.float32}
    assert copied[0].head.held[0] is copied[0].embedding.weight
    x = torch.randn(4, 8)
    torch.testing.assert_close(copied(x), model(x), rtol=0.05, atol=0.02)


@pytest.mark.parametrize("ended", [False, True])
def test_a_copy_takes_a_state_by_assignment(amp: ModuleType, ended: bool) -> None:
    model = nn.Linear(8, 2)
    amp.initialize(model, opt_level="O2", verbosity=0)
    copied = copy.deepcopy(model)
    if ended:
        amp.deactivate()
    state = {name: torch.ones_like(value) for name, value in copied.state_dict().items()}
    copied.load_state_dict(state, assign=True)
    assert (copied.weight == 1).all()
