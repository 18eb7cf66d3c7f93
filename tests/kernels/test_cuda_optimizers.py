"""Launches of the optimizers' kernels, on SGD without momentum: numbers that are written by hand.

What the kernels compute is tested in tests/csrc; here is what is launched, for which rows.
"""

import weakref

import pytest
import torch
from cuda_on_cpu.launcher import EmulatedModules
from torch import Tensor

from amp_patch.kernels.cuda_optimizers import (
    Factors,
    GroupRows,
    KernelStep,
    OptimizerKernels,
    learning_rate,
)

F16, F32 = torch.float16, torch.float32
NONE = Factors(None, None)


@pytest.fixture
def step() -> KernelStep:
    return KernelStep(OptimizerKernels("sgd.cu", 32, "dPdddiii"))


def group(lr: float | Tensor, *rows: tuple[Tensor, Tensor, Tensor | None]) -> GroupRows:
    """Return a group; a row has gradient, parameter and half weight."""
    grads, params, weights = (list(column) for column in zip(*rows, strict=True))
    nothing: list[Tensor | None] = [None] * len(rows)
    arguments = [*learning_rate(lr), 0.0, 0.0, 0.0, 0, 0, 0]
    return GroupRows(arguments, [grads, params, nothing, weights, nothing])


def row(size: int, grad: float, dtype: torch.dtype = F16) -> tuple[Tensor, Tensor, Tensor]:
    """Return a gradient, a parameter of ones and its half weight."""
    return torch.full((size,), grad, dtype=dtype), torch.ones(size), torch.ones(size, dtype=F16)


@pytest.mark.usefixtures("modules")
def test_each_group_is_stepped_by_its_own_options(step: KernelStep) -> None:
    first, second, third = row(3, 2.0), row(2, 4.0), row(1, 8.0, F32)
    assert step.take([group(0.5, first, third), group(torch.tensor(0.25), second)])
    step.step(NONE, None)
    for (_, param, weight), expected in ((first, 0.0), (second, 0.0), (third, -3.0)):
        assert set(param.tolist()) == {expected}
        assert torch.equal(weight, param.half())


@pytest.mark.usefixtures("modules")
def test_gradients_are_multiplied_by_both_factors(step: KernelStep) -> None:
    one = row(2, 64.0)
    step.take([group(1.0, one)])
    step.step(Factors(torch.tensor([16.0]), torch.tensor([0.5])), torch.zeros(1))
    assert one[1].tolist() == [-1.0, -1.0]
    assert one[0].tolist() == [64.0, 64.0]


@pytest.mark.usefixtures("modules")
def test_after_an_overflow_nothing_changes(step: KernelStep) -> None:
    one = row(2, 64.0)
    step.take([group(1.0, one)])
    step.step(NONE, torch.ones(1))
    assert (one[1].tolist(), one[2].tolist()) == ([1.0, 1.0], [1.0, 1.0])


def test_a_group_is_prepared_in_one_launch_where_its_rows_follow_each_other(
    step: KernelStep, modules: EmulatedModules
) -> None:
    rows = [row(2, 1.0) for _ in range(3)]
    step.take([group(0.5, *rows[:2]), group(0.5, rows[2])])
    step.step(NONE, None)
    assert modules.launched == ["sgd_prepare", "sgd_prepare", "sgd_float16_to_float16"]


@pytest.mark.usefixtures("modules")
def test_a_row_without_a_half_weight_is_stepped_alone(step: KernelStep) -> None:
    grad, param, _ = row(2, 2.0, F32)
    assert step.take([group(0.5, (grad, param, None))])
    step.step(NONE, None)
    assert param.tolist() == [0.0, 0.0]


@pytest.mark.usefixtures("modules")
def test_autograd_is_told_of_what_was_written(step: KernelStep) -> None:
    grad, param, weight = row(2, 2.0)
    before = [one._version for one in (grad, param, weight)]
    step.take([group(0.5, (grad, param, weight))])
    step.step(NONE, None)
    assert [one._version > old for one, old in zip((grad, param, weight), before, strict=True)] == [
        False,
        True,
        True,
    ]


@pytest.mark.usefixtures("modules")
def test_rows_that_no_kernel_takes_are_refused_as_a_whole(step: KernelStep) -> None:
    grad, param, weight = row(2, 2.0, torch.float64)
    assert not step.take([group(0.5, row(2, 1.0), (grad, param.double(), weight))])
    assert step.take([group(0.5, row(2, 1.0))])


# --- what is known of a step is for these tensors, in this memory and layout, alone ---


class Rows:
    """A group with one row of 2 x 2 elements, stepped once.

    Attributes:
        columns: gradient, parameter, momentum, half weight and counter.
    """

    def __init__(self, step: KernelStep, has_weight: bool = True) -> None:
        self._step = step
        weight = torch.ones(2, 2, dtype=F16) if has_weight else None
        grad = torch.full((2, 2), 2.0, dtype=F16 if has_weight else F32)
        self.columns = [grad, torch.ones(2, 2), torch.ones(2, 2), weight, None]
        assert self.step() == -0.25

    def step(self) -> float | None:
        """Return the last element of the parameter then; None where no kernel takes the row."""
        arguments = [*learning_rate(0.5), 0.5, 0.0, 0.0, 0, 0, 0]
        if not self._step.take([GroupRows(arguments, [[one] for one in self.columns])]):
            return None
        self._step.step(NONE, None)
        return self.columns[1].flatten()[-1].item()


def transposed(tensor: Tensor) -> Tensor:
    """Return the same values in the other order of memory."""
    return tensor.t().contiguous().t()


@pytest.mark.usefixtures("modules")
@pytest.mark.parametrize("column", [0, 1, 2, 3])
def test_a_column_in_another_order_of_memory_is_not_taken(step: KernelStep, column: int) -> None:
    rows = Rows(step)
    before = rows.columns[column]
    rows.columns[column] = transposed(before)
    assert rows.step() is None
    rows.columns[column] = before
    assert rows.step() is not None


@pytest.mark.usefixtures("modules")
@pytest.mark.parametrize(("column", "has_weight"), [(3, True), (1, False)])
def test_other_strides_of_the_same_memory_are_noticed(
    step: KernelStep, column: int, has_weight: bool
) -> None:
    rows = Rows(step, has_weight)
    rows.columns[column].data = rows.columns[column].data.t()
    assert rows.step() is None


def test_a_gradient_of_another_dtype_gets_its_own_kernel(
    step: KernelStep, modules: EmulatedModules
) -> None:
    rows = Rows(step)
    for dtype, kernel in ((F32, "sgd_float32_to_float16"), (F16, "sgd_float16_to_float16")):
        rows.columns[0] = rows.columns[0].to(dtype)
        rows.step()
        assert modules.launched[-1] == kernel


@pytest.mark.usefixtures("modules")
@pytest.mark.parametrize(("column", "dtype"), [(1, torch.float64), (2, F16), (3, torch.float64)])
def test_another_dtype_of_what_is_stepped_is_noticed(
    step: KernelStep, column: int, dtype: torch.dtype
) -> None:
    rows = Rows(step)
    rows.columns[column].data = rows.columns[column].data.to(dtype)
    assert rows.step() is None


@pytest.mark.usefixtures("modules")
def test_a_smaller_parameter_in_the_same_memory_is_noticed(step: KernelStep) -> None:
    rows = Rows(step)
    whole = rows.columns[1]
    rows.columns = [None if one is None else one[:1] for one in rows.columns]
    assert rows.step() is not None
    assert whole[1].tolist() == [-0.25, -0.25]
    assert whole[0].tolist() != [-0.25, -0.25]


@pytest.mark.usefixtures("modules")
def test_another_parameter_in_the_same_list_and_memory_is_noticed(step: KernelStep) -> None:
    """As after `group["params"][0] = smaller`, where the new one got the memory of the old one."""
    first, second = row(2, 2.0), row(2, 2.0)
    one = group(1.0, first, second)
    for grad in (2.0, 2.0):
        first[0].fill_(grad)
        assert step.take([one])
        step.step(NONE, None)
    for column in one.columns:
        if column[0] is not None:
            column[0] = column[0][:1]
    assert step.take([one])
    step.step(NONE, None)
    assert first[1].tolist() == [-5.0, -3.0]
    assert second[1].tolist() == [-5.0, -5.0]


@pytest.mark.usefixtures("modules")
def test_a_sparse_gradient_is_not_taken(step: KernelStep) -> None:
    rows = Rows(step)
    rows.columns[0] = rows.columns[0].to_sparse()
    assert rows.step() is None


@pytest.mark.usefixtures("modules")
def test_no_gradient_is_held_after_release(step: KernelStep) -> None:
    grad, param, weight = row(2, 2.0)
    held = weakref.ref(grad)
    step.take([group(0.5, (grad, param, weight))])
    step.step(NONE, None)
    del grad
    assert held() is not None
    step.release()
    assert held() is None


def test_a_learning_rate_is_a_number_or_a_tensor_in_its_place() -> None:
    lr = torch.tensor(0.5)
    assert learning_rate(0.5) == [0.5, None]
    assert learning_rate(lr) == [0.0, lr]
