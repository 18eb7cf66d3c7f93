"""Frozen weights that come in half, under trained ones in fp32: trained, saved, given back."""

import copy
import io
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given
from support import scaled_backward, trains
from torch import Tensor, nn
from torch.nn import functional as F

from amp_patch.step.prepared_optimizers import PreparedOptimizers

EVERY_LEVEL = True
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
#: dtype of the products of each level, and by how much a loss may be off from the fp32 loop's
COMPUTED = {"O0": F32, "O1": F16, "O2": F16, "O3": F16, "O4": BF16, "O5": BF16}
ALLOWED = {F32: 0.0, F16: 4e-3, BF16: 3e-2}
STORED = {"O0": F32, "O2": F16, "O3": F16, "O5": BF16}
INPUTS = torch.randn(16, 6, generator=torch.Generator().manual_seed(0))
TARGETS = torch.randint(3, (16,), generator=torch.Generator().manual_seed(1))


class Adapted(nn.Module):
    """A frozen layer with a low-rank adapter beside it, as LoRA has it, and a frozen norm."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.base = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.down, self.up = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)
        self.register_buffer("gain", torch.rand(width) + 0.5)
        self.register_buffer("codes", torch.arange(width, dtype=torch.int8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return torch.tanh(self.base(x) * self.gain + self.up(self.down(x)))


class Own(nn.Module):
    """Frozen parameters that are no layer's: one of a product, one of a sum, one of integers."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / 2)
        self.shift = nn.Parameter(torch.randn(width))
        self.codes = nn.Parameter(torch.arange(width, dtype=torch.int8), requires_grad=False)
        self.scale = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale(x) @ self.weight.t() + self.shift + self.codes.to(x.dtype) / 8


def frozen(module: nn.Module, dtype: torch.dtype, *trained: str) -> nn.Module:
    """Freeze a module in half, but for the submodules of these names."""
    for name, param in module.named_parameters(recurse=False):
        if param.is_floating_point():
            setattr(module, name, nn.Parameter(param.detach().to(dtype), requires_grad=False))
    for name, buffer in module.named_buffers(recurse=False):
        if buffer.is_floating_point():
            setattr(module, name, buffer.to(dtype))
    for name, child in module.named_children():
        if name not in trained:
            frozen(child, dtype, *trained)
    return module


BLOCKS = {
    "linear": lambda dtype: frozen(nn.Linear(6, 6), dtype),
    "adapted": lambda dtype: frozen(Adapted(), dtype, "down", "up"),
    "own": lambda dtype: frozen(Own(), dtype, "scale"),
    "trained": lambda dtype: nn.Sequential(nn.Linear(6, 6), nn.Tanh()),
}


def make(dtype: torch.dtype, blocks: tuple[str, ...] = ("adapted", "own")) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(BLOCKS[name](dtype) for name in blocks), nn.Linear(6, 3))


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


def halves(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if not p.requires_grad}


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(trained(model), lr=0.1, momentum=0.5)


def prepared(amp: ModuleType, model: nn.Module, level: str) -> Any:
    scale = {"loss_scale": 256.0} if level in ("O1", "O2") else {}
    return amp.initialize(model, optimizer_of(model), opt_level=level, verbosity=0, **scale)


def losses(amp: ModuleType, model: nn.Module, optimizer: Any, steps: int) -> Iterator[float]:
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(INPUTS).float(), TARGETS)
        scaled_backward(amp, loss, optimizer)
        optimizer.step()
        yield loss.item()


def losses_in_fp32(model: nn.Module, steps: int) -> Iterator[float]:
    """Train a copy, all of it in fp32, by torch alone."""
    model = copy.deepcopy(model).float()
    optimizer = optimizer_of(model)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(INPUTS), TARGETS)
        loss.backward()
        optimizer.step()
        yield loss.item()


def same_bits(one: Tensor, other: Tensor) -> bool:
    if one.dtype is not other.dtype or not one.is_floating_point() or one.dtype is F32:
        return one.dtype is other.dtype and torch.equal(one, other)
    return torch.equal(one.view(torch.int16), other.view(torch.int16))


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in expected if not same_bits(found[name], expected[name])] == []


# -- training --


@pytest.mark.parametrize("level", LEVELS)
@given(
    dtype=st.sampled_from([F16, BF16]),
    blocks=st.lists(st.sampled_from(sorted(BLOCKS)), min_size=1, max_size=3).map(tuple),
)
@trains(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_it_trains_as_in_fp32_and_comes_back_bit_for_bit(
    amp: ModuleType, level: str, dtype: torch.dtype, blocks: tuple[str, ...]
) -> None:
    model = make(dtype, blocks)
    expected = list(losses_in_fp32(model, 4))
    before = {name: param.clone() for name, param in halves(model).items()}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    start = [param.clone() for param in trained(model)]
    try:
        found = list(losses(amp, *prepared(amp, model, level), 4))
    finally:
        amp.deactivate()
    tolerance = ALLOWED[COMPUTED[level]]
    assert found == pytest.approx(expected, abs=tolerance, rel=tolerance)
    assert_same({**halves(model)}, before)
    assert_same(dict(model.named_buffers()), buffers)
    assert not any(map(torch.equal, trained(model), start))
    assert all(param.grad is None for param in halves(model).values())


@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize("level", LEVELS)
def test_where_frozen_weights_are_stored(amp: ModuleType, level: str, dtype: torch.dtype) -> None:
    model = make(dtype)
    addresses = {name: param.data_ptr() for name, param in halves(model).items()}
    prepared(amp, model, level)
    floats = {n: p for n, p in halves(model).items() if p.is_floating_point()}
    assert {param.dtype for param in floats.values()} == {STORED.get(level, dtype)}
    assert model[1].codes.dtype is model[0].codes.dtype is torch.int8
    assert model[0].gain.dtype is STORED.get(level, dtype)
    if STORED.get(level, dtype) is dtype:
        assert {name: param.data_ptr() for name, param in halves(model).items()} == addresses


@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize("level", ["O2", "O3", "O5", "O0"])
def test_a_frozen_batch_norm_is_stored_as_the_level_says(
    amp: ModuleType, level: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    norm = frozen(nn.BatchNorm1d(6), dtype)
    norm.running_mean.normal_()
    model = nn.Sequential(norm, nn.Linear(6, 3))
    before = copy.deepcopy(norm.state_dict())
    expected = list(losses_in_fp32(model, 3))
    found = list(losses(amp, *prepared(amp, model, level), 3))
    stored = F16 if level == "O3" else F32
    assert {norm.weight.dtype, norm.bias.dtype, norm.running_mean.dtype} == {stored}
    tolerance = ALLOWED[COMPUTED[level]]
    assert found == pytest.approx(expected, abs=tolerance, rel=tolerance)
    assert model.state_dict()["0.weight"].dtype is (F32 if level == "O0" else dtype)
    running = norm.running_mean.clone()
    amp.deactivate()
    assert_same(dict(norm.named_parameters()), {n: before[n] for n in ("weight", "bias")})
    assert same_bits(norm.running_mean, running.to(dtype))
    assert not torch.equal(norm.running_mean, before["running_mean"])


@pytest.mark.parametrize("level", ["O1", "O4"])
@pytest.mark.parametrize("width", [8, 160])
def test_casts_of_a_frozen_half_weight_are_made_once_in_an_iteration(
    amp: ModuleType, level: str, width: int
) -> None:
    other = BF16 if COMPUTED[level] is F16 else F16
    for dtype, is_cast in ((COMPUTED[level], False), (other, True)):
        layer = frozen(nn.Linear(width, width, bias=False), dtype)
        model = nn.Sequential(nn.Linear(6, width), layer, layer, nn.Linear(width, 3))
        model, optimizer = prepared(amp, model, level)
        list(losses(amp, model, optimizer, 2))
        first, second = weights_of_products(model(INPUTS), layer)
        assert first == second
        assert (first != layer.weight.data_ptr()) == is_cast
        amp.deactivate()


def weights_of_products(output: Tensor, layer: nn.Module) -> list[int]:
    """Return the addresses of the weights of such a shape that a graph saves for its products."""
    found, nodes, seen = [], [output.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for name in ("_saved_mat2", "_saved_weight"):
            saved = getattr(node, name, None)
            if saved is not None and saved.numel() == layer.weight.numel():
                found.append(saved.data_ptr())
        nodes += [following for following, _ in node.next_functions]
    return found


# -- what is saved, loaded and given back --


@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize("level", LEVELS)
def test_a_state_has_frozen_weights_as_they_came(
    amp: ModuleType, level: str, dtype: torch.dtype
) -> None:
    model = make(dtype)
    with torch.no_grad():  # beyond the range of the other half dtype, and below it
        model[0].base.bias.copy_(torch.tensor([6e4, 1e-7, -1e-7, 0.0, -0.0, 1 / 3]))
    before = {name: param.clone() for name, param in halves(model).items()}
    model, optimizer = prepared(amp, model, level)
    list(losses(amp, model, optimizer, 2))
    state = model.state_dict()
    if level == "O0":
        before = {n: p.float() if p.is_floating_point() else p for n, p in before.items()}
    assert_same({name: state[name] for name in before}, before)
    names = {name for name, param in model.named_parameters() if param.requires_grad}
    assert {state[name].dtype for name in names} == {F32}
    plain = make(dtype)
    plain.load_state_dict(state)
    amp.deactivate()
    assert_same(dict(plain.named_parameters()), dict(model.named_parameters()))


@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize("level", LEVELS)
def test_a_resumed_training_is_one_that_never_stopped(
    amp: ModuleType, level: str, dtype: torch.dtype
) -> None:
    model, optimizer = prepared(amp, make(dtype), level)
    list(losses(amp, model, optimizer, 2))
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict(), amp.state_dict()), file)
    file.seek(0)
    expected = list(losses(amp, model, optimizer, 3))
    end = model.state_dict()
    amp.deactivate()
    model = make(dtype)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    model, optimizer = prepared(amp, model, level)
    states = torch.load(file)
    for target, state in zip((model, optimizer, amp), states, strict=True):
        target.load_state_dict(state)
    assert list(losses(amp, model, optimizer, 3)) == expected
    assert_same(model.state_dict(), end)


@pytest.mark.parametrize("level", ["O0", "O2", "O3", "O5"])
def test_what_is_written_to_a_frozen_weight_is_given_back(amp: ModuleType, level: str) -> None:
    model = make(BF16)
    before = model[0].base.weight.detach().clone()
    gain = model[0].gain.clone()
    prepared(amp, model, level)
    with torch.no_grad():
        model[0].base.weight[0] = 0.75
        model[0].gain[0] = 0.75
    amp.deactivate()
    before[0] = gain[0] = 0.75
    assert same_bits(model[0].base.weight, before)
    assert model[0].gain.dtype is BF16
    torch.testing.assert_close(model[0].gain, gain)


@pytest.mark.parametrize("has_other", [False, True])
@pytest.mark.parametrize("level", LEVELS)
def test_a_failing_initialize_leaves_frozen_weights_and_buffers(
    amp: ModuleType, level: str, has_other: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = nn.Linear(6, 6)
    if has_other:
        amp.initialize(other, opt_level="O0", verbosity=0)
    model = make(BF16)
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    before = {name: (id(t), t.data_ptr(), t.dtype) for name, t in tensors.items()}
    grads = {name: param.grad for name, param in model.named_parameters()}

    def fail(*_: Any) -> None:
        raise ValueError("in the middle")

    with monkeypatch.context() as patch:
        patch.setattr(PreparedOptimizers, "set_up", fail)
        with pytest.raises(ValueError, match="in the middle"):
            prepared(amp, model, level)
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    assert {name: (id(t), t.data_ptr(), t.dtype) for name, t in tensors.items()} == before
    assert {name: param.grad for name, param in model.named_parameters()} == grads
    model.float()
    prepared(amp, model, level)  # nothing of the failed call is left
    amp.deactivate()
    assert {param.dtype for param in model.parameters()} == {F32, torch.int8}
    assert {buffer.dtype for buffer in model.buffers()} == {F32, torch.int8}


# -- what is trained later, and what is refused --


@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize("is_added_first", [False, True])
@pytest.mark.parametrize("level", ["O0", "O2", "O5"])
def test_an_unfrozen_weight_is_trained_in_fp32(
    amp: ModuleType, level: str, is_added_first: bool, dtype: torch.dtype
) -> None:
    """One update is far below what the half dtype can tell apart; fifty are not."""
    model = nn.Sequential(frozen(nn.Linear(6, 1, bias=False), dtype), nn.Linear(1, 1))
    weight = model[0].weight
    with torch.no_grad():
        weight.fill_(1 / 3)
        expected = weight.float() - 50 * 1e-4
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.0)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale=1.0)
    weight.requires_grad_(not is_added_first)
    optimizer.add_param_group({"params": model[0].parameters(), "lr": 1e-4})
    weight.requires_grad_(True)
    for _ in range(50):
        optimizer.zero_grad()
        with amp.scale_loss(model(INPUTS).sum() * 0, optimizer) as loss:
            loss.backward()
        for param in amp.master_params(optimizer):
            param.grad = torch.ones_like(param)
        optimizer.step()
    torch.testing.assert_close(model.state_dict()["0.weight"], expected, rtol=0, atol=1e-6)
    if level != "O0":  # it has a master, also where it is frozen again
        weight.requires_grad_(False)
        torch.testing.assert_close(model.state_dict()["0.weight"], expected, rtol=0, atol=1e-6)
    amp.deactivate()
    torch.testing.assert_close(weight.detach(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("as_generator", [False, True])
@pytest.mark.parametrize("level", ["O1", "O4"])
def test_a_half_weight_is_not_added_where_it_would_be_stepped(
    amp: ModuleType, level: str, as_generator: bool
) -> None:
    model, optimizer = prepared(amp, make(BF16), level)
    list(losses(amp, model, optimizer, 1))
    model[0].base.requires_grad_(True)
    given = model[0].base.parameters()
    groups = len(optimizer.param_groups)
    with pytest.raises(RuntimeError, match="got 2 in torch.bfloat16 in the SGD"):
        optimizer.add_param_group({"params": given if as_generator else list(given)})
    assert len(optimizer.param_groups) == groups
    optimizer.add_param_group({"params": nn.Linear(2, 2).parameters()})
    assert len(optimizer.param_groups) == groups + 1
    list(losses(amp, model, optimizer, 1))


@pytest.mark.parametrize("level", LEVELS)
def test_half_weights_that_would_be_trained_are_refused_before_anything_changes(
    amp: ModuleType, level: str
) -> None:
    model = make(BF16)
    model[1].shift.requires_grad_(True)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match="got '1.shift' in torch.bfloat16"):
        prepared(amp, model, level)
    assert_same(model.state_dict(), before)
    assert not hasattr(F.linear, "__wrapped__")


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_half_weights_of_another_model_are_refused_too(amp: ModuleType, level: str) -> None:
    other = nn.Linear(2, 2).half()
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match="optimizers of amp.initialize.. train float32"):
        amp.initialize(make(BF16), optimizer, opt_level=level)
    assert not hasattr(F.linear, "__wrapped__")


@pytest.mark.parametrize("fused_step", [False, True])
@pytest.mark.parametrize("level", LEVELS)
def test_an_optimizer_may_hold_the_frozen_weights(
    amp: ModuleType, level: str, fused_step: bool
) -> None:
    """As ``AdamW(model.parameters())`` does: it trains as one that holds only what is trained."""
    if fused_step and level not in ("O2", "O5"):
        pytest.skip("a fused step needs masters")
    found = []
    for held in (trained, nn.Module.parameters):
        model = make(BF16)
        optimizer = torch.optim.AdamW(held(model), lr=0.1, eps=1e-8 if level == "O2" else 1e-4)
        model, optimizer = amp.initialize(
            model, optimizer, opt_level=level, verbosity=0, loss_scale=64.0, fused_step=fused_step
        )
        found.append(list(losses(amp, model, optimizer, 4)))
        frozen_ones = [one for one in halves(model).values() if one.is_floating_point()]
        assert all(param.dtype is not F32 for param in frozen_ones) or level == "O0"
        masters = set(map(id, amp.master_params(optimizer)))  # none of a frozen one is made
        assert held is trained or masters.issuperset(map(id, frozen_ones))
        amp.deactivate()
        assert all(param.dtype is BF16 for param in frozen_ones)
    assert found[0] == found[1]


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_a_held_half_weight_that_is_unfrozen_is_refused(amp: ModuleType, level: str) -> None:
    model = make(BF16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    list(losses(amp, model, optimizer, 1))
    model[1].shift.requires_grad_(True)
    with pytest.raises(RuntimeError, match="got 1 in torch.bfloat16 in the SGD"):
        list(losses(amp, model, optimizer, 1))
    model[1].shift.requires_grad_(False)
    list(losses(amp, model, optimizer, 1))


@pytest.mark.parametrize("level", LEVELS)
def test_a_model_that_is_frozen_as_a_whole_is_evaluated(amp: ModuleType, level: str) -> None:
    model = frozen(make(BF16), BF16).eval()
    expected = copy.deepcopy(model).float()(INPUTS)
    with torch.no_grad():
        found = amp.initialize(model, opt_level=level, verbosity=0)(INPUTS)
    tolerance = max(ALLOWED[COMPUTED[level]], 1e-6)
    torch.testing.assert_close(found.float(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_an_averaged_model_has_all_of_it_in_fp32(amp: ModuleType, level: str) -> None:
    model, optimizer = prepared(amp, make(BF16), level)
    average = torch.optim.swa_utils.AveragedModel(model)
    list(losses(amp, model, optimizer, 1))
    average.update_parameters(model)
    assert {p.dtype for p in average.parameters() if p.is_floating_point()} == {F32}
    assert average(INPUTS).dtype is F32


@pytest.mark.parametrize("level", ["O0", "O2", "O3", "O5"])
def test_a_copy_has_all_of_it_in_fp32(amp: ModuleType, level: str) -> None:
    model, optimizer = prepared(amp, make(BF16), level)
    list(losses(amp, model, optimizer, 1))
    copied = copy.deepcopy(model)
    assert {p.dtype for p in copied.parameters() if p.is_floating_point()} == {F32}
    assert_same(copied.state_dict(), {k: v.to(F32) if v.is_floating_point() else v
                                      for k, v in model.state_dict().items()})  # fmt: skip
    with torch.no_grad():
        expected = model(INPUTS)
        tolerance = max(ALLOWED[COMPUTED[level]], 1e-6)
        torch.testing.assert_close(copied(INPUTS), expected, rtol=tolerance, atol=tolerance)


# --- what amp_patch itself has stored in half, and what changes later ---


def backbone_and_heads() -> tuple[nn.Module, nn.Module, nn.Module]:
    torch.manual_seed(0)
    backbone = nn.Linear(6, 6).requires_grad_(False)
    return backbone, *(nn.Sequential(backbone, nn.Linear(6, 3)) for _ in range(2))


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_a_frozen_part_that_two_models_share_comes_back_in_fp32(
    amp: ModuleType, level: str
) -> None:
    backbone, one, other = backbone_and_heads()
    amp.initialize([one, other], optimizer_of(one), opt_level=level, verbosity=0)
    assert other.state_dict()["0.weight"].dtype is F32
    amp.deactivate()
    assert backbone.weight.dtype is F32


def test_a_frozen_weight_that_two_models_share_keeps_its_master(amp: ModuleType) -> None:
    backbone, one, other = backbone_and_heads()
    exact = backbone.weight.detach().clone()
    optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
    amp.initialize([one, other], optimizer, opt_level="O2", verbosity=0)
    assert torch.equal(one.state_dict()["0.weight"], exact)
    amp.deactivate()
    assert torch.equal(backbone.weight, exact)


@pytest.mark.parametrize("level", ["O0", "O2", "O5"])
def test_a_frozen_model_that_is_prepared_is_not_taken_again(amp: ModuleType, level: str) -> None:
    backbone, one, other = backbone_and_heads()
    amp.initialize(one, optimizer_of(one), opt_level="O2", verbosity=0)
    one.requires_grad_(False)
    before = copy.deepcopy(one.state_dict())
    for again in (one, backbone, other):
        with pytest.raises(RuntimeError, match="which amp.initialize.. has cast"):
            amp.initialize(again, opt_level=level, verbosity=0)
    assert_same(one.state_dict(), before)


def unfrozen(amp: ModuleType, level: str, dtype: torch.dtype) -> Any:
    """Return a model whose frozen part is trained from now on, and an optimizer that holds all."""
    model = nn.Sequential(frozen(nn.Linear(6, 6), dtype), nn.Tanh(), nn.Linear(6, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-4)
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=level, verbosity=0, loss_scale=64.0
    )
    model[0].requires_grad_(True)
    return model, optimizer


@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.parametrize("dtype", [torch.float16, BF16])
def test_training_of_unfrozen_weights_is_resumed_to_the_bit(
    amp: ModuleType, level: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    model, optimizer = unfrozen(amp, level, dtype)
    list(losses(amp, model, optimizer, 3))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    list(losses(amp, model, optimizer, 3))
    expected = copy.deepcopy(model.state_dict())
    amp.deactivate()
    model, optimizer = unfrozen(amp, level, dtype)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    list(losses(amp, model, optimizer, 3))
    assert_same(model.state_dict(), expected)


@pytest.mark.parametrize("level", ["O0", "O2", "O3", "O5"])
def test_what_was_trained_and_frozen_again_is_not_rounded(amp: ModuleType, level: str) -> None:
    torch.manual_seed(0)
    model, optimizer = unfrozen(amp, level, BF16)
    list(losses(amp, model, optimizer, 3))
    trained_value = model.state_dict()["0.weight"].float().clone()
    model[0].requires_grad_(False)
    assert torch.equal(model.state_dict()["0.weight"].float(), trained_value)
    amp.deactivate()
    assert torch.equal(model[0].weight.float(), trained_value)


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_numbers_that_half_cannot_hold_are_loaded_in_fp32(amp: ModuleType, level: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].half().requires_grad_(False)
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    model.load_state_dict({k: torch.full(v.shape, 0.1) for k, v in model.state_dict().items()})
    for name, value in model.state_dict().items():
        assert value.dtype is torch.float32, name
        assert torch.equal(value, torch.full_like(value, 0.1)), name
