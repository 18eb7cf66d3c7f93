"""A masked language model of BERT's shape; it knows nothing of amp_patch.

The attention is unfused and its query, key and value are separate linear layers, so that every
cast of theirs is dispatched on its own. No count depends on the widths.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class Layer(nn.Module):
    """Self-attention, then a feed-forward net, with a layer norm after each: (N, T, width)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.norm1 = nn.LayerNorm(width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm2 = nn.LayerNorm(width)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.norm1(hidden + self.out(self.attend(hidden)))
        return self.norm2(hidden + self.narrow(F.gelu(self.widen(hidden))))

    def attend(self, hidden: Tensor) -> Tensor:
        query, key, value = (
            part(hidden).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        scores = torch.matmul(query, key.transpose(-1, -2)) / query.shape[-1] ** 0.5
        mixed = torch.matmul(torch.softmax(scores, dim=-1), value)
        return mixed.transpose(1, 2).flatten(2)


class MaskedLanguageModel(nn.Module):
    """Tokens (N, T) and their true values (N, T) to the loss, a scalar."""

    def __init__(
        self,
        layers: int = 24,
        width: int = 16,
        heads: int = 2,
        vocabulary: int = 32,
        *,
        recompute: bool = False,
    ) -> None:
        super().__init__()
        self.recompute = recompute
        self.tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor, truth: Tensor) -> Tensor:
        hidden = self.tokens(tokens)
        for layer in self.layers:
            if self.recompute:
                hidden = checkpoint(layer, hidden, use_reentrant=False)
            else:
                hidden = layer(hidden)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), truth.flatten())
