"""Parallel wrappers around models before `amp.initialize`: right, or refused before any change."""

from collections.abc import Iterator
from types import ModuleType

import accumulating
import pytest
import rank_training as training
import ranks
import torch
import wrapping
from support import nightly_but
from test_accumulation import assert_alike
from test_engines import PLANTS, assert_ranks_agree, assert_trained_alike
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

#: Levels that leave the parameters as they are.
KEPT = ("O0", "O1", "O4")


@pytest.mark.parametrize("engine", ["ddp-first", "ddp-around"])
def test_a_wrapper_from_before_trains_where_parameters_stay(engine: str) -> None:
    found = ranks.run(training.train_and_compare, engine, KEPT, 8, PLANTS, max_norm=0.5)
    for level in KEPT:
        assert_ranks_agree([one[level][0] for one in found], engine)
        assert_trained_alike(*found[0][level], engine, level)


def test_gradients_of_a_wrapper_from_before_wait_for_the_others() -> None:
    found = ranks.run(accumulating.train_all, "ddp-first", KEPT, delayed=False, synced=False)
    assert_alike(found, are_same_scales=True, levels=KEPT)


def test_a_wrapper_from_before_is_refused_where_parameters_change() -> None:
    for said in ranks.run(wrapping.all_that_is_said, ("O2", "O3", "O5")):
        for message in said:
            assert (
                "got a wrapper of type DistributedDataParallel around one whose parameters"
                in message
            )
            assert "then wrap what it returns" in message


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_a_later_stage_drops_the_wrapper_of_the_earlier_one(amp: ModuleType) -> None:
    model = nn.Linear(3, 2)
    amp.initialize(model, opt_level="O2", verbosity=0)
    wrapper = DistributedDataParallel(model)
    amp.deactivate()
    with pytest.raises(RuntimeError, match="del the wrapper of an earlier stage"):
        amp.initialize(model, opt_level="O2", verbosity=0)
    del wrapper
    amp.initialize(model, opt_level="O2", verbosity=0)
    assert DistributedDataParallel(model)(torch.ones(1, 3)).dtype is torch.float32


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_ranks_that_begin_apart_have_the_masters_of_the_first(level: str) -> None:
    started = {}
    for is_written in (False, True):
        first, second = ranks.run(wrapping.sent_at_the_start, level, is_written)
        for one, other in zip(first, second, strict=True):
            assert all(map(torch.equal, one, other))
        started[is_written] = first[0]
    half = torch.float16 if level == "O2" else torch.bfloat16
    assert any(not torch.equal(value, value.to(half).float()) for value in started[False])
    # to a half weight by hand, and to a master
    assert torch.equal(started[True][0].to(half), started[False][0].to(half) * 1.1)
    torch.testing.assert_close(started[True][1], started[False][1] + 0.01)


@pytest.mark.parametrize(("level", "batches"), [("O1", 3), ("O2", 3), ("O5", 0)])
def test_ranks_have_equal_values_after_join(level: str, batches: int) -> None:
    first, second = ranks.run(wrapping.sent_at_the_end, level, batches)
    assert all(map(torch.equal, first, second))


def test_zero_that_sends_buckets_is_refused_where_weights_are_in_half() -> None:
    for level in ("O1", "O2", "O3"):
        for said in ranks.run(wrapping.zero_that_is_refused, level, "parameters_as_bucket_view"):
            assert ("parameters_as_bucket_view=True, whose buckets" in said) == (level != "O1")


@pytest.mark.parametrize("level", nightly_but(["O1", "O2"], ["O1", "O2", "O4", "O5"]))
def test_zero_that_steps_without_inputs_is_refused_where_others_may_skip(level: str) -> None:
    for said in ranks.run(wrapping.zero_in_join, level, timeout=20):
        assert ("got Join([..., optimizer])" in said) == (level != "O4")


DELAYED = [("O1", "before"), ("O1", "after"), ("O2", "after"), ("O4", "before"), ("O4", "after")]


def test_a_wrapper_that_shares_memory_of_its_own_is_refused_where_blocks_set_it_aside() -> None:
    with ranks.Ranks(1) as one:
        for level, when in DELAYED:
            (said,) = one.run(wrapping.delaying, level, when)
            assert ("got delay_all_reduce_named_params" in said) == (level != "O4")


@pytest.mark.usefixtures("one_rank", "recwarn")  # torch warns of torch.jit, which it uses there
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O4", "O5"])
def test_a_wrapper_that_steps_in_the_backward_is_refused_where_blocks_come_first(
    amp: ModuleType, level: str
) -> None:
    model, rest = nn.Linear(3, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    before = model.bias.detach().float().clone()
    wrapper = DistributedDataParallel(nn.Sequential(model, rest))
    some = (param for param in model.parameters())
    if level in ("O1", "O2", "O5"):
        with pytest.raises(
            RuntimeError, match=r"got DistributedDataParallel\._register_fused_optim"
        ):
            wrapper._register_fused_optim(torch.optim.SGD, 0.5, optim_params=some)
        with pytest.raises(RuntimeError, match="opt_level='O4'"):
            wrapper._register_fused_optim(torch.optim.SGD, 0.5)
        wrapper._register_fused_optim(torch.optim.SGD, 0.5, optim_params=rest.parameters())
        return
    wrapper._register_fused_optim(torch.optim.SGD, 0.5, optim_params=some)
    with amp.scale_loss(wrapper(torch.ones(1, 3)).sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
    expected = before - 0.5 * rest.weight.sum(0)
    torch.testing.assert_close(model.bias.float(), expected, rtol=0, atol=2e-2)
    assert not torch.equal(model.bias.float(), before)


@pytest.mark.usefixtures("one_rank", "recwarn")  # torch warns of torch.jit, which it uses there
@pytest.mark.parametrize(("level", "is_refused"), [("O1", False), ("O2", True)])
def test_a_wrapper_that_steps_in_the_backward_is_refused_beside_no_optimizer(
    amp: ModuleType, level: str, is_refused: bool
) -> None:
    model = amp.initialize(nn.Linear(3, 2), opt_level=level, verbosity=0)
    before, wrapper = model.bias.detach().clone(), DistributedDataParallel(model)
    if is_refused:
        with pytest.raises(RuntimeError, match="steps the model's own weights within it"):
            wrapper._register_fused_optim(torch.optim.SGD, 0.5)
        return
    wrapper._register_fused_optim(torch.optim.SGD, 0.5)
    wrapper(torch.ones(1, 3)).sum().backward()
    assert torch.equal(model.bias, before - 0.5)


@pytest.mark.parametrize("level", nightly_but(["O1", "O2"], ["O1", "O2", "O5"]))
def test_zero_is_given_a_layer_later(level: str) -> None:
    assert ranks.run(wrapping.zero_of_a_later_group, level) == [True, True]


@pytest.mark.parametrize("level", nightly_but(["O1"], ["O0", "O1", "O2", "O3"]))
def test_zero_that_steps_in_the_backward_is_refused(level: str) -> None:
    for said in ranks.run(wrapping.zero_that_is_refused, level, "overlap_with_ddp"):
        assert "overlap_with_ddp=False" in said


@pytest.mark.parametrize("level", nightly_but(["O3"], ["O0", "O1", "O2", "O3"]))
def test_zero_that_was_loaded_is_given_back(level: str) -> None:
    assert ranks.run(wrapping.zero_given_back_after_a_load, level) == [torch.float32] * 2


def trained(amp: ModuleType, level: str, when: str) -> list[torch.Tensor]:
    """Return the parameters of a model that `nn.DataParallel` wraps "before", "after" or "never".

    On one device: there it calls the model itself.
    """
    model: nn.Module = training.make_model()
    optimizer = training.adamw(model.parameters())
    model = nn.DataParallel(model) if when == "before" else model
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    model = nn.DataParallel(model) if when == "after" else model
    wrapping.train(model, optimizer, steps=4)
    found = [param.detach().clone() for param in model.parameters()]
    amp.deactivate()
    return found


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O4", "O5"])
def test_data_parallel_trains_what_the_model_itself_does(amp: ModuleType, level: str) -> None:
    expected = trained(amp, level, "never")
    assert all(map(torch.equal, trained(amp, level, "after"), expected))
    if level in KEPT:
        assert all(map(torch.equal, trained(amp, level, "before"), expected))
    else:
        with pytest.raises(
            RuntimeError, match="got a wrapper of type DataParallel around one whose parameters"
        ):
            trained(amp, level, "before")


@pytest.mark.usefixtures("one_rank", "recwarn")  # torch warns of torch.jit, which it uses there
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_a_wrapper_steps_what_learns_beside_a_frozen_part_in_the_backward(
    amp: ModuleType, level: str
) -> None:
    other = nn.Linear(2, 2)
    frozen, head = nn.Linear(3, 2).requires_grad_(False), nn.Linear(2, 1)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.5)
    amp.initialize([frozen, other], optimizer, opt_level=level, verbosity=0)
    wrapper, before = DistributedDataParallel(nn.Sequential(frozen, head)), head.bias.clone()
    wrapper._register_fused_optim(torch.optim.SGD, 0.5)
    wrapper(torch.ones(1, 3)).sum().backward()
    assert torch.equal(head.bias, before - 0.5)
