"""Where the running torch has the functions that casts concern."""

import pkgutil
import sys
import types
from collections import defaultdict

import autocast_oracle as oracle
import pytest
import torch
from casting_support import LISTS

from amp_patch.casting import targets

LAYERED = torch.rand(2, 3, 4, 4)


def test_every_target_is_a_function_that_returns_its_result():
    for path, rule in targets.rule_targets().items():
        assert callable(pkgutil.resolve_name(path)), path
        assert not path.endswith("_") or path.endswith("__"), path
        assert rule in {*LISTS, "no_half", "float_on_cpu"}, path
    assert "torch.Tensor.__ipow__" not in targets.rule_targets()


def test_a_function_that_is_reached_at_several_places_has_one_rule():
    rules = defaultdict(set)
    for path, rule in targets.rule_targets().items():
        rules[pkgutil.resolve_name(path)].add(rule)
    assert not [function for function, found in rules.items() if len(found) > 1]


def test_every_listed_operator_that_torch_offers_to_users_is_a_target():
    reached = {path.rsplit(".", 1)[-1].removeprefix("linalg_") for path in targets.rule_targets()}
    for name in (name for names in LISTS.values() for name in names):
        offered = hasattr(torch, name) or hasattr(torch._C._nn, name)
        assert name in reached or not offered or name.startswith("_thnn"), name


def test_what_a_module_of_torch_has_imported_by_name_is_a_target_too():
    """But for what acts where no model runs. Functions in Python call inner ones, which are."""
    ruled = set(targets.rule_targets())
    functions = set(map(pkgutil.resolve_name, ruled))
    found = {
        f"{path}.{name}"
        for path, module in sys.modules.items()
        if path.startswith(("torch.nn.", "torch.distributions."))
        for name, value in vars(module).items()
        if type(value) is types.BuiltinFunctionType and value in functions
    }
    assert found - ruled == {"torch.nn.utils.weight_norm.norm_except_dim"}


@pytest.mark.parametrize(
    ("path", "rule"),
    [
        ("torch.matmul", "half"),
        ("torch.Tensor.__rmatmul__", "half"),
        ("torch.nn.functional.linear", "half"),
        ("torch.nn.functional.scaled_dot_product_attention", "half"),
        ("torch._VF.lstm", "half"),
        ("torch.functional.einsum", "half"),
        ("torch.linalg.multi_dot", "half"),
        ("torch.nn.functional.cross_entropy", "float"),
        ("torch.special.expm1", "float"),
        ("torch.Tensor.__rtruediv__", "float"),
        ("torch.linalg.norm", "float_dtype"),
        ("torch.Tensor.sum", "float_dtype"),
        ("torch.nn.functional.bilinear", "promote"),
        ("torch.nn.functional.binary_cross_entropy", "banned"),
        ("torch.fft.rfft2", "no_half"),
        ("torch.linalg.inv", "no_half"),
        ("torch.nn.functional.avg_pool3d", "float_on_cpu"),
    ],
)
def test_the_rule_of_well_known_functions(path, rule):
    assert targets.rule_targets()[path] == rule


def test_a_region_covers_the_targets_and_what_computes_but_nothing_else():
    region = targets.region_targets()
    assert set(targets.rule_targets()) <= set(region)
    assert len(region) == len(set(region))
    for name in ("add", "__add__", "__eq__", "relu", "sigmoid", "mean", "cat", "max", "where"):
        assert {f"torch.{name}", f"torch.Tensor.{name}"} & set(region), name
    for path in ("torch.nn.functional.gelu", "torch.nn.functional.avg_pool2d", "torch.batch_norm"):
        assert path in region
    for path in region:
        assert callable(pkgutil.resolve_name(path)), path
        assert not path.endswith("_") or path.endswith("__"), path


def test_a_region_covers_every_function_of_nn_functional_that_torch_has_samples_for():
    paths = {path for op in oracle.operators() for _, path in oracle.spellings(op)}
    functional = {path for path in paths if path.startswith("torch.nn.functional.")}
    lookups = {"embedding", "embedding_bag", "one_hot"}
    scaled = {"grouped_mm", "scaled_grouped_mm", "scaled_mm"}
    left_alone = functional - set(targets.region_targets())
    assert len(functional) > 100
    assert {path.rsplit(".", 1)[-1] for path in left_alone} <= lookups | scaled


def test_a_region_computes_in_float32_what_has_no_half_kernel():
    found = targets.region_float_targets()
    assert set(found) <= set(targets.region_targets())
    assert found["torch.linalg.matrix_norm"] == found["torch.linalg.inv"] == "no_half"
    by_lists = {"torch.nn.functional.multi_margin_loss", "torch.nn.functional.avg_pool3d"}
    banned = {path for path, rule in targets.rule_targets().items() if rule == "banned"}
    assert {found[path] for path in by_lists | banned} == {"float_on_cpu"}


def test_a_region_casts_only_the_input_of_norms_that_update_running_statistics():
    first_only = targets.first_argument_targets()
    assert set(first_only) <= set(targets.region_targets())
    assert set(first_only) >= {"torch.batch_norm", "torch.nn.functional.instance_norm"}
    weights = torch.ones(3)
    for path in first_only:
        if path.startswith("torch.nn.functional."):
            mean, var = torch.zeros(3), torch.ones(3)
            function = pkgutil.resolve_name(path)
            out = function(LAYERED.half(), mean, var, weights, weights, True)
            assert out.dtype is torch.float16
            assert (mean != 0).all()


@pytest.mark.parametrize(
    "name",
    ["zeros_like", "rand_like", "bernoulli", "to", "float", "type_as", "view", "size", "new_zeros"]
    + ["__getitem__", "__iadd__", "clone", "transpose", "numpy", "backward", "embedding", "copy_"],
)
def test_a_region_leaves_factories_conversions_views_and_in_place_functions_alone(name):
    ends = {path.rsplit(".", 1)[-1] for path in targets.region_targets()}
    assert name not in ends


def test_a_users_rule_for_a_bare_name_means_every_place_of_it():
    assert set(targets.user_rule_targets("softmax")) == {
        "torch.softmax",
        "torch.Tensor.softmax",
        "torch.nn.functional.softmax",
        "torch.special.softmax",
    }
    assert set(targets.user_rule_targets("matmul")) == {
        "torch.matmul",
        "torch.linalg.matmul",
        "torch.Tensor.matmul",
        "torch.Tensor.__matmul__",
        "torch.Tensor.__rmatmul__",
    }


@pytest.mark.parametrize("path", ["torch.nn.functional.gelu", "torch.linalg.inv", "operator.add"])
def test_a_users_rule_for_a_dotted_path_means_itself(path):
    assert targets.user_rule_targets(path) == [path]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "sofmax",
            r"rules must name functions of torch, by a bare name \('softmax'\) or a dotted path "
            r"\('torch.nn.functional.softmax'\); got 'sofmax'; did you mean 'softmax'"
            r".*\? Call amp.initialize\(..., rules={'softmax': 'float'}\)\.$",
        ),
        ("lin", r"did you mean 'linear' or .*\? Call amp.initialize\(..., rules={'linear': "),
        ("torch.nn.functional.geluu", r"did you mean 'torch.nn.functional.gelu'"),
        (
            "no.such.module",
            r"got 'no.such.module', which it has not\. "
            r"Call amp.initialize\(..., rules={'softmax': 'float'}\), or for a module of the model "
            r"rules={'modules': {'no.such.module': 'float'}}\.$",
        ),
        ("torch.float16", r"got 'torch.float16'"),
        ("torch.Tensor", r"got 'torch.Tensor'"),
        (
            "relu_",
            r"rules must name functions that return their result; got the in-place 'relu_': "
            r"name 'relu' and call that",
        ),
    ],
)
def test_a_users_rule_for_something_else_is_refused(name, message):
    with pytest.raises(ValueError, match=message):
        targets.user_rule_targets(name)
