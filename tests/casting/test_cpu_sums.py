"""What comes back to rows that were looked up by ids is float64's sum, rounded (torch >= 2.9)."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from casting_support import HALF_OF, activate
from hypothesis import given
from hypothesis import strategies as st
from support import allocations
from torch import Tensor, nn

from amp_patch import amp as core

pytestmark = pytest.mark.skipif(
    not hasattr(torch.library, "get_kernel"), reason="this torch gives no kernel of its own away"
)
#: More than bfloat16 and float16 count to one by one.
MANY = 6000
IDS = torch.arange(MANY).remainder(3)
#: Rows of a tensor of 3 rows and 3 columns, thousands of times.
LOOKUPS: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda h: h[IDS],
    "rows counted from the last": lambda h: h[IDS - 3],
    "rows, int32": lambda h: h[IDS.int()],
    "rows, a batch of ids": lambda h: h[IDS.view(2, 3, -1)],
    "rows, a list": lambda h: h[[1] * MANY],
    "parts of rows": lambda h: h[IDS, 1:],
    "columns": lambda h: h[:, IDS],
    "places": lambda h: h[IDS, (IDS + 1) % 3],
    "places, crossed": lambda h: h[torch.arange(3), IDS[:9].view(3, 3)],
    "numbers": lambda h: h[:, 0][IDS],
    "matrices": lambda h: h[:, None, :].expand(3, 2, 3)[IDS],
    "one row": lambda h: h[1:2][torch.zeros_like(IDS)],
    "of a transposed one": lambda h: h.T[IDS],
    "embedding": lambda h: nn.functional.embedding(IDS, h),
    "embedding, a padding": lambda h: nn.functional.embedding(IDS, h, padding_idx=1),
    "embedding, by frequency": lambda h: nn.functional.embedding(IDS, h, scale_grad_by_freq=True),
    "take": lambda h: h.take(IDS),
    "a mask": lambda h: h[torch.tensor([True, False, True])],
    "none": lambda h: h[IDS[:0]],
}


def gradient(look: Callable[[Tensor], Tensor], h: Tensor, create_graph: bool = False) -> Tensor:
    """Return what comes back to ``h`` of factors between 0.5 and 1, which halves hold."""
    h = h.detach().requires_grad_()
    rows = look(h)
    count = torch.arange(rows.numel(), device="cpu").remainder(64)
    factors = (0.5 + count / 128).view(rows.shape).to(h.dtype)
    (found,) = torch.autograd.grad(rows, h, factors, create_graph=create_graph)
    return found.detach()


def close(found: Tensor, exact: Tensor) -> bool:
    """Return whether a sum of positive numbers is right but for a few roundings."""
    return torch.allclose(found.double(), exact, rtol=torch.finfo(found.dtype).eps, atol=0)


@pytest.mark.parametrize("lookup", LOOKUPS)
@pytest.mark.parametrize("level", ["O1", "O2", "O3", "O4", "O5"])
def test_the_gradient_of_a_lookup_is_that_of_float64(
    amp: ModuleType, level: str, lookup: str
) -> None:
    activate(amp, level)
    h = torch.ones(3, 3, dtype=HALF_OF[level])
    exact = gradient(LOOKUPS[lookup], h.double())
    for create_graph in (False, True):
        assert close(gradient(LOOKUPS[lookup], h, create_graph), exact)


@given(data=st.data())
def test_the_gradient_of_any_lookup_is_that_of_float64(data: st.DataObject) -> None:
    """Whatever the shape of the tensor, and whichever of its dimensions ids are of."""
    core.deactivate()
    dtype = data.draw(st.sampled_from([torch.float16, torch.bfloat16]))
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    count = data.draw(st.sampled_from([0, 1, 7, 600]))
    indices: list[Tensor | slice] = []
    for size in shape[: data.draw(st.integers(1, len(shape)))]:
        drawn = data.draw(st.lists(st.integers(-size, size - 1), min_size=2, max_size=4))
        ids = torch.tensor(drawn).repeat(count)[:count]
        indices.append(data.draw(st.sampled_from([ids, slice(None)])))
    h = torch.ones(shape, dtype=dtype)

    def look(h: Tensor) -> Tensor:
        return h[tuple(indices)]

    exact = gradient(look, h.double())
    try:
        core.initialize(nn.Linear(2, 2), opt_level="O4", verbosity=0)
        assert close(gradient(look, h), exact)
    finally:
        core.deactivate()


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_table_of_three_types_learns_from_thousands_of_nodes(amp: ModuleType, level: str) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3, 4))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale[IDS]

    torch.manual_seed(0)
    x, model = torch.rand(MANY, 4), Scaled()
    expected = torch.zeros(3, 4).index_add(0, IDS, x)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=level, loss_scale=1.0, verbosity=0
    )
    with amp.scale_loss(model(x).sum(), optimizer) as loss:
        loss.backward()
    (master,) = amp.master_params(optimizer)
    torch.testing.assert_close(master.grad, expected, rtol=0.01, atol=0)


def count() -> float:
    """Return how far a CPU counts in bfloat16: torch's own kernel to less than a quarter."""
    return float(gradient(lambda h: h[torch.zeros_like(IDS)], torch.ones(1, 1).bfloat16()))


def test_torch_has_its_own_kernels_but_for_while_a_model_on_a_cpu_is_in_half() -> None:
    lost = count()
    assert lost < MANY / 4
    core.initialize(nn.Linear(2, 2), opt_level="O0", verbosity=0)
    assert count() == lost
    core.initialize(nn.Linear(2, 2, device="meta"), opt_level="O4", verbosity=0)
    assert count() == lost
    for _ in range(2):
        core.initialize(nn.Linear(2, 2), opt_level="O4", verbosity=0)
        assert count() > MANY / 2
    core.deactivate()
    assert count() == lost


def test_an_initialize_that_fails_leaves_torchs_kernels(
    amp: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    activate(amp, "O0")
    monkeypatch.setattr(core.session.optimizers, "set_up", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        core.initialize(nn.Linear(2, 2), opt_level="O5", verbosity=0)
    assert count() < MANY / 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_writes_are_torchs(amp: ModuleType, dtype: torch.dtype) -> None:
    activate(amp, "O4")
    one, rows = torch.ones(1, dtype=dtype), torch.tensor([[1, 2], [3, 4]]).to(dtype)
    h = torch.full((3, 2), 5, dtype=dtype)
    h[torch.tensor([0, 2])] = rows
    h[h == 2] = 7
    h.put_(torch.tensor([3]), one)
    assert h.tolist() == [[1, 7], [5, 1], [3, 4]]
    h.put_(torch.tensor([0, 0]), one.expand(2), accumulate=True)
    # no function that is patched, so that the kernel gets what is not float32
    torch._index_put_impl_(h, (torch.tensor([2, 2]),), one[0], accumulate=True)
    torch._index_put_impl_(h, (torch.tensor([-1, 1]),), rows, accumulate=True)
    assert h.tolist() == [[3, 7], [8, 5], [6, 8]]


def test_a_few_rows_of_a_table_make_no_copy_of_it(amp: ModuleType) -> None:
    activate(amp, "O5")
    table = torch.zeros(40_000, 8, dtype=torch.bfloat16)
    ids = torch.arange(99) % 7
    lookups: list[Callable[[Tensor], Tensor]] = [
        lambda h: h[ids],
        lambda h: h[ids - 7],
        lambda h: h[ids, ids % 8],
        lambda h: h.take(ids),
        lambda h: torch.embedding(h, ids),
    ]
    for look in lookups:
        assert sum(allocations(lambda look=look: gradient(look, table))) < 2 * table.nbytes
