"""apex's layers and losses against torch's own, and against loops over the formulas."""

from __future__ import annotations

import copy
import importlib
import itertools
import pickle
import types
from typing import Any

import pytest
import torch
from support import nightly_but
from torch import Tensor, nn
from torch.nn import functional as F

import amp_patch.amp

SHARES_APEX = True
HALVES = [torch.float16, torch.bfloat16]


@pytest.fixture
def load(apex: types.ModuleType) -> Any:
    """Imports a module of the drop-in by its name after 'apex.'."""
    return lambda name: importlib.import_module(f"apex.{name}")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


# MLP


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("activation", "function"), [("none", nn.Identity), ("relu", nn.ReLU), ("sigmoid", nn.Sigmoid)]
)
def test_mlp_is_linear_layers(load: Any, bias: bool, activation: str, function: Any) -> None:
    mlp = load("mlp").MLP([3, 5, 4, 2], bias=bias, activation=activation)
    layers: list[nn.Module] = []
    for index, (fan_in, fan_out) in enumerate(itertools.pairwise([3, 5, 4, 2])):
        layers += [nn.Linear(fan_in, fan_out, bias=bias), function()]
        with torch.no_grad():
            mlp.weights[index].copy_(layers[-2].weight)
            if bias:
                mlp.biases[index].copy_(layers[-2].bias)
    x = torch.randn(6, 3)
    assert torch.equal(mlp(x), nn.Sequential(*layers)(x))
    names = ["weight", "bias"] if bias else ["weight"]
    assert set(mlp.state_dict()) == {f"{name}_{index}" for name in names for index in range(3)}
    assert mlp.num_layers == 3


def test_mlp_starts_as_published(load: Any) -> None:
    mlp = load("mlp").MLP([400, 600, 500])
    for weight in mlp.weights:
        assert weight.std().item() == pytest.approx((2 / sum(weight.shape)) ** 0.5, rel=0.02)
        assert weight.abs().max() > 3 * weight.std()  # normal, not uniform
    for bias in mlp.biases:
        assert bias.std().item() == pytest.approx(len(bias) ** -0.5, rel=0.2)


def test_mlp_keeps_its_settings(load: Any) -> None:
    mlp = load("mlp").MLP([3, 2], activation="sigmoid")
    assert repr(mlp) == "MLP(MLP sizes: [3, 2], Bias=True, activation=2)"
    other = copy.deepcopy(mlp).half()
    assert other(torch.ones(1, 3).half()).dtype == torch.half
    with pytest.raises(TypeError, match=r"'relu' or 'sigmoid'; got 'tanh'. Call MLP\(mlp_sizes, "):
        load("mlp").MLP([3, 2], activation="tanh")


# Fused dense


def test_functions_have_the_classes_that_scripts_call_the_apply_of(load: Any) -> None:
    module, x = load("fused_dense"), torch.randn(2, 4)
    first, second = nn.Linear(4, 6), nn.Linear(6, 3)
    assert torch.equal(module.FusedDenseFunc.apply(x, first.weight, first.bias), first(x))
    assert torch.equal(module.DenseNoBiasFunc.apply(x, first.weight), F.linear(x, first.weight))
    params = [*first.parameters(), *second.parameters()]
    expected = second(F.gelu(first(x), approximate="tanh"))
    torch.testing.assert_close(module.FusedDenseGeluDenseFunc.apply(x, *params), expected)
    weights, biases = params[::2], params[1::2]
    found = load("mlp").MlpFunction.apply(True, 1, x, *weights, *biases)
    assert torch.equal(found, second(first(x).relu()).relu())


@pytest.mark.parametrize("bias", [True, False])
def test_fused_dense(load: Any, bias: bool) -> None:
    dense = load("fused_dense").FusedDense(4, 3, bias=bias)
    x = torch.randn(2, 5, 4)
    expected = x.double() @ dense.weight.double().T + (dense.bias.double() if bias else 0.0)
    torch.testing.assert_close(dense(x).double(), expected, rtol=1e-5, atol=1e-5)
    assert list(dense.state_dict()) == (["weight", "bias"] if bias else ["weight"])


def test_dense_without_bias(load: Any) -> None:
    module = load("fused_dense")
    dense = module.DenseNoBias(4, 3)
    x = torch.randn(2, 4)
    assert torch.equal(dense(x), module.dense_no_bias_function(x, dense.weight))
    assert list(dense.state_dict()) == ["weight"]
    with pytest.raises(ValueError, match=r"has no bias; got bias=True. Call FusedDense\("):
        module.DenseNoBias(4, 3, bias=True)


def test_dense_gelu_dense(load: Any) -> None:
    module = load("fused_dense").FusedDenseGeluDense(4, 6, 3)
    x = torch.randn(2, 4)
    inner = x.double() @ module.weight1.double().T + module.bias1.double()
    inner = inner * torch.special.ndtr(inner)
    expected = inner @ module.weight2.double().T + module.bias2.double()
    torch.testing.assert_close(module(x).double(), expected, rtol=1e-2, atol=5e-3)
    assert sorted(module.state_dict()) == ["bias1", "bias2", "weight1", "weight2"]
    with pytest.raises(ValueError, match=r"needs biases; got bias=False. Call torch.nn.Sequential"):
        load("fused_dense").FusedDenseGeluDense(4, 6, 3, bias=False)


# RNN

TORCH = {
    "LSTM": nn.LSTM,
    "GRU": nn.GRU,
    "ReLU": lambda *sizes, **options: nn.RNN(*sizes, nonlinearity="relu", **options),
    "Tanh": nn.RNN,
}


def with_weights_of(network: nn.Module, reference: nn.RNNBase) -> None:
    directions = [network.fwd, network.bckwrd] if reference.bidirectional else [network]
    with torch.no_grad():
        for direction, suffix in zip(directions, ["", "_reverse"], strict=False):
            for layer, cell in enumerate(direction.rnns):
                for name in ("w_ih", "w_hh", "b_ih", "b_hh"):
                    kind = name.replace("w_", "weight_").replace("b_", "bias_")
                    value = getattr(reference, f"{kind}_l{layer}{suffix}", None)
                    assert (getattr(cell, name) is None) == (value is None)
                    if value is not None:
                        getattr(cell, name).copy_(value)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", TORCH)
def test_rnn_is_that_of_torch(load: Any, name: str, bias: bool, batch_first: bool) -> None:
    reference = TORCH[name](3, 5, num_layers=2, bias=bias, batch_first=batch_first)
    network = getattr(load("RNN"), name)(3, 5, 2, bias=bias, batch_first=batch_first)
    with_weights_of(network, reference)
    x = torch.randn(4, 7, 3)
    output, hidden = network(x)
    expected, states = reference(x)
    torch.testing.assert_close(output, expected)
    states = states if name == "LSTM" else (states,)
    assert len(hidden) == len(states)
    for mine, theirs in zip(hidden, states, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("name", TORCH)
def test_both_directions(load: Any, name: str) -> None:
    # One layer: torch's second takes both directions of the first, apex's directions stay apart.
    reference = TORCH[name](3, 5, bidirectional=True)
    network = getattr(load("RNN"), name)(3, 5, 1, bidirectional=True)
    with_weights_of(network, reference)
    x = torch.randn(4, 2, 3)
    output, hidden = network(x)
    expected, states = reference(x)
    torch.testing.assert_close(output, expected)
    first = states[0] if name == "LSTM" else states
    torch.testing.assert_close(hidden[0], torch.cat([first[:1], first[1:]], -1))


def test_directions_of_two_layers_stay_apart(load: Any) -> None:
    network = load("RNN").LSTM(3, 5, 2, bidirectional=True)
    x = torch.randn(4, 2, 3)
    output, _ = network(x)
    network.reset_hidden(2)
    back, _ = network.bckwrd(x.flip(0))
    torch.testing.assert_close(output[..., 5:], back.flip(0))
    assert {"fwd.rnns.1.w_ih", "bckwrd.rnns.0.b_hh", "rnns.1.rnns.0.w_hh"} <= set(
        network.state_dict()
    )


@pytest.mark.parametrize("both", [True, False])
def test_states_of_every_step(load: Any, both: bool) -> None:
    network = load("RNN").LSTM(3, 5, 2, bidirectional=both)
    x = torch.randn(4, 2, 3)
    output, hidden = network(x, collect_hidden=True)
    assert [state.shape for state in hidden] == [(4, 2, 2, 10 if both else 5)] * 2
    torch.testing.assert_close(hidden[0][:, -1], output)


def mlstm_by_hand(network: nn.Module, x: Tensor) -> Tensor:
    """Krause et al., arXiv:1609.07959, equations 17 to 22, in float64, with a projection."""
    layer = {name: param.double() for name, param in network.rnns[0].named_parameters()}
    output = torch.zeros(x.shape[1], layer["w_hh"].shape[1], dtype=torch.float64)
    cell = torch.zeros(x.shape[1], layer["w_hh"].shape[0] // 4, dtype=torch.float64)
    outputs = []
    for step in x.double():
        m = (step @ layer["w_mih"].T) * (output @ layer["w_mhh"].T)
        gates = step @ layer["w_ih"].T + layer["b_ih"] + m @ layer["w_hh"].T + layer["b_hh"]
        i, f, g, o = gates.split(cell.shape[1], 1)
        cell = torch.sigmoid(f) * cell + torch.sigmoid(i) * torch.tanh(g)
        output = torch.sigmoid(o) * torch.tanh(cell)
        output = output @ layer["w_ho"].T if "w_ho" in layer else output
        outputs.append(output)
    return torch.stack(outputs)


@pytest.mark.parametrize("output_size", [None, 5, 2])
def test_multiplicative_lstm(load: Any, output_size: int | None) -> None:
    network = load("RNN").mLSTM(3, 5, 1, output_size=output_size)
    with torch.no_grad():
        for param in network.parameters():
            param.mul_(3)  # so that the states move
    x = torch.randn(4, 2, 3)
    output, _ = network(x)
    torch.testing.assert_close(output.double(), mlstm_by_hand(network, x), rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
def test_projected_lstm_is_that_of_torch(load: Any) -> None:
    reference = nn.LSTM(3, 5, proj_size=2)
    network = load("RNN").LSTM(3, 5, 1, output_size=2)
    with_weights_of(network, reference)
    with torch.no_grad():
        network.rnns[0].w_ho.copy_(reference.weight_hr_l0)
    x = torch.randn(4, 2, 3)
    (output, hidden), (expected, states) = network(x), reference(x)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(hidden, list(states))


@pytest.mark.parametrize("name", ["ReLU", "Tanh", "mLSTM", "LSTM"])
def test_projection_in_layers(load: Any, name: str) -> None:
    network = getattr(load("RNN"), name)(3, 5, 2, output_size=2)
    output, hidden = network(torch.randn(4, 6, 3))
    assert output.shape == (4, 6, 2)
    assert [state.shape[-1] for state in hidden] == ([2] if len(hidden) == 1 else [2, 5])


def test_gru_has_no_projection(load: Any) -> None:
    assert load("RNN").GRU(3, 5, 1, output_size=5)(torch.randn(1, 1, 3))[0].shape == (1, 1, 5)
    with pytest.raises(ValueError, match=r"of hidden_size=5 features; got output_size=2. Call GRU"):
        load("RNN").GRU(3, 5, 1, output_size=2)


@pytest.mark.parametrize("both", [True, False])
def test_states_live_on_until_reset(load: Any, both: bool) -> None:
    network = load("RNN").Tanh(3, 5, 2, bidirectional=both)
    x = torch.randn(4, 2, 3)
    first, _ = network(x)
    second, _ = network(x)
    assert not torch.allclose(first, second)
    network.detach_hidden()
    third, _ = network(x)
    first.sum().backward()
    third.sum().backward()  # its graph ends at the detached states
    network.reset_hidden(2)
    torch.testing.assert_close(network(x)[0], first)
    network.init_hidden(2)  # keeps what fits
    assert not torch.allclose(network(x)[0], first)
    assert network(torch.randn(4, 6, 3))[0].shape[1] == 6


def test_detaching_needs_states(load: Any) -> None:
    network = load("RNN").LSTM(3, 5, 1)
    with pytest.raises(RuntimeError, match=r"got none yet. Call init_hidden\(batch_size\), or run"):
        network.detach_hidden()
    network.init_hidden(2)
    network.detach_hidden()


def test_dropout_between_layers_in_training_only(load: Any) -> None:
    network = load("RNN").LSTM(3, 5, 2, dropout=0.5)
    x = torch.randn(4, 2, 3)

    def run() -> Tensor:
        network.reset_hidden(2)
        output: Tensor = network(x)[0]
        return output

    assert not torch.allclose(run(), run())
    assert bool((run() != 0).all())  # the last layer's outputs are not dropped
    network.eval()
    assert torch.equal(run(), run())


def test_network_is_pickled_and_initialized_anew(load: Any) -> None:
    network = load("RNN").GRU(3, 5, 2)
    again = pickle.loads(pickle.dumps(network))
    x = torch.randn(4, 2, 3)
    expected = network(x)[0]
    assert torch.equal(again(x)[0], expected)
    again.reset_parameters()
    again.reset_hidden(2)
    assert not torch.allclose(again(x)[0], expected)
    assert all(bool((param.abs() <= 5**-0.5).all()) for param in again.parameters())


def test_stack_of_given_cells(load: Any) -> None:
    backend = load("RNN.RNNBackend")
    cells = [backend.RNNCell(1, 3, 5, load("RNN.cells").RNNTanhCell, 1)]
    cells.append(cells[0].new_like(5))
    assert backend.stackedRNN(cells, 2)(torch.randn(4, 2, 3))[0].shape == (4, 2, 5)
    with pytest.raises(ValueError, match="got 3 and 2 cells. Call stackedRNN"):
        backend.stackedRNN(cells, 3)


class Tagger(nn.Module):
    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.head = nn.Linear(8, 1)
        self.dtypes: set[torch.dtype] = set()

    def forward(self, x: Tensor) -> Tensor:
        output, _ = self.network(x)
        self.network.detach_hidden()
        self.dtypes.add(output.dtype)
        return self.head(output)


DTYPE = {"O1": torch.half, "O2": torch.half, "O4": torch.bfloat16, "O5": torch.bfloat16}


@pytest.mark.parametrize("level", nightly_but(("O1", "O5"), DTYPE))
@pytest.mark.parametrize("name", [*TORCH, "mLSTM"])
def test_networks_train_in_half(load: Any, name: str, level: str) -> None:
    amp = load("amp")
    model = Tagger(getattr(load("RNN"), name)(3, 8, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    x = torch.randn(5, 16, 3)
    targets = x.cumsum(0)[..., :1].tanh()
    losses = []
    try:
        for _ in range(40):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x).float(), targets)
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            optimizer.step()
            losses.append(loss.item())
        assert model.dtypes == {DTYPE[level]}
    finally:
        amp_patch.amp.deactivate()
    assert losses[-1] < 0.6 * losses[0]


@pytest.mark.parametrize("name", TORCH)
def test_states_made_in_half_serve_in_float32(load: Any, name: str) -> None:
    network = getattr(load("RNN"), name)(3, 5, 2)
    x = torch.randn(4, 2, 3)
    network.bfloat16()(x.bfloat16())
    output, hidden = network.float()(x)
    assert {output.dtype, *(state.dtype for state in hidden)} == {torch.float32}


# Contributed


@pytest.mark.parametrize("padding", [0, 3, -100])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_smoothed_cross_entropy(
    load: Any, dtype: torch.dtype, smoothing: float, padding: int
) -> None:
    loss_class = load("contrib.xentropy").SoftmaxCrossEntropyLoss
    logits = (torch.randn(6, 5) * 3).to(dtype).requires_grad_()
    labels = torch.tensor([0, 1, 2, 3, 4, max(padding, 0)], dtype=torch.int32)
    losses = loss_class.apply(logits, labels, smoothing, padding, True)
    assert losses.dtype == torch.float32
    exact = logits.detach().double().requires_grad_()
    one_hot = F.one_hot(labels.long(), 5).double()
    target = (1 - smoothing) * one_hot + smoothing / 5
    expected = -(target * (exact - exact.exp().sum(1, keepdim=True).log())).sum(1)
    expected = expected * (labels != padding)
    torch.testing.assert_close(losses.double(), expected, rtol=1e-5, atol=1e-5)
    losses.sum().backward()
    expected.sum().backward()
    tolerance = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=tolerance, atol=tolerance)
    assert loss_class.apply(logits, labels, smoothing, padding).dtype == dtype


@pytest.mark.parametrize("weight", [torch.float32, *HALVES])
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_fast_layer_norm(load: Any, dtype: torch.dtype, weight: torch.dtype) -> None:
    module = load("contrib.layer_norm")
    norm = module.FastLayerNorm(8, eps=1e-3).to(weight)
    with torch.no_grad():
        norm.bias.add_(0.5)
    x = (torch.randn(4, 8) * 0.03).to(dtype)  # so small that eps counts
    output = norm(x)
    assert output.dtype == weight
    expected = F.layer_norm(x.double(), (8,), eps=1e-3) + 0.5
    torch.testing.assert_close(output.double(), expected, rtol=1e-2, atol=1e-2)
    assert list(norm.state_dict()) == ["weight", "bias"]
    norm.reset_parameters()
    assert not norm.bias.any()
    function = module.layer_norm.FastLayerNormFN
    assert torch.equal(function.apply(x, norm.weight, norm.bias, 1e-3), norm(x))


# Reparameterization


def convolutions() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(5, 3), nn.Sequential(nn.Linear(3, 4)), nn.LSTM(4, 2))


def test_weight_norm_of_a_whole_model(load: Any) -> None:
    module, model = load("reparameterization"), convolutions()
    tokens = torch.tensor([[1, 2, 3]])
    expected = model(tokens)[0]
    assert module.apply_weight_norm(model) is model
    names = set(dict(model.named_parameters()))
    assert {"0.weight", "1.0.weight_g", "1.0.weight_v", "1.0.bias", "2.weight_hh_l0_g"} <= names
    assert "1.0.weight" not in names
    torch.testing.assert_close(model(tokens)[0], expected)
    with torch.no_grad():
        model[1][0].weight_v.mul_(7)
        torch.testing.assert_close(model(tokens)[0], expected)
        model[1][0].weight_g.mul_(2)
    changed = model(tokens)[0]
    assert not torch.allclose(changed, expected)
    assert module.remove_weight_norm(model) is model
    assert set(dict(model.named_parameters())) == set(dict(convolutions().named_parameters()))
    torch.testing.assert_close(model(tokens)[0], changed)


@pytest.mark.parametrize(("dim", "shape"), [(0, (4, 1)), (1, (1, 3)), (None, ())])
def test_weight_norm_of_one_weight(load: Any, dim: int | None, shape: tuple[int, ...]) -> None:
    module, model = load("reparameterization"), convolutions()
    module.apply_weight_norm(model, "1.0.weight", dim)
    assert model[1][0].weight_g.shape == shape
    assert "2.weight_hh_l0" in dict(model.named_parameters())
    with pytest.raises(ValueError, match="weight_norm of 'bias' not found"):
        module.remove_weight_norm(model, "1.0.bias")
    module.remove_weight_norm(model, "1.0.weight", remove_all=True)
    assert "1.0.weight" in dict(model.named_parameters())
