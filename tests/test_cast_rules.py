"""The rules are torch's: its dispatcher, its test lists and its CUDA autocast are the oracles."""

import logging
import warnings
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import autocast_oracle as oracle
import pytest
import torch

from amp_patch import cast_rules

LISTS = {
    "half": cast_rules.HALF,
    "float": cast_rules.FLOAT,
    "float_dtype": cast_rules.FLOAT_DTYPE,
    "promote": cast_rules.PROMOTE,
    "banned": cast_rules.BANNED,
}
# The version whose lists cast_rules.py has; an older torch may lack some of them.
LISTS_VERSION = (2, 13)
# Registered by builds with cuDNN only, where torch.lstm and its kind run it.
CUDNN_ONLY = {"_cudnn_rnn"}
# The database's way to the operator is not a public function of torch.
UNREACHED = {"_upsample_bilinear2d_aa"}
# Fails in any dtype of another item size, or takes sparse tensors, which stay float32 here.
NOT_ABOUT_HALF = {"as_strided", "sparse_mm", "sparse_sampled_addmm"}
DTYPES = {
    "float32": (torch.float32,),
    "float16": (torch.float16,),
    "mixed": (torch.float32, torch.float16),
    "mixed, half first": (torch.float16, torch.float32),
}
Mismatches = dict[str, list[str]]


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Silence torch about deprecated functions and about fake kernels that refuse half tensors."""
    monkeypatch.setattr(logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def registered_operators() -> set[str]:
    names = torch._C._dispatch_get_all_op_names()
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    cast = [name for name in names if has_kernel(name, "AutocastCUDA")]
    return {name.removeprefix("aten::").split(".")[0] for name in cast} - CUDNN_ONLY


def test_every_operator_that_cuda_autocast_registers_stands_in_a_list():
    listed = {name for names in LISTS.values() for name in names}
    missing = registered_operators() - listed - set(cast_rules.DIFFERENCES)
    assert not missing, f"add to the lists of cast_rules.py: {sorted(missing)}"


@pytest.mark.skipif(
    torch.torch_version.TorchVersion(torch.__version__) < LISTS_VERSION,
    reason="the lists are those of a newer torch",
)
def test_every_listed_operator_is_registered_with_cuda_autocast():
    listed = {name for names in LISTS.values() for name in names}
    stale = listed - registered_operators() - set(cast_rules.DIFFERENCES)
    assert not stale, f"remove from the lists of cast_rules.py: {sorted(stale)}"


def test_no_operator_stands_in_two_lists_and_each_list_is_sorted():
    everything = [name for names in LISTS.values() for name in names]
    everything += [*cast_rules.COMPOSITES, *cast_rules.NO_HALF_ON_CPU]
    assert len(everything) == len(set(everything))
    for names in (*LISTS.values(), tuple(cast_rules.COMPOSITES), tuple(cast_rules.DIFFERENCES)):
        assert list(names) == sorted(names)


def torch_lists() -> dict[str, list[Any]]:
    with oracle.FAKE_MODE:
        lists = oracle.AutocastTestLists("cuda")
    return {
        "half": lists.torch_fp16 + lists.nn_fp16 + lists.linalg_fp16 + lists.methods_fp16,
        "float": lists.torch_fp32 + lists.nn_fp32 + lists.methods_fp32,
        "promote": lists.torch_need_autocast_promote,
        "banned": lists.banned,
        "none": lists.torch_expect_builtin_promote + lists.methods_expect_builtin_promote,
    }


def paths_named(name: str) -> list[str]:
    surfaces = [*cast_rules.SURFACES, "torch._VF"]
    named = [f"{surface}.{name.removeprefix('linalg_')}" for surface in surfaces]
    return [path for path in named if path in cast_rules.targets()]


@pytest.mark.parametrize("rule", ["half", "float", "promote", "banned"])
def test_the_operators_of_torchs_autocast_test_lists_have_the_rule_of_their_list(rule):
    allowed = {"float", "float_dtype"} if rule == "float" else {rule}
    for name, *_ in torch_lists()[rule]:
        found = {path: cast_rules.targets()[path] for path in paths_named(name)}
        assert found, f"{name} is not patched anywhere"
        assert set(found.values()) <= allowed, f"{name}: {found}"
        assert name not in cast_rules.DIFFERENCES


def test_what_torch_promotes_by_itself_is_not_patched():
    names = {name for name, *_ in torch_lists()["none"]}
    assert {"add", "__add__", "cat", "eq", "__eq__"} <= names
    assert not [path for name in names for path in paths_named(name)]


def operator_calls() -> Iterator[tuple[str, Any, Any, Any]]:
    """Yield name, function, arguments and keyword arguments for torch's samples and for ours."""
    for op in oracle.op_db:
        for sample in oracle.samples(op, 3):
            for name, path in oracle.spellings(op):
                yield name, path, (sample.input, *sample.args), sample.kwargs
    yield from ((name, path, args, {}) for name, path, args in EXTRA_CALLS)


SQUARE, CUBE, LAYERED = torch.rand(3, 3), torch.rand(3, 3, 3), torch.rand(2, 3, 4, 4)
# Public functions, and dispatching methods, of which torch's operator database has no sample.
EXTRA_CALLS = [
    ("corrcoef", "torch.corrcoef", (SQUARE,)),
    ("cov", "torch.cov", (SQUARE,)),
    ("chain_matmul", "torch.chain_matmul", (SQUARE, SQUARE, SQUARE)),
    ("conv_tbc", "torch.conv_tbc", (CUBE, CUBE, torch.rand(3))),
    ("frobenius_norm", "torch.frobenius_norm", (SQUARE, [0, 1])),
    ("gumbel_softmax", "torch.nn.functional.gumbel_softmax", (SQUARE,)),
    ("lp_pool2d", "torch.nn.functional.lp_pool2d", (LAYERED, 2.0, 2)),
    ("matmul", "torch.Tensor.__matmul__", (SQUARE, SQUARE)),
    ("matmul", "torch.Tensor.__rmatmul__", (SQUARE, SQUARE)),
    ("nll_loss2d", "torch._C._nn.nll_loss2d", (LAYERED, torch.zeros(2, 4, 4).long())),
    ("norm_except_dim", "torch.norm_except_dim", (SQUARE,)),
    ("pow", "torch.Tensor.__pow__", (SQUARE, 2)),
    ("pow", "torch.Tensor.__rpow__", (SQUARE, 2)),
    ("reciprocal", "torch.Tensor.__rdiv__", (SQUARE, 2)),
    ("reciprocal", "torch.Tensor.__rtruediv__", (SQUARE, 2)),
    ("softmax", "torch.softmax", (SQUARE, 0, torch.float64)),
    ("upsample", "torch.nn.functional.upsample", (LAYERED, None, 2)),
]


def compare_with_autocast() -> tuple[Mismatches, set[str]]:
    """Return where results or kernels differ, and what autocast changes at all, by operator."""
    mismatches, changed = defaultdict(list), set()
    casts = oracle.Casts()
    with casts.patched(cast_rules.targets()):
        for name, path, args, kwargs in operator_calls():
            for label, dtypes in DTYPES.items():
                expected, got = oracle.observe_both(casts, path, args, kwargs, dtypes)
                if expected.error:
                    continue
                if got != expected:
                    mismatches[name].append(f"{path} of {label}: {got}, autocast: {expected}")
                if expected.dtypes[:1] != list(dtypes[:1]):
                    changed.add(name)
    return mismatches, changed


def test_every_operator_computes_in_the_dtypes_of_torchs_cuda_autocast():
    mismatches, changed = compare_with_autocast()
    unexplained = set(mismatches) - set(cast_rules.DIFFERENCES) - UNREACHED
    assert not unexplained, "\n".join(mismatches[name][0] for name in sorted(unexplained))
    stale = set(cast_rules.DIFFERENCES) - set(mismatches)
    assert not stale, f"remove from DIFFERENCES: {sorted(stale)}"
    assert len(changed) > 150
