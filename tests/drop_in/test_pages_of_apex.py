"""docs/apex.md: what it says is supplied is. docs/leave-apex.md: its names are there."""

from __future__ import annotations

import importlib
import inspect
import operator
import re
import types

import pytest
import torch
from running import ROOT
from torch import nn

PAGE = (ROOT / "docs" / "apex.md").read_text(encoding="utf-8")
TABLE = PAGE.partition("<!-- supplied:begin -->")[2].partition("<!-- supplied:end -->")[0]
ROWS = re.findall(r"^\| (`.+?) \| (.+) \|$", TABLE, re.MULTILINE)
MISSING = re.findall(r"`(apex\.\w+)`", PAGE[PAGE.index("Not supplied are") :].split(":")[0])
CONTRIBUTED = ["clip_grad", "layer_norm", "optimizers", "xentropy"]
LEAVING = (ROOT / "docs" / "leave-apex.md").read_text(encoding="utf-8")
#: public names that the page has no line for, and why
TOLD_OTHERWISE = {
    "ReduceOp": "torch's own",
    "mlp_function": "the function of MLP",
    "dense_no_bias_function": "the function of DenseNoBias",
    "fused_dense_function": "the function of FusedDense",
    "fused_dense_gelu_dense_function": "the function of FusedDenseGeluDense",
    "DenseNoBias": "as FusedDense",
    "DenseNoBiasFunc": "the function of DenseNoBias",
    "FusedDenseFunc": "the function of FusedDense",
    "FusedDenseGeluDenseFunc": "the function of FusedDenseGeluDense",
    "MlpFunction": "the function of MLP",
    "MultiTensorApply": "the class of multi_tensor_applier",
    "remove_weight_norm": "as apply_weight_norm",
    "bfloat16_function": "as half_function",
    "float_function": "as half_function",
    "promote_function": "as half_function",
    "register_bfloat16_function": "as register_half_function",
    "register_float_function": "as register_half_function",
    "register_promote_function": "as register_half_function",
}


def names(cell: str) -> list[str]:
    return re.findall(r"`([\w.]+)`", cell)


def found(name: str) -> object:
    """Return what a dotted name means; raise AttributeError where it means nothing."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            module = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        return operator.attrgetter(".".join(parts[count:]))(module) if parts[count:] else module
    raise AttributeError(name)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_modules_and_names_of_the_table_are_there(apex: types.ModuleType, row) -> None:
    modules = [importlib.import_module(name) for name in names(row[0])]
    if row[0] == "`apex.amp`":
        return  # its row names attributes of other objects, see test_amp_drop_in
    for name in names(row[1]):
        found(f"{modules[0].__name__}.{name}")


def test_the_table_has_every_package_of_apex(apex: types.ModuleType) -> None:
    listed = {name for row in ROWS for name in names(row[0])}
    packages = {f"apex.{name}" for name, one in vars(apex).items() if hasattr(one, "__path__")}
    assert packages <= listed


def test_what_is_not_supplied_is_not(apex: types.ModuleType) -> None:
    assert MISSING == ["apex.transformer", "apex.pyprof", "apex.contrib"]
    for name in MISSING[:2]:
        with pytest.raises(ImportError, match="Instead of"):
            importlib.import_module(name)


# --- leaving apex ---


def absent(*roots: str) -> list[str]:
    """Return the dotted names of the page that begin so and mean nothing."""
    table = re.findall(r"^\|.*\|$", LEAVING, re.MULTILINE)
    dotted = {name for row in table for name in re.findall(r"`([\w.]+)", row)}
    missing = []
    for name in sorted(name for name in dotted if name.startswith(roots)):
        try:
            found(f"amp_patch.{name}" if name.startswith("amp.") else name)
        except AttributeError:
            missing.append(name)
    return missing


@pytest.mark.usefixtures("amp")
def test_the_names_of_the_page_are_there(apex: types.ModuleType) -> None:
    apex.amp.initialize(torch.nn.Linear(1, 1), verbosity=0)  # from then on there are loss scalers
    assert absent("apex.") == []
    assert absent("amp.", "amp_patch.", "torch.") == []


def test_a_name_that_is_not_there_is_seen() -> None:
    with pytest.raises(AttributeError):
        found("torch.optim.FusedAdam")


def test_the_page_has_every_public_name_of_what_is_supplied(apex: types.ModuleType) -> None:
    inside = [name for row in ROWS for name in names(row[0]) if name.startswith("apex.")]
    inside += [f"apex.contrib.{name}" for name in CONTRIBUTED]
    modules = [importlib.import_module(name) for name in inside]
    public = {
        name
        for module in modules
        for name in module.__all__
        if callable(getattr(module, name)) and not name.startswith("_")
    }
    assert "FusedAdam" in public
    assert public - set(re.findall(r"\w+", LEAVING)) == set(TOLD_OTHERWISE)


def test_the_page_has_every_argument_of_distributed_data_parallel(apex: types.ModuleType) -> None:
    section = LEAVING.partition("## DistributedDataParallel")[2].partition("\n## ")[0]
    arguments = inspect.signature(apex.parallel.DistributedDataParallel).parameters
    told = set(re.findall(r"\w+", section))
    assert set(arguments) - told == set()


#: What the page says, what it is in the place of, and what a reader builds.
LAYERS = [
    (
        "torch.nn.RMSNorm(shape, eps=1e-5)",
        lambda apex: apex.normalization.FusedRMSNorm(6),
        [nn.RMSNorm(6, eps=1e-5)],
    ),
    (
        "with a `ReLU` after the last `Linear`, too",
        lambda apex: apex.mlp.MLP([6, 5, 4]),
        [nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4), nn.ReLU()],
    ),
    (
        '`Linear`, `torch.nn.GELU(approximate="tanh")`, `Linear`',
        lambda apex: apex.fused_dense.FusedDenseGeluDense(6, 5, 4),
        [nn.Linear(6, 5), nn.GELU(approximate="tanh"), nn.Linear(5, 4)],
    ),
]


@pytest.mark.parametrize(("words", "make", "layers"), LAYERS, ids=["rms norm", "mlp", "gelu"])
def test_layers_of_torch_compute_what_those_of_apex_do(apex, words, make, layers) -> None:
    for name in ("normalization", "mlp", "fused_dense"):
        importlib.import_module(f"apex.{name}")
    old, new = make(apex), nn.Sequential(*layers)
    with torch.no_grad():
        for mine, theirs in zip(new.parameters(), old.parameters(), strict=True):
            mine.copy_(theirs)
    inputs = 1e-2 * torch.randn(3, 6)
    torch.testing.assert_close(new(inputs), old(inputs))
    assert words in LEAVING
