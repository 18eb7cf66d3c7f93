"""Training at every level against the fp32 run, or against the same training written by hand."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from small_models import OPTIMIZERS, TASKS, Task, cross_entropy
from support import nightly_but, scaled_backward
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, Optimizer

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
EVERY_LEVEL = True  # here is what each level is
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
# What a linear layer or a convolution gives, what weights are stored in, and batch norms' weights.
ACTIVATIONS = {"O0": F32, "O1": F16, "O2": F16, "O3": F16, "O4": BF16, "O5": BF16}
WEIGHTS = {"O0": F32, "O1": F32, "O2": F16, "O3": F16, "O4": F32, "O5": BF16}
NORMS = {"O0": F32, "O1": F32, "O2": F32, "O3": F16, "O4": F32, "O5": F32}
STEPS = 50


@functools.cache
def fp32_losses(task: str, optimizer_name: str) -> list[float]:
    """Losses of plain torch, from the same start and on the same batch."""
    torch.manual_seed(0)
    model = TASKS[task].build()
    optimizer = OPTIMIZERS[optimizer_name](model, TASKS[task])
    inputs, targets = TASKS[task].batch()
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def amp_losses(
    amp: ModuleType, model: nn.Module, optimizer: Optimizer, task: Task, steps: int = STEPS
) -> list[float]:
    inputs, targets = task.batch()
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), targets)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def prepared(amp: ModuleType, task: str, optimizer_name: str, level: str, **options):
    torch.manual_seed(0)
    model = TASKS[task].build()
    optimizer = OPTIMIZERS[optimizer_name](model, TASKS[task])
    return amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)


# Every two of level, task and optimizer meet in the ordinary run.
TRAININGS = list(itertools.product(LEVELS, TASKS, OPTIMIZERS))
ORDINARY = [
    (level, task, optimizer)
    for (i, level), (j, task), (k, optimizer) in itertools.product(
        enumerate(LEVELS), enumerate(TASKS), enumerate(OPTIMIZERS)
    )
    if (i + j + k) % 3 == 0
]


@pytest.mark.parametrize("training", nightly_but(ORDINARY, TRAININGS), ids="-".join)
def test_training_ends_near_the_fp32_run(amp: ModuleType, training: tuple[str, str, str]) -> None:
    level, task, optimizer_name = training
    expected = fp32_losses(task, optimizer_name)
    assert expected[-1] < 0.5 * expected[0]
    model, optimizer = prepared(amp, task, optimizer_name, level)
    losses = amp_losses(amp, model, optimizer, TASKS[task])
    if level == "O0":
        assert losses == expected
        return
    assert losses != expected
    # O3 steps half weights: it trains, and no more is promised.
    drop = expected[0] - expected[-1]
    assert losses[0] == pytest.approx(expected[0], rel=0.02)
    assert losses[-1] == pytest.approx(expected[-1], abs=drop * (0.15 if level == "O3" else 0.02))


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("level", LEVELS)
def test_layers_compute_and_weights_are_stored_as_the_level_says(
    amp: ModuleType, level: str, task: str
) -> None:
    model, optimizer = prepared(amp, task, "sgd", level)
    watched = model.get_submodule(TASKS[task].watched)
    seen: list[torch.dtype] = []
    watched.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    outputs = model(TASKS[task].batch()[0])
    assert seen == [ACTIVATIONS[level]]
    assert outputs.dtype is (ACTIVATIONS[level] if level in ("O1", "O4") else F32)
    assert watched.weight.dtype is watched.bias.dtype is WEIGHTS[level]
    assert {p.dtype for p in amp.master_params(optimizer)} == {F16 if level == "O3" else F32}
    if TASKS[task].norm:
        norm = model.get_submodule(TASKS[task].norm)
        assert norm.weight.dtype is norm.running_var.dtype is NORMS[level]


def gan_losses(step: Callable, seed: int = 0) -> tuple[list[float], list[torch.dtype]]:
    """Train on points of a line; ``step(losses, optimizers, ids)`` runs backward and steps.

    Returns the losses of the discriminator on real and generated points and of the generator,
    and the dtypes of the discriminator's hidden layer.
    """
    torch.manual_seed(seed)
    generator = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
    discriminator = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
    optimizers = [Adam(m.parameters(), lr=5e-3, eps=1e-4) for m in (generator, discriminator)]
    models, optimizers, backward = step([generator, discriminator], optimizers)
    generator, discriminator = models
    seen: list[torch.dtype] = []
    discriminator[0].register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    losses = []
    judge = F.binary_cross_entropy_with_logits
    for _ in range(20):
        along = torch.randn(64, 1)
        real = torch.cat([along, 2 * along], 1)
        optimizers[1].zero_grad()
        judged = discriminator(real)
        on_real = judge(judged, torch.ones_like(judged))
        backward(on_real, optimizers[1], 0)
        fake = generator(torch.randn(64, 4))
        judged = discriminator(fake.detach())
        on_fake = judge(judged, torch.zeros_like(judged))
        backward(on_fake, optimizers[1], 1)
        optimizers[1].step()
        optimizers[0].zero_grad()
        judged = discriminator(fake)
        on_generated = judge(judged, torch.ones_like(judged))
        backward(on_generated, optimizers[0], 2)
        optimizers[0].step()
        losses += [on_real.item(), on_fake.item(), on_generated.item()]
    return losses, seen


def plain_backward(loss: Tensor, optimizer: Optimizer, loss_id: int) -> None:
    loss.backward()


@pytest.mark.parametrize("container", [list, tuple])
@pytest.mark.parametrize("level", LEVELS)
def test_a_gan_with_two_optimizers_and_three_losses_follows_the_fp32_losses(
    amp: ModuleType, level: str, container: type
) -> None:
    def with_amp(models: list[nn.Module], optimizers: list[Optimizer]):
        models, optimizers = amp.initialize(
            container(models),
            container(optimizers),
            opt_level=level,
            num_losses=3,
            verbosity=0,
        )

        def backward(loss: Tensor, optimizer: Optimizer, loss_id: int) -> None:
            scaled_backward(amp, loss, optimizer, loss_id=loss_id)

        return models, optimizers, backward

    expected, _ = gan_losses(lambda models, optimizers: (models, optimizers, plain_backward))
    losses, seen = gan_losses(with_amp)
    assert set(seen) == {ACTIVATIONS[level]}
    if level == "O0":
        assert losses == expected
    assert losses == pytest.approx(expected, abs=0.05 if level != "O3" else 0.1)
    # apex did not count at a scale fixed at 1: schedules that are gated on the count stood still.
    assert [entry["unskipped"] for entry in amp.state_dict().values()] == [20] * 3


def penalty_gradients(model: nn.Module, inputs: Tensor, backward: Callable) -> list[Tensor]:
    """Gradients of the parameters for a loss with the norm of the input's gradient in it."""
    inputs = inputs.clone().requires_grad_()
    outputs = model(inputs).float()
    (slope,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
    loss = outputs.square().mean() + (slope.float().norm(dim=1) - 1).square().mean()
    backward(loss)
    return [param.grad for param in model.parameters()]


@pytest.mark.parametrize("level", LEVELS)
def test_a_gradient_penalty_gives_the_fp32_gradients(amp: ModuleType, level: str) -> None:
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    inputs = torch.randn(32, 6)
    expected = penalty_gradients(copy.deepcopy(model), inputs, lambda loss: loss.backward())
    optimizer = SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)

    def backward(loss: Tensor) -> None:
        scaled_backward(amp, loss, optimizer)

    penalty_gradients(model, inputs, backward)
    assert not amp.step_was_skipped(optimizer)
    got = [param.grad for param in amp.master_params(optimizer)]
    if level == "O0":
        assert all(map(torch.equal, got, expected))
    tolerance = 0.1 if ACTIVATIONS[level] is BF16 else 0.02
    for gradient, reference in zip(got, expected, strict=True):
        # The last bias does not move the slope; relative to the largest entry otherwise.
        error = (gradient.float() - reference).abs().max() / reference.abs().max()
        assert error < tolerance


def accumulate(
    amp: ModuleType, level: str, micro_batches: int, delay: bool, **options
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the unscaled gradients and, after the step, the parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
    inputs, targets = TASKS["mlp"].batch()
    batches = list(zip(inputs.chunk(micro_batches), targets.chunk(micro_batches), strict=True))
    for number, (xs, ys) in enumerate(batches):
        loss = cross_entropy(model(xs), ys) / micro_batches
        last = number == micro_batches - 1
        with amp.scale_loss(loss, optimizer, delay_unscale=delay and not last) as scaled_loss:
            scaled_loss.backward()
    gradients = [param.grad.clone() for param in amp.master_params(optimizer)]
    optimizer.step()
    params = [param.detach().clone() for param in amp.master_params(optimizer)]
    amp.deactivate()
    return gradients, params


@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("scale", [None, 1.0, 128.0])
@pytest.mark.parametrize("level", LEVELS)
def test_accumulated_gradients_are_those_of_the_whole_batch(
    amp: ModuleType, level: str, scale: float | None, delay: bool
) -> None:
    expected, expected_params = accumulate(amp, "O0", 1, False)
    got, params = accumulate(amp, level, 4, delay, loss_scale=scale)
    tolerance = {F32: 1e-6, F16: 4e-3, BF16: 3e-2}[ACTIVATIONS[level]]
    for gradient, reference in zip(got, expected, strict=True):
        assert (gradient.float() - reference).abs().max() < tolerance * reference.abs().max()
    for param, reference in zip(params, expected_params, strict=True):
        torch.testing.assert_close(param.float(), reference, rtol=0, atol=tolerance)


class Tied(nn.Module):
    """A bigram model whose output layer is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 16)
        self.hidden = nn.Linear(16, 16)
        self.head = nn.Linear(16, 12, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.hidden(self.embed(tokens))))


@pytest.mark.parametrize("level", LEVELS)
def test_tied_weights_stay_one_parameter_and_train(amp: ModuleType, level: str) -> None:
    tokens = torch.arange(12).repeat(4)
    targets = (tokens * 5 + 1) % 12

    def train(model: nn.Module, backward: Callable[[Tensor, Optimizer], None], optimizer) -> float:
        for _ in range(40):
            optimizer.zero_grad()
            loss = cross_entropy(model(tokens), targets)
            backward(loss, optimizer)
            optimizer.step()
        return loss.item()

    def scaled_backward(loss: Tensor, optimizer: Optimizer) -> None:
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()

    torch.manual_seed(0)
    model = Tied()
    reference = copy.deepcopy(model)
    expected = train(
        reference,
        lambda loss, optimizer: loss.backward(),
        Adam(reference.parameters(), lr=1e-2, eps=1e-4),
    )
    optimizer = Adam(model.parameters(), lr=1e-2, eps=1e-4)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    got = train(model, scaled_backward, optimizer)
    assert model.head.weight is model.embed.weight
    assert model.head.weight.dtype is WEIGHTS[level]
    assert len(list(amp.master_params(optimizer))) == 3
    assert got == pytest.approx(expected, rel=0.05, abs=0.02 if level != "O3" else 0.1)


State = dict[str, Tensor]


def copied(state: State) -> State:
    return {name: value.clone() for name, value in state.items()}


def load(model: nn.Module, state: State) -> None:
    model.load_state_dict(state)


def write_to_data(model: nn.Module, state: State) -> None:
    for name, param in model.named_parameters():
        param.data.copy_(state[name])
    for name, buffer in model.named_buffers():
        buffer.data.copy_(state[name])


def evaluated(model: nn.Module) -> Tensor:
    model.eval()
    with torch.no_grad():
        outputs = model(TASKS["mlp"].batch()[0]).clone()
    model.train()
    return outputs


def train_averaged(
    amp: ModuleType, level: str, swap: Callable[[nn.Module, State], None] | None
) -> tuple[list[float], State, list[Tensor]]:
    """Return losses, the average of the weights, and what it computed after each step."""
    model, optimizer = prepared(amp, "mlp", "sgd", level)
    average, losses, outputs = copied(model.state_dict()), [], []
    for _ in range(6):
        losses += amp_losses(amp, model, optimizer, TASKS["mlp"], steps=1)
        own = copied(model.state_dict())
        for name in average:
            average[name] = ((average[name] + own[name]) / 2).to(own[name].dtype)
        if swap is not None:
            swap(model, average)
            outputs.append(evaluated(model))
            swap(model, own)
    return losses, average, outputs


@pytest.mark.parametrize("swap", [load, write_to_data])
@pytest.mark.parametrize("level", LEVELS)
def test_evaluating_averaged_weights_leaves_training_as_it_was(
    amp: ModuleType, level: str, swap: Callable[[nn.Module, State], None]
) -> None:
    expected, _, _ = train_averaged(amp, level, None)
    losses, average, outputs = train_averaged(amp, level, swap)
    if swap is write_to_data and level in ("O2", "O5"):
        # The half weights are all that a write to .data can give back.
        assert losses == pytest.approx(expected, rel=1e-2)
    else:
        assert losses == expected
    fresh, _ = prepared(amp, "mlp", "sgd", level)
    fresh.load_state_dict(average)
    assert torch.equal(outputs[-1], evaluated(fresh))
    assert not torch.equal(outputs[-1], outputs[0])
