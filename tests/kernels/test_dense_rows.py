"""Which rows the kernels take: those whose elements lie in memory in one order, without gaps."""

import pytest
import torch
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor

from amp_patch.kernels.dense_rows import DenseRows, chosen, split

CHANNELS_LAST = torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)
SPARSE = torch.sparse_coo_tensor(
    torch.tensor([[1]]), torch.ones(1, 3), (5, 3), check_invariants=True
)


@pytest.mark.parametrize(
    ("row", "taken"),
    [
        ([torch.zeros(3), torch.zeros(3).half()], True),
        ([torch.zeros(()), torch.zeros(()).bfloat16()], True),
        ([torch.zeros(0, 3), torch.zeros(0, 3)], True),
        ([CHANNELS_LAST, CHANNELS_LAST.half()], True),
        ([torch.zeros(4, 6).t(), torch.zeros(4, 6).t()], True),
        ([torch.zeros(4, 1, 6), torch.zeros(4, 6, 1).transpose(1, 2)], True),
        ([torch.zeros(1, 6).expand(1, 6)[:, 1:], torch.zeros(1, 5)], True),
        ([CHANNELS_LAST, torch.zeros(2, 3, 4, 5)], False),
        ([torch.zeros(6, 4), torch.zeros(4, 6).t()], False),
        ([torch.zeros(6)[::2], torch.zeros(6)[::2]], False),
        ([torch.zeros(3, 6)[:, :4], torch.zeros(3, 6)[:, :4]], False),
        ([torch.zeros(1).expand(3), torch.zeros(1).expand(3)], False),
        ([torch.zeros(3).double(), torch.zeros(3)], False),
        ([torch.zeros(3), torch.zeros(3, dtype=torch.complex64)], False),
        ([SPARSE, SPARSE], False),
        ([torch.zeros(5, 3), SPARSE], False),
        ([torch.zeros(3), torch.zeros(3, device="meta")], False),
        ([torch.nn.Parameter(torch.zeros(3)), torch.zeros(3)], True),
    ],
    ids=str,
)
def test_which_rows_are_taken(row: list[Tensor], taken: bool) -> None:
    columns = [[one] for one in row]
    for parts, others in (split("a", *columns), DenseRows().split(*columns)):
        assert [list(part.rows) for part in parts] == [[0]] * taken
        assert others == [0] * (not taken)


def test_what_wraps_other_tensors_has_no_memory_and_is_not_taken() -> None:
    # none may be alive in other tests: what looks for all tensors cannot copy it
    wrapper, plain = TwoTensor(torch.zeros(3), torch.zeros(3)), torch.zeros(3)
    for columns in ([[wrapper], [plain]], [[plain], [wrapper]]):
        for parts, others in (split("a", *columns), DenseRows().split(*columns)):
            assert (parts, others) == ([], [0])


def test_parts_are_by_device_and_groups_by_dtypes() -> None:
    half, full = torch.zeros(3).half(), torch.zeros(4)
    meta = torch.zeros(5, device="meta")
    sources = [half, meta, full, SPARSE, half]
    targets = [full[:3], meta, full, SPARSE, full[:3]]
    parts, others = split("a", sources, targets)
    assert [(part.device.type, part.rows) for part in parts] == [("cpu", [0, 2, 4]), ("meta", [1])]
    mixes = [group.mix for group in parts[0].table.groups]
    assert mixes == [("float16", "float32"), ("float32", "float32")]
    assert others == [3]


def test_a_mix_without_a_kernel_is_not_taken() -> None:
    sources, targets = [torch.zeros(3)] * 2, [torch.zeros(3).half(), torch.zeros(3)]
    rows = DenseRows(lambda mix: mix == ("float32", "float16"))
    parts, others = rows.split(sources, targets)
    assert ([part.rows for part in parts], others) == ([[0]], [1])


def test_lists_of_the_same_strides_share_a_split() -> None:
    rows = DenseRows()
    contiguous = rows.split([torch.zeros(2, 3)])
    assert rows.split([torch.ones(2, 3)]) is contiguous
    permuted = rows.split([torch.zeros(3, 2).t()])
    assert permuted is not contiguous
    assert rows.split([torch.ones(3, 2).t()]) is permuted
    assert rows.split([torch.zeros(2, 6)[:, ::2]]).others == [0]
    mixed = rows.split([SPARSE])
    assert mixed.others == [0]
    assert rows.split([SPARSE]) is mixed
    assert rows.split([torch.ones(2, 3)]) is contiguous


@pytest.mark.parametrize("shape", [(3,), (3, 2)])
def test_gradients_of_another_dtype_are_split_anew(shape: tuple[int, ...]) -> None:
    """The columns are permuted where they have two dimensions."""
    rows = DenseRows()
    targets = [torch.zeros(shape).permute(*reversed(range(len(shape))))]
    for dtype in (torch.float16, torch.float32, torch.bfloat16, torch.float64, torch.float16):
        parts, others = rows.split([targets[0].to(dtype)], targets)
        mixes = [group.mix for part in parts for group in part.table.groups]
        taken = dtype is not torch.float64
        assert mixes == [(str(dtype).removeprefix("torch."), "float32")] * taken
        assert others == [0] * (not taken)


def test_lists_like_those_seen_lately_share_tables() -> None:
    first, again = (split("a", [torch.zeros(7), torch.zeros(9)]) for _ in range(2))
    assert again is first
    assert split("a", [torch.zeros(7), torch.zeros(8)]) is not first
    assert split("b", [torch.zeros(7), torch.zeros(9)]) is not first


def test_chosen_items() -> None:
    assert chosen("abc", [0, 2]) == ["a", "c"]
    assert chosen("abc", [0, 1, 2]) == ["a", "b", "c"]
    assert chosen("abc", []) == []
