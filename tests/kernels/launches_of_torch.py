"""Notes what torch launches on a GPU while a test runs on a CPU."""

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

NO_KERNEL = {"empty", "unbind", "detach", "view", "slice", "select", "_unsafe_view"}


class Operations(TorchDispatchMode):
    """Notes torch's functions that launch a kernel on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in NO_KERNEL:
            self.names.append(name)
        return func(*args, **(kwargs or {}))
