"""The rules are torch's: its dispatcher, its test lists and its CUDA autocast are the oracles."""

import contextlib
import logging
import re
import warnings
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import autocast_oracle as oracle
import pytest
import torch
from casting_support import LISTS
from support import PROFILE

from amp_patch.casting import rules as cast_rules
from amp_patch.casting import targets

# Registered by builds with cuDNN only, where torch.lstm and its kind run it.
CUDNN_ONLY = {"_cudnn_rnn"}
# The database's way to the operator is not a public function of torch.
UNREACHED = {"_upsample_bilinear2d_aa"}
# Fails in any dtype of another item size, or has to do with sparse tensors, which are not cast.
NOT_ABOUT_HALF = {"as_strided", "sparse_mm", "sparse_sampled_addmm", "to_sparse"}
DTYPES = {
    "float32": (torch.float32,),
    "float16": (torch.float16,),
    "mixed": (torch.float32, torch.float16),
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


def is_offered(op: str) -> bool:
    """Tell whether the running torch has the operator, or a function of this name."""
    if torch._C._jit_get_schemas_for_operator(f"aten::{op}"):
        return True
    with contextlib.suppress(ValueError):
        return bool(targets.user_rule_targets(op))
    return False


def differences() -> set[str]:
    """Return those of `DIFFERENCES` that the running torch has."""
    since = cast_rules.DIFFERENCES_BEFORE
    names = {op for op in cast_rules.DIFFERENCES if is_offered(op)}
    return {op for op in names if op not in since or torch.__version__ < since[op]}


def test_every_operator_that_cuda_autocast_registers_stands_in_a_list():
    listed = {name for names in LISTS.values() for name in names}
    missing = registered_operators() - listed - differences()
    assert not missing, f"add to the lists of casting/rules.py: {sorted(missing)}"


def test_every_listed_operator_is_registered_with_cuda_autocast():
    listed = {name for names in LISTS.values() for name in names if is_offered(name)}
    stale = listed - registered_operators() - differences()
    assert not stale, f"remove from the lists of casting/rules.py: {sorted(stale)}"


def test_no_operator_stands_in_two_lists_and_each_list_is_sorted():
    everything = [name for names in LISTS.values() for name in names]
    everything += [*cast_rules.COMPOSITES, *cast_rules.NO_HALF, *cast_rules.NO_HALF_ON_CPU]
    everything += [*cast_rules.NO_HALF_ON_CPU_BEFORE, *cast_rules.NO_HALF_ON_CUDA]
    everything += cast_rules.NO_HALF_BEFORE
    assert len(everything) == len(set(everything))
    assert all(
        any(op in names for names in LISTS.values()) for op in cast_rules.LISTED_WITHOUT_HALF
    )
    for names in (*LISTS.values(), cast_rules.COMPOSITES, cast_rules.DIFFERENCES):
        assert list(names) == sorted(names)
    assert set(cast_rules.DIFFERENCES_BEFORE) < set(cast_rules.DIFFERENCES)


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
    surfaces = [*targets.SURFACES, "torch._VF"]
    named = [f"{surface}.{name.removeprefix('linalg_')}" for surface in surfaces]
    return [path for path in named if path in targets.rule_targets()]


@pytest.mark.parametrize("rule", ["half", "float", "promote", "banned"])
def test_the_operators_of_torchs_autocast_test_lists_have_the_rule_of_their_list(rule):
    allowed = {"float", "float_dtype"} if rule == "float" else {rule}
    for name, *_ in torch_lists()[rule]:
        found = {path: targets.rule_targets()[path] for path in paths_named(name)}
        assert found, f"{name} is not patched anywhere"
        assert set(found.values()) <= allowed, f"{name}: {found}"
        assert name not in differences()


def test_what_torch_promotes_by_itself_is_not_patched():
    names = {name for name, *_ in torch_lists()["none"]}
    assert {"add", "__add__", "cat", "eq", "__eq__"} <= names
    assert not [path for name in names for path in paths_named(name)]


def operator_calls() -> Iterator[tuple[str, Any, Any, Any]]:
    """Yield name, function, arguments and keyword arguments for torch's samples and for ours.

    In the ordinary run one sample of an operator that has no rule.
    """
    listed = {name for names in LISTS.values() for name in names} | differences()
    for op in oracle.operators():
        every = PROFILE == "nightly" or not listed.isdisjoint(oracle.operator_names(op))
        for sample in oracle.samples(op, 2 if every else 1):
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
    ("linalg_matrix_power", "torch.linalg.matrix_power", (SQUARE, 3)),
    ("matmul", "torch.Tensor.__matmul__", (SQUARE, SQUARE)),
    ("matmul", "torch.Tensor.__rmatmul__", (SQUARE, SQUARE)),
    ("matrix_power", "torch.matrix_power", (SQUARE, 3)),
    ("nll_loss2d", "torch._C._nn.nll_loss2d", (LAYERED, torch.zeros(2, 4, 4).long())),
    ("norm_except_dim", "torch.norm_except_dim", (SQUARE,)),
    ("pow", "torch.Tensor.__pow__", (SQUARE, 2)),
    ("pow", "torch.Tensor.__rpow__", (SQUARE, 2)),
    ("reciprocal", "torch.Tensor.__rdiv__", (SQUARE, 2)),
    ("reciprocal", "torch.Tensor.__rtruediv__", (SQUARE, 2)),
    ("softmax", "torch.softmax", (SQUARE, 0, torch.float64)),
    ("sum_to_size", "torch.Tensor.sum_to_size", (SQUARE, 3, 3)),
    ("upsample", "torch.nn.functional.upsample", (LAYERED, None, 2)),
]


def compare_with_autocast() -> tuple[Mismatches, set[str]]:
    """Return where results or kernels differ, and what autocast changes at all, by operator."""
    mismatches, changed = defaultdict(list), set()
    casts = oracle.Casts()
    with casts.patched(targets.rule_targets()):
        for name, path, args, kwargs in operator_calls():
            for label, dtypes in DTYPES.items():
                observed = oracle.observe_both(casts, path, args, kwargs, dtypes)
                if observed is None:
                    continue
                expected, got = observed
                if got != expected:
                    mismatches[name].append(f"{path} of {label}: {got}, autocast: {expected}")
                if expected.dtypes[:1] != list(dtypes[:1]):
                    changed.add(name)
    return mismatches, changed


def test_every_operator_computes_in_the_dtypes_of_torchs_cuda_autocast():
    mismatches, changed = compare_with_autocast()
    # the kernels of the fake device compute what a GPU refuses
    refused = cast_rules.NO_HALF.union(cast_rules.NO_HALF_ON_CUDA, cast_rules.NO_HALF_BEFORE)
    unexplained = set(mismatches) - differences() - UNREACHED - refused
    assert not unexplained, "\n".join(mismatches[name][0] for name in sorted(unexplained))
    stale = differences() - set(mismatches)
    assert not stale, f"remove from DIFFERENCES: {sorted(stale)}"
    assert len(changed) > 150


def cpu_samples(no_half: set[str]) -> Iterator[tuple[str, str, Any]]:
    """Yield name, path and sample of operators, with gradients where they have any.

    In the ordinary run two samples of an operator that is not listed.
    """
    for op in oracle.operators():
        every = PROFILE == "nightly" or not no_half.isdisjoint(oracle.operator_names(op))
        count = 4 if every else 2
        for sample in oracle.samples(op, count, requires_grad=op.supports_autograd):
            for name, path in oracle.spellings(op):
                yield name, path, sample
    for name, path, args in EXTRA_CPU_CALLS:
        yield name, path, oracle.SampleInput(args[0], args=args[1:])


EXTRA_CPU_CALLS = [
    ("_upsample_lanczos2d_aa", "torch._C._nn._upsample_lanczos2d_aa", (LAYERED, (8, 8), False)),
    ("linalg_svd", "torch.linalg.svd", (SQUARE,)),
    ("lobpcg", "torch.lobpcg", (torch.eye(9), 1)),
    ("slogdet", "torch.slogdet", (SQUARE,)),
    ("svd", "torch.svd", (SQUARE,)),
]


@pytest.mark.slow(instead="the dtypes of each operator, by the same lists")
def test_what_has_no_half_kernel_on_the_cpu_is_listed_and_nothing_else():
    failing, failing_in_spite = set(), defaultdict(list)
    older = (cast_rules.NO_HALF_ON_CPU_BEFORE | cast_rules.NO_HALF_BEFORE).items()
    listed_anywhere = cast_rules.NO_HALF | cast_rules.NO_HALF_ON_CPU
    no_half = {op for op in listed_anywhere if is_offered(op)}
    no_half |= {op for op, version in older if torch.__version__ < version}
    casts = oracle.Casts()
    with casts.patched(targets.rule_targets()):
        for name, path, sample in cpu_samples(no_half):
            listed = name in no_half and name not in failing
            if listed and oracle.half_failures(casts, path, sample, active=False):
                failing.add(name)
            if failures := oracle.half_failures(casts, path, sample, active=True):
                failing_in_spite[name].append(f"{path}: {failures}")
    missing = set(failing_in_spite) - NOT_ABOUT_HALF
    assert not missing, "\n".join(failing_in_spite[name][0] for name in sorted(missing))
    stale = no_half - failing
    assert not stale, f"remove from NO_HALF or NO_HALF_ON_CPU: {sorted(stale)}"


#: Of which a GPU takes some half tensors: of sizes that are powers of two, to complex halves, by
#: norms that need no singular values.
SOME_ON_CUDA = re.compile("fft_.*|stft|complex|polar|view_as_complex|linalg_matrix_norm")


def test_what_has_no_half_kernel_anywhere_is_what_torchs_database_says():
    """Its entries say which dtypes a function takes on a CUDA device; torch tests them on one."""
    on_cuda, halves = defaultdict(set), {torch.float16, torch.bfloat16}
    for op in oracle.operators():
        for name in oracle.operator_names(op):
            on_cuda[name] |= op.dtypesIfCUDA & halves
    listed = {op for op, rule in cast_rules.LISTED_WITHOUT_HALF.items() if rule == "no_half"}
    no_half = cast_rules.NO_HALF | listed
    known = {name for name in no_half & on_cuda.keys() if not SOME_ON_CUDA.match(name)}
    assert len(known) > 70
    assert not {name: on_cuda[name] for name in known if on_cuda[name]}
    for name in cast_rules.NO_HALF_ON_CPU & on_cuda.keys():
        assert on_cuda[name] == halves, name


#: Make tensors, are made of functions that are listed, or move numbers without computing; what is
#: sparse is not cast.
NEED_NO_RULE = re.compile(
    "signal_windows_.*|broadcast_shapes|(pca|svd)_lowrank|lu_unpack|sparse_sampled_addmm"
)


def test_what_has_no_half_kernel_on_a_gpu_is_listed_and_nothing_else():
    """No GPU is asked, but torch's database: a CPU has half kernels for some that a GPU refuses."""
    on_cuda, on_cpu = defaultdict(set), defaultdict(set)
    halves = {torch.float16, torch.bfloat16}
    for op in oracle.operators():
        for name in oracle.operator_names(op):
            on_cuda[name] |= op.dtypesIfCUDA
            on_cpu[name] |= op.dtypes
    refused = {
        name
        for name, dtypes in on_cuda.items()
        if torch.float32 in dtypes and dtypes.isdisjoint(halves) and not NEED_NO_RULE.match(name)
    }
    rules = cast_rules.rules() | cast_rules.LISTED_WITHOUT_HALF
    unlisted = {name for name in refused if rules.get(name) not in ("no_half", "float")}
    assert not unlisted, f"add to NO_HALF or NO_HALF_ON_CUDA: {sorted(unlisted)}"
    newly = {"angle"} if torch.__version__ >= "2.14" else set()
    assert refused >= cast_rules.NO_HALF_ON_CUDA & on_cuda.keys() - newly
    for name in cast_rules.NO_HALF_ON_CUDA & on_cpu.keys():
        assert on_cpu[name] >= halves, name
