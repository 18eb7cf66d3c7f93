"""Imports DGL and PyTorch Geometric for tests: their imports warn, and say which backend is on."""

import contextlib
import io
import os
import warnings

os.environ.setdefault("DGLBACKEND", "pytorch")  # else it writes a file to the home directory
with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
    warnings.simplefilter("ignore")
    import dgl as dgl
    import torch_geometric as torch_geometric
