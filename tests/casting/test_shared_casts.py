"""The shared cast of an activation, against programs in which every use casts it anew."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from cast_counter import CastCounter
from hypothesis import given
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from amp_patch.casting import shared_casts
from amp_patch.casting.mode import mode
from amp_patch.casting.shared_casts import CAST, shared_cast

HALF = torch.float16
Program = list[tuple[str, int]]


@pytest.fixture(autouse=True)
def forget_last() -> None:
    shared_casts.forget()


class Run:
    """Uses activations in half, writes to them, and differentiates.

    All values are small integers, so that sums in half are exact, in whatever order.

    Attributes:
        seen: every output and gradient, in order.
    """

    def __init__(self, cast: Callable[[Tensor, torch.dtype], Tensor]) -> None:
        self.cast = cast
        self.weight = torch.tensor([[1.0, 0.0], [-1.0, 1.0]], dtype=HALF, requires_grad=True)
        self.leaves = [torch.ones(2, 2, requires_grad=bool(number)) for number in range(3)]
        self.activations: list[Tensor] = [leaf * 1 for leaf in self.leaves] + self.leaves
        self.outputs: list[Tensor] = []
        self.seen: list[tuple[str, Any]] = []

    def execute(self, program: Program) -> list[tuple[str, Any]]:
        for operation, number in program:
            activation = self.activations[number % len(self.activations)]
            self.use(activation, number)
            getattr(self, operation)(activation, number)
            self.use(activation, number)
        self.backward(self.activations[0], 0)
        return self.seen

    def use(self, activation: Tensor, number: int) -> None:
        dtype = HALF if number % 5 else torch.bfloat16
        output = self.cast(activation, dtype) @ self.weight.to(dtype)
        self.outputs.append(output)
        self.seen.append(("output", (output.detach().clone(), output.requires_grad)))

    def use_without_grad(self, activation: Tensor, number: int) -> None:
        with torch.no_grad() if number % 2 else torch.inference_mode():
            self.use(activation, number)
        self.outputs.pop()

    def write_in_place(self, activation: Tensor, number: int) -> None:
        with torch.no_grad():
            activation.add_(1).remainder_(3)

    def write_to_a_view(self, activation: Tensor, number: int) -> None:
        with torch.no_grad():
            activation[0].neg_()

    def replace_data(self, activation: Tensor, number: int) -> None:
        activation.data = activation.data + 1

    def toggle_requires_grad(self, activation: Tensor, number: int) -> None:
        if activation.is_leaf:
            activation.requires_grad_(not activation.requires_grad)

    def new_activation(self, activation: Tensor, number: int) -> None:
        self.activations[number % 3] = self.leaves[number % 3] * 2

    def drop_graphs(self, activation: Tensor, number: int) -> None:
        self.outputs.clear()

    def backward(self, activation: Tensor, number: int) -> None:
        losses = [output.float().sum() for output in self.outputs if output.requires_grad]
        if losses:
            torch.stack(losses).sum().backward(retain_graph=True)
        self.outputs.clear()
        self.activations[:3] = [leaf * 1 for leaf in self.leaves]
        grads = [(leaf, leaf.grad) for leaf in (*self.leaves, self.weight)]
        self.seen += [("gradient", None if g is None else g.clone()) for _, g in grads]


OPERATIONS = [name for name in vars(Run) if name != "execute" and not name.startswith("_")]
programs = st.lists(
    st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 11)), min_size=2, max_size=14
)


def assert_equal(found: Any, expected: Any) -> None:
    if isinstance(expected, tuple):
        assert found[1] == expected[1]
        found, expected = found[0], expected[0]
    assert (found is None) == (expected is None)
    assert found is None or torch.equal(found, expected)


@given(program=programs)
def test_a_program_sees_the_same_bits_as_with_every_use_cast_anew(program: Program) -> None:
    found = Run(shared_cast).execute(program)
    expected = Run(lambda tensor, dtype: CAST[dtype](tensor)).execute(program)
    assert [what for what, _ in found] == [what for what, _ in expected]
    for (_, ours), (_, theirs) in zip(found, expected, strict=True):
        assert_equal(ours, theirs)


def use(cast: Tensor) -> Tensor:
    return cast @ torch.ones(2, 2, dtype=HALF, requires_grad=True)


def made() -> Tensor:
    """Return what an operator has made, as most activations are."""
    return torch.ones(2, 2, requires_grad=True) * 1


def test_uses_in_a_row_share_one_cast() -> None:
    activation = made()
    with CastCounter() as counter:
        outputs = [use(shared_cast(activation, HALF)) for _ in range(3)]
    assert (len(outputs), counter.casts) == (3, 1)


def test_a_cast_goes_with_the_graphs_that_hold_it() -> None:
    activation = made()
    cast = shared_cast(activation, HALF)
    held = weakref.ref(cast)
    output = use(cast)
    del cast
    gc.collect()
    assert held() is not None
    del output
    assert held() is None


def test_an_activation_is_not_kept_alive() -> None:
    activation = made()
    output = use(shared_cast(activation, HALF))
    held = weakref.ref(activation)
    del activation
    output.sum().backward()
    del output
    assert held() is None


def test_a_write_to_the_cast_itself_is_not_shared() -> None:
    activation = made()
    cast = shared_cast(activation, HALF)
    cast.add_(1)
    assert shared_cast(activation, HALF).eq(1).all()


def test_a_cast_of_inference_mode_is_not_shared() -> None:
    activation = made()
    with torch.inference_mode():
        held = shared_cast(activation, HALF)
    assert held.is_inference()
    assert not shared_cast(activation, HALF).is_inference()


def test_a_cast_made_before_is_no_constant_of_a_recorded_graph() -> None:
    activation = made()
    output = use(shared_cast(activation, HALF))
    recorded = make_fx(lambda tensor: use(shared_cast(tensor, HALF)))(activation)
    assert torch.equal(recorded(activation * 2), output * 2)


@pytest.fixture
def in_a_forward() -> Iterator[None]:
    mode.enter_model(0, HALF, HALF)
    yield
    mode.leave_model(0)


@pytest.mark.usefixtures("in_a_forward")
def test_a_cast_of_a_transform_does_not_outlive_it() -> None:
    activation = torch.ones(2, 2)
    kept: list[Tensor] = []

    def loss(weight: Tensor) -> Tensor:
        kept.append(shared_cast(activation, HALF))
        return (kept[-1].float() @ weight).sum()

    torch.func.grad(loss)(torch.ones(2, 2))
    after = shared_cast(activation, HALF)
    assert after is not kept[-1]
    assert after.tolist() == [[1, 1], [1, 1]]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden.tanh()
        query, key, value = (part(hidden) for part in (self.query, self.key, self.value))
        return query @ key.mT @ value


@pytest.mark.parametrize("opt_level", ["O1", "O4"])
def test_query_key_and_value_share_a_cast_and_its_gradient(amp: ModuleType, opt_level: str) -> None:
    model = amp.initialize(Attention(), opt_level=opt_level, verbosity=0)
    x = torch.randn(2, 3, 4, requires_grad=True)
    model(x)  # casts the weights
    with CastCounter() as counter:
        output = model(x)
    assert counter.casts == 1
    with CastCounter() as counter:
        output.backward(torch.ones_like(output))
    assert counter.casts == 1 + 6  # of the activation's gradient, and of those of the weights


def write_by_numpy(inputs: Tensor, value: float) -> None:
    inputs.detach().numpy()[:] = value


WRITES: dict[str, Callable[[Tensor, float], Any]] = {
    "NumPy": write_by_numpy,
    "data": lambda inputs, value: inputs.data.fill_(value),
    "dlpack": lambda inputs, value: torch.from_dlpack(inputs.detach()).fill_(value),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("differentiated", [True, False])
@pytest.mark.parametrize("opt_level", ["O1", "O4"])
def test_an_input_that_others_write_to_is_cast_in_each_forward(
    amp: ModuleType, opt_level: str, differentiated: bool, write: str
) -> None:
    """As an environment writes its observations, while the graphs of earlier forwards live."""
    model = amp.initialize(nn.Linear(2, 2), opt_level=opt_level, verbosity=0)
    inputs = torch.zeros(1, 2, requires_grad=differentiated)
    outputs = []
    for value in range(1, 4):
        WRITES[write](inputs, value)
        outputs.append(model(inputs))
    for value, output in enumerate(outputs, 1):
        assert torch.equal(output, model(torch.full((1, 2), float(value))))


def test_nor_does_a_function_outside_of_a_forward_share_the_cast_of_an_input(
    amp: ModuleType,
) -> None:
    model = amp.initialize(nn.Linear(2, 2), opt_level="O1", verbosity=0)
    with torch.no_grad():
        model.weight.copy_(torch.eye(2))
    inputs, results = torch.zeros(2, 2), []
    for value in range(1, 4):
        write_by_numpy(inputs, value)
        results.append(nn.functional.linear(inputs, model.weight))
    assert [result[0, 0].item() for result in results] == [1.0, 2.0, 3.0]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("to_layout", [Tensor.to_sparse_csr, Tensor.to_sparse])
def test_a_sparse_matrix_has_no_address_and_is_cast_anew(
    to_layout: Callable[[Tensor], Tensor],
) -> None:
    matrix = to_layout(torch.eye(2))
    for _ in range(2):
        assert torch.equal(shared_cast(matrix, HALF).to_dense(), torch.eye(2, dtype=HALF))


def test_a_users_function_gets_a_cast_of_its_own(amp: ModuleType) -> None:
    seen: list[Tensor] = []

    class Holder:
        @staticmethod
        def doubled(tensor: Tensor) -> Tensor:
            seen.append(tensor)
            return tensor.mul_(2)

    amp.register_half_function(Holder, "doubled")
    model = amp.initialize(nn.Linear(2, 2), opt_level="O1", verbosity=0)
    activation = torch.ones(2, 2).requires_grad_().tanh()
    output = model(activation)
    Holder.doubled(activation)
    output.sum().backward()  # needs what the layer has saved
    assert seen[0].eq(2 * activation.half()).all()


class Asking(nn.Module):
    """Asks for the gradient of its input after a first layer has taken it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])

    def forward(self, x: Tensor) -> Tensor:
        kept = self.layers[0](x)
        return self.layers[1](x.requires_grad_()) + 0 * kept


def test_a_cast_from_before_a_gradient_is_asked_for_is_not_shared(amp: ModuleType) -> None:
    model = Asking()
    amp.initialize(model, opt_level="O1", verbosity=0)
    x = torch.ones(1, 2)
    (grad,) = torch.autograd.grad(model(x).float().sum(), x)
    torch.testing.assert_close(grad[0], model.layers[1].weight.sum(0), rtol=1e-2, atol=1e-2)


def test_what_one_thread_writes_without_a_version_no_other_takes_from_its_last_cast() -> None:
    source = torch.ones(2, requires_grad=True) * 1
    kept = shared_cast(source, HALF)
    assert shared_cast(source, HALF) is kept
    other = threading.Thread(target=shared_casts.forget)
    other.start()
    other.join()
    assert shared_cast(source, HALF) is not kept
