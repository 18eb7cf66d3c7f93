"""Whether a backward runs, which code that hooks call needs to know."""

import torch


def is_in_backward() -> bool:
    """Return whether autograd's engine runs a backward in this thread, which may be one of its."""
    return torch._C._current_graph_task_id() != -1
