"""The models whose whole training steps are measured, each with its loss on one fixed batch.

Knows no mixed precision. Weights and data are drawn from one seed; nothing is fetched, and no model
has dropout, so that the losses of all candidates can be compared.
"""

from __future__ import annotations

import copy
import importlib.util
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
Batch = Mapping[str, Tensor]


class Workload(NamedTuple):
    """A model and what it is trained on.

    Attributes:
        model: in fp32, in training mode.
        batch: tensors that stay where they are.
        loss: returns the scalar loss of a model's forward on a batch, as a user writes it.
        samples: what "samples per second" counts, of one step.
        learning_rate: of AdamW.
    """

    model: nn.Module
    batch: Batch
    loss: Callable[[nn.Module, Batch], Tensor]
    samples: int
    learning_rate: float

    def on(self, device: torch.device) -> Workload:
        """Return a copy on a device."""
        batch = {name: tensor.to(device) for name, tensor in self.batch.items()}
        return self._replace(model=copy.deepcopy(self.model).to(device), batch=batch)


class Maker(NamedTuple):
    """Makes a workload.

    Attributes:
        make: takes whether it is to be tiny, as for a test.
        package: what must be installed beside torch; None if nothing.
    """

    make: Callable[[bool], Workload]
    package: str | None = None

    def missing(self) -> str | None:
        """Return the package, if it is missing."""
        found = self.package is None or importlib.util.find_spec(self.package) is not None
        return None if found else self.package


def made(name: str, tiny: bool) -> Workload:
    """Return a workload of `MODELS` on the CPU: the same for each call, in each process."""
    torch.manual_seed(0)
    return MODELS[name].make(tiny)


def attention() -> str:
    """Return the name, for Hugging Face, of torch's attention of whole sequences.

    By its own name, "sdpa", some versions make a mask of ones while a model is compiled or
    captured, with which torch has slower kernels than without: the modes could not be compared.
    """
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register("sdpa_without_mask", sdpa_attention_forward)
    return "sdpa_without_mask"


def bert(sequences: int, tiny: bool) -> Workload:
    """Train to tell tokens that are masked; the length is 128."""
    from transformers import BertConfig, BertForMaskedLM

    small: dict[str, Any] = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2}
    small |= {"num_attention_heads": 2, "intermediate_size": 32}
    config = BertConfig(
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        attn_implementation=attention(),
        **(small if tiny else {}),
    )
    shape = (2, 8) if tiny else (sequences, 128)
    tokens, truth = torch.randint(4, config.vocab_size, (2, *shape))
    is_asked = torch.rand(shape) < 0.15
    is_asked[0, 0] = True  # of a tiny batch, too
    batch = {"tokens": tokens, "labels": truth.where(is_asked, -100)}
    return Workload(BertForMaskedLM(config).train(), batch, loss_of_tokens, shape[0], 1e-4)


def gpt2(tiny: bool) -> Workload:
    """Train to tell each token's next one."""
    from transformers import GPT2Config, GPT2LMHeadModel

    small: dict[str, Any] = {"vocab_size": 64, "n_embd": 16, "n_layer": 2, "n_head": 2}
    config = GPT2Config(
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        resid_pdrop=0.0,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation=attention(),
        **(small if tiny else {}),
    )
    shape = (2, 9) if tiny else (8, 1025)
    text = torch.randint(config.vocab_size, shape)
    batch = {"tokens": text[:, :-1].contiguous(), "labels": text[:, 1:].contiguous()}
    return Workload(GPT2LMHeadModel(config).train(), batch, loss_of_tokens, shape[0], 1e-4)


def loss_of_tokens(model: nn.Module, batch: Batch) -> Tensor:
    # Not with labels=: the model would compute the loss itself, at O2 in half precision.
    logits = model(input_ids=batch["tokens"]).logits
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def resnet50(tiny: bool) -> Workload:
    """Classify images of ImageNet's size, in the order of memory that tensor cores want."""
    from torchvision.models import ResNet, resnet
    from torchvision.models.resnet import Bottleneck

    classes = 4 if tiny else 1000
    model = ResNet(Bottleneck, [1] * 4, classes) if tiny else resnet.resnet50(weights=None)
    shape = (2, 3, 32, 32) if tiny else (128, 3, 224, 224)
    images = torch.randn(shape).to(memory_format=torch.channels_last)
    batch = {"inputs": images, "labels": torch.randint(classes, shape[:1])}
    model = model.to(memory_format=torch.channels_last)
    return Workload(model.train(), batch, loss_of_classes, shape[0], 1e-3)


def mlp(tiny: bool) -> Workload:
    """24 layers so small that a GPU is done before Python has launched the next one."""
    width, layers, rows = (8, 2, 4) if tiny else (256, 24, 64)
    pairs = [(nn.Linear(width, width), nn.ReLU()) for _ in range(layers)]
    model = nn.Sequential(*(layer for pair in pairs for layer in pair))
    batch = {"inputs": torch.randn(rows, width), "labels": torch.randint(width, (rows,))}
    return Workload(model, batch, loss_of_classes, rows, 1e-3)


def loss_of_classes(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["inputs"]), batch["labels"])


def gat(tiny: bool) -> Workload:
    """Train the graph attention network of examples/gat.py on a drawn graph; samples are nodes."""
    if str(EXAMPLES) not in sys.path:
        sys.path.append(str(EXAMPLES))
    from gat import HIDDEN, PyGNet, reddit_like

    graph = reddit_like(0.0001 if tiny else 0.005)
    hidden = 8 if tiny else HIDDEN
    widths = (graph.features.shape[1], hidden, hidden, int(graph.classes.max()) + 1)
    # By number: a mask would have the host wait for the device, which a capture forbids.
    trained = graph.train_mask.nonzero().flatten()
    batch = {"edges": graph.edges, "features": graph.features, "nodes": trained}
    batch["labels"] = graph.classes[trained]
    model = PyGNet(widths, heads=(1, 1, 1))
    return Workload(model.train(), batch, loss_of_nodes, len(graph.features), 1e-3)


def loss_of_nodes(model: nn.Module, batch: Batch) -> Tensor:
    classes = model(batch["edges"], batch["features"])
    return F.cross_entropy(classes.index_select(0, batch["nodes"]), batch["labels"])


BERT, SMALL_BERT, MLP = "BERT-base 128 x 128", "BERT-base batch 8", "host-bound MLP"
#: What tells most first.
MODELS: dict[str, Maker] = {
    BERT: Maker(partial(bert, 128), "transformers"),
    SMALL_BERT: Maker(partial(bert, 8), "transformers"),
    MLP: Maker(mlp),
    "ResNet-50": Maker(resnet50, "torchvision"),
    "GPT-2 small": Maker(gpt2, "transformers"),
    "GAT": Maker(gat, "torch_geometric"),
}
