"""Large gradients wait in half until the step, which makes few of them in fp32 at once."""

import gc
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from drawn_trainings import assert_same
from hypothesis import given
from hypothesis import strategies as st
from support import nightly_but, trains
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop
from torch.utils._pytree import tree_map

from amp_patch.common.living_objects import instances, is_leaf
from amp_patch.kernels.strips import Strips
from amp_patch.optimizers import FusedLAMB, step_parts
from amp_patch.optimizers.direct_step import DirectStep
from amp_patch.tools.sweep.memory import LivingTensors
from amp_patch.weights.parameter_lists import stored_grad

WIDTH, DEPTH = 512, 6
#: Weights, masters and two moments; and half gradients: bytes for each parameter.
BETWEEN, GRADIENTS = 2 + 4 + 8, 2


def living_bytes() -> int:
    gc.collect()
    # Fake tensors of what an earlier test has compiled may live, with a size that is a symbol.
    tensors = [one for one in instances(Tensor) if type(one) in (Tensor, nn.Parameter)]
    grads = [stored_grad(one) for one in tensors if is_leaf(one)]
    tensors += [grad for grad in grads if grad is not None]
    storages = {one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in tensors}
    return sum(storages.values())


class Training:
    """Layers of which only the biases are small, counted without what lived before."""

    def __init__(
        self, amp: ModuleType, make: Callable[[Any], Optimizer] = AdamW, **options: Any
    ) -> None:
        self.amp, self.before = amp, living_bytes()
        torch.manual_seed(0)
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)]
        model = nn.Sequential(
            *layers, nn.LayerNorm(WIDTH) if options.pop("norm", False) else nn.Identity()
        )
        options = {"opt_level": "O2", "loss_scale": 64.0, "verbosity": 0, **options}
        self.model, self.optimizer = amp.initialize(model, make(model.parameters()), **options)
        self.count = sum(param.numel() for param in self.model.parameters())

    def per_param(self) -> float:
        return (living_bytes() - self.before) / self.count

    def backward(self) -> None:
        loss = self.model(torch.ones(2, WIDTH)).float().square().mean()
        with self.amp.scale_loss(loss, self.optimizer) as scaled_loss:
            scaled_loss.backward()

    def train(self) -> None:
        self.optimizer.zero_grad()
        self.backward()
        self.optimizer.step()

    def taken_by_a_step(self, clips: bool = False) -> int:
        """Return the most bytes that the second step takes beside what was there before it."""
        self.train()
        self.optimizer.zero_grad()
        self.backward()
        with LivingTensors() as counted:
            before = counted.peak
            if clips:
                self.amp.clip_grad_norm_(self.optimizer, 0.1)
            self.optimizer.step()
        return counted.peak - before


@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.parametrize(("fused_step", "after_backward"), [(True, 16), (False, 20)])
def test_bytes_per_parameter(
    amp: ModuleType, level: str, fused_step: bool, after_backward: int
) -> None:
    training = Training(amp, opt_level=level, fused_step=fused_step)
    for _ in range(2):
        training.train()
    training.optimizer.zero_grad()
    assert training.per_param() == pytest.approx(BETWEEN, abs=0.3)
    training.backward()
    assert training.per_param() == pytest.approx(after_backward, abs=0.3)
    if fused_step:
        amp.clip_grad_norm_(training.optimizer, 0.1)
        assert training.per_param() == pytest.approx(after_backward, abs=0.3)


@pytest.mark.parametrize(
    ("make", "temporary"),
    [
        (lambda params: AdamW(params, fused=True), 0),
        (AdamW, 4),  # denominators
        (lambda params: SGD(params, lr=0.1, fused=True), 0),
    ],
    ids=["fused AdamW", "AdamW", "fused SGD"],
)
@pytest.mark.parametrize("clips", [False, True])
def test_the_step_makes_a_strip_of_gradients_at_once(
    amp: ModuleType, make: Any, temporary: int, clips: bool
) -> None:
    of_a_strip = step_parts._LEAST
    taken = Training(amp, make, fused_step=True).taken_by_a_step(clips)
    assert 4 * of_a_strip <= taken <= 1.02 * of_a_strip * (4 + temporary)


def test_lamb_makes_few_gradients_at_once(amp: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer's: its norms are of whole tensors."""
    monkeypatch.setattr(step_parts, "_MOST", WIDTH * WIDTH)
    of_a_layer = 4 * WIDTH * WIDTH
    taken = Training(amp, FusedLAMB, fused_step=True).taken_by_a_step()
    # clipped gradients, updates, denominators
    assert of_a_layer <= taken <= 1.1 * 4 * of_a_layer


class Large(nn.Module):
    """Weights above the size of small ones: contiguous, channels last, and one like neither."""

    def __init__(self) -> None:
        super().__init__()
        conv = nn.Conv2d(32, 32, 3).to(memory_format=torch.channels_last)
        self.layers = nn.ModuleList([nn.Linear(80, 70), conv, nn.Linear(8, 8)])
        self.gaps = nn.Parameter(torch.randn(70, 160)[:, ::2])

    def forward(self, seed: int) -> Tensor:
        numbers = torch.Generator().manual_seed(seed)
        return sum(
            (param.float() * torch.randn(param.shape, generator=numbers)).sum()
            for param in self.parameters()
        )


def contiguous(state: Any) -> Any:
    return tree_map(
        lambda leaf: (
            leaf.clone(memory_format=torch.contiguous_format) if isinstance(leaf, Tensor) else leaf
        ),
        state,
    )


STRIPPED: dict[str, Any] = {
    "adamw": lambda p: AdamW(p, lr=0.01),
    "adamw, fused": lambda p: AdamW(p, lr=0.01, fused=True),
    "amsgrad, maximize": lambda p: Adam(p, lr=0.01, amsgrad=True, maximize=True, weight_decay=0.1),
    "amsgrad, fused": lambda p: Adam(p, lr=0.01, amsgrad=True, weight_decay=0.1, fused=True),
    "sgd": lambda p: SGD(p, lr=0.1, weight_decay=0.1),
    "nesterov": lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "dampened, maximize": lambda p: SGD(p, lr=0.1, momentum=0.9, dampening=0.2, maximize=True),
    "sgd, fused": lambda p: SGD(p, lr=0.1, momentum=0.9, dampening=0.2, fused=True),
    "rmsprop": lambda p: RMSprop(p, lr=0.01, momentum=0.9, weight_decay=0.1),
    "rmsprop, centered": lambda p: RMSprop(p, lr=0.01, eps=0.1, centered=True, maximize=True),
    "adagrad": lambda p: Adagrad(p, lr=0.1, lr_decay=0.1, weight_decay=0.1),
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # of steps without gradients
@pytest.mark.parametrize("level", nightly_but(["O1", "O2"], ["O1", "O2", "O5"]))
@pytest.mark.parametrize("name", STRIPPED)
def test_steps_in_strips_have_torchs_bits(
    amp: ModuleType, name: str, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(in_strips: bool) -> tuple[nn.Module, Optimizer]:
        torch.manual_seed(0)
        model = Large()
        with monkeypatch.context() as patch:
            if not in_strips:
                patch.setattr(DirectStep, "suits", staticmethod(lambda optimizer: False))
            return amp.initialize(
                model, STRIPPED[name](model.parameters()), opt_level=level, loss_scale=8.0,
                verbosity=0, fused_step=in_strips and level != "O1",
            )  # fmt: skip

    # torch's fused SGD refuses momentum that only some parameters have
    first = [(2, "")] if name == "sgd, fused" else []
    cut: list[int] = []
    rows = Strips.rows
    monkeypatch.setattr(Strips, "rows", lambda *args: cut.append(1) or rows(*args))

    @trains()
    @given(
        st.lists(st.tuples(st.integers(0, 9), st.sampled_from(["", "", "", *"01g"])), max_size=5),
        st.integers(64, 3000),
    )
    def run(steps: list[tuple[int, str]], about: int) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(step_parts, "_LEAST", about)
            patch.setattr(step_parts, "_MOST", about)
            results = []
            for model, optimizer in (started(True), started(False)):
                for seed, missing in (*first, *steps, (0, ""), (1, "")):
                    optimizer.zero_grad()
                    for key, param in model.named_parameters():
                        param.requires_grad_(not missing or missing not in key)
                    make_pass(amp, model(seed), optimizer)
                    optimizer.step()
                    if seed == 0:  # as from a checkpoint of a model in another memory format
                        optimizer.load_state_dict(contiguous(optimizer.state_dict()))
                params = [p for group in optimizer.param_groups for p in group["params"]]
                states = [optimizer.state[param] for param in params]
                results.append([list(model.parameters()), params, states])
            assert_same(*results)

    run()
    # where gradients are there, to cut saves no memory but that of denominators
    has_none = "sgd" in name or "fused" in name or "nesterov" in name or "dampened" in name
    assert bool(cut) is (level != "O1" or not has_none)


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("rows", [2048, 8192])
def test_a_state_of_another_shape_is_refused_and_no_step_counted(
    amp: ModuleType, level: str, rows: int
) -> None:
    """As from the checkpoint of a model with other words: torch checks no shapes as it loads."""
    old = nn.Embedding(rows, 128)
    before = AdamW(old.parameters())
    old.weight.grad = torch.ones_like(old.weight)
    before.step()
    model = nn.Embedding(4096, 128)
    optimizer = AdamW(model.parameters())
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=level, verbosity=0, fused_step=level != "O1", loss_scale=8.0
    )
    optimizer.load_state_dict(before.state_dict())
    param = optimizer.param_groups[0]["params"][0]
    make_pass(amp, model(torch.arange(4096)).float().sum(), optimizer)
    with pytest.raises(RuntimeError, match=rf"must match.*{rows}|{rows}.*must match"):
        optimizer.step()
    assert optimizer.state[param]["step"] == 1


def test_clipping_makes_one_gradient_at_once(amp: ModuleType) -> None:
    """Of parameters that are just too small to be cut."""
    model = nn.ParameterList(torch.ones(196_000) for _ in range(6))
    optimizer = SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O5", fused_step=True, verbosity=0)
    make_pass(amp, sum(param.float().sum() for param in model), optimizer)
    with LivingTensors() as counted:
        before = counted.peak
        amp.clip_grad_norm_(optimizer, 0.1)
    assert counted.peak - before <= 1.02 * 4 * 196_000


def test_a_norm_of_many_elements_is_nearer_to_float64_than_torchs(amp: ModuleType) -> None:
    model = nn.ParameterList([torch.ones(2_000, 1_000)])
    optimizer = SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O5", fused_step=True, verbosity=0)
    make_pass(amp, (model[0].float() * 0.1).sum(), optimizer)
    grad = model[0].grad
    expected = grad.double().norm().item()
    ours = abs(amp.clip_grad_norm_(optimizer, 1.0).item() / expected - 1)
    assert ours <= 1e-4
    assert ours < abs(grad.float().norm().item() / expected - 1)


@pytest.mark.parametrize("clip", [1e-3, 1e3])
def test_a_norm_taken_in_strips_is_that_of_float64(
    amp: ModuleType, clip: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_parts, "_LEAST", 500)
    monkeypatch.setattr(step_parts, "_MOST", 500)
    torch.manual_seed(0)
    model = Large()
    optimizer = SGD(model.parameters(), lr=1.0)
    amp.initialize(model, optimizer, opt_level="O5", fused_step=True, verbosity=0)
    masters = [param for group in optimizer.param_groups for param in group["params"]]
    before = [master.detach().clone() for master in masters]
    make_pass(amp, model(3), optimizer)
    grads = [param.grad.double() for param in model.parameters()]
    expected = torch.cat([grad.flatten() for grad in grads]).norm()
    norm = amp.clip_grad_norm_(optimizer, clip)
    assert norm.item() == pytest.approx(expected.item(), rel=1e-6)
    optimizer.step()
    factor = min(1.0, clip / (expected.item() + 1e-6))
    for start, master, grad in zip(before, masters, grads, strict=True):
        torch.testing.assert_close(master.double(), start - factor * grad, rtol=1e-5, atol=1e-6)


def test_lamb_without_clipping_steps_large_parameters_as_a_whole(
    amp: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_parts, "_LEAST", 500)
    monkeypatch.setattr(step_parts, "_MOST", 500)
    results = []
    for fused_step in (True, False):
        torch.manual_seed(0)
        model = Large()
        optimizer = FusedLAMB(model.parameters(), lr=0.01, max_grad_norm=0.0)
        amp.initialize(model, optimizer, opt_level="O5", fused_step=fused_step, verbosity=0)
        for seed in range(2):
            optimizer.zero_grad()
            make_pass(amp, model(seed), optimizer)
            optimizer.step()
        results.append(list(amp.master_params(optimizer)))
    assert_same(*results)


@pytest.mark.parametrize("make", [AdamW, lambda params: SGD(params, lr=0.1, momentum=0.9)])
@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_norms_in_float32_beside_and_clipping_change_nothing(
    amp: ModuleType, make: Any, norm_type: float
) -> None:
    """The batch norms' gradients are stored, in one group with those that wait in half."""
    results = []
    for fused_step in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 96), nn.BatchNorm1d(96), nn.Linear(96, 96))
        model, optimizer = amp.initialize(
            model, make(model.parameters()), opt_level="O2", verbosity=0, fused_step=fused_step
        )
        norms = []
        for _ in range(4):
            optimizer.zero_grad()
            loss = model(torch.randn(4, 8)).float().square().mean()
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            norms.append(amp.clip_grad_norm_(optimizer, 0.1, norm_type=norm_type))
            optimizer.step()
        assert amp.step_was_skipped(optimizer) is False
        results.append([norms, [p.detach().clone() for p in amp.master_params(optimizer)]])
    assert_same(*results)


@pytest.mark.parametrize("by_data", [False, True])
def test_a_step_refuses_a_large_half_gradient_that_was_written_to(
    amp: ModuleType, by_data: bool
) -> None:
    training = Training(amp, fused_step=True)
    training.train()
    training.optimizer.zero_grad()
    training.backward()
    before = [master.detach().clone() for master in amp.master_params(training.optimizer)]
    training.optimizer.zero_grad()
    training.backward()
    grad = training.model[0].weight.grad
    (grad.data if by_data else grad).mul_(0.5)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"must stay, .* got 1 of 6 written to"):
            training.optimizer.step()
    masters = [group["params"] for group in training.optimizer.param_groups][0]
    assert_same([one.detach() for one in masters], before)
    training.train()
    assert not torch.equal(masters[0], before[0])


def test_a_write_by_a_hook_of_the_step_is_refused_before_anything_is_stepped(
    amp: ModuleType,
) -> None:
    training = Training(amp, fused_step=True)
    training.backward()

    def halve(*_: Any) -> None:
        training.model[DEPTH - 1].weight.grad.mul_(0.5)

    training.optimizer.register_step_pre_hook(halve)
    before = [param.detach().clone() for param in training.model.parameters()]
    with pytest.raises(RuntimeError, match=r"must stay, .* got 1 of 6 written to"):
        training.optimizer.step()
    assert_same([param.detach() for param in training.model.parameters()], before)
    training.optimizer.zero_grad()


def test_a_write_that_the_step_refuses_is_told_at_the_end(amp: ModuleType) -> None:
    training = Training(amp, fused_step=True)
    training.backward()
    training.model[0].weight.grad.mul_(0.5)
    with pytest.warns(UserWarning, match="must stay, .* got 1 of 6 written to"):
        amp.deactivate()
    assert all(type(param) is nn.Parameter for param in training.model.parameters())


def trained(amp: ModuleType, fused_step: bool, passes: int, prepare: Callable[[Any], None]) -> Any:
    """Return the masters after two steps of several passes."""
    training = Training(amp, SGD, fused_step=fused_step)
    prepare(training.model)
    for _ in range(2):
        training.optimizer.zero_grad()
        for _ in range(passes):
            training.backward()
        training.optimizer.step()
    masters = [one.detach().clone() for one in amp.master_params(training.optimizer)]
    amp.deactivate()
    return masters


@pytest.mark.skipif(not hasattr(Tensor, "grad_dtype"), reason="torch has no Tensor.grad_dtype")
@pytest.mark.parametrize("passes", [1, 2])
def test_gradients_of_another_dtype_are_unscaled_at_once(amp: ModuleType, passes: int) -> None:
    def widen(model: nn.Module) -> None:
        for param in model.parameters():
            param.grad_dtype = torch.float32

    assert_same(*(trained(amp, fused_step, passes, widen) for fused_step in (True, False)))


@pytest.mark.filterwarnings("ignore:a hook of a parameter")
@pytest.mark.filterwarnings("ignore:a hook of register_post_accumulate_grad_hook sees")
@pytest.mark.parametrize("passes", [1, 2, 3])
def test_gradients_in_memory_of_others_are_made_before_that_is_written_to(
    amp: ModuleType, passes: int
) -> None:
    """As by DistributedDataParallel with ``gradient_as_bucket_view=True``."""

    def into(place: Tensor) -> Callable[[Tensor], None]:
        def hook(param: Tensor) -> None:
            param.grad = place.copy_(param.grad)

        return hook

    def share(model: nn.Module) -> None:
        for param in model.parameters():
            place = torch.zeros_like(param).detach().flatten().view_as(param)
            param.register_post_accumulate_grad_hook(into(place))

    assert_same(*(trained(amp, fused_step, passes, share) for fused_step in (True, False)))


def test_a_loss_of_another_thread_leaves_waiting_gradients_alone(amp: ModuleType) -> None:
    models = [nn.Linear(300, 300) for _ in range(2)]
    optimizers = [AdamW(model.parameters()) for model in models]
    amp.initialize(models, optimizers, opt_level="O5", fused_step=True, verbosity=0)

    def backward(row: int) -> None:
        loss = models[row](torch.ones(2, 300, dtype=torch.bfloat16)).float().square().mean()
        with amp.scale_loss(loss, optimizers[row]) as scaled_loss:
            scaled_loss.backward()

    backward(0)
    other = threading.Thread(target=backward, args=(1,))
    other.start()
    other.join()
    assert all(stored_grad(one) is None for one in optimizers[0].param_groups[0]["params"])


@pytest.mark.filterwarnings("ignore:What is written to the gradients of half parameters")
@pytest.mark.parametrize(("make", "options"), [(FusedLAMB, {}), (AdamW, {"set_to_none": False})])
def test_what_was_written_to_can_be_cleared(amp: ModuleType, make: Any, options: Any) -> None:
    training, straight = (Training(amp, make, fused_step=True) for _ in range(2))
    training.backward()
    training.model[0].weight.grad.mul_(0.5)
    training.optimizer.zero_grad(**options)
    for one in (training, straight):
        one.train()
    assert not amp.step_was_skipped(training.optimizer)
    assert_same(list(training.model.parameters()), list(straight.model.parameters()))


def test_a_large_gradient_that_overflows_skips_the_step_by_its_name(
    amp: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    training = Training(amp, fused_step=True, verbosity=1)
    before = training.model[2].weight.detach().clone()
    loss = training.model(torch.ones(2, WIDTH)).float().square().mean()
    with amp.scale_loss(loss, training.optimizer) as scaled_loss:
        scaled_loss.backward()
        training.model[2].weight.grad[3, 4] = float("nan")
    training.optimizer.step()
    assert amp.step_was_skipped(training.optimizer)
    assert "2.weight (NaN)" in capsys.readouterr().out
    assert torch.equal(training.model[2].weight, before)


@pytest.mark.parametrize("scale", [0.5, 2.0])
def test_a_gradient_that_overflows_only_unscaled_is_found(amp: ModuleType, scale: float) -> None:
    """bfloat16 reaches as far as float32: half of a finite scale makes it overflow."""
    training = Training(amp, opt_level="O5", fused_step=True, loss_scale=scale)
    loss = training.model(torch.ones(2, WIDTH)).float().square().mean()
    with amp.scale_loss(loss, training.optimizer) as scaled_loss:
        scaled_loss.backward()
        training.model[2].weight.grad[3, 4] = 3e38
    training.optimizer.step()
    assert amp.step_was_skipped(training.optimizer) is (scale < 1)


def test_a_second_block_adds_to_what_waits(amp: ModuleType) -> None:
    results = []
    for fused_step in (True, False):
        training = Training(amp, fused_step=fused_step)
        for _ in range(2):
            training.optimizer.zero_grad()
            training.backward()
            training.backward()
            training.optimizer.step()
        results.append([p.detach().clone() for p in amp.master_params(training.optimizer)])
    assert_same(*results)


def test_a_layer_that_a_batch_leaves_out_is_not_stepped(amp: ModuleType) -> None:
    results = []
    for fused_step in (True, False):
        training = Training(amp, fused_step=fused_step)
        for left_out in (1, 2, 1):
            training.optimizer.zero_grad()
            hidden = torch.ones(2, WIDTH, dtype=torch.half)
            for number, layer in enumerate(training.model):
                hidden = hidden if number == left_out else layer(hidden)
            with amp.scale_loss(hidden.float().square().mean(), training.optimizer) as scaled_loss:
                scaled_loss.backward()
            training.optimizer.step()
        results.append([p.detach().clone() for p in amp.master_params(training.optimizer)])
    assert_same(*results)


class Two(nn.Module):
    """Two layers with large weights, of which a call may leave out the first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(96, 96), nn.Linear(96, 96)

    def forward(self, x: Tensor, only_second: bool = False) -> Tensor:
        return self.second(x if only_second else self.first(x)).float().square().mean()


def both_ways(
    amp: ModuleType, program: Callable[[nn.Module, list[Optimizer]], None], count: int = 1
) -> None:
    """Compare the masters of a program with and without a fused step.

    Args:
        amp: of the core.
        program: gets the model, and its optimizers: one of both layers, or one of each.
        count: how many there are.
    """
    results = []
    for fused_step in (True, False):
        torch.manual_seed(0)
        model = Two()
        groups = [
            [{"params": list(layer.parameters()), "lr": lr}]
            for layer, lr in ((model.first, 0.1), (model.second, 0.2))
        ]
        given = groups if count == 2 else [[*groups[0], *groups[1]]]
        model, optimizers = amp.initialize(
            model,
            [SGD(group) for group in given],
            opt_level="O2",
            loss_scale=8.0,
            verbosity=0,
            fused_step=fused_step,
        )
        program(model, optimizers)
        masters = (group["params"] for one in optimizers for group in one.param_groups)
        results.append([p.detach().clone() for params in masters for p in params])
    assert_same(*results)


def make_pass(amp: ModuleType, loss: Tensor, optimizer: Optimizer) -> None:
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()


X = torch.linspace(-1, 1, 192).reshape(2, 96)


def test_what_a_backward_writes_to_masters_beside_is_added(amp: ModuleType) -> None:
    def program(model: nn.Module, optimizers: list[Optimizer]) -> None:
        make_pass(amp, model(X), optimizers[0])
        master = optimizers[0].param_groups[0]["params"][0]
        master.square().sum().backward()
        optimizers[0].step()

    both_ways(amp, program)


def test_a_gradient_that_was_set_by_hand_is_stepped_beside_those_that_wait(amp: ModuleType) -> None:
    def program(model: nn.Module, optimizers: list[Optimizer]) -> None:
        first, second = optimizers[0].param_groups
        first["params"] += second["params"]
        del optimizers[0].param_groups[1]
        master = first["params"][0]
        master.grad = torch.ones_like(master)
        make_pass(amp, model(X, only_second=True), optimizers[0])
        optimizers[0].step()

    both_ways(amp, program)


def test_a_parameter_that_moves_to_another_group_steps_by_its_options(amp: ModuleType) -> None:
    def program(model: nn.Module, optimizers: list[Optimizer]) -> None:
        for _ in range(2):
            optimizers[0].zero_grad()
            make_pass(amp, model(X), optimizers[0])
            optimizers[0].step()
            first, second = (group["params"] for group in optimizers[0].param_groups)
            second.insert(0, first.pop())

    both_ways(amp, program)


@pytest.mark.filterwarnings("ignore:What is written to the gradients of half parameters")
def test_a_backward_of_another_optimizer_may_reach_what_waits(amp: ModuleType) -> None:
    def program(model: nn.Module, optimizers: list[Optimizer]) -> None:
        make_pass(amp, model(X), optimizers)
        optimizers[0].step()
        optimizers[0].zero_grad()
        make_pass(amp, model(X * 2), optimizers[0])
        optimizers[1].step()

    both_ways(amp, program, count=2)


def test_large_sparse_gradients_are_made_at_once(amp: ModuleType) -> None:
    results = []
    for fused_step in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(2000, 8, sparse=True), nn.Linear(8, 600))
        optimizer = SGD(model.parameters(), lr=0.5)
        model, optimizer = amp.initialize(
            model, optimizer, opt_level="O2", verbosity=0, fused_step=fused_step, loss_scale=8.0
        )
        for _ in range(2):
            optimizer.zero_grad()
            make_pass(amp, model(torch.tensor([1, 2, 1])).float().square().sum(), optimizer)
            optimizer.step()
        results.append([p.detach().clone() for p in amp.master_params(optimizer)])
    assert_same(*results)
