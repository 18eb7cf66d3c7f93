"""The tables of a launch: against those of the kernels' own tests, and when they are uploaded."""

import cuda_on_cpu
import pytest
import torch
from cuda_on_cpu.memory import chunk_ranges, chunk_table, row_table
from hypothesis import given
from hypothesis import strategies as st

from amp_patch.kernels import tensor_tables
from amp_patch.kernels.graph_capture import captures
from amp_patch.kernels.tensor_tables import CHUNK, Resident, TensorTable

CPU = torch.device("cpu")
LENGTHS = st.sampled_from([0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK]) | st.integers(0, 50000)


def test_a_chunk_is_as_long_as_in_the_sources() -> None:
    assert cuda_on_cpu.CHUNK == CHUNK


@given(st.lists(st.tuples(LENGTHS, st.sampled_from("abc")), max_size=8))
def test_chunks_of_one_mix_follow_each_other(drawn: list[tuple[int, str]]) -> None:
    lengths, mixes = [length for length, _ in drawn], [mix for _, mix in drawn]
    table = TensorTable(lengths, mixes, CPU)
    chunks = table.chunks()
    assert chunks.dtype == torch.int32
    assert len(chunks) == table.chunk_count == sum(-(-length // CHUNK) for length in lengths)
    seen = []
    for mix, begin, end in table.groups:
        rows = [row for row, other in enumerate(mixes) if other == mix]
        expected = chunk_table([lengths[row] for row in rows], rows)
        assert torch.equal(chunks[begin:end], expected)
        assert begin < end
        seen += range(begin, end)
    assert seen == list(range(table.chunk_count))
    assert len({group.mix for group in table.groups}) == len(table.groups)


@given(st.lists(LENGTHS, max_size=8))
def test_ranges_name_each_rows_chunks(lengths: list[int]) -> None:
    ranges, ticket = TensorTable(lengths, [0] * len(lengths), CPU).ranges()
    assert torch.equal(ranges, chunk_ranges(lengths) if lengths else ranges)
    assert (ranges.dtype, ranges.shape) == (torch.int32, (len(lengths), 2))
    assert ticket.tolist() == [0]


@given(st.lists(st.tuples(LENGTHS, st.sampled_from("ab")), max_size=8))
def test_ranges_name_them_in_any_order_of_mixes(drawn: list[tuple[int, str]]) -> None:
    lengths, mixes = [length for length, _ in drawn], [mix for _, mix in drawn]
    table = TensorTable(lengths, mixes, CPU)
    chunks, (ranges, _) = table.chunks(), table.ranges()
    for row, (begin, end) in enumerate(ranges.tolist()):
        count = -(-lengths[row] // CHUNK)
        assert chunks[begin:end].tolist() == [[row, index] for index in range(count)]


def test_rows_hold_addresses_and_lengths() -> None:
    ones, others = [torch.zeros(3), torch.zeros(5)], [torch.zeros(5)[2:], torch.zeros(5)]
    table = TensorTable([3, 5], "aa", CPU)
    rows = table.rows(ones, others, [None, others[1]])
    expected = [[a.data_ptr(), b.data_ptr()] for a, b in zip(ones, others, strict=True)]
    assert rows.dtype == torch.int64
    assert rows.tolist() == [[*expected[0], 0, 3], [*expected[1], others[1].data_ptr(), 5]]
    assert torch.equal(table.rows(ones, others), row_table(list(zip(ones, others, strict=True))))
    assert table.rows([True, False]).tolist() == [[1, 3], [0, 5]]


def test_a_tensor_of_more_than_2_to_the_31_elements_has_all_of_its_chunks() -> None:
    length = 2**31 + CHUNK + 5
    table = TensorTable([3, length], "aa", CPU)
    assert table.rows([0, 0]).tolist() == [[0, 3], [0, length]]
    chunks = table.chunks()
    assert chunks[-1].tolist() == [1, (length - 1) // CHUNK]
    assert len(chunks) == 1 + 2**31 // CHUNK + 2
    assert table.ranges()[0].tolist() == [[0, 1], [1, len(chunks)]]


def test_a_table_without_rows_is_empty() -> None:
    table = TensorTable([], [], CPU)
    assert table.rows([], []).shape == (0, 3)
    assert (table.groups, table.chunks().shape, table.ranges()[0].shape) == ([], (0, 2), (0, 2))


def test_rows_are_uploaded_only_when_an_address_changed() -> None:
    tensors = [torch.zeros(3), torch.zeros(5)]
    table = TensorTable([3, 5], "aa", CPU)
    first = table.rows(tensors)
    assert table.rows(list(tensors)).data_ptr() == first.data_ptr()
    other = table.rows([torch.zeros(3), tensors[1]])
    assert other.data_ptr() != first.data_ptr()
    assert first[0, 0] == tensors[0].data_ptr()


def test_chunks_and_ranges_are_uploaded_once() -> None:
    table = TensorTable([3, 5], "ab", CPU)
    assert table.chunks().data_ptr() == table.chunks().data_ptr()
    assert table.ranges()[0].data_ptr() == table.ranges()[0].data_ptr()


def test_tables_are_made_on_the_host_whatever_the_default_device_is() -> None:
    """Memory is pinned on the host only, and CUDA may be the device that torch makes tensors on."""
    with torch.device("meta"):
        table = TensorTable([3], "a", CPU)
        upload = tensor_tables._Upload(torch.int64, CPU)
        upload._spare.append(torch.zeros(2, dtype=torch.int64, device=CPU))
        assert table.chunks().tolist() == [[0, 0]]
        assert upload._capture([1, 2]).tolist() == [1, 2]


def test_a_scalar_is_made_anew_for_another_number() -> None:
    scalar = tensor_tables.scalar(CPU)
    first = scalar.holding(3.0)
    assert (first.tolist(), first.dtype) == ([3.0], torch.float32)
    assert scalar.holding(3.0) is first
    assert scalar.holding(0.1).tolist() == [torch.tensor(0.1).item()]


# --- streams and graphs, as torch.cuda would tell of them ---


class Cuda:
    """Says what stream is current, and whether it is being captured."""

    stream, capturing = 7, False

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)
        monkeypatch.setattr(torch.cuda, "current_stream", self.current_stream)

    def current_stream(self, device: torch.device) -> "Cuda":
        assert device == torch.device("cuda", 1)
        return self

    @property
    def cuda_stream(self) -> int:
        return self.stream


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    return Cuda(monkeypatch)


def noting(made: list[str]) -> Resident:
    def make(content: str) -> torch.Tensor:
        made.append(f"made {content}")
        return torch.zeros(1)

    def capture(content: str) -> torch.Tensor:
        made.append(f"captured {content}")
        return torch.ones(1)

    return Resident(torch.device("cuda", 1), make, capture)


def test_every_stream_gets_its_own(cuda: Cuda) -> None:
    made: list[str] = []
    resident = noting(made)
    first = resident.holding("a")
    assert resident.holding("a") is first
    cuda.stream = 8
    assert resident.holding("a") is not first
    assert made == ["made a"] * 2


def test_every_capture_gets_its_own(cuda: Cuda) -> None:
    made: list[str] = []
    resident = noting(made)
    first = resident.holding("a")
    cuda.capturing = True
    assert resident.holding("a").item() == 1
    assert resident.holding("a").item() == 1
    cuda.capturing = False
    assert resident.holding("a") is first
    assert made == ["made a", "captured a", "captured a"]


def test_memory_that_graphs_copy_from_is_kept_for_each() -> None:
    upload = tensor_tables._Upload(torch.int64, CPU)
    spare = [torch.zeros(3, dtype=torch.int64) for _ in range(2)]
    upload._spare.extend(spare)
    with captures.collect() as first:
        assert upload._capture([1, 2, 3]).tolist() == [1, 2, 3]
        assert upload._capture([1, 2, 3]).tolist() == [1, 2, 3]
    with captures.collect() as second:
        assert upload._capture([1, 2, 3]).tolist() == [1, 2, 3]
        assert upload._capture([4, 5, 6]).tolist() == [4, 5, 6]
    assert list(first.memory.values()) == [spare[1]]
    assert set(second.memory) == {id(spare[1]), id(spare[0])}
    assert [one.tolist() for one in spare] == [[4, 5, 6], [1, 2, 3]]


def test_a_capture_before_any_step_is_refused() -> None:
    upload = tensor_tables._Upload(torch.int64, CPU)
    message = (
        "a step must run before a CUDA graph captures it.*; got a capture of 3 numbers without "
        r"any; run the step outside of torch.cuda.graph\(\) first"
    )
    with pytest.raises(RuntimeError, match=message):
        upload._capture([1, 2, 3])
