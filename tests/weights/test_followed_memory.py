"""Masters lie as their half parameters do, and with them their gradients and what is kept of them.

torch's fused optimizers go through all of these as they lie in memory: on a CPU without a look.
"""

import copy
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

from amp_patch.kernels.strips import in_order_of
from amp_patch.weights.followed_memory import FollowedMemory
from amp_patch.weights.fp32_values import FP32Values
from amp_patch.weights.own_gradients import OwnGradients
from amp_patch.weights.stepped_state import SteppedState

LAST = torch.channels_last
MAKERS: dict[str, Callable[..., Optimizer]] = {
    "AdamW": lambda params: AdamW(params, lr=0.25),
    "AdamW fused": lambda params: AdamW(params, lr=0.25, fused=True),
    "Adam amsgrad fused": lambda params: Adam(params, lr=0.25, amsgrad=True, fused=True),
    "SGD fused": lambda params: SGD(params, lr=0.25, momentum=0.5, fused=True),
    "Adagrad fused": lambda params: Adagrad(params, lr=0.25, fused=True),
    "RMSprop": lambda params: RMSprop(params, lr=0.25, momentum=0.5),
}
#: Elements: waits in half with fused_step, and shares its memory with others.
LARGE, SMALL = (32, 16, 4, 4), (8, 4, 2, 2)


class Weights(nn.Module):
    """Has a loss whose gradients are exact in half, and the same in every order of memory."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in (("large", LARGE), ("small", SMALL)):
            values = torch.arange(torch.Size(shape).numel()) % 7 / 4
            self.register_parameter(name, nn.Parameter(values.reshape(shape)))

    def forward(self, factor: Tensor) -> Tensor:
        return sum((one * _slopes(one.shape, factor).to(one)).float().sum() for one in self._both())

    def _both(self) -> Iterator[Tensor]:
        return iter((self.large, self.small))


def _slopes(shape: Any, factor: Tensor) -> Tensor:
    count = torch.Size(shape).numel()
    return ((torch.arange(count) * 5 % 11 - 4) * factor).reshape(shape)


def to_channels_last(model: nn.Module, masters: list[Tensor]) -> None:
    model.to(memory_format=LAST)


def set_data(model: nn.Module, masters: list[Tensor]) -> None:
    for param in model.parameters():
        param.data = param.data.transpose(0, 2).contiguous().transpose(0, 2)


def set_masters(model: nn.Module, masters: list[Tensor]) -> None:
    for one in masters:
        one.data = one.data.contiguous(memory_format=LAST)


def set_half_gradients(model: nn.Module, masters: list[Tensor]) -> None:
    for param in model.parameters():
        grad = param.grad
        param.grad = None if grad is None else grad.contiguous(memory_format=LAST)


def do_nothing(model: nn.Module, masters: list[Tensor]) -> None:
    pass


WAYS = [to_channels_last, set_data, set_masters, set_half_gradients]


def backward(amp: ModuleType, loss: Tensor, optimizer: Optimizer, **options: bool) -> None:
    with amp.scale_loss(loss, optimizer, **options) as scaled:
        scaled.backward()


def train(
    amp: ModuleType,
    make: Callable[..., Optimizer],
    level: str | None,
    reorder: Callable[[nn.Module, list[Tensor]], None],
    at: str,
    **options: Any,
) -> list[Tensor]:
    """Return the fp32 weights after steps of which each adds up two passes.

    Args:
        at: when they are given another order: at the "start", "between" the passes of the third
            step, or behind the first one, whose state is "loaded" again later.
    """
    model = Weights()
    optimizer = make(model.parameters())
    options = {"loss_scale": 4.0, "verbosity": 0, "enabled": level is not None, **options}
    model, optimizer = amp.initialize(model, optimizer, opt_level=level or "O0", **options)

    def params() -> list[Tensor]:
        return [one for group in optimizer.param_groups for one in group["params"]]

    def come_to(moment: str) -> None:
        if moment == at.partition(" ")[0]:
            reorder(model, params())

    come_to("start")
    for step in range(5):
        if step == 1:
            saved = copy.deepcopy(optimizer.state_dict())
            come_to("loaded")
        if step == 3 and at == "loaded":
            optimizer.load_state_dict(saved)
        optimizer.zero_grad()
        delays = at == "between delayed"
        backward(amp, model(torch.tensor(0.25)), optimizer, delay_unscale=delays)
        come_to("between" if step == 2 else "")
        backward(amp, model(torch.tensor(0.5 + step / 4)), optimizer)
        optimizer.step()
    found = [one.detach().clone(memory_format=torch.contiguous_format) for one in params()]
    amp.deactivate()
    return found


MOMENTS = ["start", "between", "between delayed", "loaded"]
#: Each way and moment with one optimizer, each other optimizer with each way.
CASES = [("AdamW fused", way, at) for way in WAYS for at in MOMENTS] + [
    (name, way, MOMENTS[(place + row) % len(MOMENTS)])
    for place, name in enumerate(MAKERS)
    for row, way in enumerate(WAYS)
    if name != "AdamW fused"
]


# of the gradients that set_half_gradients leaves for the next pass
@pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout contract")
@pytest.mark.parametrize(("name", "reorder", "at"), CASES)
@pytest.mark.parametrize("fused_step", [False, True])
def test_another_order_changes_no_number(
    amp: ModuleType, name: str, fused_step: bool, reorder: Any, at: str
) -> None:
    make, level = MAKERS[name], "O2" if fused_step else "O5"
    plain = train(amp, make, None, do_nothing, at)
    trained = train(amp, make, level, reorder, at, fused_step=fused_step)
    for one, expected in zip(trained, plain, strict=True):
        torch.testing.assert_close(one, expected, rtol=1e-6, atol=1e-6)


def prepared(amp: ModuleType, **options: Any) -> tuple[nn.Module, list[Optimizer]]:
    model = nn.Conv2d(4, 8, 2)
    optimizers = [SGD(model.parameters(), lr=0.25, momentum=0.5) for _ in range(2)]
    options = {"opt_level": "O5", "verbosity": 0, **options}
    return amp.initialize(model, optimizers, **options)


def train_step(amp: ModuleType, model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.zero_grad()
    backward(amp, model(torch.ones(1, 4, 2, 2)).float().sum(), optimizer)
    optimizer.step()


def test_all_of_a_master_lies_as_its_parameter(amp: ModuleType) -> None:
    model, (optimizer, _) = prepared(amp)
    for format in (torch.contiguous_format, LAST):
        model.to(memory_format=format)
        train_step(amp, model, optimizer)
        master = optimizer.param_groups[0]["params"][0]
        momentum = optimizer.state[master]["momentum_buffer"]
        assert master.stride() == momentum.stride() == model.weight.stride()


def test_masters_of_two_optimizers_stay_in_one_memory(amp: ModuleType) -> None:
    model, optimizers = prepared(amp)
    for optimizer in optimizers:
        train_step(amp, model, optimizer)
    model.to(memory_format=LAST)
    for optimizer in optimizers:
        train_step(amp, model, optimizer)
    first, second = (one.param_groups[0]["params"][0] for one in optimizers)
    assert first.data_ptr() == second.data_ptr()
    assert first.stride() == model.weight.stride()


def test_tied_masters_stay_tied(amp: ModuleType) -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 2), nn.Conv2d(4, 4, 2))
    optimizer = SGD(model.parameters(), lr=0.25)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O5", verbosity=0)
    for data in (model[1].weight.data, model[1].weight.data.contiguous(memory_format=LAST)):
        model[0].weight.data = model[1].weight.data = data
        loss = sum(one.float().square().sum() for one in model.parameters())
        backward(amp, loss, optimizer)
        optimizer.step()
        first, _, second, _ = optimizer.param_groups[0]["params"]
        assert (first.data_ptr(), first.stride()) == (second.data_ptr(), data.stride())
        optimizer.zero_grad()


def test_deactivate_gives_weights_back_in_their_order(amp: ModuleType) -> None:
    model, (optimizer, _) = prepared(amp)
    train_step(amp, model, optimizer)
    model.to(memory_format=LAST)
    amp.deactivate()
    assert model.weight.is_contiguous(memory_format=LAST)
    assert not model.weight.is_contiguous()


def test_a_master_that_comes_late_lies_as_its_parameter(amp: ModuleType) -> None:
    model = amp.initialize(nn.Conv2d(4, 8, 2), opt_level="O5", verbosity=0)
    model.to(memory_format=LAST)
    optimizer = amp.initialize([], SGD(model.parameters(), lr=0.25), opt_level="O5", verbosity=0)[1]
    assert optimizer.param_groups[0]["params"][0].stride() == model.weight.stride()


def test_who_unscales_hears_of_another_order_once() -> None:
    heard: list[bool] = []
    param = nn.Parameter(torch.zeros(SMALL, dtype=torch.bfloat16))
    master = nn.Parameter(param.detach().float())
    memory = FollowedMemory(FP32Values(), SteppedState([]), OwnGradients(), None)
    memory.when_reordered = lambda: heard.append(True)
    memory.add(param, master)
    memory.follow_orders([param], [master], lambda row: False)
    assert not heard
    param.data = param.data.contiguous(memory_format=LAST)
    for _ in range(2):
        memory.follow_orders([param], [master], lambda row: False)
    assert heard == [True]
    assert master.stride() == param.stride()


def test_a_gradient_that_no_script_has_written_stays_such() -> None:
    own = OwnGradients()
    param = nn.Parameter(torch.zeros(SMALL, dtype=torch.bfloat16))
    master = nn.Parameter(param.detach().float())
    memory = FollowedMemory(FP32Values(), SteppedState([]), own, None)
    memory.add(param, master)
    master.grad = torch.ones(SMALL)
    own.note(master)
    param.data = param.data.contiguous(memory_format=LAST)
    memory.follow_orders([param], [master], lambda row: False)
    assert own.has(master)
    assert master.grad.stride() == param.stride()


def test_what_lies_as_it_should_is_not_copied() -> None:
    tensor = torch.arange(4.0).reshape(2, 2)
    assert in_order_of(tensor, tensor) is tensor
    assert in_order_of(torch.zeros(2, 4)[:, ::2], tensor) is tensor
    copied = in_order_of(tensor.t(), tensor)
    assert copied.stride() == (1, 2)
    assert torch.equal(copied, tensor)
