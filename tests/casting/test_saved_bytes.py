"""What backward needs takes no more memory at O1 and O4 than under autocast: bytes are counted."""

import contextlib
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, TOKENS, LAYERS = 64, 48, 2
#: Of a tensor of an activation in half.
HALF = TOKENS * WIDTH * 2


class Encoder(nn.Module):
    """BERT's layer, whose norms are given float32: so they run by CUDA's list, and by the CPU's."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        heads = [one(x).view(1, TOKENS, 4, -1).transpose(1, 2) for one in self.inputs()]
        found = F.scaled_dot_product_attention(*heads).transpose(1, 2).reshape(TOKENS, WIDTH)
        x = self.norms[0]((self.out(found) + x).float())
        result: Tensor = self.norms[1]((self.down(F.gelu(self.up(x))) + x).float())
        return result

    def inputs(self) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
        return self.query, self.key, self.value


class Residual(nn.Module):
    """A convolution with its batch norm, added to what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(WIDTH, WIDTH, 3, padding=1), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(self.norm(self.conv(x[None]))[0])


def encoders() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(*[Encoder() for _ in range(LAYERS)]), torch.randn(TOKENS, WIDTH)


def residuals() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(*[Residual() for _ in range(LAYERS)]), torch.randn(WIDTH, TOKENS)


def saved(model: nn.Module, x: Tensor, casts: contextlib.AbstractContextManager[object]) -> int:
    """Return the bytes that one forward saves, beside parameters, buffers and the input."""
    known = {one.untyped_storage().data_ptr() for one in (*model.parameters(), *model.buffers(), x)}
    found: dict[int, Tensor] = {}  # which lives on, so that no address comes twice

    def pack(tensor: Tensor) -> Tensor:
        found.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor.detach()  # an output that is kept as it is would hold its own graph

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), casts:
        model(x)
    return sum(
        one.untyped_storage().nbytes() for address, one in found.items() if address not in known
    )


@pytest.mark.parametrize(("level", "dtype"), [("O1", torch.float16), ("O4", torch.bfloat16)])
@pytest.mark.parametrize(
    ("make", "less"),
    [(encoders, LAYERS * 2 * HALF), (residuals, 0)],
    ids=["encoders share the cast of q, k and v", "convolutions"],
)
def test_a_forward_saves_what_autocast_does_less_what_is_shared(
    amp: ModuleType,
    level: str,
    dtype: torch.dtype,
    make: Callable[[], tuple[nn.Module, Tensor]],
    less: int,
) -> None:
    model, x = make()
    theirs = saved(model, x, torch.autocast("cpu", dtype))
    model = amp.initialize(model, opt_level=level, verbosity=0)
    assert saved(model, x, contextlib.nullcontext()) == theirs - less
