"""The number of casts of a training step; it is the same on every machine."""

from contextlib import nullcontext

import pytest
import torch
from benchmarks.casts import amp_casts, autocast_casts
from cast_counter import CastCounter
from casting_support import half_kernels_as_on_cuda
from torch.nn import functional as F


@pytest.fixture
def counter() -> CastCounter:
    return CastCounter()


def test_a_cast_is_counted_however_it_is_spelled(counter: CastCounter) -> None:
    single = torch.ones(4)
    with counter:
        half = single.half()
        torch.empty(4, dtype=torch.bfloat16).copy_(half)
        half.sum(dtype=torch.float32)
        torch.softmax(half, 0, dtype=torch.float32)
    assert counter.casts == 4


def test_what_changes_no_dtype_is_not_counted(counter: CastCounter) -> None:
    single = torch.ones(4, 4)
    with counter:
        single.to(torch.float32)
        single + single.detach().clone()
        torch.empty(4, 4).copy_(single)
        single.argmax()
        single.isnan()
        F.embedding(torch.arange(4), single)
    assert counter.casts == 0


def test_an_operator_that_reads_both_dtypes_is_not_a_cast(counter: CastCounter) -> None:
    single, half = torch.ones(4), torch.ones(4, dtype=torch.float16)
    with counter:
        assert (half + single).dtype is torch.float32
    assert counter.casts == 0


def test_casts_of_weights_are_told_apart_also_through_their_views() -> None:
    weight, other = torch.nn.Parameter(torch.ones(4, 4)), torch.ones(4, 4)
    counter = CastCounter([weight])
    with counter:
        weight.half()
        weight.detach()[0].half()
        other.half()
    assert (counter.casts, counter.of_weights) == (3, 2)


def test_a_bulk_copy_is_counted_apart(counter: CastCounter) -> None:
    singles = [torch.ones(4), torch.ones(3)]
    halves = [single.half() for single in singles]
    with counter:
        torch._foreach_copy_(halves, singles)
    assert (counter.casts, counter.bulk_copies) == (0, 1)


@pytest.mark.parametrize(("cuda_list", "expected"), [(True, 920), (False, 824)])
def test_autocast_casts_a_weight_per_use_and_gradient(cuda_list: bool, expected: int) -> None:
    casts = autocast_casts(cuda_list=cuda_list)
    assert casts.total == expected
    assert casts.of_weights == 290


def test_the_first_o1_step_casts_as_autocast_does_but_q_k_and_v_share_one_cast() -> None:
    (first,) = amp_casts(steps=1)
    autocast = autocast_casts(cuda_list=True)
    shared = 2 * 24
    assert first.forward == autocast.forward - shared
    assert first.backward == autocast.backward - shared
    assert first.of_weights == autocast.of_weights


@pytest.mark.parametrize("opt_level", ["O1", "O4"])
def test_a_warm_step_casts_no_weight_and_at_most_552_times(opt_level: str) -> None:
    (casts,) = amp_casts(opt_level=opt_level)
    assert casts.of_weights == 0
    assert casts.bulk_copies == 1
    assert casts.total <= 552


@pytest.mark.parametrize("opt_level", ["O1", "O4"])
@pytest.mark.parametrize(("as_on_cuda", "at_most"), [(False, 485), (True, 391)])
def test_fast_norms_cast_less(opt_level: str, as_on_cuda: bool, at_most: int) -> None:
    with half_kernels_as_on_cuda() if as_on_cuda else nullcontext():
        (casts,) = amp_casts(opt_level=opt_level, rules="fast-norms")
    assert casts.of_weights == 0
    assert casts.bulk_copies == 1
    assert casts.total == at_most
    if as_on_cuda:
        # Left are gradients of weights and biases, of 145 linear layers and of all norms but the
        # first, whose input is float32 as the embedding is; and one of that norm's input.
        assert casts.backward - casts.forward == 2 * 145 + 2 * 47 + 1


def test_a_second_micro_batch_refreshes_no_weight() -> None:
    first, second = amp_casts(micro_batches=2)
    assert (first.bulk_copies, second.bulk_copies) == (1, 0)
    assert first.of_weights == second.of_weights == 0
    assert second.total == first.total


def test_a_second_micro_batch_of_the_first_step_casts_no_weight_again() -> None:
    first, second = amp_casts(micro_batches=2, steps=1)
    assert (first.of_weights, second.of_weights) == (290, 0)


def test_a_checkpoint_recomputes_activations_without_casting_a_weight() -> None:
    (plain,) = amp_casts()
    (recomputed,) = amp_casts(recompute=True)
    # a checkpoint keeps no activation: nothing holds the cast that q, k and v could share
    assert recomputed.forward == plain.forward + 24 * 2
    assert recomputed.of_weights == 0
    assert recomputed.bulk_copies == plain.bulk_copies
    # the activations are cast once more in backward; the head is not recomputed
    assert recomputed.backward - plain.backward == 24 * (6 + 2)


def test_a_first_step_with_checkpoints_casts_each_weight_once() -> None:
    (casts,) = amp_casts(recompute=True, steps=1)
    assert casts.of_weights == 290


@pytest.mark.parametrize(("opt_level", "at_the_output"), [("O0", 0), ("O3", 1)])
def test_levels_without_casts_of_functions_cast_the_output_only(
    opt_level: str, at_the_output: int
) -> None:
    (casts,) = amp_casts(opt_level=opt_level)
    assert (casts.forward, casts.backward) == (at_the_output, at_the_output)
    assert casts.of_weights == 0
