"""What lies on a device from step to step: when it is uploaded, and what a captured graph gets."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from amp_patch.kernels import resident
from amp_patch.kernels.graph_capture import captures
from amp_patch.kernels.resident import AddressTable, FixedTable, Resident, scalar

CPU = torch.device("cpu")


def test_a_scalar_is_made_anew_for_another_number() -> None:
    number = scalar(CPU)
    first = number.holding(3.0)
    assert (first.tolist(), first.dtype) == ([3.0], torch.float32)
    assert number.holding(3.0) is first
    assert number.holding(0.1).tolist() == [torch.tensor(0.1).item()]


# --- streams and graphs, as torch.cuda would tell of them ---


class Cuda:
    """Says what stream is current, and whether it is being captured."""

    stream, capturing = 7, False

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)
        monkeypatch.setattr(
            torch._C, "_cuda_getCurrentRawStream", self.current_stream, raising=False
        )

    def current_stream(self, index: int) -> int:
        assert index == 1
        return self.stream


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    return Cuda(monkeypatch)


def noting(made: list[str]) -> Resident[torch.Tensor]:
    def make(content: str) -> torch.Tensor:
        made.append(f"made {content}")
        return torch.zeros(1)

    def capture(content: str) -> torch.Tensor:
        made.append(f"captured {content}")
        return torch.ones(1)

    return Resident(torch.device("cuda", 1), make, capture)


def test_every_stream_gets_its_own(cuda: Cuda) -> None:
    made: list[str] = []
    table = noting(made)
    first = table.holding("a")
    assert table.holding("a") is first
    cuda.stream = 8
    assert table.holding("a") is not first
    assert made == ["made a"] * 2


def test_every_capture_gets_its_own(cuda: Cuda) -> None:
    made: list[str] = []
    table = noting(made)
    first = table.holding("a")
    cuda.capturing = True
    assert table.holding("a").item() == 1
    assert table.holding("a").item() == 1
    cuda.capturing = False
    assert table.holding("a") is first
    assert made == ["made a", "captured a", "captured a"]


class Uploads:
    """What a table is copied to a device by, which here is the host's memory once more."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[list[int]] = []
        monkeypatch.setattr(resident, "_without_waiting", self.upload)

    def upload(self, host: torch.Tensor, device: torch.device) -> torch.Tensor:
        assert host.device.type == "cpu"
        self.made.append(host.flatten().tolist())
        return host.clone()


@pytest.fixture
def uploads(monkeypatch: pytest.MonkeyPatch) -> Uploads:
    return Uploads(monkeypatch)


GPU = torch.device("cuda", 1)


def test_a_graph_reads_a_fixed_table_where_it_is(cuda: Cuda, uploads: Uploads) -> None:
    table = FixedTable([1, 2, 3], GPU, lambda table: table)
    first = table.tensors()
    cuda.stream = 8
    second = table.tensors()
    assert second is not first
    cuda.capturing = True
    with captures.collect() as graph:
        assert table.tensors() is second
        assert table.tensors() is second
    assert list(graph.memory.values()) == [second]
    cuda.capturing = False
    assert table.tensors() is second
    assert uploads.made == [[1, 2, 3]] * 2


@given(st.lists(st.lists(st.sampled_from([7, 2**62]), min_size=2, max_size=2), max_size=4))
def test_a_table_of_addresses_is_that_of_the_columns(steps: list[list[int]]) -> None:
    table = AddressTable(2, CPU)
    made = []
    for column in steps:
        made.append((table.holding([[1, 2], column]), [[1, column[0]], [2, column[1]]]))
    # what was returned before stays: the device may still read it
    for tensor, expected in made:
        assert (tensor.tolist(), tensor.dtype) == (expected, torch.int64)
    assert table.holding([[4, 5]]).tolist() == [[4], [5]]
    assert table.holding([[4, 5], [6, 7]]).tolist() == [[4, 6], [5, 7]]


def give_spare(table: AddressTable, count: int) -> list[torch.Tensor]:
    """Let a table of one column have pinned memory for graphs, which only CUDA can give."""
    memory = [torch.zeros(2, 1, dtype=torch.int64) for _ in range(count)]
    table._spare.extend(memory)
    return memory


def test_memory_that_graphs_copy_from_is_kept_for_each() -> None:
    table = AddressTable(2, CPU)
    spare = give_spare(table, 2)
    with captures.collect() as first:
        assert table._capture([[1, 2]]).tolist() == [[1], [2]]
        assert table._capture([[1, 2]]).tolist() == [[1], [2]]
    with captures.collect() as second:
        assert table._capture([[1, 2]]).tolist() == [[1], [2]]
        assert table._capture([[4, 5]]).tolist() == [[4], [5]]
    assert list(first.memory.values()) == [spare[1]]
    assert set(second.memory) == {id(spare[1]), id(spare[0])}
    assert [one.tolist() for one in spare] == [[[4], [5]], [[1], [2]]]


def test_a_step_beside_a_graph_does_not_change_what_the_graph_uploads(
    cuda: Cuda, uploads: Uploads
) -> None:
    table = AddressTable(2, GPU)
    give_spare(table, 5)
    assert table.holding([[1, 2]]).tolist() == [[1], [2]]
    cuda.capturing = True
    with captures.collect() as graph, pytest.raises((AssertionError, RuntimeError)):
        table.holding([[3, 4]])  # the copy to a GPU; what it copies from is there
    (memory,) = graph.memory.values()
    cuda.capturing = False
    assert table.holding([[5, 6]]).tolist() == [[5], [6]]
    assert memory.tolist() == [[3], [4]]
    assert uploads.made == [[1, 2], [5, 6]]


def test_a_step_may_have_as_many_contents_as_the_rehearsed_one() -> None:
    table, contents = AddressTable(2, CPU), [[[n, n + 1]] for n in range(9)]
    for _ in range(2):
        with captures.rehearse():
            for content in contents:
                table.holding(content)
    with captures.collect() as graph:
        made = [table._capture(content).tolist() for content in [*contents, *contents]]
        with pytest.raises(RuntimeError, match=REFUSED.format(2)):
            table._capture([[7, 7]])
    assert made == [[[n], [n + 1]] for n in range(9)] * 2
    assert [one.tolist() for one in graph.memory.values()] == made[:9]
    table.holding([[3, 4]])
    with captures.collect() as other:  # of the same contents
        table._capture(contents[8])
    assert list(other.memory) == [list(graph.memory)[8]]
    del graph, other
    assert len(table._captured) == 0


def test_memory_for_a_graph_has_as_many_columns_as_the_table() -> None:
    table = AddressTable(2, CPU)
    for columns in ([[1, 2]], [[1, 2], [3, 4]]):
        with captures.rehearse():
            table.holding(columns)
    assert table._capture([[1, 2], [5, 6]]).tolist() == [[1, 5], [2, 6]]


REFUSED = (
    "a step must run before a CUDA graph captures it.*; got a capture of {} rows without "
    r"any; run the step outside of torch.cuda.graph\(\) first"
)


def test_a_capture_before_any_step_is_refused(cuda: Cuda) -> None:
    cuda.capturing = True
    with pytest.raises(RuntimeError, match=REFUSED.format(3)):
        FixedTable([1, 2, 3], GPU, lambda table: table).tensors()
    with pytest.raises(RuntimeError, match=REFUSED.format(2)):
        AddressTable(2, GPU).holding([[1, 2]])
