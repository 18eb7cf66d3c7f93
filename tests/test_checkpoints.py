"""Checkpoints: resumed in a new process bit for bit, and those of apex and of GradScaler."""

from __future__ import annotations

import os
import sys
from collections import OrderedDict
from pathlib import Path
from types import ModuleType
from typing import Any

import processes
import pytest
import resumed_training as training
import torch
from resumed_training import LEVELS
from support import made_once, nightly_but
from torch import Tensor
from torch.nn import functional as F

ROOT = Path(__file__).parent.parent


def equal(left: Any, right: Any) -> bool:
    """Whether two nested states are equal, tensors bit for bit and in dtype."""
    if isinstance(left, Tensor):
        same_type = isinstance(right, Tensor) and left.dtype is right.dtype
        return same_type and torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(equal(left[k], right[k]) for k in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(equal, left, right))
    return left == right


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train and save every variant here, once for all processes of pytest-xdist."""

    def train_all(folder: Path) -> None:
        for variant in training.VARIANTS:
            never_stopped(folder, *variant)
        resume(folder, *training.ORDINARY_ORDERS)

    return made_once(tmp_path_factory, "checkpoints", train_all)


@pytest.fixture(scope="module")
def in_all_orders(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Resume them in the orders that are left, too."""
    others = set(training.ORDERS) - set(training.ORDINARY_ORDERS)
    made_once(tmp_path_factory, "resumed", lambda _: resume(folder, *others))


def resume(folder: Path, *orders: str) -> None:
    """Resume all of them in one new process."""
    command = [sys.executable, "-W", "error", training.__file__, str(folder), *orders]
    done = processes.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr


def never_stopped(folder: Path, level: str, optimizer_name: str, options: str) -> None:
    """Train to the end, saving on the way."""
    name = f"{level}-{optimizer_name}-{options}"
    run = training.initialize(training.build(optimizer_name, seed=0), level, options)
    training.train(run, range(training.SAVED_AT), options)
    torch.save(training.state(run), folder / f"{name}.pt")
    losses = training.train(run, range(training.SAVED_AT, training.STEPS), options)
    torch.save(training.ending(run, losses), folder / f"{name}.never_stopped")
    training.amp.deactivate()


@pytest.mark.parametrize("order", nightly_but(training.ORDINARY_ORDERS, training.ORDERS))
@pytest.mark.parametrize("variant", training.VARIANTS, ids="-".join)
def test_training_resumed_in_a_new_process_goes_on_bit_for_bit(
    request: pytest.FixtureRequest, folder: Path, variant: tuple[str, ...], order: str
) -> None:
    if order not in training.ORDINARY_ORDERS:
        request.getfixturevalue("in_all_orders")
    name = "-".join(variant)
    expected = torch.load(folder / f"{name}.never_stopped", weights_only=True)
    got = torch.load(folder / f"{name}-{order}.resumed", weights_only=True)
    for part in expected:
        assert equal(got[part], expected[part]), part


@pytest.mark.parametrize("variant", training.VARIANTS, ids="-".join)
def test_what_was_compared_is_what_is_hard_to_resume(
    folder: Path, variant: tuple[str, ...]
) -> None:
    level, optimizer_name, options = variant
    name = "-".join(variant)
    saved = torch.load(folder / f"{name}.pt", weights_only=True)
    ended = torch.load(folder / f"{name}.never_stopped", weights_only=True)
    assert not equal(saved["model"], ended["model"])
    masters_are_weights = equal(ended["masters"], ended["weights"])
    assert masters_are_weights == (level not in ("O2", "O5"))
    assert {value.dtype for value in saved["model"].values()} == {torch.float32, torch.int64}
    skipped = len(training.OVERFLOWS) if options == "dynamic" else 0
    if optimizer_name == "adam":
        assert {entry["step"].item() for entry in ended["optimizer"]["state"].values()} == {
            training.STEPS - skipped
        }
    if options == "dynamic":
        assert [state["amp"]["loss_scaler0"] for state in (saved, ended)] == [
            {"loss_scale": 2.0**17, "unskipped": 0, "hysteresis": 1},
            {"loss_scale": 2.0**17, "unskipped": 0, "hysteresis": 2},
        ]


def apex_checkpoint(run: training.Run) -> dict[str, Any]:
    """What a script of apex's saved at O2: half weights cast up, and the masters beside them."""
    model, optimizer = run
    weights = {name: value.detach().float() for name, value in model.named_parameters()}
    buffers = dict(model.named_buffers())
    return {
        "model": OrderedDict({**weights, **buffers}),
        "optimizer": optimizer.state_dict(),
        "amp": OrderedDict(loss_scaler0={"loss_scale": 32768.0, "unskipped": 3}),
        "master params": list(training.amp.master_params(optimizer)),
    }


def copy_data(master: Tensor, saved: Tensor) -> None:
    master.data.copy_(saved.data)


def copy_without_grad(master: Tensor, saved: Tensor) -> None:
    with torch.no_grad():
        master.copy_(saved)


@pytest.mark.parametrize("copy_master", [copy_data, copy_without_grad])
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_an_apex_checkpoint_with_master_params_resumes_bit_for_bit(
    amp: ModuleType, tmp_path: Path, level: str, copy_master: Any
) -> None:
    options = {"opt_level": level, "verbosity": 0, "loss_scale": "dynamic"}
    run = amp.initialize(*training.build("adam", seed=0), **options)
    training.train(run, range(3), "default")
    torch.save(apex_checkpoint(run), tmp_path / "apex.pt")
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 32768.0, "unskipped": 3}})
    expected = training.ending(run, training.train(run, range(3, 6), "default"))

    saved = torch.load(tmp_path / "apex.pt", weights_only=True)
    model, optimizer = amp.initialize(*training.build("adam", seed=9), **options)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    amp.load_state_dict(saved["amp"])
    rounded = [master.clone() for master in amp.master_params(optimizer)]
    assert not all(map(torch.equal, rounded, saved["master params"]))
    for master, value in zip(amp.master_params(optimizer), saved["master params"], strict=True):
        copy_master(master, value)
    losses = training.train((model, optimizer), range(3, 6), "default")
    got = training.ending((model, optimizer), losses)
    # One list of scalers: the second run goes on with the first one's.
    assert got.pop("amp")["loss_scaler0"]["unskipped"] == 6
    for part in got:
        assert equal(got[part], expected[part]), part


@pytest.mark.parametrize("level", LEVELS)
def test_an_apex_checkpoint_without_masters_gives_its_weights_and_scale(
    amp: ModuleType, level: str
) -> None:
    model, optimizer = training.build("sgd", seed=0)
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=level, verbosity=0, loss_scale="dynamic", num_losses=2
    )
    halves = {name: value.half().float() for name, value in training.mlp().state_dict().items()}
    halves["1.num_batches_tracked"] = torch.tensor(7)
    model.load_state_dict(halves)
    amp.load_state_dict(
        OrderedDict(
            loss_scaler0={"loss_scale": 8192.0, "unskipped": 41},
            loss_scaler1={"loss_scale": 2.0, "unskipped": 0},
        )
    )
    if level != "O5":  # bfloat16 holds less of float16's values
        assert equal(dict(model.state_dict()), halves)
        assert all(torch.equal(p.float(), halves[n]) for n, p in model.named_parameters())
    assert (amp.loss_scale(0), amp.loss_scale(1)) == (8192.0, 2.0)
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 8192.0, "unskipped": 41}


def test_the_state_of_torchs_grad_scaler_loads(amp: ModuleType, tmp_path: Path) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=10)
    weight = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(3):
        scaler.scale(F.mse_loss(weight, torch.zeros(2))).backward()
        scaler.step(optimizer)
        scaler.update()
    torch.save(scaler.state_dict(), tmp_path / "scaler.pt")
    amp.initialize(*training.build("sgd", seed=0), opt_level="O1", verbosity=0)
    amp.load_state_dict(torch.load(tmp_path / "scaler.pt", weights_only=True))
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 1024.0, "unskipped": 3}}


def test_what_amp_saves_has_apexs_keys_and_one_more_above_a_hysteresis_of_1(
    amp: ModuleType,
) -> None:
    run = training.build("sgd", seed=0)
    amp.initialize(*run, opt_level="O2", verbosity=0, num_losses=2)
    assert list(amp.state_dict().items()) == [
        ("loss_scaler0", {"loss_scale": 65536.0, "unskipped": 0}),
        ("loss_scaler1", {"loss_scale": 65536.0, "unskipped": 0}),
    ]
    destination: OrderedDict[str, Any] = OrderedDict(epoch={"number": 1})
    assert amp.state_dict(destination) is destination
    assert list(destination) == ["epoch", "loss_scaler0", "loss_scaler1"]
    amp.initialize(*training.build("sgd", seed=1), opt_level="O2", verbosity=0, hysteresis=3)
    assert amp.state_dict()["loss_scaler2"] == {
        "loss_scale": 65536.0,
        "unskipped": 0,
        "hysteresis": 3,
    }


@pytest.mark.parametrize("loaded", LEVELS)
@pytest.mark.parametrize("saved", LEVELS)
def test_a_models_state_moves_between_levels(amp: ModuleType, saved: str, loaded: str) -> None:
    run = amp.initialize(*training.build("adam", seed=0), opt_level=saved, verbosity=0)
    training.train(run, range(3), "default")
    state = {name: value.clone() for name, value in run[0].state_dict().items()}
    model, _ = amp.initialize(*training.build("adam", seed=1), opt_level=loaded, verbosity=0)
    model.load_state_dict(state)
    if loaded == "O3":  # has no masters, and keeps the numbers of buffers alone
        state |= {name: state[name].half().float() for name, _ in model.named_parameters()}
    assert equal(dict(model.state_dict()), state)
    half = {"O2": torch.float16, "O3": torch.float16, "O5": torch.bfloat16}.get(loaded)
    if half is not None:
        assert torch.equal(model[0].weight, state["0.weight"].to(half))


@pytest.mark.parametrize(
    ("state", "printed"),
    [
        (
            {},
            "Warning: state_dict contains 0 entries, while 1 loss_scalers are used\n",
        ),
        (
            dict.fromkeys(("loss_scaler0", "loss_scaler1"), {"loss_scale": 4.0, "unskipped": 1}),
            "Warning: state_dict contains 2 entries, while 1 loss_scalers are used\n"
            "Skipping loss_scaler[1], since num_losses was set to 1\n",
        ),
    ],
)
@pytest.mark.parametrize("verbosity", [0, 1])
def test_another_number_of_scalers_is_printed_unless_verbosity_is_0(
    amp: ModuleType,
    capsys: pytest.CaptureFixture[str],
    state: dict[str, Any],
    printed: str,
    verbosity: int,
) -> None:
    amp.initialize(*training.build("sgd", seed=0), opt_level="O2", verbosity=verbosity)
    capsys.readouterr()
    amp.load_state_dict(state)
    assert capsys.readouterr().out == (printed if verbosity else "")
    assert amp.loss_scale() == (4.0 if state else 65536.0)


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_assign_is_refused_where_the_optimizer_steps_what_was_cast(
    amp: ModuleType, level: str
) -> None:
    """Or, at O2, masters of it."""
    model, _ = amp.initialize(*training.build("sgd", seed=0), opt_level=level, verbosity=0)
    state = model.state_dict()
    message = (
        r"load_state_dict\(\) must copy into the parameters that amp.initialize\(\) cast, for the "
        r"optimizer steps these, or masters of these; got assign=True. Leave it out, or call "
        r"amp.deactivate\(\) first."
    )
    with pytest.raises(RuntimeError, match=message):
        model.load_state_dict(state, assign=True)
    assert equal(dict(model.state_dict()), dict(state))
    amp.deactivate()
    model.load_state_dict(state, assign=True)
    assert equal(dict(model.state_dict()), dict(state))
