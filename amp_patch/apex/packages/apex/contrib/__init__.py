"""What apex called contributed; each package but the optimizers is imported by itself."""

# Scripts write `import apex; apex.contrib.optimizers.FP16_Optimizer(...)`.
from . import optimizers

__all__ = ["optimizers"]
