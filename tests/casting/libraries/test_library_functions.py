"""Functions of a library written for the test: found when it is imported, cast, put back."""

import functools
import importlib
import itertools
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import autocast_oracle as oracle
import pytest
import torch
from torch import Tensor, nn
from torch.fft import rfft  # a builtin
from torch.nn import functional as F
from torch.nn.functional import huber_loss
from torch.utils._pytree import tree_map_only

from amp_patch import amp as core
from amp_patch.casting import held_functions
from amp_patch.casting.kept_wrappers import KeptWrappers
from amp_patch.casting.libraries import library_functions, library_rules
from amp_patch.casting.libraries.library_casts import Rule, wrap
from amp_patch.casting.targets import no_half_targets
from amp_patch.levels import HALVES
from amp_patch.patching import resolve
from amp_patch.session import session
from amp_patch.weights import prepared_models

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
HALF_OF = {"O1": F16, "O2": F16, "O3": F16, "O4": BF16, "O5": BF16}

OPS = """
import torch
seen = []

def multiply(a, b, *, out=None):
    "As a kernel that takes one dtype, and no half one on the CPU."
    seen.append((a.dtype, b.dtype))
    if a.dtype is not b.dtype:
        raise TypeError("mixed dtypes")
    if a.dtype is torch.float16:
        raise TypeError("no half kernel")
    return torch.mul(a, b, out=out)

def total(values):
    return multiply(values["a"], values["b"]).sum()

class Layer:
    def __call__(self, x):
        seen.append(x.dtype)
        return x + 1.0

class Heir(Layer):
    pass

class Own(Layer):
    def __call__(self, x):
        return super().__call__(x)

class NotCalled:
    pass

from collections import Counter
from torch.nn import Linear
"""
USER = """
from made_up_library.ops import multiply
TABLE = [multiply]
"""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Give the name of a package that can be imported, and forget it and its rules afterwards."""
    package = tmp_path / "made_up_library"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "ops.py").write_text(OPS)
    (package / "user.py").write_text(USER)
    monkeypatch.syspath_prepend(tmp_path)
    rules = dict(session.libraries._rules)
    yield "made_up_library"
    session.libraries._rules.clear()
    session.libraries._rules.update(rules)
    session.libraries._awaited.discard("made_up_library.ops")
    for name in [name for name in sys.modules if name.startswith("made_up_library")]:
        del sys.modules[name]


def imported(name: str) -> ModuleType:
    return importlib.import_module(name)


class Calls(nn.Module):
    """Calls a function in its forward, on its input and on what it holds."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.function = [function]

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return self.function[0](self.layer(x), HELD)


HELD = torch.full((2, 4), 1.001)


@pytest.mark.parametrize("order", list(itertools.permutations(["register", "import", "begin"])))
def test_a_function_is_patched_whatever_comes_first(
    amp: ModuleType, library: str, order: tuple[str, ...]
) -> None:
    for what in order:
        if what == "register":
            amp.register_library_function(f"{library}.ops", "multiply", in_float="cpu")
        elif what == "import":
            user = imported(f"{library}.user")
        else:
            amp.initialize(nn.Linear(2, 2), opt_level="O2", verbosity=0)
    ops = imported(f"{library}.ops")
    original = ops.multiply.__wrapped__
    half, full = torch.ones(3, dtype=F16), torch.ones(3)
    assert user.multiply(half, full).dtype is F32
    assert ops.multiply(half, half).dtype is F16
    assert ops.seen == [(F32, F32), (F32, F32)]
    amp.deactivate()
    assert ops.multiply is original
    assert user.multiply is original
    with pytest.raises(TypeError, match="mixed"):
        user.multiply(half, full)
    amp.initialize(nn.Linear(2, 2), opt_level="O5", verbosity=0)
    assert user.multiply(half, full).dtype is F32


def test_nothing_is_patched_without_initialize(amp: ModuleType, library: str) -> None:
    amp.register_library_function(f"{library}.ops", "multiply")
    ops = imported(f"{library}.ops")
    assert not hasattr(ops.multiply, "__wrapped__")


def test_a_library_that_comes_after_the_end_is_left_alone(amp: ModuleType, library: str) -> None:
    amp.register_library_function(f"{library}.ops", "multiply")
    amp.initialize(nn.Linear(2, 2), opt_level="O1", verbosity=0)
    amp.deactivate()
    assert not hasattr(imported(f"{library}.ops").multiply, "__wrapped__")


def test_a_module_of_torchs_may_come_late(
    amp: ModuleType, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ``torch.nn.attention.flex_attention``, which nothing of torch imports."""
    folder = importlib.import_module(library).__path__[0]
    monkeypatch.setattr(torch, "__path__", [*torch.__path__, folder])
    amp.register_library_function("torch.ops_of_late", "multiply", casts="stored")
    Path(folder, "ops_of_late.py").write_text(OPS)
    amp.initialize(nn.Linear(2, 2), opt_level="O2", verbosity=0)
    ops = importlib.import_module("torch.ops_of_late")
    original = getattr(ops.multiply, "stands_for", None)
    amp.deactivate()
    del sys.modules["torch.ops_of_late"], torch.ops_of_late
    session.libraries._awaited.discard("torch.ops_of_late")
    assert ops.multiply is original


def test_what_a_user_registered_first_stands_on_it_and_both_go(
    amp: ModuleType, library: str
) -> None:
    amp.register_float_function(f"{library}.ops", "multiply")
    amp.register_library_function(f"{library}.ops", "multiply")
    amp.initialize(nn.Linear(2, 2), opt_level="O1", verbosity=0)
    ops = imported(f"{library}.ops")
    original = ops.multiply.__wrapped__.__wrapped__
    assert ops.multiply(torch.ones(3, dtype=F16), torch.ones(3, dtype=F16)).dtype is F32
    amp.deactivate()
    assert ops.multiply is original


def test_a_method_of_each_class_by_a_star(amp: ModuleType, library: str) -> None:
    amp.register_library_function(f"{library}.ops", "*.__call__", casts="stored")
    ops = imported(f"{library}.ops")
    own = vars(ops.Layer)["__call__"]
    model = amp.initialize(Calls(lambda x, held: ops.Layer()(held)), opt_level="O2", verbosity=0)
    model(torch.ones(2, 4), HELD)
    assert ops.seen == [F16]
    assert ops.Layer()(torch.ones(1)).dtype is F32
    amp.deactivate()
    assert vars(ops.Layer)["__call__"] is own


def test_a_star_stands_for_the_modules_own_classes_that_have_the_method(
    amp: ModuleType, library: str
) -> None:
    """One that inherits another's is served by that one's; what is imported is not the module's."""
    ops = imported(f"{library}.ops")
    before = {kind: vars(kind).get("__call__") for kind in (ops.Heir, ops.NotCalled)}
    of_torch, of_python = vars(nn.Linear).copy(), vars(ops.Counter).copy()
    amp.register_library_function(f"{library}.ops", "*.__call__", casts="stored")
    called = amp.initialize(Calls(lambda x, held: ops.Heir()(held)), opt_level="O5", verbosity=0)
    called(torch.ones(2, 4), HELD)
    assert ops.seen == [BF16]
    for kind in (ops.Layer, ops.Own):
        assert hasattr(vars(kind)["__call__"], "__wrapped__")
    assert {kind: vars(kind).get("__call__") for kind in before} == before
    forward = {"forward": nn.Linear.forward}  # which is replaced in half models
    assert (vars(nn.Linear), vars(ops.Counter)) == ({**of_torch, **forward}, of_python)


def test_a_method_stays_the_very_object_until_a_model_is_stored_in_half(
    amp: ModuleType, library: str
) -> None:
    """Of methods that act in such models alone; a module that comes late has them patched, too."""
    amp.register_library_function(f"{library}.ops", "Layer.__call__", casts="stored")
    ops = imported(f"{library}.ops")
    own = vars(ops.Layer)["__call__"]
    amp.initialize(nn.Linear(1, 1), opt_level="O1", verbosity=0)
    assert vars(ops.Layer)["__call__"] is own
    amp.initialize(nn.Linear(1, 1), opt_level="O2", verbosity=0)
    assert vars(ops.Layer)["__call__"].stands_for is own
    amp.deactivate()
    assert vars(ops.Layer)["__call__"] is own


def test_a_name_that_a_version_has_not_is_passed_over(amp: ModuleType, library: str) -> None:
    amp.register_library_function(f"{library}.ops", "of_another_version")
    amp.register_library_function(f"{library}.ops", "Missing.method")
    amp.initialize(nn.Linear(2, 2), opt_level="O2", verbosity=0)
    assert not hasattr(imported(f"{library}.ops").multiply, "__wrapped__")


def test_wrong_words_are_refused_before_anything_changes(amp: ModuleType, library: str) -> None:
    rules = dict(session.libraries._rules)
    for wrong in ({"casts": "double"}, {"in_float": "gpu"}):
        with pytest.raises(ValueError, match="must be one of"):
            amp.register_library_function(f"{library}.ops", "multiply", **wrong)
    with pytest.raises(TypeError, match="two strings"):
        amp.register_library_function(torch, "multiply")
    assert session.libraries._rules == rules


# --- layers and functions of torch ---

SEEN: list[tuple[torch.dtype, ...]] = []


class Noting(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        SEEN.append((x.dtype,))
        return x


class Doubling(nn.Module):
    """Doubles by a layer whose weight is half at O2; notes what the product comes out as."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4, bias=False)
        self.layer.weight.data = 2 * torch.eye(4)

    def forward(self, x: Tensor) -> Tensor:
        return wrap(self.compute, self.rule)(x)

    def compute(self, x: Tensor) -> Tensor:
        found = self.layer(x)
        SEEN.append((found.dtype,))
        return found + 1e-30

    rule = Rule("stored", "cpu")


@pytest.mark.parametrize(
    ("level", "rule", "computed", "result"),
    [
        ("O2", Rule("stored", "cpu"), F32, F16),
        ("O5", Rule("stored", "always"), F32, BF16),
        ("O5", Rule("stored"), BF16, BF16),
        ("O1", Rule("stored", "always"), F16, F16),
        ("O0", Rule("stored", "always"), F32, F32),
        ("O1", Rule("float"), F32, F32),
        ("O2", Rule("float"), F32, F16),
        ("O5", Rule("float"), F32, BF16),
        ("O0", Rule("float"), F32, F32),
        ("O0", Rule("result"), F32, F32),
    ],
)
def test_layers_inside_of_a_function_run_in_float32_too(
    amp: ModuleType, level: str, rule: Rule, computed: torch.dtype, result: torch.dtype
) -> None:
    model = Doubling()
    model.rule = rule
    outer = nn.Sequential(model, Noting())
    amp.initialize(outer, opt_level=level, verbosity=0)
    assert torch.equal(outer(torch.ones(2, 4)).float(), torch.full((2, 4), 2.0))
    assert SEEN[-2:] == [(computed,), (result,)]


class Propagating(nn.Module):
    """A graph convolution in torch's own functions, on a matrix that is no input of the model."""

    def __init__(self, matrix: Tensor) -> None:
        super().__init__()
        self.layer, self.matrix = nn.Linear(4, 4), [matrix]

    def forward(self, x: Tensor) -> Tensor:
        x = torch.sparse.mm(self.matrix[0], self.layer(x))
        SEEN.append((x.dtype,))
        return torch.sparse.addmm(x, self.matrix[0], x)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
def test_a_sparse_matrix_takes_features_of_another_dtype(
    amp: ModuleType, level: str, layout: torch.layout
) -> None:
    torch.manual_seed(0)
    matrix, x = torch.rand(3, 3).relu().to_sparse(layout=layout), torch.randn(3, 4)
    model = Propagating(matrix)
    expected = model(x)
    expected.sum().backward()
    grad, model.layer.weight.grad = model.layer.weight.grad, None
    amp.initialize(model, opt_level=level, verbosity=0)
    found = model(x)
    assert SEEN.pop() == (HALF_OF.get(level, F32),)
    found.float().sum().backward()
    assert torch.allclose(found.float(), expected, rtol=0.02, atol=0.02)
    assert torch.allclose(model.layer.weight.grad.float(), grad, rtol=0.02, atol=0.05)


class Scoring(Propagating):
    """Scores of edges: products of the features at their ends, beside what the matrix has."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        scores = torch.sparse.sampled_addmm(self.matrix[0], x, x.T, beta=0.5)
        SEEN.append((scores.dtype,))
        return scores.to_dense()


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
def test_scores_of_edges_take_features_of_another_dtype_than_the_matrix(
    amp: ModuleType, level: str
) -> None:
    torch.manual_seed(0)
    matrix, x = torch.rand(3, 3).round().to_sparse_csr(), torch.randn(3, 4)
    model = Scoring(matrix)
    exact = Scoring(matrix.double()).double()
    exact.load_state_dict(model.state_dict())
    expected = exact(x.double())
    expected.square().sum().backward()
    amp.initialize(model, opt_level=level, verbosity=0)
    found = model(x)
    assert SEEN[-1] == (HALF_OF.get(level, F32),)
    found.float().square().sum().backward()
    assert torch.allclose(found.double(), expected, rtol=0.02, atol=0.02)
    grad = exact.layer.weight.grad
    assert torch.allclose(model.layer.weight.grad.double(), grad, rtol=0.02, atol=0.05)


class ZeroRows(nn.Module):
    """Divides by the lengths of rows, of which one is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        alike = F.cosine_similarity(x, x) + torch.cosine_similarity(x, x)
        alike = alike + F.cosine_embedding_loss(x, x, torch.ones(len(x)))
        return F.normalize(x).relu() + alike.detach()[:, None]


@pytest.mark.parametrize(
    ("level", "compiled"), [("O1", False), ("O2", False), ("O2", True), ("O5", False)]
)
def test_a_row_of_zeros_can_be_normalized(amp: ModuleType, level: str, compiled: bool) -> None:
    torch.manual_seed(0)
    x = torch.cat([torch.zeros(1, 4), torch.randn(2, 4)])
    model = ZeroRows()
    expected = model(x)
    amp.initialize(model, opt_level=level, verbosity=0)
    found = torch.compile(model, backend="eager", fullgraph=True)(x) if compiled else model(x)
    assert found.float().allclose(expected, atol=4 * torch.finfo(HALF_OF[level]).eps)
    found.float().sum().backward()
    assert model.layer.weight.grad.isfinite().all()


LENGTHS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x.norm(dim=-1),
    lambda x: torch.norm(x, dim=-1),
    lambda x: torch.linalg.norm(x, dim=-1),
    lambda x: torch.linalg.vector_norm(x, dim=-1),
    lambda x: F.pairwise_distance(x, torch.zeros_like(x), eps=0.0),
]


class LengthOfLayer(nn.Module):
    def __init__(self, length: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.length = nn.Linear(4, 4, bias=False), length

    def forward(self, x: Tensor) -> Tensor:
        return self.length(self.layer(x))


def gradient_of_forces(model: LengthOfLayer, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (forces,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    loss = (forces * torch.arange(1.0, 5)).sum() * 0.001
    return torch.autograd.grad(loss, model.layer.weight)[0].float()


@pytest.mark.parametrize("level", ["O1", "O2", "O3", "O5"])
@pytest.mark.parametrize("length", LENGTHS)
def test_forces_that_come_of_a_short_length_can_be_trained(
    amp: ModuleType, length: Callable[[Tensor], Tensor], level: str
) -> None:
    """One over it leaves float16's range in between, and what comes of that does not."""
    torch.manual_seed(0)
    x = 5e-6 * torch.randn(8, 4)
    model = LengthOfLayer(length)
    nn.init.orthogonal_(model.layer.weight)
    expected = gradient_of_forces(model, x)
    amp.initialize(model, opt_level=level, verbosity=0)
    assert (gradient_of_forces(model, x) - expected).norm() < 0.1 * expected.norm()


def test_a_length_of_float32_numbers_stays_so(amp: ModuleType) -> None:
    class Lengths(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            lengths = [x.norm(), x.float().norm(), x.norm(dim=-1, dtype=F32)]
            return [length.dtype for length in lengths]

    model = amp.initialize(Lengths(4, 4), opt_level="O2", verbosity=0)
    assert model(torch.randn(3, 4)) == [F16, F32, F32]


@pytest.mark.parametrize(
    ("module", "name", "count"),
    [(F, "normalize", 1), (F, "cosine_similarity", 2), (torch.fft, "rfft", 1), (F, "mse_loss", 2)],
)
def test_a_function_of_torch_takes_few_calls_of_python(
    amp: ModuleType, module: ModuleType, name: str, count: int
) -> None:
    """No look into nested containers, and no region, in which each call of torch is one more."""
    calls: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and "amp_patch" in frame.f_code.co_filename:
            calls.append(frame.f_code.co_name)

    class Profiled(nn.Linear):  # whose device says which tensors are cast
        def forward(self, *inputs: Any) -> Any:
            sys.setprofile(note)
            try:
                return getattr(module, name)(*inputs)
            finally:
                sys.setprofile(None)

    model = amp.initialize(Profiled(4, 4), opt_level="O2", verbosity=0)
    model(*[torch.rand(3, 4)] * count)
    assert 3 <= len(calls) <= 12, calls


def test_out_is_written_to(library: str) -> None:
    ops = imported(f"{library}.ops")
    out = torch.zeros(2)
    wrap(ops.multiply, Rule("half"))(torch.ones(2), torch.ones(2), out=out)
    assert torch.equal(out, torch.ones(2))


@pytest.mark.parametrize("first", ["O0", "O2", None])
def test_a_function_of_torch_with_two_rules_is_reached_where_it_is_held(
    amp: ModuleType, first: str | None
) -> None:
    original = F.cosine_similarity
    model = Calls(original)
    if first is not None:
        amp.initialize(nn.Linear(2, 2), opt_level=first, verbosity=0)
    amp.initialize(model, opt_level="O1", verbosity=0)
    assert model.function[0](HELD.half(), HELD.half()).dtype is F32
    amp.deactivate()
    assert model.function[0] is original is F.cosine_similarity


def test_a_model_that_took_a_function_while_it_was_patched_gets_it_back(amp: ModuleType) -> None:
    original = F.normalize
    amp.initialize(nn.Linear(2, 2), opt_level="O2", verbosity=0)
    model = Calls(F.normalize)
    assert model.function[0] is not original
    amp.deactivate()
    assert model.function[0] is original is F.normalize


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_no_living_modules_are_looked_for_where_nobody_holds_a_wrapper(
    amp: ModuleType, monkeypatch: pytest.MonkeyPatch, level: str
) -> None:
    """To find them takes a tenth of a second, and wrappers are kept for the next initialize."""
    monkeypatch.setattr(
        library_functions, "_kept", KeptWrappers()
    )  # tests hold some: what they compiled
    searches: list[type] = []
    monkeypatch.setattr(held_functions, "instances", lambda base: searches.append(base) or [])
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    model = amp.initialize(model, opt_level=level, verbosity=0)
    model(torch.randn(3, 2)).sum().backward()
    amp.deactivate()
    assert library_functions._kept.ids
    assert searches == []


def test_what_somebody_keeps_out_of_reach_is_looked_for_once(
    amp: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch.compile does, for as long as the process runs."""
    monkeypatch.setattr(library_functions, "_kept", KeptWrappers())
    searches: list[type] = []
    monkeypatch.setattr(held_functions, "instances", lambda base: searches.append(base) or [])
    kept = []
    for _ in range(3):
        amp.initialize(nn.Linear(2, 2), opt_level="O2", verbosity=0)
        kept = kept or [F.normalize]  # a local variable is no place where one can be put back
        amp.deactivate()
    assert kept != [F.normalize]
    assert searches == [nn.Module]


def test_a_rule_that_comes_while_functions_cast_leaves_nothing_behind(
    amp: ModuleType, library: str
) -> None:
    original = F.cosine_similarity
    imported(f"{library}.ops")
    amp.initialize(nn.Linear(2, 2), opt_level="O1", verbosity=0)
    amp.register_library_function(f"{library}.ops", "multiply")
    assert F.cosine_similarity(torch.ones(2, 4).half(), HELD.half()).dtype is F32
    amp.deactivate()
    assert F.cosine_similarity is original


#: Losses, and what torch has no half kernel for; of half numbers and what is float32.
WIDE: dict[str, Callable[[Tensor], Tensor]] = {
    "cdist": lambda x: torch.cdist(x, torch.eye(4).to(x)),
    "cross_entropy": lambda x: F.cross_entropy(
        x, torch.arange(4), torch.arange(1.0, 5).to(torch.promote_types(x.dtype, F32))
    ),
    "ctc_loss": lambda x: F.ctc_loss(
        x[:, None], torch.tensor([[1, 2]]), torch.tensor([4]), torch.tensor([2])
    ),
    "MSELoss": lambda x: nn.MSELoss(reduction="none")(x, x.flip(0)),
    "quantile": lambda x: x.quantile(0.3, dim=1),
    "slogdet": lambda x: torch.linalg.slogdet(x)[1],
}


@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
def test_losses_and_what_has_no_half_kernel_are_float32(amp: ModuleType, level: str) -> None:
    seen: dict[str, tuple[Tensor, Tensor]] = {}

    def all_of_them(half: Tensor, _: Tensor) -> Tensor:
        assert half.dtype is HALF_OF[level]
        seen.update({name: (half, function(half)) for name, function in WIDE.items()})
        with core.float_region():
            assert F.mse_loss(half, half).dtype is F32
        return sum(found.sum() for _, found in seen.values())

    model = Calls(all_of_them)
    amp.initialize(model, opt_level=level, verbosity=0)
    model(torch.randn(4, 4), torch.ones(1)).backward()
    for name, (half, found) in seen.items():
        assert found.dtype is F32, name
        torch.testing.assert_close(
            found.double(),
            WIDE[name](half.double()),
            msg=name,
            check_dtype=False,
            rtol=1e-4,
            atol=1e-5,
        )
    assert model.layer.weight.grad.isfinite().all()


def without_half_kernel(dtype: torch.dtype) -> Iterator[tuple[str, Any, Any]]:
    """Yield path and arguments of what has none, and what float32 makes of these."""
    targets = {f"{module}.{name}" for module, found in no_half_targets().items() for name in found}
    for op in oracle.operators():
        for sample in oracle.samples(op, 2):
            given = (sample.input, *sample.args), sample.kwargs
            args, kwargs = tree_map_only(Tensor, lambda one: as_half(one, dtype), given)
            for _, path in oracle.spellings(op):
                if path in targets.difference(WAITING):
                    wide = tree_map_only(Tensor, as_float, (args, kwargs))
                    torch.manual_seed(0)
                    yield path, (args, kwargs), resolve(path)[2](*wide[0], **wide[1])


def as_half(one: Tensor, dtype: torch.dtype) -> Tensor:
    return one.detach().to(dtype) if one.dtype is F32 else one


def as_float(one: Tensor) -> Tensor:
    return one.float() if one.dtype in HALVES else one


@pytest.mark.filterwarnings("ignore:torch.*is deprecated", "ignore:A window was not provided")
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_what_has_no_half_kernel_is_float32_beside_a_model_in_half_as_well(
    amp: ModuleType, level: str
) -> None:
    """As a penalty on a half weight is: ``torch.linalg.svdvals(layer.weight)``."""
    calls = list(without_half_kernel(HALF_OF[level]))
    assert len({path for path, *_ in calls}) > 70
    amp.initialize(nn.Linear(2, 2), opt_level=level, verbosity=0)
    for path, (args, kwargs), expected in calls:
        torch.manual_seed(0)
        found = resolve(path)[2](*args, **kwargs)
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True, msg=path)


class HoldsLosses(nn.Module):
    smooth = staticmethod(F.smooth_l1_loss)

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.loss = F.mse_loss
        self.criterion = functools.partial(F.cross_entropy, label_smoothing=0.1)
        self.losses = {"l1": [F.l1_loss]}
        self.distance = torch.cdist

    def held(self) -> list[Any]:
        return [self.loss, self.smooth, self.losses["l1"][0], self.distance, huber_loss]

    def forward(self, x: Tensor) -> set[torch.dtype]:
        half = self.layer(x)
        assert half.dtype is F16
        found = [*(loss(half, x) for loss in self.held()), self.criterion(half, torch.arange(4))]
        return {one.dtype for one in found}


@pytest.mark.parametrize("beside", ["O0", "O1"])
def test_losses_that_a_model_in_half_holds_or_its_module_imported_are_float32(
    amp: ModuleType, library: str, beside: str
) -> None:
    model = HoldsLosses()
    originals = [*model.held(), F.cross_entropy]
    # one that is gone where the next one comes, and with it the functions that cast
    amp.initialize(HoldsLosses(), opt_level=beside, verbosity=0)
    amp.initialize(model, opt_level="O2", verbosity=0)
    assert model(torch.randn(4, 4)) == {F32}
    pickle.loads(pickle.dumps(model.held()))
    imported(f"{library}.ops")
    amp.register_library_function(f"{library}.ops", "multiply")
    assert model(torch.randn(4, 4)) == {F32}
    amp.deactivate()
    assert [*model.held(), model.criterion.func] == originals


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
@pytest.mark.parametrize(("beside", "names_it"), [("O0", True), ("O1", True), ("O1", False)])
def test_losses_of_a_module_beside_the_models_are_float32(
    amp: ModuleType, monkeypatch: pytest.MonkeyPatch, level: str, beside: str, names_it: bool
) -> None:
    """A file of losses, say, whose functions the model's forward calls.

    In its tables where the file of the model's class names it, or what it has.
    """
    losses = ModuleType("file_of_losses")
    own: dict[str, Any] = {
        "torch": torch,
        "mse_loss": F.mse_loss,
        "table": {"l1": F.l1_loss},
        "compiled": torch.compile(F.huber_loss, backend="eager"),
    }
    vars(losses).update(own)
    monkeypatch.setitem(sys.modules, losses.__name__, losses)
    if names_it:  # as by ``import file_of_losses``
        monkeypatch.setattr(sys.modules[__name__], "file_of_losses", losses, raising=False)
    found: list[Tensor] = []

    def all_of_them(x: Tensor, _: Tensor) -> Tensor:
        held = (losses.table["l1"], losses.compiled) if names_it else ()
        functions = losses.mse_loss, *held
        found[:] = [function(x.detach(), x.detach() + 1) for function in functions]
        return x

    amp.initialize(nn.Linear(4, 4), opt_level=beside, verbosity=0)
    model = amp.initialize(Calls(all_of_them), opt_level=level, verbosity=0)
    model(torch.randn(2, 4), HELD)
    assert {one.dtype for one in found} == {F32}
    amp.deactivate()
    assert (losses.mse_loss, losses.table["l1"]) == (F.mse_loss, F.l1_loss)
    losses.compiled(torch.ones(2), torch.ones(2))
    torch._dynamo.reset()


def test_tables_of_a_file_that_has_names_of_torch_alone_are_put_back(
    amp: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = ModuleType("file_of_losses")
    vars(losses).update(mse_loss=F.mse_loss, table={"mse": F.mse_loss})
    nameless = ModuleType("nameless")
    del nameless.__name__
    monkeypatch.setitem(sys.modules, losses.__name__, losses)
    for name, module in (("file_of_losses", losses), ("nameless", nameless)):
        monkeypatch.setattr(sys.modules[__name__], name, module, raising=False)
    found: list[Tensor] = []

    def loss(x: Tensor, _: Tensor) -> Tensor:
        found.append(losses.table["mse"](x.detach(), x.detach() + 1))
        return x

    original = F.mse_loss
    model = amp.initialize(Calls(loss), opt_level="O2", verbosity=0)
    model(torch.randn(2, 4), HELD)
    assert found[0].dtype is F32
    amp.deactivate()
    assert losses.table["mse"] is losses.mse_loss is F.mse_loss is original


#: What acts in models alone that are stored in half.
WAITING = [
    f"{module}.{name}"
    for module, rows in library_rules.RULES.items()
    for name, (casts, *_) in rows.items()
    if module.partition(".")[0] == "torch"
    and casts in ("stored", "wide", "rounded", "lengths", "logits", "steep", "powers")
]


def beneath_casts(path: str) -> Any:
    """Return what stands at a path, without what O1 and O4 put there."""
    found = resolve(path)[2]
    while _is_wrapper(found) and not hasattr(found, "stands_for"):
        found = found.__wrapped__
    return found


def _is_wrapper(function: Any) -> bool:
    """Tell amp_patch's from torch's own, around which torch has put one (`__pow__`)."""
    around = getattr(function, "__globals__", {}).get("__name__", "")
    return hasattr(function, "__wrapped__") and around.startswith("amp_patch.")


def test_functions_of_torch_stay_the_very_objects_until_a_model_is_stored_in_half(
    amp: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside = HoldsLosses()
    originals = [resolve(path)[2] for path in WAITING]
    amp.initialize(beside, opt_level="O0", verbosity=0)
    assert [resolve(path)[2] for path in WAITING] == originals
    for level in ("O1", "O4", "O1"):
        amp.initialize(nn.Linear(4, 4) if level == "O4" else beside, opt_level=level, verbosity=0)
        assert [beneath_casts(path) for path in WAITING] == originals
    assert beside(torch.randn(4, 4)) == {F32}
    with monkeypatch.context() as patch:
        patch.setattr(prepared_models, "ForwardCasts", None)
        with pytest.raises(TypeError, match="NoneType"):
            amp.initialize(nn.Linear(4, 4), opt_level="O2", verbosity=0)
    assert [beneath_casts(path) for path in WAITING] == originals
    model = amp.initialize(HoldsLosses(), opt_level="O2", verbosity=0)
    assert [beneath_casts(path).stands_for for path in WAITING] == originals
    for one in (model, beside, model):
        assert one(torch.randn(4, 4)) == {F32}
    amp.deactivate()
    assert [resolve(path)[2] for path in WAITING] == originals
    assert model.held() == beside.held() == HoldsLosses().held()
    amp.initialize(nn.Linear(4, 4), opt_level="O0", verbosity=0)
    assert [resolve(path)[2] for path in WAITING] == originals


def test_a_builtin_that_the_module_of_a_model_imported_by_name_is_put_back(amp: ModuleType) -> None:
    original = rfft
    model = HoldsLosses()
    amp.initialize(model, opt_level="O2", verbosity=0)
    assert rfft is torch.fft.rfft is not original
    amp.deactivate()
    assert rfft is original


def test_what_a_later_module_has_imported_by_name_is_put_back(
    amp: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = nn.functional.mse_loss
    amp.initialize(nn.Linear(2, 2), opt_level="O2", verbosity=0)
    late: Any = ModuleType("late")
    monkeypatch.setitem(sys.modules, "late", late)
    exec("from torch.nn.functional import mse_loss", vars(late))
    assert late.mse_loss is nn.functional.mse_loss is not original
    amp.deactivate()
    assert late.mse_loss is original


class Spectral(nn.Module):
    """As a Fourier neural operator: a product with complex weights between two transforms."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.skip, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)
        self.weight = nn.Parameter(torch.randn(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x)
        mixed = torch.fft.irfft(torch.fft.rfft(x) * torch.view_as_complex(self.weight), n=6)
        frames = torch.stft(x, 4, window=torch.ones(4), return_complex=True)
        back = torch.istft(frames, 4, window=torch.ones(4), length=6)
        assert mixed.dtype is back.dtype is x.dtype
        assert frames.dtype is torch.complex64
        return self.head(self.skip(x) + mixed + back)


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_fourier_transforms_in_a_model_in_half_are_computed_in_float32(
    amp: ModuleType, level: str
) -> None:
    model, inputs = Spectral(), torch.randn(5, 6)
    expected = model(inputs).detach()
    amp.initialize(model, opt_level=level, verbosity=0)
    found = model(inputs)
    found.sum().backward()
    tolerance = 64 * torch.finfo(HALF_OF[level]).eps
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
    assert model.weight.grad.isfinite().all()


@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.avg_pool3d(x, 2),
        nn.LocalResponseNorm(3),
        lambda x: F.rrelu(x, lower=0.2, upper=0.2, training=True),
        lambda x: F.interpolate(x[0], size=(3, 3), mode="bicubic", antialias=True),
        lambda x: F.interpolate(x[0], size=(3, 3), mode="bilinear", antialias=True),
    ],
    ids=["avg_pool3d", "local_response_norm", "rrelu", "bicubic", "bilinear"],
)
def test_what_has_no_half_kernel_on_the_cpu_alone_is_computed_in_float32_there(
    amp: ModuleType, level: str, function: Callable[[Tensor], Tensor]
) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv3d(4, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            inner = function(self.conv(x))
            assert inner.dtype is self.conv.weight.dtype
            return inner

    model, inputs = Model(), torch.randn(1, 4, 4, 4, 4)
    expected = model(inputs).detach()
    amp.initialize(model, opt_level=level, verbosity=0)
    found = model(inputs)
    found.sum().backward()
    tolerance = 16 * torch.finfo(HALF_OF[level]).eps
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
    assert model.conv.weight.grad.isfinite().all()


def is_pickled(function: Any) -> bool:
    try:
        return pickle.loads(pickle.dumps(function)) is function
    except (pickle.PicklingError, AttributeError, RuntimeError, TypeError):
        return False


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
@pytest.mark.parametrize(
    "owner", [Tensor, F, torch.linalg, torch.fft, torch.autograd, torch.autograd.graph]
)
def test_what_torch_has_of_functions_is_pickled_as_before(
    amp: ModuleType, level: str, owner: Any
) -> None:
    """By the places where a script finds them: arguments of a pool's functions may be some."""
    names = [name for name in dir(owner) if callable(getattr(owner, name))]
    before = {name: pickled for name in names if is_pickled(pickled := getattr(owner, name))}
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    replaced = {name for name, one in before.items() if getattr(owner, name) is not one}
    assert {name for name in replaced if not is_pickled(getattr(owner, name))} == set()
