"""The drop-in assigns to attributes of foreign objects by amp_patch.patching alone, as the core."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_architecture import (
    OWN_ATTRIBUTES,
    PACKAGE,
    RING,
    declared_attributes,
    foreign_assignments,
    parse,
)

RING_ATTRIBUTES = set().union(*(declared_attributes(parse(path)) for path in RING))
#: File of the drop-in -> assignments that are no patch, and why.
ALLOWED = {
    # A module that is just made, by its loader.
    "finder.py": ["vars(module)['__getattr__']"],
    # Of the module itself, as Python's documentation has it.
    "packages/apex/amp/_amp_state.py": ["_module.__class__"],
    # What the script assigns, handed on to the optimizer inside; data, as its state is.
    "packages/apex/fp16_utils/fp16_optimizer.py": ["self.optimizer.param_groups"],
    "packages/apex/optimizers/scaled_optimizer.py": ["self.optimizer.param_groups"],
    "packages/apex/parallel/LARC.py": ["self.optim.param_groups"],
}


@pytest.fixture(autouse=True)
def _know_the_attributes_of_the_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    known = OWN_ATTRIBUTES | RING_ATTRIBUTES
    monkeypatch.setattr("test_architecture.OWN_ATTRIBUTES", known)


@pytest.mark.parametrize("path", RING, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_patching_assigns_to_foreign_attributes(path: Path) -> None:
    name = path.relative_to(PACKAGE / "apex").as_posix()
    assert foreign_assignments(parse(path)) == ALLOWED.get(name, [])


def test_what_is_allowed_is_there() -> None:
    assert all((PACKAGE / "apex" / name).is_file() for name in ALLOWED)
