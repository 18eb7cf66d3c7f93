"""Which parameters other ranks step, of an optimizer like ZeroRedundancyOptimizer."""

import torch
from torch import nn
from torch.optim import SGD

from amp_patch.step.held_params import HeldParams
from amp_patch.step.optimizer_backward import OptimizerBackward
from amp_patch.step.replaced_methods import ReplacedMethods
from amp_patch.step.skip import Skip
from amp_patch.step.zero_shares import ZeroShares
from amp_patch.weights.fp32_values import FP32Values


def test_what_others_step_has_no_value_here_also_where_it_is_added_later() -> None:
    own, other, later = (nn.Parameter(torch.ones(2, dtype=torch.half)) for _ in range(3))
    zero, local = SGD([own, other]), SGD([own])
    values = FP32Values()
    for param in (own, other, later):
        values.set(param, param.detach().float())
    backward = OptimizerBackward(local, HeldParams(local, masters=None), None, Skip(print))
    shares = ZeroShares(zero, values, backward, ReplacedMethods())
    assert [id(one) for one in backward.gradients.elsewhere] == [id(other)]
    assert [values.holds(one) for one in (own, other, later)] == [True, False, True]
    zero.add_param_group({"params": [later]})
    assert {id(one) for one in backward.gradients.elsewhere} == {id(other), id(later)}
    assert not values.holds(later)
    del shares  # the replaced method does not hold it
