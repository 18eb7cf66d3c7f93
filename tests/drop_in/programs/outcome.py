"""What every program prints at its end: the loss, and dtypes seen on the way."""

import json

import torch


class Outcome:
    """Watches one layer of a model while it trains.

    Args:
        layer: a module with a weight.
    """

    def __init__(self, layer):
        self.layer = layer
        self.activation = None
        layer.register_forward_hook(self._look)

    def _look(self, layer, inputs, output):
        self.activation = (output[0] if isinstance(output, tuple) else output).dtype

    def report(self, loss, **more):
        weight = next(self.layer.parameters())
        seen = {"activation": str(self.activation), "parameter": str(weight.dtype)}
        print(
            "OUTCOME",
            json.dumps({"loss": torch.as_tensor(loss).item(), **seen, **more}),
            flush=True,
        )
