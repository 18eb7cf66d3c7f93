"""What of a model is stored in half, and how it comes back."""

import copy
from itertools import chain
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from amp_patch.weights import half_storage

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
HALF_OF = {"O2": F16, "O3": F16, "O5": BF16}
LEVELS = sorted(HALF_OF)


def prepared(amp: ModuleType, model: nn.Module, level: str = "O2", **options: Any) -> nn.Module:
    return amp.initialize(model, opt_level=level, verbosity=0, **options)


@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm1d(4),
        nn.BatchNorm2d(4),
        nn.BatchNorm3d(4),
        nn.SyncBatchNorm(4),
        nn.BatchNorm1d(4, affine=False),
        nn.BatchNorm1d(4, track_running_stats=False),
    ],
    ids=str,
)
@pytest.mark.parametrize(("level", "kept"), [("O2", F32), ("O5", F32), ("O3", F16)])
def test_batch_norms_keep_fp32_where_the_level_says_so(
    amp: ModuleType, norm: nn.Module, level: str, kept: torch.dtype
) -> None:
    norm = copy.deepcopy(norm)
    model = prepared(amp, nn.Sequential(nn.Linear(4, 4), norm), level)
    floats = [t for t in model[1].state_dict(keep_vars=True).values() if t.is_floating_point()]
    stored = [*norm.parameters(), *(b for b in norm.buffers() if b.is_floating_point())]
    assert len(floats) == len(stored)
    assert {tensor.dtype for tensor in stored} <= {kept}
    assert model[0].weight.dtype is HALF_OF[level]


@pytest.mark.parametrize(
    "norm",
    [
        nn.LayerNorm(4),
        nn.GroupNorm(2, 4),
        nn.InstanceNorm1d(4, affine=True),
        nn.RMSNorm(4),
    ],
    ids=str,
)
@pytest.mark.parametrize("level", LEVELS)
def test_other_norms_go_half(amp: ModuleType, norm: nn.Module, level: str) -> None:
    model = prepared(amp, nn.Sequential(copy.deepcopy(norm)), level)
    floats = [t for t in [*model.parameters(), *model.buffers()] if t.is_floating_point()]
    assert floats
    assert {tensor.dtype for tensor in floats} == {HALF_OF[level]}


@pytest.mark.parametrize(
    ("level", "keep", "expected"),
    [("O2", False, F16), ("O2", "False", F16), ("O3", True, F32), ("O5", False, BF16)],
)
def test_keep_batchnorm_fp32_overrides_the_level(
    amp: ModuleType, level: str, keep: Any, expected: torch.dtype
) -> None:
    model = prepared(amp, nn.Sequential(nn.BatchNorm1d(4)), level, keep_batchnorm_fp32=keep)
    assert model[0].weight.dtype is expected
    assert model[0].running_mean.dtype is expected
    assert model[0].num_batches_tracked.dtype is torch.int64
    assert model(torch.randn(8, 4)).dtype is F32


@pytest.mark.parametrize("affine", [True, False])
def test_a_kept_batch_norm_takes_half_and_averages_in_fp32(amp: ModuleType, affine: bool) -> None:
    model = prepared(amp, nn.Sequential(nn.BatchNorm1d(4, affine=affine)))
    inputs = torch.randn(64, 4)
    outputs = model(inputs)
    reference = nn.BatchNorm1d(4, affine=affine)
    expected = reference(inputs.half().float())
    torch.testing.assert_close(outputs, expected, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(model[0].running_var, reference.running_var)


@pytest.mark.parametrize("level", LEVELS)
def test_values_are_rounded_once_in_the_same_objects(amp: ModuleType, level: str) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3))
    model.register_buffer("table", torch.rand(5))
    params, before = list(model.parameters()), copy.deepcopy(model.state_dict())
    prepared(amp, model, level)
    assert all(new is old for new, old in zip(model.parameters(), params, strict=True))
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        assert torch.equal(tensor, before[name].to(HALF_OF[level]))


@pytest.mark.parametrize("level", LEVELS)
def test_float64_complex_and_integer_tensors_are_untouched(amp: ModuleType, level: str) -> None:
    model = nn.Linear(4, 3)
    model.double_weight = nn.Parameter(torch.rand(2, dtype=F64))
    model.complex_weight = nn.Parameter(torch.rand(2, dtype=torch.complex64))
    for name, dtype in (("d", F64), ("c", torch.complex64), ("i", torch.int64), ("b", torch.bool)):
        model.register_buffer(name, torch.zeros(2, dtype=dtype))
    others = {
        name: tensor
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
        if tensor.dtype is not F32
    }
    before = {name: (tensor.data_ptr(), tensor.dtype) for name, tensor in others.items()}
    prepared(amp, model, level)
    now = dict([*model.named_parameters(), *model.named_buffers()])
    assert before == {name: (now[name].data_ptr(), now[name].dtype) for name in before}


@pytest.mark.parametrize("level", LEVELS)
def test_a_model_that_processes_share_is_shared_still(amp: ModuleType, level: str) -> None:
    models = [nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)) for _ in range(2)]
    models[0][0].register_buffer("mean", torch.full((3,), 0.1))
    models[0].share_memory()
    optimizer = torch.optim.SGD([p for one in models for p in one.parameters()], lr=0.1)
    amp.initialize(models, optimizer, opt_level=level, verbosity=0)
    shared, own = ([*one.parameters(), *one.buffers()] for one in models)
    assert models[0][0].weight.dtype is models[0][0].mean.dtype is HALF_OF[level]
    assert all(tensor.is_shared() for tensor in shared)
    assert not any(tensor.is_shared() for tensor in own)


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_masters_are_in_the_memory_that_processes_share(amp: ModuleType, level: str) -> None:
    """A process that starts by spawn initializes the shared model, and what it learns is seen."""
    model = nn.Linear(4, 3).share_memory()
    elsewhere = model.weight.detach()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=1.0, verbosity=0)
    with amp.scale_loss(model(torch.ones(2, 4)).sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    assert torch.equal(elsewhere, model.state_dict()["weight"])


class NamesWhatIsKept(nn.Module):
    """As T5 of transformers, and a mixture of experts: casts to what is kept, where it is."""

    _keep_in_fp32_modules = ("wo",)
    _keep_in_fp32_modules_strict = ("gate.weight", "correction")

    def __init__(self) -> None:
        super().__init__()
        self.wi, self.wo, self.gate = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.two = nn.Linear(4, 4)
        self.register_buffer("correction", torch.full((4,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.wo(self.wi(x).to(self.wo.weight.dtype)).to(x.dtype)
        scores = hidden.float() @ self.gate.weight
        return self.two(hidden * (scores + self.correction).to(x.dtype))


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_what_a_model_of_transformers_keeps_in_fp32_stays_so(amp: ModuleType, level: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), NamesWhatIsKept())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=1.0, verbosity=0)
    wide = {"1.gate.weight", "1.correction", *(["1.wo.weight", "1.wo.bias"] * (level == "O2"))}
    tensors = dict(chain(model.named_parameters(), model.named_buffers()))
    assert {name for name, tensor in tensors.items() if tensor.dtype is torch.float32} == wide
    with amp.scale_loss(model(torch.randn(3, 4)).sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    amp.deactivate()
    for name, value in model.state_dict().items():
        assert value.dtype is torch.float32
        learned = name not in ("1.correction", "1.gate.bias")  # which the forward does not use
        assert torch.equal(value, before[name]) != learned, name


class GivesHalf(NamesWhatIsKept):
    """Casts to nothing, as DeepSeek-V4 of transformers, which torch's half model raises for."""

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.wo(self.wi(x)))


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_a_layer_that_is_kept_takes_half_and_computes_in_fp32(amp: ModuleType, level: str) -> None:
    torch.manual_seed(0)
    model, x = GivesHalf(), torch.randn(3, 4)
    expected = model(x)
    found: list[torch.dtype] = []
    model.wo.register_forward_hook(lambda module, args, output: found.append(output.dtype))
    amp.initialize(model, opt_level=level, verbosity=0)
    torch.testing.assert_close(model(x), expected, rtol=0.02, atol=0.02)
    assert found == [torch.bfloat16 if level == "O5" else torch.float32]
    amp.deactivate()
    assert not model.wo._forward_pre_hooks


def test_a_tied_weight_stays_one_parameter(amp: ModuleType) -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(5, 4), "head": nn.Linear(4, 5, bias=False)})
    model["head"].weight = model["embed"].weight
    prepared(amp, model)
    assert model["head"].weight is model["embed"].weight
    assert model["head"].weight.dtype is F16


@pytest.mark.parametrize("cell", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("level", LEVELS)
def test_recurrent_layers_run_on_packed_sequences(
    amp: ModuleType, cell: type[nn.Module], level: str
) -> None:
    model = prepared(amp, cell(3, 5), level)
    packed = pack_padded_sequence(torch.randn(4, 2, 3), [4, 2])
    outputs, _ = model(packed)
    assert isinstance(outputs, PackedSequence)
    assert outputs.data.dtype is F32
    assert packed.data.dtype is F32
    assert torch.equal(outputs.batch_sizes, packed.batch_sizes)


@pytest.mark.parametrize("level", LEVELS)
def test_deactivate_brings_everything_back_to_fp32(amp: ModuleType, level: str) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.LSTM(3, 2))
    model.register_buffer("table", torch.rand(5))
    params = list(model.parameters())
    prepared(amp, model, level)
    amp.deactivate()
    floats = [t for t in [*model.parameters(), *model.buffers()] if t.is_floating_point()]
    assert {tensor.dtype for tensor in floats} == {F32}
    assert all(new is old for new, old in zip(model.parameters(), params, strict=True))
    assert model[2](torch.randn(4, 1, 3))[0].dtype is F32


@pytest.mark.parametrize("level", ["O3", "O5"])
def test_convert_hands_back_the_old_storage(level: str) -> None:
    model = nn.Linear(4, 3)
    pointers = {param: param.data_ptr() for param in model.parameters()}
    model.weight.grad = torch.ones(3, 4)
    model.register_buffer("shift", torch.ones(3))
    shift = model.shift
    originals, _, rounded = half_storage.convert(model, HALF_OF[level], keep_batchnorm_fp32=False)
    assert rounded[model.shift] is shift
    assert {param: original.data_ptr() for param, original in originals.items()} == pointers
    assert torch.equal(originals[model.weight].grad, torch.ones(3, 4))
    assert model.weight.grad is None
    assert originals[model.bias].grad is None


@pytest.mark.parametrize("level", LEVELS)
def test_a_gradient_from_before_initialize_is_stepped(amp: ModuleType, level: str) -> None:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with torch.no_grad():
        model.weight.fill_(1.0)
    model.weight.grad = torch.full((3, 4), 0.25)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    optimizer.step()
    assert torch.equal(model.weight.float(), torch.full((3, 4), 0.75))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("is_cleared", [False, True])
def test_a_gradient_from_before_of_a_layer_that_joins_later(
    amp: ModuleType, level: str, is_cleared: bool
) -> None:
    """It is the layer's, in half, until an optimizer gets it; and the layer's to be cleared."""
    model = nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3)])
    optimizer = torch.optim.SGD(model[0].parameters(), lr=1.0)
    nn.init.ones_(model[1].weight)
    model[1].weight.grad = torch.full((3, 4), 0.25)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=1.0, verbosity=0)
    assert torch.equal(model[1].weight.grad.float(), torch.full((3, 4), 0.25))
    if is_cleared:
        model.zero_grad()
    optimizer.add_param_group({"params": model[1].parameters()})
    optimizer.step()
    assert torch.equal(model[1].weight.float(), torch.full((3, 4), 1.0 if is_cleared else 0.75))
