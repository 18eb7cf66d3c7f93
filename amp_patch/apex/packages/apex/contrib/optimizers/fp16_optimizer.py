"""The place that apex moved its wrapper of 2019 to."""

from ...optimizers.fp16_optimizer import FP16_Optimizer

__all__ = ["FP16_Optimizer"]
