"""What is kept is made once; what somebody else holds is kept no longer."""

from __future__ import annotations

import torch

from amp_patch.casting.kept_wrappers import KeptWrappers


class Wrapper:
    """Anything that can be told from another one."""


def test_each_function_has_one_wrapper_for_each_key() -> None:
    kept = KeptWrappers()
    first, second = kept.get(torch.mm, 1, Wrapper), kept.get(torch.mm, 2, Wrapper)
    assert kept.get(torch.mm, 1, Wrapper) is first is not second
    assert kept.ids == {id(first), id(second)}


def test_a_second_name_of_a_function_in_c_has_a_wrapper_of_its_own() -> None:
    kept = KeptWrappers()
    assert torch.mm == torch.dsmm
    assert kept.get(torch.mm, 1, Wrapper) is not kept.get(torch.dsmm, 1, Wrapper)


def test_what_somebody_holds_is_forgotten_and_made_anew() -> None:
    kept = KeptWrappers()
    held = kept.get(torch.mm, 1, Wrapper)
    let_go = id(kept.get(torch.mm, 2, Wrapper))
    kept.forget_held()
    assert kept.ids == {let_go}
    assert kept.get(torch.mm, 1, Wrapper) is not held
