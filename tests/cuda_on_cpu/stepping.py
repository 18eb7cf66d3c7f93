"""Parameters with their state as the optimizers' kernels get them, and the launches of a step."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from amp_patch.kernels.cuda_optimizers import BLOCKS_PER_CHUNK
from cuda_on_cpu import THREADS, Kernels
from cuda_on_cpu.kernel_names import DTYPES
from cuda_on_cpu.memory import Memory, chunk_ranges, chunk_table, row_table
from cuda_on_cpu.rules import Factors, Rule

Names = tuple[str, str]
Offsets = Mapping[str, int]


class Parameters:
    """Masters with gradient, state, half weight and step, each a column of the table of tensors.

    Args:
        masters: the float32 values to start from.
        rule: whose state they have.
        dtypes: of the gradients, and of the weights.
        has_weight: whether there are weights at all.
        offsets: elements from an aligned address to where the tensors of a column begin, by name.
        wins: for each master, whether it wins where its weight disagrees; None: all do.
    """

    def __init__(
        self,
        masters: Sequence[Tensor],
        rule: Rule,
        dtypes: Names,
        *,
        has_weight: bool = True,
        offsets: Offsets | None = None,
        wins: Sequence[bool] | None = None,
    ) -> None:
        self.memory, self.dtypes = Memory(), dtypes
        self.lengths = [len(master) for master in masters]
        self._offsets = offsets or {}
        self.columns = {"gradient": self._filled("gradient", DTYPES[dtypes[0]])}
        self.columns["master"] = self._filled("master", torch.float32)
        for ours, values in zip(self["master"], masters, strict=True):
            ours.copy_(values)
        for name, start in rule.state().items():
            self.columns[name] = self._filled(name, torch.float32, start)
        weight = DTYPES[dtypes[1]]
        self.columns["weight"] = self._filled("weight", weight, 0.0 if has_weight else None)
        self.columns["step"] = [self.memory.place(torch.zeros(1)) for _ in masters]
        rows = row_table(list(zip(*self.columns.values(), strict=True)))
        winning = torch.tensor([True] * len(rows) if wins is None else wins).long().reshape(-1, 1)
        self.rows = torch.cat([rows[:, :-1], winning, rows[:, -1:]], dim=1)
        self.chunks = chunk_table(self.lengths)

    def _filled(
        self, name: str, dtype: torch.dtype, value: float | None = 0.0
    ) -> list[Tensor | None]:
        if value is None:
            return [None for _ in self.lengths]
        offset = self._offsets.get(name, 0)
        columns = (torch.full((length,), value, dtype=dtype) for length in self.lengths)
        return [self.memory.place(column, offset) for column in columns]

    def receive(self, gradients: Sequence[Tensor]) -> None:
        """Store gradients, rounded to their dtype."""
        for ours, theirs in zip(self["gradient"], gradients, strict=True):
            ours.copy_(theirs)

    def __getitem__(self, name: str) -> list[Tensor]:
        return [tensor for tensor in self.columns[name] if tensor is not None]

    def bits(self) -> list[list[int]]:
        """Return every bit of every column."""
        return [tensor.view(torch.uint8).tolist() for name in self.columns for tensor in self[name]]

    def check(self) -> None:
        """Fail where a weight is not its master, rounded, or anything beside tensors changed."""
        self.memory.check()
        for weight, master in zip(self["weight"], self["master"], strict=False):
            assert torch.equal(weight, master.to(weight.dtype))


def launch(
    kernels: Kernels,
    parameters: Parameters,
    groups: Mapping[range, Rule],
    *,
    scale: float | None = None,
    clip: float | None = None,
    found_inf: float | None = None,
    seed: int = 0,
) -> Tensor:
    """Launch a step of all rows, each by the rule of its group; return what is left to look at.

    Returns:
        LAMB's ratios, else the coefficients.
    """
    rule = next(iter(groups.values()))
    factors = Factors(*(None if one is None else torch.tensor(one) for one in (scale, clip)))
    flag = None if found_inf is None else torch.tensor(found_inf)
    coefficients = parameters.memory.empty(torch.uint8, len(parameters.rows), rule.size)
    for rows, one in groups.items():
        kernels.launch(
            f"{rule.name}_prepare",
            -(-len(rows) // THREADS),
            parameters.rows[rows.start :],
            len(rows),
            coefficients[rows.start :],
            flag,
            *one.arguments(),
        )
    if rule.name == "lamb":
        return _launch_lamb(kernels, parameters, coefficients, factors, flag, seed)
    name = "{}_{}_to_{}".format(rule.name, *parameters.dtypes)
    tables = (parameters.rows, parameters.chunks, coefficients)
    grid = len(parameters.chunks) * BLOCKS_PER_CHUNK
    kernels.launch(name, grid, *tables, *factors, flag, seed=seed)
    return coefficients


def _launch_lamb(
    kernels: Kernels,
    parameters: Parameters,
    coefficients: Tensor,
    factors: Factors,
    flag: Tensor | None,
    seed: int,
) -> Tensor:
    rows, chunks, memory = parameters.rows, parameters.chunks, parameters.memory
    norms = memory.empty(torch.uint8, len(chunks), 16)
    ratios = memory.empty(torch.float32, len(rows))
    tables, grid = (rows, chunks, coefficients), len(chunks)
    name = "lamb_moments_{}_to_{}".format(*parameters.dtypes)
    kernels.launch(name, grid, *tables, *factors, flag, norms, seed=seed)
    sums = (chunk_ranges(parameters.lengths), norms, coefficients, ratios)
    kernels.launch("lamb_ratios", len(rows), *sums, flag, seed=seed)
    kernels.launch(f"lamb_update_{parameters.dtypes[1]}", grid, *tables, ratios, flag, seed=seed)
    return ratios
