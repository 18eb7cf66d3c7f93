"""apex.contrib.xentropy: cross entropy of each row, with smoothed labels."""

from . import softmax_xentropy
from .softmax_xentropy import SoftmaxCrossEntropyLoss

__all__ = ["SoftmaxCrossEntropyLoss", "softmax_xentropy"]
