"""What any backward wrote, many gradients a share at a time: the same sums, in little memory."""

import pytest
import torch
from drawn_passes import PASSES, Pass, Received
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from amp_patch.gradients import gradient_buffers
from amp_patch.gradients.gradients import Gradients
from amp_patch.gradients.param_pairs import ParamPairs
from amp_patch.tools.sweep.memory import LivingTensors
from amp_patch.weights.lazy_gradients import LazyGradients


@given(passes=PASSES, is_lazy=st.booleans(), in_place=st.sampled_from([0, 0, 1, 3]))
def test_in_shares_gradients_add_up_to_what_they_do_at_once(
    passes: list[Pass], is_lazy: bool, in_place: int
) -> None:
    found = []
    for at_once in (1, 1 << 17):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gradient_buffers, "_LEAST_SHARE", at_once)
            received = Received(is_lazy, in_place)
            for one in passes:
                received.run(one, is_alone=False)
        found.append(received.state())
    assert found[0] == found[1]


@pytest.mark.parametrize("is_lazy", [False, True])
def test_a_later_pass_takes_the_memory_of_one_share(is_lazy: bool) -> None:
    count, size = 8, 1 << 17
    lazy = LazyGradients() if is_lazy else None
    halves = [nn.Parameter(torch.zeros(size, dtype=torch.float16)) for _ in range(count)]
    make = lazy.parameter if lazy else nn.Parameter
    pairs = ParamPairs([*halves], [make(half.detach().float(), True) for half in halves])
    gradients = Gradients(lazy)

    def backward() -> None:
        gradients.set_aside(pairs, 8.0)
        for half in halves:
            half.grad = torch.full_like(half, 8.0)

    def receive() -> None:
        taken = gradients.passes.receive(pairs, 8.0)
        gradients.passes.round_into_halves(taken)
        gradients.passes.finish(taken)

    for _ in range(2):
        backward()
        receive()
    backward()
    with LivingTensors() as living:
        before = living.peak
        receive()
    # Earlier half gradients go first. All at once, fp32 ones would take 32 bytes of each size.
    assert living.peak - before <= 4 * size
    assert all(torch.equal(one.grad, torch.full((size,), 3.0)) for one in pairs.master)
