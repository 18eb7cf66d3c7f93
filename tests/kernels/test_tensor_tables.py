"""The tables of a launch: against those of the kernels' own tests, and when they are uploaded."""

import cuda_on_cpu
import pytest
import torch
from cuda_on_cpu.memory import chunk_ranges, chunk_table, row_table
from hypothesis import given
from hypothesis import strategies as st

from amp_patch.kernels.graph_capture import captures
from amp_patch.kernels.tensor_tables import CHUNK, TensorTable, addresses

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
    assert table.rows_of([True, False]).tolist() == [[1, 3], [0, 5]]


def test_a_tensor_of_more_than_2_to_the_31_elements_has_all_of_its_chunks() -> None:
    length = 2**31 + CHUNK + 5
    table = TensorTable([3, length], "aa", CPU)
    assert table.rows_of([0, 0]).tolist() == [[0, 3], [0, length]]
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
        assert table.chunks().tolist() == [[0, 0]]
        assert table.rows_of([5]).tolist() == [[5, 3]]


@given(st.lists(st.booleans(), max_size=5))
def test_addresses_are_those_of_the_tensors(there: list[bool]) -> None:
    column = [torch.zeros(4)[place:] if one else None for place, one in enumerate(there)]
    assert addresses(column) == [0 if one is None else one.data_ptr() for one in column]


def test_a_launch_in_a_graph_counts_in_memory_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    table = TensorTable([3, 5], "aa", CPU)
    ranges, ticket = table.ranges()
    monkeypatch.setattr(captures, "are_made", lambda device: True)
    captured_ranges, captured_ticket = table.ranges()
    assert captured_ranges.data_ptr() == ranges.data_ptr()
    assert captured_ticket.data_ptr() != ticket.data_ptr()
    assert captured_ticket.tolist() == [0]
