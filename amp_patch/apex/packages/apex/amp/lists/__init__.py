"""apex's cast lists, which scripts may change before `initialize` or `init`."""

from . import functional_overrides, tensor_overrides, torch_overrides

__all__ = ["functional_overrides", "tensor_overrides", "torch_overrides"]
