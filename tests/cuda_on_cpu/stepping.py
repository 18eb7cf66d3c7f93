"""Parameters with their state as the optimizers' kernels get them, and the launches of a step."""

from collections.abc import Callable, Mapping, Sequence

import torch
from hypothesis import strategies as st
from torch import Tensor

from cuda_on_cpu import THREADS, Argument, Kernels
from cuda_on_cpu.kernel_names import DTYPES
from cuda_on_cpu.memory import Memory, chunk_table, row_table

SCALES = st.sampled_from([None, 2.0**16, 3.0, 0.25])
CLIPS = st.sampled_from([None, 1.0, 0.3])
Names = tuple[str, str]
Offsets = dict[str, int]


def offsets(*columns: str) -> st.SearchStrategy[Offsets]:
    """Draw where the columns begin: mostly aligned, all alike or one of them misaligned."""
    alike = st.sampled_from([0, 0, 1, 2]).map(lambda offset: dict.fromkeys(columns, offset))
    return alike | st.sampled_from(columns).map(lambda name: {name: 1})


class Parameters:
    """Masters with gradient, state, half weight and step, each a column of the table of tensors.

    Args:
        masters: the float32 values to start from.
        dtypes: of the gradients, and of the weights.
        state: the names of the float32 tensors between master and weight, which start at 0.
        has_weight: whether there are weights at all.
        offsets: elements from an aligned address to where the tensors of a column begin, by name.
    """

    def __init__(
        self,
        masters: Sequence[Tensor],
        dtypes: Names,
        state: Sequence[str | None],
        *,
        has_weight: bool = True,
        offsets: Offsets | None = None,
    ) -> None:
        self.memory, self.dtypes = Memory(), dtypes
        self.lengths = [len(master) for master in masters]
        self._offsets = offsets or {}
        self.columns = {"gradient": self._zeros("gradient", DTYPES[dtypes[0]])}
        self.columns["master"] = self._zeros("master", torch.float32)
        for ours, values in zip(self["master"], masters, strict=True):
            ours.copy_(values)
        for i, name in enumerate(state):
            missing: list[Tensor | None] = [None for _ in masters]
            self.columns[name or f"none {i}"] = (
                self._zeros(name, torch.float32) if name else missing
            )
        weights = self._zeros("weight", DTYPES[dtypes[1]])
        self.columns["weight"] = weights if has_weight else [None for _ in masters]
        self.columns["step"] = [self.memory.place(torch.zeros(1)) for _ in masters]
        self.rows = row_table(list(zip(*self.columns.values(), strict=True)))
        self.chunks = chunk_table(self.lengths)

    def _zeros(self, name: str, dtype: torch.dtype) -> list[Tensor | None]:
        offset = self._offsets.get(name, 0)
        return [self.memory.place(torch.zeros(n, dtype=dtype), offset) for n in self.lengths]

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

    def prepare(
        self,
        kernels: Kernels,
        name: str,
        size: int,
        groups: Mapping[range, Sequence[Argument]],
        found_inf: Tensor | None,
    ) -> Tensor:
        """Launch ``<name>_prepare`` for each group of rows; return all rows' coefficients."""
        coefficients = self.memory.empty(torch.uint8, len(self.rows), size)
        for rows, arguments in groups.items():
            kernels.launch(
                f"{name}_prepare",
                -(-len(rows) // THREADS),
                self.rows[rows.start :],
                len(rows),
                coefficients[rows.start :],
                found_inf,
                *arguments,
            )
        return coefficients


def scalar(value: float | None) -> Tensor | None:
    """Return a float32 scalar in memory, or None."""
    return None if value is None else torch.tensor(value)


def unscaled(gradient: Tensor, scale: float | None, clip: float | None) -> Tensor:
    """Return in float64 what an optimizer is to be stepped with."""
    factor = 1.0 if scale is None else (1.0 / torch.tensor(scale)).double().item()
    return gradient.double() * factor * (1.0 if clip is None else torch.tensor(clip).item())


def perturbed(gradients: Sequence[Tensor], masters: Sequence[Tensor]) -> list[Tensor]:
    """Return gradients that float32 could not tell from these once weight decay is added."""
    return [
        gradient + 3e-7 * (gradient.abs() + master.detach().abs())
        for gradient, master in zip(gradients, masters, strict=True)
    ]


def assert_stepped(
    ours: Sequence[Tensor],
    expected: Sequence[Tensor],
    nearby: Sequence[Tensor],
    *,
    lr: float,
    steps: int,
) -> None:
    """Compare masters with float64 ones: float32's rounding of the values and of their updates.

    An update is at most a few times lr; a wrong coefficient is off by more than 1e-4 of it. Where
    decay cancels the gradient the rounding error matters more: by as much as in `nearby`, which was
    stepped with `perturbed` gradients.
    """
    for one, other, near in zip(ours, expected, nearby, strict=True):
        assert_near(one, other, near, (3e-7 * other.abs() + 1e-5 * lr) * steps)


def assert_near(one: Tensor, other: Tensor, near: Tensor, tolerance: Tensor) -> None:
    """Compare with `other` up to a tolerance per element, and twice as far as `near` is off."""
    with torch.no_grad():
        excess = (one.double() - other).abs() - tolerance - 2 * (near - other).abs()
    assert not (excess > 0).any(), f"off by {excess.max()} more than allowed"


def reference(
    make: Callable[[list[Tensor]], torch.optim.Optimizer], masters: Sequence[Tensor]
) -> tuple[torch.optim.Optimizer, list[Tensor]]:
    """Build an optimizer of torch over float64 copies of masters."""
    parameters = [master.double() for master in masters]
    for parameter in parameters:
        parameter.requires_grad_()
    return make(parameters), parameters


def step(
    optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor], gradients: Sequence[Tensor]
) -> None:
    """Step an optimizer of torch with these gradients."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    optimizer.step()
