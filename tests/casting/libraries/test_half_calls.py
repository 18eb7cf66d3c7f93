"""Results that are half where functions cast; what its author has registered; what is not cast."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from casting_support import HALF_OF, called_at
from torch import Tensor, nn
from torch.nn.utils import parametrize

from amp_patch.casting.libraries.library_casts import Rule, wrap

F16, F32 = torch.float16, torch.float32


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4"])
def test_a_result_is_half_where_functions_cast(amp: ModuleType, level: str) -> None:
    function = wrap(lambda x: x + torch.ones(4), Rule("result"))
    found = called_at(level, "inside", function, torch.ones(2, 4, dtype=HALF_OF.get(level, F16)))
    assert found.dtype is (HALF_OF[level] if level in ("O1", "O4") else F32)
    assert called_at(level, "float_region", function, torch.ones(2, 4)).dtype is F32


@pytest.fixture
def custom_product() -> Any:
    """Give a custom operator for a product, which torch's autocast casts to bfloat16."""

    @torch.library.custom_op("amp_patch_tests::product", mutates_args=())
    def product(x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight.T, x.T @ grad

    product.register_autograd(
        backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
    )
    if not hasattr(product, "register_autocast"):
        pytest.skip("this torch registers no autocast for custom operators")
    product.register_autocast("cpu", torch.bfloat16)
    return product


class CustomHead(nn.Module):
    def __init__(self, product: Any) -> None:
        super().__init__()
        self.body, self.product = nn.Linear(4, 8), product
        self.weight = nn.Parameter(torch.randn(8, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.product(self.body(x), self.weight)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4"])
def test_a_custom_operator_takes_what_it_has_registered_for_autocast(
    amp, custom_product, level: str
) -> None:
    x, original, model = torch.randn(3, 4), *(CustomHead(custom_product) for _ in range(2))
    model.load_state_dict(original.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"opt_level": level, "loss_scale": 8.0, "verbosity": 0}
    model, optimizer = amp.initialize(model, optimizer, **options)
    y = model(x)
    assert (y.dtype is torch.bfloat16) == (level in ("O1", "O4"))
    with amp.scale_loss(y.float().square().mean(), optimizer) as scaled:
        scaled.backward()
    original(x).square().mean().backward()
    for param, exact in zip(model.parameters(), original.parameters(), strict=True):
        torch.testing.assert_close(param.grad.float(), exact.grad, rtol=0.05, atol=0.02)


def test_a_custom_operator_in_float_region_stays_in_float32(amp, custom_product) -> None:
    model, x = CustomHead(custom_product), torch.randn(3, 4)
    exact = model(x)
    model = amp.initialize(model, opt_level="O1", verbosity=0)
    for block in (amp.float_region, amp.disable_casts):
        with block():
            assert torch.equal(model(x), exact)


@pytest.mark.parametrize("level", ["O1", "O4"])
@pytest.mark.parametrize(
    "normalized", [nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm]
)
def test_a_spectral_norm_is_computed_in_float32_where_functions_cast(
    amp: ModuleType, level: str, normalized: Callable[[nn.Module], nn.Module]
) -> None:
    """What it keeps for the next call has the very bits, and so has the weight."""
    found = []
    for one in ("plain", level):
        torch.manual_seed(0)
        layer = normalized(nn.Linear(8, 6))
        if one == level:
            amp.initialize(layer, opt_level=level, verbosity=0)
        out = [layer(torch.ones(2, 8)) for _ in range(3)][-1]
        assert out.dtype is HALF_OF.get(one, F32)
        buffers = [buffer.clone() for buffer in layer.buffers()]
        found.append([layer.eval().weight.detach().clone(), *buffers])
    torch.testing.assert_close(*found, rtol=0, atol=0)


class Turned(nn.Module):
    """A weight that is kept turned by a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("turn", torch.linalg.qr(torch.randn(5, 5))[0])

    def forward(self, kept: Tensor) -> Tensor:
        return self.turn @ kept

    def right_inverse(self, weight: Tensor) -> Tensor:
        return self.turn.mT @ weight


@pytest.mark.parametrize("level", ["O1", "O4"])
@pytest.mark.parametrize("turned", ["own", "orthogonal"])
def test_what_a_parametrization_stores_is_computed_in_float32_where_functions_cast(
    amp: ModuleType, level: str, turned: str
) -> None:
    """It has the very bits: made, written to, and left behind, while amp is on."""
    found = []
    for one in ("plain", level):
        if one == level:
            amp.initialize(nn.Linear(2, 2), opt_level=level, verbosity=0)
        torch.manual_seed(0)
        layer = nn.Linear(5, 5)
        if turned == "own":
            parametrize.register_parametrization(layer, "weight", Turned())
        else:
            nn.utils.parametrizations.orthogonal(layer)
        made = [value.clone() for value in layer.state_dict().values()]
        layer.weight = torch.linalg.qr(torch.randn(5, 5))[0]
        written = [value.clone() for value in layer.state_dict().values()]
        parametrize.remove_parametrizations(layer, "weight")
        found.append([*made, *written, layer.weight.detach()])
    torch.testing.assert_close(*found, rtol=0, atol=0)
