"""Gradients of earlier passes are out of a backward's way, and come back where it wrote none."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from amp_patch.gradients.earlier_gradients import EarlierGradients

#: Of one parameter: what it had before the pass, and whether the pass writes another.
ROWS = st.lists(st.tuples(st.sampled_from(["none", "own", "view"]), st.booleans()), max_size=5)


def gradient(kind: str, place: int, memory: Tensor) -> Tensor | None:
    if kind == "none":
        return None
    return memory[place] if kind == "view" else torch.full((2,), place + 1.0)


@given(ROWS, st.sampled_from(["give_back", "put_back"]), st.booleans())
def test_each_parameter_has_the_gradient_of_its_last_pass(
    rows: list[tuple[str, bool]], ending: str, are_scripts: bool
) -> None:
    """Views stay in the memory of a script's; those of DDP's buckets it makes anew."""
    memory = torch.arange(1.0, 6.0).repeat_interleave(2).view(5, 2)  # as DDP's buckets
    params = [nn.Parameter(torch.zeros(2)) for _ in rows]
    before = [gradient(kind, place, memory) for place, (kind, _) in enumerate(rows)]
    for param, grad in zip(params, before, strict=True):
        param.grad = grad
    earlier = EarlierGradients()
    earlier.are_scripts = are_scripts
    assert earlier.take([*params]) is any(kind == "view" for kind, _ in rows)
    assert [param.grad for param in params] == [None] * len(params)
    assert len(earlier) == sum(kind != "none" for kind, _ in rows)
    memory.fill_(-1.0)  # the backward fills the buckets
    for param, (_, is_written) in zip(params, rows, strict=True):
        param.grad = torch.full((2,), 9.0) if is_written else None
    getattr(earlier, ending)()
    for place, (param, (kind, is_written)) in enumerate(zip(params, rows, strict=True)):
        if is_written and (kind == "none" or ending == "give_back"):
            assert param.grad.tolist() == [9.0, 9.0]
        elif kind == "none":
            assert param.grad is None
        else:
            assert param.grad.tolist() == [place + 1.0] * 2
            assert param.grad is before[place] or (kind == "view" and not are_scripts)
    assert not earlier


def test_those_that_are_cleared_meanwhile_do_not_come_back() -> None:
    params = [nn.Parameter(torch.zeros(2)) for _ in range(2)]
    for param in params:
        param.grad = torch.ones(2)
    earlier = EarlierGradients()
    earlier.take(params)
    earlier.drop({id(params[0])})
    assert list(earlier.by_param()) == [id(params[1])]
    earlier.give_back()
    assert [param.grad is None for param in params] == [True, False]
