"""Products, contractions, cells and norms, whose usual calls have wrappers of their own: drawn
calls against casts by hand, bit for bit, with their gradients."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.utils.checkpoint
from cache_programs import shared_fixtures
from hypothesis import given
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from amp_patch.casting import shared_casts
from amp_patch.session import session

HALF = torch.float16
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
#: Looked up when they are called, for they are patched then.
PRODUCTS: dict[str, tuple[int, Callable[[Any, Any], Any]]] = {
    "torch.matmul": (2, lambda a, b: torch.matmul(a, b)),
    "torch.matmul, batches": (3, lambda a, b: torch.matmul(a, b)),
    "torch.mm": (2, lambda a, b: torch.mm(a, b)),
    "torch.mm, by name": (2, lambda a, b: torch.mm(a, mat2=b)),
    "torch.bmm": (3, lambda a, b: torch.bmm(a, b)),
    "@": (2, lambda a, b: a @ b),
    "Tensor.matmul": (3, lambda a, b: a.matmul(b)),
    "Tensor.mm": (2, lambda a, b: a.mm(b)),
    "Tensor.bmm": (3, lambda a, b: a.bmm(b)),
}
CONTRACTIONS: dict[str, tuple[str, tuple[tuple[int, ...], ...]]] = {
    "a view": ("ij->ji", ((3, 4),)),
    "a product": ("ij,jk->ik", ((3, 4), (4, 3))),
    "experts": ("bi,eij->bej", ((3, 4), (2, 4, 3))),
    "number": ("ij,->ij", ((3, 4), ())),
    "diagonal": ("ii,i->i", ((3, 3), (3,))),
    "three": ("bej,eji,be->bi", ((3, 2, 4), (2, 4, 3), (3, 2))),
}
CELLS: dict[str, tuple[int, Callable[..., Tensor]]] = {
    "tanh": (1, lambda x, h, *rest, **named: torch.rnn_tanh_cell(x, h[0], *rest, **named)),
    "relu": (1, lambda x, h, *rest, **named: torch.rnn_relu_cell(x, h[0], *rest, **named)),
    "gru": (3, lambda x, h, *rest, **named: torch.gru_cell(x, h[0], *rest, **named)),
    "lstm": (4, lambda x, h, *rest, **named: torch.cat(torch.lstm_cell(x, h, *rest, **named))),
}
NORMS: dict[str, Callable[..., Tensor]] = {
    "F.layer_norm": lambda x, w, b: F.layer_norm(x, (4,), w, b, 1e-3),
    "F.layer_norm, by name": lambda x, w, b: F.layer_norm(x, (4,), weight=w, bias=b),
    "torch.layer_norm": lambda x, w, b: torch.layer_norm(x, (4,), w, b, 1e-3, False),
    "F.group_norm": lambda x, w, b: F.group_norm(x, 2, w, b, 1e-3),
    "torch.group_norm": lambda x, w, b: torch.group_norm(x, 2, w, b, 1e-3, False),
    "F.rms_norm": lambda x, w, _: F.rms_norm(x, (4,), w, 1e-3),
    "torch.rms_norm": lambda x, w, _: torch.rms_norm(x, (4,), w, 1e-3),
}
LENGTHS: dict[str, Callable[[Tensor], Tensor]] = {
    "Tensor.norm": lambda x: x.norm(),
    "Tensor.norm of rows": lambda x: x.norm(dim=-1, keepdim=True),
    "torch.norm": lambda x: torch.norm(x, 1.5, [0, 1]),
    "torch.norm, by name": lambda x: torch.norm(input=x, p=3),
    "torch.norm to a dtype": lambda x: torch.norm(x, dim=0, dtype=torch.float64),
    "linalg.norm": lambda x: torch.linalg.norm(x, dim=(0,)),
    "linalg.norm, nuclear": lambda x: torch.linalg.norm(x, "nuc"),
    "vector_norm": lambda x: torch.linalg.vector_norm(x, 2, None, True),
    "vector_norm, by name": lambda x: torch.linalg.vector_norm(x=x, ord=1, dim=1),
}
KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda tensor: tensor.requires_grad_(),
    "parameter": nn.Parameter,
    "frozen": lambda tensor: tensor,
    "transposed": lambda tensor: _transposed(tensor).requires_grad_(),
}


def _transposed(tensor: Tensor) -> Tensor:
    return tensor.mT.contiguous().mT if tensor.dim() > 1 else tensor


operands = st.tuples(st.sampled_from(list(KINDS)), st.sampled_from(FLOATS))


class Marked(Tensor):
    """A user's class of tensors."""


def drawn(operand: tuple[str, torch.dtype], *shape: int) -> Tensor:
    kind, dtype = operand
    return KINDS[kind](torch.randn(shape).to(dtype))


def run(call: Callable[..., Tensor], tensors: list[Tensor]) -> list[Any]:
    """Return a call's result and the gradients of what it was given."""
    result = call(*tensors)
    wanted = [tensor for tensor in tensors if tensor.requires_grad]
    grads = torch.autograd.grad(result.square().float().sum(), wanted) if wanted else ()
    return [result.detach(), *grads]


def assert_same(found: list[Any], expected: list[Any]) -> None:
    assert [one.dtype for one in found] == [one.dtype for one in expected]
    assert all(map(torch.equal, found, expected))


def assert_so_twice(call: Callable[..., Tensor], tensors: list[Tensor], expected: Any) -> None:
    """Assert that a call gives this, the second time with cached casts of parameters."""
    model = nn.ParameterList(one for one in tensors if type(one) is nn.Parameter)
    session.cache.add_model(model)
    for _ in range(2):
        assert_same(run(call, tensors), expected)


@pytest.mark.parametrize("name", PRODUCTS)
@shared_fixtures
@given(left=operands, right=operands, seed=st.integers(0, 99))
def test_a_product_is_that_of_the_casts(
    o1: Any, name: str, left: tuple[str, torch.dtype], right: tuple[str, torch.dtype], seed: int
) -> None:
    dims, call = PRODUCTS[name]
    torch.manual_seed(seed)
    batch = (2,) * (dims - 2)
    tensors = [drawn(left, *batch, 3, 4), drawn(right, *batch, 4, 3)]
    with o1.disable_casts():
        expected = run(lambda a, b: call(a.to(HALF), b.to(HALF)), tensors)
    assert_so_twice(call, tensors, expected)


SUMS: dict[str, tuple[int, Callable[..., Tensor]]] = {
    "addmm": (2, lambda a, b, c: torch.addmm(a, b, c)),
    "addmm, weighted": (2, lambda a, b, c: torch.addmm(a, b, c, beta=0.5)),
    "baddbmm": (3, lambda a, b, c: torch.baddbmm(a, b, c)),
}


@pytest.mark.parametrize("name", SUMS)
@shared_fixtures
@given(kinds=st.tuples(operands, operands, operands), seed=st.integers(0, 99))
def test_a_sum_with_a_product_is_that_of_the_casts(
    o1: Any, name: str, kinds: tuple[tuple[str, torch.dtype], ...], seed: int
) -> None:
    dims, call = SUMS[name]
    torch.manual_seed(seed)
    batch = (2,) * (dims - 2)
    shapes = ((3, 3), (3, 4), (4, 3))
    tensors = [drawn(kind, *batch, *shape) for kind, shape in zip(kinds, shapes, strict=True)]
    with o1.disable_casts():
        expected = run(lambda *given: call(*(one.to(HALF) for one in given)), tensors)
    assert_so_twice(call, tensors, expected)


@pytest.mark.parametrize("name", CONTRACTIONS)
@shared_fixtures
@given(kinds=st.lists(operands, min_size=3, max_size=3), listed=st.booleans(), seed=st.integers(0))
def test_a_contraction_is_that_of_the_casts(
    o1: Any, name: str, kinds: list[tuple[str, torch.dtype]], listed: bool, seed: int
) -> None:
    equation, shapes = CONTRACTIONS[name]
    torch.manual_seed(seed % 2**32)
    tensors = [drawn(kind, *shape) for kind, shape in zip(kinds, shapes, strict=False)]

    def call(*tensors: Tensor) -> Tensor:
        return torch.einsum(equation, tensors) if listed else torch.einsum(equation, *tensors)

    with o1.disable_casts():
        expected = run(lambda *tensors: call(*(one.to(HALF) for one in tensors)), tensors)
    assert_so_twice(call, tensors, expected)


@pytest.mark.parametrize("name", CELLS)
@shared_fixtures
@given(
    kinds=st.lists(operands, min_size=3, max_size=3),
    weights=operands | st.just(("parameter", torch.float32)),
    biases=st.sampled_from(["none", "given", "by name"]),
    seed=st.integers(0, 99),
)
def test_a_cell_is_that_of_the_casts(
    o1: Any,
    name: str,
    kinds: list[tuple[str, torch.dtype]],
    weights: tuple[str, torch.dtype],
    biases: str,
    seed: int,
) -> None:
    gates, cell = CELLS[name]
    torch.manual_seed(seed)
    tensors = [drawn(kind, 2, 4) for kind in kinds]
    tensors += [drawn(weights, gates * 4, 4) for _ in range(2)]
    if biases != "none":
        tensors += [drawn(one, gates * 4) for one in _plain(weights, weights)]

    def call(x: Tensor, h: Tensor, c: Tensor, *rest: Tensor) -> Tensor:
        given, named = (rest[:2], rest[2:]) if biases == "by name" else (rest, ())
        found = cell(x, (h, c), *given, **dict(zip(("b_ih", "b_hh"), named, strict=False)))
        return found + 0 * c.to(HALF).sum()  # an RNN and a GRU have no cell state

    with o1.disable_casts():
        expected = run(lambda *given: call(*(one.to(HALF) for one in given)), tensors)
    assert_so_twice(call, tensors, expected)


def test_a_computed_weight_of_a_cell_is_not_looked_for_in_the_models(o1: Any) -> None:
    session.cache.add_model(nn.Linear(1, 1))
    weights = [torch.ones(3, 1, requires_grad=True) * 1 for _ in range(2)]
    assert torch.gru_cell(torch.ones(1, 1), torch.ones(1, 1), *weights).dtype is HALF
    assert session.cache._foreign == {}


def test_a_cell_casts_to_the_dtype_of_its_rule(amp: ModuleType) -> None:
    model = nn.GRUCell(4, 4)
    amp.initialize(model, opt_level="O1", rules={"gru_cell": "bfloat16"}, verbosity=0)
    assert model(torch.randn(2, 4)).dtype is torch.bfloat16


@pytest.mark.parametrize("name", NORMS)
@shared_fixtures
@given(
    x=operands,
    weight=st.none() | operands,
    bias=st.none() | operands,
    seed=st.integers(0, 99),
)
def test_a_norm_is_that_of_float32(
    o1: Any,
    name: str,
    x: tuple[str, torch.dtype],
    weight: tuple[str, torch.dtype] | None,
    bias: tuple[str, torch.dtype] | None,
    seed: int,
) -> None:
    call = NORMS[name]
    torch.manual_seed(seed)
    given_ = [None if one is None else drawn(one, 4) for one in _plain(weight, bias)]
    if "rms" in name or weight is None:  # torch's group norm has no backward of a bias alone
        given_[1] = None
    tensors = [drawn(x, 2, 4), *(one for one in given_ if one is not None)]

    def called(cast: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
        def run_with(x: Tensor, *rest: Tensor) -> Tensor:
            left = iter(map(cast, rest))
            return call(cast(x), *[None if one is None else next(left) for one in given_])

        return run_with

    with o1.disable_casts():
        expected = run(called(Tensor.float), tensors)
    assert_same(run(called(lambda tensor: tensor), tensors), expected)


@pytest.mark.parametrize("name", LENGTHS)
@shared_fixtures
@given(x=operands, seed=st.integers(0, 99))
def test_a_length_is_that_of_float32(
    o1: Any, name: str, x: tuple[str, torch.dtype], seed: int
) -> None:
    torch.manual_seed(seed)
    tensors = [drawn(x, 3, 4)]
    with o1.disable_casts():
        expected = run(lambda x: LENGTHS[name](x.float()), tensors)
    assert_same(run(LENGTHS[name], tensors), expected)


@pytest.mark.parametrize("options", [{}, {"dim": 0}])
def test_a_length_of_half_is_left_alone_where_casts_are_off(o1: Any, options: Any) -> None:
    half, seen = torch.ones(2, 4, dtype=HALF), []

    @torch.library.custom_op("amp_patch_tests::own_length", mutates_args=())
    def own_length(x: Tensor) -> Tensor:
        seen.append(torch.linalg.vector_norm(x, **options).dtype)
        return x.clone()

    own_length(half)
    with o1.disable_casts():
        seen.append(torch.linalg.vector_norm(half, **options).dtype)
    seen.append(torch.linalg.vector_norm(half.to("meta"), **options).dtype)
    out = torch.empty(4 if options else (), dtype=HALF)
    seen.append(torch.linalg.vector_norm(half, **options, out=out).dtype)
    assert seen == [HALF] * 4
    with torch.inference_mode():
        assert torch.linalg.vector_norm(half, **options).dtype is torch.float32


def _plain(*drawn: Any) -> list[Any]:
    """Vectors have no transpose."""
    return [one and (one[0].replace("transposed", "plain"), one[1]) for one in drawn]


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("of", ["left", "right"])
def test_a_sparse_matrix_is_multiplied_in_float32(o1: Any, half: bool, of: str) -> None:
    dense = torch.eye(3, dtype=HALF if half else torch.float32)
    other = torch.randn(3, 3, dtype=HALF)
    pair = (dense.to_sparse(), other) if of == "left" else (other, dense.to_sparse())
    result = torch.mm(*pair)
    assert result.dtype is torch.float32
    assert torch.equal(result.to_dense() if result.is_sparse else result, other.float())


@pytest.mark.parametrize("kind", [lambda tensor: tensor, nn.Parameter])
@pytest.mark.parametrize("block", ["disable_casts", None])
def test_a_block_without_casts_has_none_in_products(o1: Any, block: str | None, kind: Any) -> None:
    left, right = torch.ones(2, 2), kind(torch.ones(2, 2))
    with o1.disable_casts() if block else nullcontext():
        assert torch.matmul(left, right).dtype is (torch.float32 if block else HALF)


@pytest.mark.parametrize("kind", [lambda tensor: tensor, nn.Parameter])
def test_an_operators_own_code_is_left_alone(o1: Any, kind: Any) -> None:
    seen: list[torch.dtype] = []

    @torch.library.custom_op("amp_patch_tests::own_product", mutates_args=())
    def own_product(a: Tensor, b: Tensor) -> Tensor:
        seen.append(torch.mm(a, kind(b)).dtype)
        return a.clone()

    own_product(torch.ones(2, 2), torch.ones(2, 2))
    assert seen == [torch.float32]


@pytest.mark.parametrize("name", NORMS)
def test_a_norm_of_half_is_left_alone_where_casts_are_off(o1: Any, name: str) -> None:
    half, weight = torch.ones(2, 4, dtype=HALF), torch.ones(4)
    seen: list[torch.dtype] = []

    def norm(weight: Tensor | None) -> torch.dtype:
        return NORMS[name](half, weight, weight).dtype

    @torch.library.custom_op("amp_patch_tests::own_norm", mutates_args=())
    def own_norm(x: Tensor) -> Tensor:
        seen.append(NORMS[name](x, None, None).dtype)
        return x.clone()

    own_norm(half)
    assert norm(weight) is norm(None) is torch.float32
    with o1.disable_casts():
        assert norm(None) is HALF
    with torch.inference_mode():
        assert norm(weight) is torch.float32
    assert seen == [HALF]
    assert NORMS[name](half.to("meta"), None, None).dtype is HALF  # the model is on the CPU


@pytest.mark.parametrize("kind", [lambda tensor: tensor, nn.Parameter])
@pytest.mark.parametrize("block", [torch.inference_mode, torch.no_grad])
def test_products_without_grad_are_cast_too(o1: Any, block: Any, kind: Any) -> None:
    with block():
        assert torch.mm(torch.ones(2, 2), kind(torch.ones(2, 2))).dtype is HALF


#: Usual calls of an activation and a weight, of one of each kind of wrapper that casts weights.
OF_A_WEIGHT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "layer": lambda x, weight: F.linear(x, weight),
    "product": lambda x, weight: x @ weight,
    "contraction": lambda x, weight: torch.einsum("bi,ij->bj", x, weight),
    "cell": lambda x, weight: torch.rnn_relu_cell(x, x, weight, weight),
}


@pytest.mark.parametrize("name", OF_A_WEIGHT)
@pytest.mark.parametrize("block", [torch.inference_mode, torch.no_grad])
def test_without_grad_a_weight_is_cast_as_it_is_now(o1: Any, block: Any, name: str) -> None:
    call, model = OF_A_WEIGHT[name], nn.ParameterList([torch.randn(4, 4)])
    session.cache.add_model(model)
    x, weight = torch.randn(4, 4), model[0]

    def check() -> None:
        with o1.disable_casts():
            expected = call(x.half(), weight.half())
        with block():
            found = call(x, weight)
        assert (found.requires_grad, found.dtype) == (False, HALF)
        assert torch.equal(found, expected)

    check()
    call(x, weight).sum().backward()  # whose cast is kept
    check()
    weight.data.mul_(2)  # moves no version
    check()
    weight.data = torch.randn(4, 4)
    check()
    trained = call(x, weight)  # no cast of the block above is in its graph
    (grad,) = torch.autograd.grad(trained.sum(), [weight])
    assert grad.dtype is torch.float32


def test_a_weight_that_was_elsewhere_without_grad_is_cast_anew(o1: Any) -> None:
    model, x = nn.ParameterList([torch.ones(4, 4)]), torch.ones(1, 4)
    session.cache.add_model(model)
    weight, memory = model[0], model[0].data
    F.linear(x, weight)  # whose cast is kept
    weight.data = torch.zeros(4, 4)  # an average, say
    with torch.no_grad():
        assert F.linear(x, weight).tolist() == [[0.0] * 4]
    memory.fill_(2)
    weight.data = memory
    assert F.linear(x, weight).tolist() == [[8.0] * 4]


@pytest.mark.parametrize("name", OF_A_WEIGHT)
def test_a_checkpoint_casts_its_weights_once(o1: Any, name: str) -> None:
    call, model = OF_A_WEIGHT[name], nn.ParameterList([torch.randn(4, 4)])
    session.cache.add_model(model)
    x = torch.randn(4, 4, requires_grad=True)
    torch.utils.checkpoint.checkpoint(call, x, model[0], use_reentrant=True)
    assert len(session.cache.casts()) == 1


@pytest.mark.parametrize("place", [0, 1])
def test_tensors_of_a_users_class_are_cast_too(o1: Any, place: int) -> None:
    pair = [torch.ones(2, 2), torch.ones(2, 2)]
    pair[place] = pair[place].as_subclass(Marked)
    result = torch.matmul(*pair)
    assert (type(result), result.dtype) == (Marked, HALF)


def test_what_no_rule_casts_stays(o1: Any) -> None:
    double, whole = torch.ones(2, 2, dtype=torch.float64), torch.ones(2, 2, dtype=torch.int64)
    assert torch.matmul(double, double).dtype is torch.float64
    assert torch.matmul(whole, whole).dtype is torch.int64
    result = torch.empty(2, 2)
    assert torch.matmul(torch.ones(2, 2), torch.ones(2, 2), out=result) is result


@pytest.mark.parametrize("kind", OF_A_WEIGHT)
def test_a_weight_is_read_as_it_is_now_without_grad_and_in_a_traced_graph(
    o1: Any, kind: str
) -> None:
    model, x = nn.ParameterList([torch.ones(2, 2)]), torch.ones(2, 2)
    session.cache.add_model(model)
    assert OF_A_WEIGHT[kind](x, model[0]).any()  # with a cast that is cached
    graph = make_fx(lambda x: OF_A_WEIGHT[kind](x, model[0]))(x)
    model[0].data.zero_()  # which no version tells of
    with torch.no_grad():
        assert not OF_A_WEIGHT[kind](x, model[0]).any()
    assert not graph(x).any()


def casts_under(results: list[Tensor]) -> int:
    """Count the nodes of the results' graphs that cast."""
    found: set[Any] = set()
    open_nodes: list[Any] = [result.grad_fn for result in results]
    while open_nodes:
        node = open_nodes.pop()
        if node is not None and node not in found:
            found.add(node)
            open_nodes += [before for before, _ in node.next_functions]
    return sum("ToCopy" in node.name() for node in found)


def test_products_with_weights_share_the_cast_of_their_input(o1: Any) -> None:
    x = torch.ones(2, 2, requires_grad=True) * 1
    weights = [nn.Parameter(torch.ones(2, 2)) for _ in range(3)]
    assert casts_under([x @ weight for weight in weights]) == 1 + len(weights)


def test_layers_of_computed_weights_share_the_cast_of_their_input(o1: Any) -> None:
    x, *weights = (torch.ones(2, 2, requires_grad=True) * 1 for _ in range(4))
    assert casts_under([F.linear(x, weight) for weight in weights]) == 1 + len(weights)


def test_contractions_with_weights_share_the_casts_of_input_and_weight(o1: Any) -> None:
    x, model = torch.ones(3, 4, requires_grad=True) * 1, nn.ParameterList([torch.ones(2, 4, 3)])
    session.cache.add_model(model)
    results = [torch.einsum("bi,eij->bej", x, model[0]) for _ in range(3)]
    assert casts_under(results) == 2
    listed = [torch.einsum("bi,eij->bej", [x, model[0]]) for _ in range(3)]
    assert casts_under(listed) == 4  # the weight's alone is shared


def test_a_view_by_an_equation_is_of_a_cast_of_its_own(o1: Any) -> None:
    x, weight = torch.ones(2, 2, requires_grad=True) * 1, nn.Parameter(torch.ones(2, 2))
    product = x @ weight
    # may be written to, and the product's backward reads its cast
    torch.einsum("ij->ji", x).mul_(2)
    (grad,) = torch.autograd.grad(product.sum(), [weight])
    assert torch.equal(grad, torch.full((2, 2), 2.0))


def test_a_contraction_of_activations_alone_notes_no_cast(o1: Any) -> None:
    query, key = (torch.ones(2, 2, requires_grad=True) * 1 for _ in range(2))
    assert torch.einsum("ij,kj->ik", query, key).dtype is HALF
    assert shared_casts.last_cast(query, HALF) is None
    assert shared_casts.last_cast(key, HALF) is None


def test_a_product_of_two_activations_notes_no_cast(o1: Any) -> None:
    query, key = torch.ones(2, 2, requires_grad=True), torch.ones(2, 2, requires_grad=True)
    result = torch.matmul(query, key)
    assert result.dtype is HALF  # and its graph holds both casts
    assert shared_casts.last_cast(query, HALF) is None
    assert shared_casts.last_cast(key, HALF) is None


def test_a_weight_on_the_left_is_cast_once(o1: Any) -> None:
    model = nn.ParameterList([torch.ones(2, 2)])
    session.cache.add_model(model)
    results = [model[0] @ torch.ones(2, 2) for _ in range(2)]
    assert len({result.grad_fn.next_functions[0][0] for result in results}) == 1


@pytest.mark.parametrize("dtypes", [FLOATS, FLOATS[1:] + FLOATS[:1], FLOATS[2:] + FLOATS[:2]])
def test_a_norm_whose_weights_come_by_name_is_that_of_float32(
    o1: Any, dtypes: tuple[torch.dtype, ...]
) -> None:
    x, weight, bias = (torch.randn(2, 4).to(dtypes[0]), *map(torch.ones(4).to, dtypes[1:]))
    with o1.disable_casts():
        expected = F.layer_norm(x.float(), (4,), weight.float(), bias.float())
    for function in (F.layer_norm, torch.layer_norm):
        assert_same([function(x, (4,), weight=weight, bias=bias)], [expected])
        assert_same([function(x, (4,), weight, bias=bias)], [expected])


@pytest.mark.parametrize("name", ["conv2d", "conv_transpose2d"])
def test_a_layer_takes_options_by_name(o1: Any, name: str) -> None:
    weight = nn.Parameter(torch.randn((3, 2, 3, 3) if name == "conv2d" else (2, 3, 3, 3)))
    image, bias = torch.randn(1, 2, 6, 6), nn.Parameter(torch.randn(3))
    options = {"stride": 2, "padding": (1, 1)}
    function = getattr(F, name)
    with o1.disable_casts():
        expected = function(image.half(), weight.half(), bias.half(), **options).detach()
    for found in (
        function(image, weight, bias, **options),
        function(image, weight, bias=bias, **options),
    ):
        assert_same([found.detach()], [expected])
