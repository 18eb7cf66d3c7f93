"""The examples, run as a user runs them, and what they reach at each level against float32."""

import functools
import importlib
import math
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import processes
import pytest
import torch
from support import PROFILE, nightly_but
from torch import Tensor, nn

from amp_patch import amp as amp_api

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
# torch 2.6 leaves a temporary folder to its finalizer
WARNINGS = ("-W", "error", "-W", "ignore:Implicitly cleaning up:ResourceWarning")

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
HALF_LEVELS = ("O1", "O2", "O4", "O5")
# for what trains longer than the digits
LONG_LEVELS = nightly_but(("O2",), HALF_LEVELS)
TRAINABLE = [
    *(("digits", level) for level in LEVELS),
    # Adam gives NaN in pure float16
    *(("language_model", level) for level in LEVELS if level != "O3"),
]
ORDINARY = [pair for pair in TRAINABLE if pair[0] == "digits" or pair[1] in ("O0", "O1")]
#: The layer whose weights and activations are looked at.
LAYERS = {"digits": "conv1", "language_model": "blocks.0.qkv"}
#: The share of the first loss that may be left. Each version of Python has another text to learn.
LEFT = {"digits": 0.5, "language_model": 0.52}
#: What each script prints.
PRINTED = {
    "digits": r"LEVEL: training loss 2\.3\d+ -> 0\.[01]\d+\nLEVEL: test accuracy 9\d\.\d+ %\n",
    "language_model": r"LEVEL: loss [45]\.\d+ -> [23]\.\d+, perplexity \d+\.\d+ on unseen text\n",
    "gan": r"LEVEL: discriminator loss 1\.\d+, generator loss 0\.\d+, distance 0.+ -> 0.+\n",
    "accumulation": r"LEVEL: loss 2\.\d+ -> 0\.\d+, \d+ steps clipped, \d skipped\n",
}
#: What the examples are trained with in the ordinary run: a part of their steps is enough to learn
#: as float32 does.
SHORT: dict[str, dict[str, int]] = {
    "digits": {"epochs": 4},
    "language_model": {"steps": 200},
    "gan": {"epochs": 4},
    "accumulation": {"epochs": 5},
}
FLOAT, HALF, BFLOAT = torch.float32, torch.float16, torch.bfloat16
# of a layer's weight and of what the layer returns
DTYPES = {
    "O0": (FLOAT, FLOAT),
    "O1": (FLOAT, HALF),
    "O2": (HALF, HALF),
    "O3": (HALF, HALF),
    "O4": (FLOAT, BFLOAT),
    "O5": (BFLOAT, BFLOAT),
}


@pytest.fixture(autouse=True)
def one_thread(amp: ModuleType) -> Iterator[None]:
    """Keep the small models on one thread, and torch as it was after each test."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@functools.cache
def example(name: str) -> ModuleType:
    """Import an example by name, as the examples import each other."""
    if str(EXAMPLES) not in sys.path:
        sys.path.append(str(EXAMPLES))
    return importlib.import_module(name)


@dataclass(frozen=True)
class Row:
    """What an example was seen to do at one level."""

    first_loss: float
    final_loss: float
    accuracy: float
    weights: torch.dtype
    activations: torch.dtype
    stepped: torch.dtype
    loss_scale: float


def some_inputs(name: str) -> Tensor:
    if name == "digits":
        return example(name).load_images("cpu")[0][:8]
    return example(name).load_text("cpu")[None, : example(name).CONTEXT]


def activation_dtype(model: nn.Module, layer: str, inputs: Tensor) -> torch.dtype:
    """Return the dtype in which the submodule ``layer`` returns its output."""
    seen: list[torch.dtype] = []
    hook = model.get_submodule(layer).register_forward_hook(
        lambda module, args, output: seen.append(output.dtype)
    )
    with torch.no_grad():
        model(inputs)
    hook.remove()
    return seen[0]


def short(name: str) -> dict[str, int]:
    """Return the options of an example's training: the nightly run makes it in full."""
    return {} if PROFILE == "nightly" else SHORT[name]


@functools.cache
def measured(name: str, level: str) -> Row:
    """Train an example, once for all tests of a process, and look at what it left."""
    result = example(name).train(level, **short(name))
    row = Row(
        result.first_loss,
        result.final_loss,
        result.accuracy,
        weights=result.model.get_submodule(LAYERS[name]).weight.dtype,
        activations=activation_dtype(result.model, LAYERS[name], some_inputs(name)),
        stepped=next(amp_api.master_params(result.optimizer)).dtype,
        loss_scale=amp_api.loss_scale(),
    )
    amp_api.deactivate()
    return row


@functools.cache
def trained(name: str, level: str, **options: int) -> Any:
    """Train an example, once for all tests of a process, and return its result."""
    result = example(name).train(level, **options)
    amp_api.deactivate()
    return result


def run_script(name: str, *args: str, fork: bool = processes.FORKS) -> str:
    """Run an example in a process of its own, warnings being errors; return what it prints."""
    done = processes.run(
        [sys.executable, *WARNINGS, EXAMPLES / name, *args],
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "80"},
        fork=fork,
    )
    assert done.stderr == ""
    assert done.returncode == 0
    return done.stdout


@pytest.mark.parametrize(
    "command",
    [
        "digits --epochs 4",
        "language_model --opt-level O4 --steps 50",
        "gan --opt-level O5 --epochs 1",
        "accumulation --epochs 3",
        *(pytest.param(name, marks=pytest.mark.slow) for name in PRINTED),
    ],
)
def test_each_script_runs_as_it_stands(command: str) -> None:
    name, *arguments = command.split()
    level = "O1" if "--opt-level" not in arguments else arguments[1]
    own_python = name == "digits"  # of the others only the start would be the same once more
    printed = run_script(f"{name}.py", *arguments, fork=processes.FORKS and not own_python)
    assert re.fullmatch(PRINTED[name].replace("LEVEL", level), printed)


@pytest.mark.slow(instead="a quarter to two fifths of its steps, at O0 and O1")
@pytest.mark.parametrize("level", HALF_LEVELS)
def test_the_language_model_in_full_reaches_its_float32_loss(level: str) -> None:
    result, reference = trained("language_model", level), trained("language_model", "O0")
    assert 0 < result.final_loss <= result.first_loss / 2
    assert result.final_loss == pytest.approx(reference.final_loss, rel=0.05)


@pytest.mark.slow(instead="each example's script; the dtypes at every level")
@pytest.mark.parametrize("pair", nightly_but(ORDINARY, TRAINABLE), ids="-".join)
def test_a_level_learns_as_float32_does_in_the_dtypes_that_it_says(pair: tuple[str, str]) -> None:
    """In one test, for each process that looks at a pair has to train it."""
    (task, level), row, reference = pair, measured(*pair), measured(pair[0], "O0")
    assert 0 < row.final_loss <= row.first_loss * LEFT[task]
    if level in HALF_LEVELS:
        assert row.final_loss == pytest.approx(reference.final_loss, rel=0.05)
    if task == "digits" and level != "O3":
        assert reference.accuracy > 95
        assert row.accuracy == pytest.approx(reference.accuracy, abs=1)
    assert (row.weights, row.activations) == DTYPES[level]
    assert row.stepped is (HALF if level == "O3" else FLOAT)
    assert (row.loss_scale > 1) is (level in ("O1", "O2"))


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_batch_norms_of_the_digits_model_are_kept_where_the_level_says_so(level: str) -> None:
    model = example("digits").train(level, epochs=1).model
    kept = FLOAT if level == "O2" else HALF
    assert {model.norm1.weight.dtype, model.norm1.running_mean.dtype} == {kept}
    assert model.conv1.weight.dtype is HALF


@pytest.mark.parametrize("level", ["O0", *LONG_LEVELS])
def test_gan_halves_the_distance_of_its_mean_image_near_its_float32_losses(level: str) -> None:
    result, reference = (trained("gan", one, **short("gan")) for one in (level, "O0"))
    assert result.final_distance <= result.first_distance / 2
    for loss in ("discriminator_loss", "generator_loss"):
        assert math.isfinite(getattr(result, loss))
        assert getattr(result, loss) == pytest.approx(getattr(reference, loss), rel=0.1)


@pytest.mark.filterwarnings("ignore:an optimizer that steps float16 weights")
@pytest.mark.parametrize("level", LEVELS)
def test_both_models_of_the_gan_have_the_dtypes_of_the_level(
    level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gan = example("gan")
    images, digits = gan.load_images("cpu")
    monkeypatch.setattr(gan, "load_images", lambda device: (images[: gan.BATCH], digits))
    result = gan.train(level, epochs=1)
    models = {
        result.generator: torch.randn(4, gan.LATENT),
        result.discriminator: torch.randn(4, 1, 8, 8),
    }
    for model, inputs in models.items():
        layer = model[0]
        assert (layer.weight.dtype, activation_dtype(model, "0", inputs)) == DTYPES[level]


@pytest.mark.parametrize("level", LONG_LEVELS)
def test_accumulation_reaches_its_float32_loss_and_clips_some_steps(level: str) -> None:
    options = short("accumulation")
    result, reference = (trained("accumulation", one, **options) for one in (level, "O0"))
    assert reference.final_loss <= reference.first_loss / 2
    assert result.final_loss == pytest.approx(reference.final_loss, rel=0.05)
    steps = 18 * options.get("epochs", 20)
    assert 0 < reference.clipped_steps < steps
    assert reference.skipped_steps == 0


@pytest.mark.parametrize("level", LEVELS)
def test_the_accumulation_model_has_the_dtypes_of_the_level(level: str) -> None:
    model = example("accumulation").train(level, epochs=1).model
    activation = activation_dtype(model, "hidden", torch.randn(4, 1, 8, 8))
    assert (model.hidden.weight.dtype, activation) == DTYPES[level]


# torch's compiler looks at the attribute of what the loss is traced with
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_graph_mode_trains_the_digits(amp: ModuleType) -> None:
    result = example("graph_mode").train("O2", epochs=2, backend="eager")
    assert result.final_loss < result.first_loss * 0.8
    assert amp.loss_scale() <= 3000.0
