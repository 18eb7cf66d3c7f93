"""Masters as a script gets them: with true gradients, and none in the midst of a backward."""

import copy
import threading
from types import ModuleType

import pytest
import torch
from support import scaled_backward
from torch import Tensor, nn
from torch.optim import SGD


@pytest.mark.filterwarnings("ignore:a hook of a parameter")
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_masters_that_a_hook_reads_in_the_backward_get_no_scaled_gradients(
    amp: ModuleType, level: str
) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model = copy.deepcopy(plain)
    optimizer, plain_optimizer = (SGD(one.parameters(), lr=0.1) for one in (model, plain))
    amp.initialize(model, optimizer, opt_level=level, loss_scale=2.0**12, verbosity=0)
    read: list[Tensor] = []
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(
            lambda _: read.extend(one.detach().clone() for one in amp.master_params(optimizer))
        )
    for one, stepped in ((model, optimizer), (plain, plain_optimizer)):
        for _ in range(2):
            loss = one(torch.linspace(-1, 1, 8).reshape(2, 4)).float().square().mean()
            scaled_backward(amp, loss, stepped) if one is model else loss.backward()
            stepped.step()
            stepped.zero_grad()
    assert len(read) == 2 * 4 * 4
    found = [param.float() for param in model.parameters()]
    torch.testing.assert_close(found, list(plain.parameters()), rtol=0.02, atol=0.01)


@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.parametrize("place", ["in the block", "after it", "after the step"])
def test_they_have_the_gradients_of_plain_training(amp: ModuleType, level: str, place: str) -> None:
    model = nn.Linear(4, 1, bias=False)
    optimizer = SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=64.0, verbosity=0)
    inputs = torch.tensor([[1.0, 2.0, -4.0, 0.5]])
    read: list[Tensor] = []

    def look() -> None:
        read.extend(one.grad.clone() for one in amp.master_params(optimizer))

    with amp.scale_loss(model(inputs).float().sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
        if place == "in the block":
            look()
    if place == "after it":
        look()
    optimizer.step()
    if place == "after the step":
        read.append(optimizer.param_groups[0]["params"][0].grad.clone())
    (grad,) = read
    assert grad.dtype == torch.float32
    assert torch.equal(grad, inputs)


@pytest.mark.filterwarnings("ignore:a hook of a parameter")
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_another_thread_that_reads_masters_in_the_backward_ends_no_pass(
    amp: ModuleType, level: str
) -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 1, bias=False))
    optimizer = SGD(model.parameters(), lr=0.0)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=64.0, verbosity=0)
    read: list[list[Tensor]] = []

    def read_in_a_thread(_: Tensor) -> None:
        thread = threading.Thread(target=lambda: read.append(list(amp.master_params(optimizer))))
        thread.start()
        thread.join()

    model[1].weight.register_post_accumulate_grad_hook(read_in_a_thread)  # the other has none yet
    scaled_backward(amp, model(torch.ones(1, 4)).float().sum(), optimizer)
    assert len(read) == 1
    masters = list(amp.master_params(optimizer))
    expected = torch.autograd.grad(
        (masters[1] @ (masters[0] @ torch.ones(4, 1))).sum(), masters, retain_graph=True
    )
    found = [master.grad for master in masters]
    torch.testing.assert_close(found, list(expected), rtol=2e-2, atol=2e-2)


def merge(optimizer: SGD, losses: list[Tensor]) -> None:
    """Give the parameters the sum of the gradients of losses, as PCGrad and its like do."""
    params = optimizer.param_groups[0]["params"]
    sums = [torch.zeros_like(param) for param in params]
    for loss in losses:
        optimizer.zero_grad()
        loss.backward(retain_graph=True)
        for param, total in zip(params, sums, strict=True):
            if param.grad is not None:
                total += param.grad
    for param, total in zip(params, sums, strict=True):
        param.grad = total


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
def test_a_wrapper_that_merges_gradients_in_the_block_is_right_or_refused(
    amp: ModuleType, level: str
) -> None:
    model = nn.Linear(4, 2, bias=False)
    optimizer = SGD(model.parameters(), lr=0.5)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=8.0, verbosity=0)
    before = model.state_dict()["weight"].float().clone()

    def train() -> None:
        outputs = model(torch.ones(1, 4)).float()[0]
        with amp.scale_loss(outputs, optimizer) as scaled:
            merge(optimizer, [scaled[0], scaled[1]])
        optimizer.step()

    if level not in ("O2", "O5"):
        train()
        assert torch.allclose(model.state_dict()["weight"].float(), before - 0.5, atol=1e-6)
        return
    with (
        pytest.warns(UserWarning, match="got one's .grad read or cleared inside of the block"),
        pytest.raises(RuntimeError, match="got a gradient assigned to one inside of the block"),
    ):
        train()
    optimizer.zero_grad()
    scaled_backward(amp, model(torch.ones(1, 4)).float().sum(), optimizer)
    optimizer.step()
    assert torch.allclose(model.state_dict()["weight"].float(), before - 0.5, atol=1e-6)


class ClearsItself(SGD):
    """As optimizers of scripts that look at each gradient before they clear it."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.grad = None


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", [SGD, ClearsItself])
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_what_is_right_in_a_block_is_not_told(amp: ModuleType, level: str, kind: type[SGD]) -> None:
    """Masters' values, gradients of the model, and what is cleared between two backwards."""
    model = nn.Linear(4, 2)
    optimizer = kind(model.parameters(), lr=0.5)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=8.0, verbosity=0)
    for _ in range(3):
        with amp.scale_loss(model(torch.ones(1, 4)).float().sum(), optimizer) as scaled_loss:
            scaled_loss.backward(retain_graph=True)
            optimizer.zero_grad()
            scaled_loss.backward()
            norms = [param.grad.norm() for param in model.parameters()]
            norms += [
                one.detach().norm() for group in optimizer.param_groups for one in group["params"]
            ]
        assert all(norm.isfinite() for norm in norms)
        assert all(one.grad is not None for one in optimizer.param_groups[0]["params"])
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.parametrize("row", [0, 1])
def test_an_assignment_to_any_master_in_the_block_is_refused(
    amp: ModuleType, level: str, row: int
) -> None:
    model = nn.Linear(4, 2)
    optimizer = SGD(model.parameters(), lr=0.5)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=8.0, verbosity=0)
    master = optimizer.param_groups[0]["params"][row]
    before = model.state_dict()

    def train() -> None:
        with amp.scale_loss(model(torch.ones(1, 4)).float().sum(), optimizer) as scaled_loss:
            scaled_loss.backward()
            master.grad = torch.ones_like(master)

    with pytest.raises(RuntimeError, match="got a gradient assigned to one inside of the block"):
        train()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.filterwarnings("ignore:optimizers of amp.initialize")
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_backward_to_masters_after_a_read_is_no_assignment(amp: ModuleType, level: str) -> None:
    """As of a penalty on the fp32 weights."""
    model = nn.Linear(2, 2, bias=False)
    optimizer = SGD(model.parameters(), lr=1.0)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=8.0, verbosity=0)
    (master,) = optimizer.param_groups[0]["params"]
    before = master.detach().clone()
    with amp.scale_loss(model(torch.ones(1, 2)).float().sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
        assert master.grad is None
        (scaled_loss.detach() / scaled_loss.detach() * 8.0 * master.sum()).backward()
    optimizer.step()
    torch.testing.assert_close(master.detach(), before - 2.0, rtol=1e-5, atol=1e-5)
