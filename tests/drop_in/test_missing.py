"""What the drop-in does not supply is an error that says what to use, or a plain no."""

from __future__ import annotations

import importlib
import importlib.util
import pydoc
import re
import sys
import types

import pytest
from running import SUPPLIED

from amp_patch import amp
from amp_patch.apex.replacements import COMPILED, ONLY_HERE, REPLACEMENTS

SHARES_APEX = True


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ("import apex.transformer", "'apex.transformer' .* use megatron.core"),
        ("from apex import transformer", "'apex.transformer' .* use megatron.core"),
        (
            "from apex.transformer.layers import x",
            "'apex.transformer' .* apex has RNN, amp, .* use mega",
        ),
        (
            "from apex import nothing",
            "supplies no 'apex.nothing' .*; apex has RNN, amp, .* in torch",
        ),
        ("from apex.amp.opt import Nothing", "supplies no 'apex.amp.opt.Nothing'"),
        ("from apex.contrib.sparsity import ASP", "to_sparse_semi_structured"),
        (
            "from apex.optimizers import FusedLARS",
            "apex.optimizers has .*FusedAdam",
        ),
        ("from amp_C import multi_tensor_lars", "amp_C has .*multi_tensor_scale.*Instead of multi"),
        ("from apex.amp import amp, dummy", "supplies no 'apex.amp.dummy'"),
    ],
)
def test_what_is_not_supplied_is_an_import_error_with_advice(
    apex: types.ModuleType, statement: str, words: str
) -> None:
    with pytest.raises(ImportError, match=words):
        exec(statement)


def test_what_apex_never_had_is_said_to_be_in_amp_patch(apex: types.ModuleType) -> None:
    assert set(ONLY_HERE) == set(amp.__all__) - set(dir(apex.amp))
    with pytest.raises(AttributeError, match=r"Instead of \w+, use amp_patch.amp.float_region\."):
        apex.amp.float_region()


def test_libraries_that_probe_get_no(apex: types.ModuleType) -> None:
    assert not hasattr(apex, "transformer")
    assert not hasattr(apex.amp.opt, "Nothing")
    for name in ("apex.transformer", "apex.amp.dummy", "apex.contrib.sparsity", "syncbn"):
        assert importlib.util.find_spec(name) is None
    assert importlib.util.find_spec("apex.amp.opt") is not None


@pytest.mark.parametrize("name", SUPPLIED)
def test_loaders_of_plug_ins_may_ask_for_what_is_not_there(
    apex: types.ModuleType, name: str
) -> None:
    """Python ignores such a name, and so do ``pydoc``, ``unittest`` and their like."""
    module = __import__(name, fromlist=["dummy"])
    assert module is __import__(name, fromlist=[""]) is sys.modules[name]
    assert not [loaded for loaded in sys.modules if loaded.endswith(".")]
    assert not hasattr(module, "dummy")
    assert getattr(module, "dummy", 3) == 3
    with pytest.raises(ImportError):
        exec(f"from {name} import dummy")
    with pytest.raises(ModuleNotFoundError) as raised:
        importlib.import_module(f"{name}.dummy")
    assert raised.value.name == f"{name}.dummy"


def test_a_class_is_located_by_its_name(apex: types.ModuleType) -> None:
    """Configuration files name classes so, and what locates them tries module after module."""
    assert pydoc.locate("apex.amp.scaler.LossScaler") is apex.amp.scaler.LossScaler
    assert pydoc.locate("apex.optimizers.FusedAdam") is apex.optimizers.FusedAdam
    for name in ("apex.amp.scaler.Nothing", "apex.transformer.layers.Nothing", "syncbn.forward"):
        assert pydoc.locate(name) is None


def test_an_error_in_a_statement_is_told_from_one_beside_it(apex: types.ModuleType) -> None:
    """The statement asks the module as ``hasattr`` does; only its own question is answered so."""
    code = "import apex.amp\nhas = hasattr(apex.amp, 'dummy')\nfrom apex.amp import initialize"
    names: dict[str, object] = {}
    exec(code, names)
    assert names["has"] is False
    assert names["initialize"] is apex.amp.initialize
    many = "\n".join(f"name_{index} = {index}" for index in range(300))  # EXTENDED_ARG before it
    with pytest.raises(ImportError, match=r"supplies no 'apex.amp.dummy'") as raised:
        exec(f"{many}\nfrom apex.amp import dummy")
    assert raised.value.name == "apex.amp"


@pytest.mark.parametrize("name", COMPILED)
def test_what_apex_compiled_is_an_import_error_with_advice(
    apex: types.ModuleType, name: str
) -> None:
    with pytest.raises(ModuleNotFoundError, match=f"Instead of {name}, use ") as raised:
        importlib.import_module(name)
    assert raised.value.name == name
    with pytest.raises(ModuleNotFoundError, match=f"supplies no '{name}', which is a module that"):
        exec(f"from {name} import forward")
    assert importlib.util.find_spec(name) is None
    for advised in re.findall(r"(?:apex|amp_C)[.\w]+", COMPILED[name]):
        package, _, attribute = advised.rpartition(".")
        assert hasattr(importlib.import_module(package), attribute)


@pytest.mark.parametrize("name", REPLACEMENTS)
def test_what_has_a_replacement_is_not_supplied(apex: types.ModuleType, name: str) -> None:
    with pytest.raises(ImportError, match="Instead of"):
        importlib.import_module(name)
