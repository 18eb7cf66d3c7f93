"""How often torch.compile compiles model, loss and the whole step of a training of 50 steps."""

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import support
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
pytestmark = [
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step"),
    # torch's compiler looks at the attribute of what the loss is traced with
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]
STEPS, OVERFLOW_AT, EVALUATED_AT = 50, 5, (10, 30)
SCALER = {"init_scale": 3000.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 15}
INPUTS, TARGETS = torch.randn(32, 8), torch.arange(32) % 2


class Counter:
    """A backend that runs graphs as they are traced, and counts them."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: Any, example_inputs: Any) -> Callable[..., Any]:
        self.count += 1
        return graph.forward


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Training:
    """A model at a level, its optimizer and a schedule; the step may be compiled in parts."""

    def __init__(self, amp: ModuleType, level: str, **options: Any) -> None:
        torch.manual_seed(0)
        self.amp = amp
        self.model = nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2)
        )
        self.optimizer = SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.schedule = StepLR(self.optimizer, 10)
        amp.initialize(
            self.model, self.optimizer, opt_level=level, verbosity=0, **{**SCALER, **options}
        )
        self.forward: Callable[[Tensor], Tensor] = self.model
        self.loss: Callable[..., Tensor] = F.cross_entropy

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.loss(self.forward(inputs), targets)
        with self.amp.scale_loss(loss, self.optimizer) as scaled:
            scaled.backward()
        self.optimizer.step()
        return loss.detach()

    def run(self, step: Callable[[Tensor, Tensor], Tensor]) -> list[float]:
        losses = []
        for number in range(STEPS):
            inputs = INPUTS * torch.inf if number == OVERFLOW_AT else INPUTS
            losses.append(step(inputs, TARGETS).item())
            self.schedule.step()
            if number in EVALUATED_AT:
                self.evaluate()
        return losses

    def evaluate(self) -> None:
        self.model.eval()
        with torch.no_grad():
            self.loss(self.forward(INPUTS), TARGETS)
        self.model.train()


def without_nan(losses: list[float]) -> list[float]:
    """Return the losses before the overflow: after it a batch norm's statistics are not finite."""
    return losses[:OVERFLOW_AT]


@pytest.mark.parametrize("level", support.nightly_but(["O1", "O2"], LEVELS))
def test_model_and_loss_compile_once_for_training_and_once_for_evaluation(
    amp: ModuleType, level: str
) -> None:
    """A second graph of each is torch's own: of evaluation, in which no gradient is recorded."""
    training, forward, loss = Training(amp, level), Counter(), Counter()
    training.forward = torch.compile(training.model, backend=forward, fullgraph=True)
    # torch 2.6 compiles no function of its own by itself, without amp too
    function = (
        F.cross_entropy if torch.__version__ >= (2, 7) else lambda *args: F.cross_entropy(*args)
    )
    training.loss = torch.compile(function, backend=loss, fullgraph=True)
    training.step(INPUTS, TARGETS)
    assert (forward.count, loss.count) == (1, 1)
    training.evaluate()
    assert (forward.count, loss.count) == (2, 2)
    training.run(training.step)
    assert (forward.count, loss.count) == (2, 2)


@pytest.mark.parametrize("level", support.nightly_but(["O1", "O2", "O5"], LEVELS))
def test_the_whole_step_compiles_once(amp: ModuleType, level: str) -> None:
    """The forward and the loss; backward is compiled with them, and the host does the rest."""
    eager = Training(amp, level)
    expected = eager.run(eager.step)
    skips = amp.loss_scale()
    amp.deactivate()
    training, counter = Training(amp, level), Counter()
    losses = training.run(torch.compile(training.step, backend=counter))
    assert counter.count == 1
    assert without_nan(losses) == pytest.approx(without_nan(expected), rel=1e-3)
    assert amp.loss_scale() == skips


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.slow(instead="model and loss at O1 and O2; the whole step at O1, O2 and O5")
@pytest.mark.filterwarnings("ignore")
def test_a_tuned_backend_compiles_no_more_often(amp: ModuleType, level: str) -> None:
    """mode="max-autotune-no-cudagraphs" compiles what is traced with other kernels."""
    training = Training(amp, level)
    torch._dynamo.utils.counters.clear()
    mode = "max-autotune-no-cudagraphs"
    training.forward = torch.compile(training.model, mode=mode, fullgraph=True)
    training.loss = torch.compile(F.cross_entropy, mode=mode, fullgraph=True)
    training.run(training.step)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 4


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_a_dynamic_scale_starts_where_init_scale_says(amp: ModuleType, level: str) -> None:
    training = Training(amp, level, loss_scale="dynamic")
    assert amp.loss_scale() == 3000.0
    training.step(INPUTS * torch.inf, TARGETS)
    assert amp.loss_scale() == 1500.0
