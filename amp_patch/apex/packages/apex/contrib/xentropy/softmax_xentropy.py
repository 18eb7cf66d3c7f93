"""Cross entropy of each row, over torch's."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


class SoftmaxCrossEntropyLoss:
    """What scripts call the `apply` of."""

    @staticmethod
    def apply(
        logits: Tensor,
        labels: Tensor,
        smoothing: float = 0.0,
        padding_idx: int = 0,
        half_to_float: bool = False,
    ) -> Tensor:
        """Return the cross entropy of each row; 0, without gradient, for rows of padding.

        Labels are smoothed as by Szegedy et al., arXiv:1512.00567, section 7.

        Args:
            logits: shape (rows, classes), any floating dtype; softmax is taken in float32 at least.
            labels: shape (rows,), integers.
            smoothing: share of each label that is spread over all classes.
            padding_idx: the label of rows of padding.
            half_to_float: whether losses of half logits are float32.

        Returns:
            Losses of shape (rows,), in the dtype of the logits or float32.
        """
        wide = torch.promote_types(logits.dtype, torch.float32)
        losses = functional.cross_entropy(
            logits.to(wide),
            labels.long(),
            ignore_index=padding_idx,
            reduction="none",
            label_smoothing=smoothing,
        )
        return losses.to(wide if half_to_float else logits.dtype)
