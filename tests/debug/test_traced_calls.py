"""Which calls of models are traced: those after a forward that raised, and those of their parts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from plants import WIDTH, Scores, around, prepared, square, the_cause, train
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class Failing(nn.Module):
    """Raises once."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.errors = [error]

    def forward(self, x: Tensor) -> Tensor:
        if self.errors:
            raise self.errors.pop()
        return x


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_forward_that_raised_ends_no_tracing(amp, level: str) -> None:
    model = nn.Sequential(around(Scores()), Failing(RuntimeError("out of memory")))
    model, optimizer = prepared(amp, model, level)
    with pytest.raises(RuntimeError, match="out of memory"):
        model(torch.ones(2, WIDTH))
    train(amp, model, optimizer)
    assert (the_cause(amp).module, the_cause(amp).operator) == ("0.1.1", "matmul")


def test_a_forward_that_was_interrupted_ends_no_tracing_of_later_steps(amp) -> None:
    # Ctrl-C in a notebook: no hook hears of it
    model, optimizer = prepared(
        amp, nn.Sequential(around(Scores()), Failing(KeyboardInterrupt())), "O1"
    )
    with pytest.raises(KeyboardInterrupt):
        model(torch.ones(2, WIDTH))
    optimizer.step()
    train(amp, model, optimizer)
    assert the_cause(amp).module == "0.1.1"


class Autoencoder(nn.Module):
    """Its parts are called by themselves; no call of it is made."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = around(Scores()), nn.Linear(WIDTH, WIDTH)

    def encode(self, x: Tensor) -> Tensor:
        return self.encoder(x)


@pytest.mark.parametrize("others", [0, 1])
def test_a_part_that_is_called_by_itself_is_traced(amp, others: int) -> None:
    model = Autoencoder()
    first = [nn.Linear(2, 2)] * others
    models = [*first, model]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    amp.initialize(models, optimizer, opt_level="O1", verbosity=0, trace_overflow=True)
    inputs = torch.randn(4, WIDTH)
    train(amp, lambda _: model.decoder(model.encode(inputs)), optimizer)
    cause = the_cause(amp)
    assert (cause.model, cause.module, cause.level) == ("Autoencoder", "encoder.1.1", "O1")
    assert cause.rule == {"1:encoder.1.1" if others else "encoder.1.1": "float"}


class Product(nn.Module):
    """Hands on a number that float16 cannot hold."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 0.0 + x.new_tensor(60000.0) * 2.0


def test_what_only_the_part_that_was_called_mends_is_advised_for_it(amp) -> None:
    model = nn.ModuleDict({"body": nn.Sequential(Product(), nn.Linear(WIDTH, WIDTH))})
    model, optimizer = prepared(amp, model, "O1")
    train(amp, lambda x: square(model["body"](x.half())), optimizer, lambda loss: loss)
    cause = the_cause(amp)
    assert (cause.module, cause.mended_by, cause.rule) == ("body.0", "model", {"body": "float"})
    assert "Compute `body` in" in cause.advice()
    assert "`body.0` alone is not enough" in cause.advice()


@pytest.mark.parametrize("in_half", [True, False])
def test_a_loss_that_is_computed_in_half_outside_of_the_model_is_told_so(amp, in_half) -> None:
    model, optimizer = prepared(amp, around(nn.Tanh()), "O1")

    def loss_of(outputs: Tensor) -> Tensor:
        outputs = outputs[:, 0] if in_half else outputs[:, 0].float()
        return ((outputs * 0.0 + 60000.0) * (2.0 if in_half else torch.inf)).float().mean()

    train(amp, model, optimizer, loss_of)
    cause = the_cause(amp)
    assert (cause.where, cause.in_half) == ("loss", "mul" if in_half else "")
    assert ("or at `mul` in it, which is in half" in cause.advice()) == in_half
    assert ("O1 casts functions there, too" in cause.advice()) != in_half


@pytest.mark.parametrize(
    ("loss_of", "operator"),
    [
        (lambda outputs: outputs.relu().mul(0.0).log().mean(), "log"),
        (lambda outputs: (outputs * outputs.mul(0.0).reciprocal()).sum(), "reciprocal"),
        (lambda outputs: (outputs / (outputs * 0.0)).exp().mean(), "div"),
        (lambda outputs: F.mse_loss(outputs, outputs.detach() * torch.nan), "mse_loss"),
        (lambda outputs: F.softmax(outputs - torch.inf, -1).sum(), "softmax"),
        (lambda outputs: outputs.exp().sum() * 1e38, ""),
    ],
)
def test_where_a_loss_left_the_finite_range_is_told_as_far_as_its_graph_shows(
    amp, loss_of, operator: str
) -> None:
    model, optimizer = prepared(amp, around(nn.Tanh()), "O1")
    train(amp, model, optimizer, lambda outputs: loss_of(outputs.float()))
    cause = the_cause(amp)
    assert (cause.where, cause.operator) == ("loss", "")
    assert (f"shows it is `{operator}`, of these" in cause.note) == bool(operator)
    assert bool(cause.operands) == bool(operator)


@pytest.mark.skipif(
    not hasattr(torch._C._autograd.SavedTensor, "unpack_hook"),
    reason="this torch does not say what a hook unpacks: the checkpoint runs once more",
)
def test_a_checkpoint_in_a_loss_that_is_not_finite_runs_no_more_than_without(amp) -> None:
    counts = []
    for trace in (False, True):
        calls: list[None] = []

        def part(outputs: Tensor, calls: list[None] = calls) -> Tensor:
            calls.append(None)
            return outputs.float().exp().log1p()

        model, optimizer = prepared(amp, around(nn.Tanh()), "O1", trace_overflow=trace)
        train(
            amp,
            model,
            optimizer,
            lambda outputs: checkpoint(part, outputs, use_reentrant=False).mean() * torch.inf,
        )
        counts.append(len(calls))
        amp.deactivate()
    assert counts[0] == counts[1]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_weights_of_a_functional_call_are_those_of_the_second_run(amp, level: str) -> None:
    def call(x: Tensor) -> Tensor:
        weights = {name: param * 1e6 for name, param in model.named_parameters() if "1.0" in name}
        return torch.func.functional_call(model, weights, (x,))

    model, optimizer = prepared(amp, around(nn.Tanh()), level, loss_scale=1.0)
    train(amp, call, optimizer)
    cause = the_cause(amp)
    assert (cause.where, cause.module) == ("weight" if level == "O2" else "forward", "1.0")


def test_a_model_whose_second_run_is_another_is_not_said_to_be_finite(amp) -> None:
    factors = [torch.inf]  # of the script, no attribute of the model

    class Once(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * factors.pop() if factors else x

    model, optimizer = prepared(amp, around(Once()), "O1")
    train(amp, model, optimizer)
    cause = the_cause(amp)
    assert cause.where == "unknown"
    assert "did not in a second run" in cause.note


@pytest.mark.parametrize("is_zero", [True, False])
def test_a_loss_that_a_model_keeps_inside_is_named_there(amp, is_zero: bool) -> None:
    class Experts(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            chosen = x.half() * (0.0 if is_zero else 1e-9)
            self.auxiliary = (chosen * chosen.abs().float().log()).mean()
            return x

    inside = Experts()
    model, optimizer = prepared(amp, around(inside), "O1")
    train(amp, model, optimizer, lambda outputs: square(outputs) + inside.auxiliary)
    cause = the_cause(amp)
    assert (cause.where, cause.module, cause.operator) == ("forward", "1.1", "log")
    assert cause.mended_by == ("nothing" if is_zero else "module")


def test_a_traced_model_may_be_called_by_vmap(amp) -> None:
    model, optimizer = prepared(amp, around(nn.Tanh()), "O1")
    train(amp, torch.func.vmap(model), optimizer)
    assert not amp.step_was_skipped(optimizer)


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
def test_a_part_of_torch_jit_takes_no_hooks_and_the_model_is_traced(amp) -> None:
    compiled = torch.jit.script(nn.ReLU())
    model, optimizer = prepared(amp, nn.Sequential(around(Scores()), compiled), "O1")
    train(amp, model, optimizer)
    assert the_cause(amp).module == "0.1.1"


@pytest.mark.parametrize(
    "transform",
    [
        lambda model, x: torch.func.vmap(model)(x),
        lambda model, x: torch.func.grad(lambda y: model(y).float().mean())(x),
        lambda model, x: torch.func.grad(
            lambda weights: torch.func.functional_call(model, weights, (x,)).float().mean()
        )({name: param * 1.0 for name, param in model.named_parameters()})["1.0.bias"],
    ],
)
def test_a_call_inside_of_torch_func_is_said_to_be_unseen(amp, transform) -> None:
    model, optimizer = prepared(amp, around(nn.Tanh()), "O1")
    train(amp, lambda x: transform(model, x), optimizer, lambda out: (out * torch.nan).sum())
    cause = the_cause(amp)
    assert cause.where == "loss"
    assert "inside of torch.func" in cause.note
    assert "precision has no part" not in cause.advice()


class TwoDtypes(nn.Module):
    """Returns what torch computes no bounds of, too."""

    def __init__(self, of: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.of = nn.Linear(WIDTH, WIDTH), of

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.layer(x)
        return y, self.of(y.detach().float())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize(
    "of",
    [
        lambda y: y.to(torch.float8_e4m3fn),
        lambda y: torch.nested.nested_tensor([y[:1], y[1:]]),
    ],
)
def test_a_traced_model_may_return_what_has_no_bounds(amp, of) -> None:
    model, optimizer = prepared(amp, TwoDtypes(of), "O1")
    train(amp, lambda x: model(x)[0], optimizer)
    assert not amp.step_was_skipped(optimizer)


@pytest.mark.filterwarnings("ignore:.torch.jit.trace:DeprecationWarning")
def test_a_traced_model_may_be_traced_by_torch(amp) -> None:
    model, _ = prepared(amp, around(nn.Tanh()), "O1")
    inputs = torch.randn(4, WIDTH)
    torch.jit.trace(model, inputs)  # a warning of numbers that are asked for fails the test
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert model(torch.empty(4, WIDTH)).shape == inputs.shape


@pytest.mark.parametrize("nodes", [2, 600])
def test_parts_of_a_loss_whose_gradients_half_cannot_add_are_no_matter_of_the_layer(
    amp, nodes: int
) -> None:
    model, optimizer = prepared(amp, nn.Sequential(nn.Linear(WIDTH, WIDTH)), "O1", loss_scale=2**15)

    def loss_of(outputs: Tensor) -> Tensor:
        parts = outputs.float().sum(), outputs.float().sum()
        rest = outputs.new_zeros((), dtype=torch.float32, requires_grad=True)
        for _ in range(nodes - 2):
            rest = rest + 0.0
        return 1.5 * parts[0] + 1.5 * parts[1] + rest

    train(amp, model, optimizer, loss_of)
    cause = the_cause(amp)
    # a loss with operators that were not looked at may have made inf there
    assert (cause.where == "sum") == (nodes == 2)
    assert ("smaller loss scale" in cause.advice()) == (nodes == 2)
    assert ("at an output of Sequential" in cause.note) == (nodes == 2)
