"""What torch.jit compiled is called with one dtype while casts are on: that of its weights."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

HALF = {"O1": torch.float16, "O4": torch.bfloat16}
LEVELS = pytest.mark.parametrize("opt_level", HALF)


def compiled(what, example=None):
    """Compile by torch.jit, which warns of itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(what) if example is None else torch.jit.trace(what, example)


class Part(nn.Module):
    """As the compiled parts of equivariant networks: products, weights, a second method."""

    def __init__(self):
        super().__init__()
        self.inside = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))

    def forward(self, x):
        return torch.einsum("bi,ij->bj", self.inside(x), torch.eye(4))

    @torch.jit.export
    def again(self, x):
        return self.inside(x)


class Shift(nn.Module):
    def __init__(self, shift):
        super().__init__()
        self.register_buffer("shift", shift)

    def forward(self, x):
        return x + self.shift


class Around(nn.Module):
    """A model in Python, of which a part is compiled."""

    def __init__(self, part):
        super().__init__()
        self.before, self.part, self.after = nn.Linear(3, 4), part, nn.Linear(4, 2)

    def forward(self, x):
        return self.after(self.part(self.before(x)))


@compiled
def product(x, weight):
    return torch.matmul(x, weight)


@compiled
def scaled(x, scale):
    return x * scale


@compiled
def add_into(total, x, other):
    total.add_(x).add_(other)


class Product(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        return product(x, self.weight)


PARTS = {
    "scripted": lambda: compiled(Part()),
    "traced": lambda: compiled(Part(), torch.rand(5, 4)),
    "function": Product,
}


@LEVELS
@pytest.mark.parametrize("kind", PARTS)
def test_a_model_with_a_compiled_part_trains_as_in_float32(amp, opt_level, kind):
    """The layer in front of it returns half numbers, which its float32 weights do not take."""
    x, y = torch.rand(16, 3), torch.randint(2, (16,))

    def train(level):
        torch.manual_seed(0)
        model = Around(PARTS[kind]())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        losses = []
        for _ in range(10):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
            losses.append(loss.item())
        amp.deactivate()
        return torch.tensor(losses)

    losses = train("O0")
    assert losses[-1] < losses[0]
    torch.testing.assert_close(train(opt_level), losses, rtol=0.01, atol=0.003)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning", "ignore:Dynamo does not know")
@pytest.mark.parametrize("kind", PARTS)
def test_torch_compile_takes_a_model_with_a_part_that_torch_jit_compiled(amp, kind):
    torch.manual_seed(0)
    model, x = Around(PARTS[kind]()), torch.rand(5, 3)
    amp.initialize(model, opt_level="O1", verbosity=0)
    torch._dynamo.reset()
    found = torch.compile(model, backend="eager")(x)  # which reads a function, and casts in it
    torch.testing.assert_close(found, model(x), rtol=2e-3, atol=2e-3)


@LEVELS
def test_every_method_of_a_compiled_module_gets_the_dtype_of_its_weights(amp, opt_level):
    part, model = compiled(Part()), nn.Linear(3, 3)
    amp.initialize(model, opt_level=opt_level, verbosity=0)
    x = torch.rand(5, 4).to(HALF[opt_level])
    for call in (part, part.forward, part.again):
        assert call(x=x).dtype is torch.float32


@LEVELS
def test_a_part_without_float32_weights_gets_what_it_is_given(amp, opt_level):
    """Its own weights are half, or a number that decides no dtype, or there are none."""
    half = HALF[opt_level]
    own = compiled(nn.Linear(4, 4).to(half))
    number = compiled(Shift(torch.tensor(1.0)))
    vector = compiled(Shift(torch.ones(4)))
    model = nn.Linear(3, 3)
    amp.initialize(model, opt_level=opt_level, verbosity=0)
    x = torch.rand(5, 4).to(half)
    assert own(x).dtype is number(x).dtype is half
    assert vector(x).dtype is torch.float32
    assert scaled(x, torch.tensor(2.0)).dtype is scaled(x, x).dtype is half
    with amp.disable_casts(), pytest.raises(RuntimeError, match="dtype"):
        product(x, torch.eye(4))


@LEVELS
@pytest.mark.parametrize("block", [torch.enable_grad, torch.inference_mode])
def test_what_is_written_in_place_is_written_to_the_callers_tensor(amp, opt_level, block):
    """To one that has no room of its own as well, if nothing is written to it."""
    amp.initialize(nn.Linear(3, 3), opt_level=opt_level, verbosity=0)
    half, repeated = torch.ones(4, dtype=HALF[opt_level]), torch.ones(1, dtype=HALF[opt_level])
    with block():
        add_into(half, torch.full((4,), 2.0), other=repeated.expand(4))
    assert half.tolist() == [4.0] * 4


@LEVELS
def test_a_layer_of_no_model_is_called_beside_a_compiled_part(amp, opt_level):
    """A parameter that no model has is looked for among those of all."""
    model, stranger = Around(compiled(Part())), nn.Linear(2, 2)
    amp.initialize(model, opt_level=opt_level, verbosity=0)
    for _ in range(2):
        loss = (
            stranger(model(torch.rand(5, 3))).sum()
            + F.linear(torch.rand(5, 4), model.part.inside[0].weight).sum()
        )
        loss.backward()
    assert stranger.weight.grad.isfinite().all()
    assert model.part.inside[0].weight.grad.isfinite().all()


def test_deactivate_puts_torchs_calls_back(amp):
    kinds, model = (torch._C.ScriptFunction, torch._C.ScriptMethod), nn.Linear(3, 3)
    before = [vars(kind)["__call__"] for kind in kinds]
    amp.initialize(model, opt_level="O1", verbosity=0)
    assert [vars(kind)["__call__"] for kind in kinds] != before
    amp.deactivate()
    assert [vars(kind)["__call__"] for kind in kinds] == before
