"""Imports DGL and PyTorch Geometric for tests: their imports warn, and say which backend is on.

Their hundreds of modules are put aside while no test of theirs runs: `amp.initialize` and
`amp.deactivate` look through every imported module that uses torch, in nearly every test.
"""

import contextlib
import io
import os
import sys
import warnings
from collections.abc import Iterator
from types import ModuleType

os.environ.setdefault("DGLBACKEND", "pytorch")  # else it writes a file to the home directory
with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
    warnings.simplefilter("ignore")
    import dgl as dgl
    import torch_geometric as torch_geometric

_aside: dict[str, ModuleType] = {}


def put_aside() -> None:
    """Take their modules out of ``sys.modules``."""
    names = [name for name in sys.modules if name.partition(".")[0] in ("dgl", "torch_geometric")]
    _aside.update((name, sys.modules.pop(name)) for name in names)


@contextlib.contextmanager
def imported() -> Iterator[None]:
    """Have their modules where an import has them."""
    sys.modules.update(_aside)
    try:
        yield
    finally:
        put_aside()
