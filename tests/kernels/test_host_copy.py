"""Copies on their way to the host; on the CPU they are there at once."""

import torch

from amp_patch.kernels.host_copy import HostCopy


def test_a_copy_holds_what_the_tensor_was(device: torch.device) -> None:
    source = torch.arange(5, device=device).float().requires_grad_()
    copy = HostCopy(source)
    with torch.no_grad():
        source.zero_()
    held = copy.wait()
    assert copy.ready()
    assert held.device.type == "cpu"
    assert not held.requires_grad
    assert held.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
