"""A module that a rule names computes in one precision at every level, whatever happens in it."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from amp_patch.casting.mode import mode
from amp_patch.weights import module_rules

HALF = dict.fromkeys(("O0", "O1", "O2", "O3"), torch.float16)
HALF |= dict.fromkeys(("O4", "O5"), torch.bfloat16)
LEVELS = tuple(HALF)


class Big(nn.Module):
    """Leaves float16's range inside, and comes back; notes the dtype that it computes in."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4)
        self.dtypes: list[torch.dtype] = []
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.dtypes.append(self.proj(x.detach()).dtype)
        if self.fails:
            raise ArithmeticError("in the middle")
        return (self.proj(x).tanh() * 1e4) * 1e3 / 1e7


class Net(nn.Module):
    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4), Big(), nn.Linear(4, 4)])
        self.norm = nn.LayerNorm(4)
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.norm(x)


X = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))


def prepared(
    amp, level: str, modules: dict[str, str], **options: bool
) -> tuple[nn.Module, torch.Tensor]:
    """Return a model at a level with rules, and its output in fp32 before that."""
    torch.manual_seed(0)
    model = Net(**options)
    expected = model(X).detach()
    model.blocks[1].dtypes.clear()
    amp.initialize(model, opt_level=level, rules={"modules": modules}, verbosity=0)
    return model, expected


def no_region_is_left() -> bool:
    return (mode.region, mode.modules, mode.around, mode.off) == (None, [], [], False)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("rule", ["blocks.1", "0:blocks.1", "blocks.[1]", "*.1", "blocks"])
def test_a_module_in_float_mends_an_overflow_at_every_level(amp, level: str, rule: str) -> None:
    model, expected = prepared(amp, level, {rule: "float"})
    out = model(X).float()
    assert model.blocks[1].dtypes == [torch.float32]
    assert no_region_is_left()
    torch.testing.assert_close(out, expected, rtol=0.05, atol=0.05)
    out.sum().backward()
    assert all(param.grad.isfinite().all() for param in model.parameters())


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_without_the_rule_it_overflows(amp, level: str) -> None:
    model, _ = prepared(amp, level, {})
    assert not model(X).isfinite().all()


@pytest.mark.parametrize("level", LEVELS)
def test_a_module_in_half_computes_in_the_levels_half(amp, level: str) -> None:
    model, _ = prepared(amp, level, {"blocks.1": "half"})
    model(X)
    assert model.blocks[1].dtypes == [HALF[level]]


@pytest.mark.parametrize("level", LEVELS)
def test_the_rest_stays_as_the_level_has_it(amp, level: str) -> None:
    model, _ = prepared(amp, level, {"blocks.1": "float"})
    seen = []
    model.blocks[2].register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    model(X)
    assert seen == [torch.float32 if level == "O0" else HALF[level]]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_the_inner_module_decides_and_the_last_of_several_rules(amp, level: str) -> None:
    model, _ = prepared(amp, level, {"blocks.1": "float", "blocks.1.proj": "half"})
    model(X)
    assert model.blocks[1].dtypes == [torch.float16]
    model, _ = prepared(amp, level, {"blocks.*": "half", "blocks.1*": "float"})
    model(X)
    assert model.blocks[1].dtypes == [torch.float32]


def test_a_list_stands_for_what_is_in_it_and_has_no_rule_of_its_own() -> None:
    inner = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.ModuleList([nn.Sequential(), Big()])})
    inner.register_module("none", None)
    model = nn.Sequential(nn.ModuleList([nn.Linear(2, 2), inner]))
    rules = {"0.1.b": "half", "0.1.b.0": "float", "0": "float"}
    (found,) = module_rules.find([model], [0], rules)
    assert found == {**rules, "0.0": "float", "0.1.a": "float", "0.1.b.1": "half"}


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_the_whole_model_may_be_named(amp, level: str) -> None:
    model, expected = prepared(amp, level, {"": "float"})
    torch.testing.assert_close(model(X).float(), expected, rtol=0.02, atol=0.02)
    assert model.blocks[1].dtypes == [torch.float32]
    assert no_region_is_left()
    assert mode.level is None


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_exception_inside_leaves_the_mode_as_it_was(amp, level: str) -> None:
    model, _ = prepared(amp, level, {"blocks.1": "float"})
    model.blocks[1].fails = True
    with pytest.raises(ArithmeticError):
        model(X)
    assert no_region_is_left()
    with pytest.raises(ArithmeticError), amp.half_region():
        model(X)
    assert no_region_is_left()
    model.blocks[1].fails = False
    assert model(X).isfinite().all()


class Interrupted(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt


@pytest.mark.parametrize("around", [False, True])
def test_training_goes_on_in_the_right_mode_after_an_interrupt(amp, around: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rules = {"modules": {"0": "float"}}
    amp.initialize(model, optimizer, opt_level="O1", rules=rules, verbosity=0)
    model[0].forward = Interrupted(4, 4).forward
    region = amp.half_region if around else amp.disable_casts
    with pytest.raises(KeyboardInterrupt), region():
        model(X)
    if not around:
        with pytest.raises(KeyboardInterrupt):
            model(X)  # torch calls no hook then: the region is left open
        assert mode.modules
    del model[0].forward
    with amp.scale_loss(model(X).sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
    assert no_region_is_left()
    assert model(X).dtype is torch.float16


def in_its_dtype(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model).to(model.norm.weight.dtype)


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
@pytest.mark.parametrize("make", [in_its_dtype, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_keeps_its_rules(amp, level: str, make) -> None:
    model, _ = prepared(amp, level, {"blocks.1": "float"})
    expected = model(X)
    torch.testing.assert_close(make(model)(X), expected, rtol=0, atol=0)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    torch.testing.assert_close(torch.load(buffer, weights_only=False)(X), expected)


@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.parametrize("precision", ["float", "half"])
def test_a_copy_in_float32_casts_to_its_weights(amp, level: str, precision: str) -> None:
    model, _ = prepared(amp, level, {"blocks.1": precision})
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)).float()):
        twin.blocks[1].dtypes.clear()
        torch.testing.assert_close(twin(X), model(X), rtol=5e-2, atol=5e-2, equal_nan=True)
        assert twin.blocks[1].dtypes == [torch.float32 if precision == "float" else HALF[level]]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_recomputed_module_computes_in_the_same_precision(amp, level: str) -> None:
    model, _ = prepared(amp, level, {"blocks.1": "float"}, recompute=True)
    out = model(X.clone().requires_grad_())
    out.float().sum().backward()
    assert model.blocks[1].dtypes == [torch.float32] * 2
    assert no_region_is_left()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_compiled_model_computes_as_an_eager_one(amp, level: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Softmax(-1))
    rules = {"modules": {"1": "float"}}
    amp.initialize(model, opt_level=level, rules=rules, verbosity=0)
    expected = model(X)
    compiled = torch.compile(model, backend="eager")
    torch.testing.assert_close(compiled(X), expected, rtol=0, atol=0)
    assert no_region_is_left()
    torch.testing.assert_close(model(X), expected, rtol=0, atol=0)


@pytest.mark.parametrize("level", LEVELS)
def test_deactivate_takes_the_hooks_off(amp, level: str) -> None:
    model, expected = prepared(amp, level, {"blocks.1": "float"})
    amp.deactivate()
    for module in model.modules():
        assert not module._forward_pre_hooks
        assert not module._forward_hooks
    rounded = 0.05 if level == "O3" else 0.0  # which has no masters
    torch.testing.assert_close(model(X), expected, rtol=rounded, atol=rounded)


def test_a_failing_initialize_puts_the_earlier_rules_back(amp) -> None:
    model, _ = prepared(amp, "O1", {"blocks.1": "float"})
    unknown = torch.optim.Rprop(model.parameters())
    with pytest.raises(TypeError, match="fused_step"):
        amp.initialize([Net(), model], unknown, opt_level="O2", fused_step=True, verbosity=0)
    model(X)
    assert model.blocks[1].dtypes == [torch.float32]
    second = Net()  # what failed has taken no number
    amp.initialize(second, opt_level="O1", rules={"modules": {"1:blocks.1": "float"}}, verbosity=0)
    second(X)
    assert second.blocks[1].dtypes == [torch.float32]


def test_a_new_level_comes_without_the_rules_of_the_old_one(amp) -> None:
    model, _ = prepared(amp, "O1", {"blocks.1": "float"})
    amp.initialize(model, opt_level="O1", verbosity=0)
    model(X)
    assert model.blocks[1].dtypes == [torch.float16]


def test_one_of_several_models_is_meant_by_its_number(amp) -> None:
    models = [Net(), Net()]
    rules = {"modules": {"1:blocks.1": "float"}}
    amp.initialize(models, opt_level="O1", rules=rules, verbosity=0)
    third = amp.initialize(
        Net(), opt_level="O1", rules={"modules": {"2:blocks.1": "float"}}, verbosity=0
    )
    for model in (*models, third):
        model(X)
    dtypes = [model.blocks[1].dtypes for model in (*models, third)]
    assert dtypes == [[torch.float16], [torch.float32], [torch.float32]]


def test_rules_of_other_models_are_left_to_these() -> None:
    model = Net()
    assert module_rules.find([model], [3], {"1:nothing": "float"}) == [{}]
    with pytest.raises(ValueError, match="got 'nothing'"):
        module_rules.find([model], [3], {"3:nothing": "float"})


def test_nearest_names_are_told() -> None:
    with pytest.raises(ValueError, match="got 'block.1.proj'; did you mean 'blocks.1.proj'"):
        module_rules.find([Net()], [0], {"block.1.proj": "float"})


@pytest.mark.parametrize(
    ("model", "example"), [(nn.Sequential(nn.Tanh()), "0"), (nn.Tanh(), "blocks.0")]
)
def test_where_no_name_is_near_another_is_the_example(model: nn.Module, example: str) -> None:
    with pytest.raises(ValueError, match=rf"got 'nothing'\. Write .*'{example}': 'float'"):
        module_rules.find([model], [0], {"nothing": "float"})


@pytest.mark.parametrize(
    ("rules", "dtype"),
    [
        ({"0": "half", "1": "float"}, torch.float32),
        ({"0": "half", "1": "float", "[0]": "half"}, torch.float16),
    ],
)
def test_a_module_with_two_paths_goes_by_the_last_rule(amp, rules, dtype: torch.dtype) -> None:
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, shared)
    amp.initialize(model, opt_level="O1", rules={"modules": rules}, verbosity=0)
    assert model(X).dtype is dtype


class Outer(nn.Module):
    """Gives a module inside of it what only float32 can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x * 1e6) * 1e-6


@pytest.mark.parametrize("level", ["O1", "O2", "O3", "O5"])
def test_what_is_inside_of_a_module_in_fp32_takes_fp32(amp, level: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Outer(), nn.Linear(4, 4))
    expected = model(X).detach()
    amp.initialize(model, opt_level=level, rules={"modules": {"1": "float"}}, verbosity=0)
    torch.testing.assert_close(model(X).float(), expected, rtol=0.05, atol=0.05)


# -- buffers --

STORED = {level: HALF[level] for level in ("O2", "O3", "O5")}


class Rotary(nn.Module):
    """The rotary positions of a Llama, as transformers computes them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 1e4 ** -(torch.arange(0, 8, 2) / 8), persistent=False)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
        angles = positions[:, None].float() * self.inv_freq.to(dtype=torch.float)
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(dtype=x.dtype), angles.sin().to(dtype=x.dtype)


class Counts(nn.Module):
    """Counts its calls, and those of what is in it."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("calls", torch.zeros(()))
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * self.weight if self.inner is None else self.inner(x * self.weight)


class Decoder(nn.Module):
    """Turns what a layer makes by positions, and makes logits of it."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(4, 8), nn.Linear(8, 4)
        self.rotary_emb = Rotary()
        self.recompute = recompute
        self.seen: list[tuple[torch.Tensor, ...]] = []

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        call = (checkpoint, {"use_reentrant": False}) if self.recompute else (_call, {})
        cos, sin = call[0](self.rotary_emb, x, positions, **call[1])
        self.seen.append((cos, sin))
        return self.head(x * cos + torch.cat((-x[..., 4:], x[..., :4]), -1) * sin)


def _call(function, *args):
    return function(*args)


POSITIONS = torch.arange(5) * 2000


def angles_in_float64() -> tuple[torch.Tensor, torch.Tensor]:
    # the frequencies are numbers of float32, and so is a product with one
    angles = POSITIONS.float().outer(Rotary().inv_freq).double().repeat(1, 2)
    return angles.cos(), angles.sin()


@pytest.mark.parametrize("level", STORED)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("rule", ["rotary_emb", "*rotary_emb", "*rotary*", ""])
def test_a_rotary_embedding_in_float_computes_exact_angles(
    amp, level: str, recompute: bool, rule: str
) -> None:
    model = Decoder(recompute)
    amp.initialize(model, opt_level=level, rules={"modules": {rule: "float"}}, verbosity=0)
    model(X, POSITIONS).sum().backward()
    dtype = torch.float32 if rule == "" else STORED[level]
    for found, expected in zip(model.seen[0], angles_in_float64(), strict=True):
        assert found.dtype is dtype
        rounding = torch.finfo(dtype).eps
        torch.testing.assert_close(found.double(), expected, rtol=rounding, atol=1e-6)
    assert model.embed.weight.grad.isfinite().all()


@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.parametrize("recompute", [False, True])
def test_without_a_rule_its_angles_are_exact_as_well(amp, level: str, recompute: bool) -> None:
    model = Decoder(recompute)
    amp.initialize(model, opt_level=level, verbosity=0)
    model(X, POSITIONS).sum().backward()
    for found, expected in zip(model.seen[0], angles_in_float64(), strict=True):
        assert found.dtype is STORED[level]
        rounding = torch.finfo(found.dtype).eps
        torch.testing.assert_close(found.double(), expected, rtol=rounding, atol=1e-6)


class Turns(Rotary):
    """Hands on angles in the dtype of the frequencies, as older models do."""

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
        angles = torch.einsum("i,j->ij", positions.type_as(self.inv_freq), self.inv_freq)
        return angles.cos(), angles.sin()


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rotary, self.query, self.value = Turns(), nn.Linear(4, 8), nn.Linear(4, 8)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        first, second = self.query(x).chunk(2, -1)
        cos, sin = self.rotary(x, positions)
        turned = torch.cat([first * cos - second * sin, first * sin + second * cos], -1)
        return nn.functional.scaled_dot_product_attention(turned, turned, self.value(x))


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_exact_frequencies_make_half_angles_in_copies_as_well(amp, level: str) -> None:
    torch.manual_seed(0)
    model = Attends()
    expected, frequencies = model(X, POSITIONS).detach(), model.rotary.inv_freq
    amp.initialize(model, opt_level=level, verbosity=0)
    tolerance = 8 * torch.finfo(HALF[level]).eps
    for one in (model, pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        found = one(X, POSITIONS)
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
    assert no_region_is_left()
    amp.deactivate()
    assert model.rotary.inv_freq is frequencies
    assert not any(module._forward_hooks for module in model.modules())


def test_a_rule_says_half_of_frequencies(amp) -> None:
    model = Attends()
    amp.initialize(model, opt_level="O2", rules={"modules": {"rotary": "half"}}, verbosity=0)
    assert model.rotary.inv_freq.dtype is torch.float16


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_frequencies_of_a_part_that_torch_jit_compiled_are_found() -> None:
    """O0 leaves such a part as it is, and looks at it all the same."""
    compiled = torch.jit.trace(Rotary(), (X, POSITIONS))
    assert module_rules.keeps_buffers(nn.Sequential(compiled), {}, False) == {compiled}


class Norm(nn.Module):
    """A batch norm of the script's own, by hand or by torch's function."""

    def __init__(self, by_hand: bool = True, affine: bool = True, counts: bool = False) -> None:
        super().__init__()
        self.by_hand = by_hand
        self.weight = nn.Parameter(torch.rand(8) + 0.5) if affine else None
        self.bias = nn.Parameter(torch.rand(8)) if affine else None
        self.register_buffer("running_mean", torch.zeros(8))
        self.register_buffer("running_var", torch.ones(8))
        self.register_buffer("num_batches_tracked", torch.tensor(0) if counts else None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        statistics = self.running_mean, self.running_var
        if not self.by_hand:
            return nn.functional.batch_norm(x, *statistics, self.weight, self.bias, self.training)
        if self.training:
            mean, var = x.mean(0), x.var(0)
            with torch.no_grad():
                self.running_mean.mul_(0.9).add_(mean, alpha=0.1)
                self.running_var = 0.9 * self.running_var + 0.1 * var
            statistics = mean, var
        x = (x - statistics[0]) / (statistics[1] + 1e-5).sqrt()
        return x if self.weight is None else x * self.weight + self.bias


class Channels(nn.InstanceNorm1d):
    """Of one sample, whose dtype it hands on."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.t()[None])[0].t()


NORMS = {
    "by hand": Norm,
    "by torch": lambda: Norm(by_hand=False),
    "without weights": lambda: Norm(affine=False, counts=True),
    "instances": lambda: Channels(8, affine=True, track_running_stats=True),
}


class Normed(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), norm, nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.found = self.norm(self.first(x))
        return self.last(self.found)


def statistics(norm: nn.Module) -> list[torch.Tensor]:
    return [norm.running_mean.clone(), norm.running_var.clone()]


@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.parametrize("name", NORMS)
def test_running_statistics_are_float32_s(amp, name: str, level: str) -> None:
    torch.manual_seed(0)
    model = Normed(NORMS[name]())
    nn.init.constant_(model.first.bias, 5.0)
    batches = torch.randn(60, 64, 4) / 4
    twin, tolerance = copy.deepcopy(model), 4 * torch.finfo(HALF[level]).eps
    expected = [twin(batch) for batch in batches]
    amp.initialize(model, opt_level=level, verbosity=0)
    for batch, other in zip(batches, expected, strict=True):
        found = model(batch)
        torch.testing.assert_close(found, other, rtol=tolerance, atol=8 * tolerance)
    assert model.found.dtype is HALF[level]
    found.sum().backward()
    other.sum().backward()
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert mine.dtype is HALF[level]
        torch.testing.assert_close(mine.grad.float(), theirs.grad, rtol=0.1, atol=64 * tolerance)
    after = statistics(model.norm)
    for mine, theirs in zip(after, statistics(twin.norm), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)
    amp.deactivate()
    for mine, before in zip(statistics(model.norm), after, strict=True):
        torch.testing.assert_close(mine, before, rtol=0, atol=0)
    assert not any(module._forward_hooks for module in model.modules())


class Frozen(Norm):
    """All are buffers, and none is written to: in half it takes no float32 memory."""

    def __init__(self) -> None:
        super().__init__(affine=False)
        self.register_buffer("scale", torch.ones(8))


@pytest.mark.parametrize(
    ("norm", "options"),
    [
        (Norm, {"keep_batchnorm_fp32": False}),
        (Norm, {"rules": {"modules": {"norm": "half"}}}),
        (Frozen, {}),
    ],
)
def test_statistics_go_half_where_the_script_says_so_or_nothing_moves(amp, norm, options) -> None:
    model = amp.initialize(Normed(norm()).eval(), opt_level="O5", verbosity=0, **options)
    assert {one.dtype for one in statistics(model.norm)} == {torch.bfloat16}
    assert model(torch.randn(8, 4)).dtype is torch.float32


class Quantile(nn.Module):
    """Takes rows by numbers that it computes of a buffer, as layers of libraries do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("q", torch.tensor([0.999]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[(self.q * torch.tensor(len(x) - 1)).long()]


class Quantiles(Quantile):
    """Inherits what the library has a rule for."""


@pytest.mark.parametrize("level", STORED)
def test_what_a_library_s_rule_has_in_float32_keeps_its_buffers(amp, level: str) -> None:
    amp.register_library_function(__name__, "Quantile.forward", casts="stored", in_float="always")
    model = nn.Sequential(nn.Linear(4, 4), Quantiles())
    found, x = model[1].q, torch.randn(5001, 4)
    expected = model(x)
    amp.initialize(model, opt_level=level, verbosity=0)
    assert model[1].q.dtype is torch.float32
    torch.testing.assert_close(model(x), expected, atol=0.03, rtol=0.03)
    amp.deactivate()
    assert model[1].q is found


@pytest.mark.parametrize("level", STORED)
def test_buffers_are_in_float32_where_the_innermost_rule_says_float(amp, level: str) -> None:
    shared = Counts()
    model = nn.ModuleDict(
        {
            "a": Counts(Counts(Counts())),
            "b": Counts(),
            "shared": shared,
            "again": nn.Sequential(shared),
        }
    )
    rules = {"?": "half", "a": "float", "a.inner.inner": "half", "again": "float"}
    amp.initialize(model, opt_level=level, rules={"modules": rules}, verbosity=0)
    floats = {path for path, one in model.named_buffers() if one.dtype is torch.float32}
    assert floats == {"a.calls", "a.inner.calls", "shared.calls"}
    assert {param.dtype for param in model.parameters()} == {STORED[level]}
    amp.deactivate()
    assert {tensor.dtype for tensor in model.state_dict().values()} == {torch.float32}


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
@pytest.mark.parametrize("in_a_file", [False, True])
def test_a_buffer_counts_on_in_a_module_in_float(amp, level: str, in_a_file, tmp_path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Counts(Counts()), nn.Linear(4, 4))
    rules: object = {"modules": {"[1]": "float"}}
    if in_a_file:
        rules = tmp_path / "rules.toml"
        rules.write_text('[modules]\n"1" = "float"\n')
    amp.initialize(model, opt_level=level, rules=rules, verbosity=0)
    with torch.no_grad():
        model[1].calls += 3000  # beyond the whole numbers of either half dtype
        model[1].inner.calls += 3000
    for _ in range(3):
        model(X)
    twin = copy.deepcopy(model)
    twin(X)
    assert [one.calls.item() for one in (twin[1], twin[1].inner)] == [3004, 3004]
    assert model.state_dict()["1.calls"].item() == 3003
    amp.deactivate()
    model(X)
    assert [one.calls.item() for one in (model[1], model[1].inner)] == [3004, 3004]


def test_a_buffer_that_came_in_half_is_in_float32_by_a_rule_and_half_again(amp) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Module())
    table = torch.rand(3).bfloat16()
    model[1].register_buffer("table", table)
    amp.initialize(model, opt_level="O2", rules={"modules": {"1": "float"}}, verbosity=0)
    assert torch.equal(model[1].table, table.float())
    amp.deactivate()
    assert model[1].table.dtype is torch.bfloat16
    assert torch.equal(model[1].table, table)
