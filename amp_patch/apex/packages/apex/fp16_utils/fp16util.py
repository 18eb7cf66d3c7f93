"""Models to half precision, and lists of float32 masters beside their parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import clip_grad_norm_

#: ``clip_grad_norm(parameters, max_norm, norm_type=2)``: torch's, in place.
clip_grad_norm = clip_grad_norm_


class tofp16(nn.Module):
    """Casts its input, a tensor of any shape, to float16."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the input in float16."""
        return input.half()


def BN_convert_float(module: nn.Module) -> nn.Module:
    """Make the affine batch norms in a module float32, in place; return the module."""
    for child in module.modules():
        if _is_affine_batch_norm(child):
            child.float()
    return module


def network_to_half(network: nn.Module) -> nn.Module:
    """Make a network float16 in place, except its affine batch norms.

    Returns:
        A ``Sequential`` of `tofp16` and the network, so that it takes float32 inputs.
    """
    return nn.Sequential(tofp16(), BN_convert_float(network.half()))


def convert_module(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast a module's own floating parameters, gradients and buffers in place, not its children's.

    Parameters stay the objects they are.
    """
    for param in module.parameters(recurse=False):
        gradient, param.grad = param.grad, None
        _cast_in_place(param, dtype)
        if gradient is not None:
            param.grad = gradient.to(param.dtype)
    for buffer in module.buffers(recurse=False):
        _cast_in_place(buffer, dtype)


def convert_network(network: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast a network in place, except its affine batch norms, and return it.

    The weights of recurrent layers are laid out in one block again.
    """
    for module in network.modules():
        if _is_affine_batch_norm(module):
            continue
        convert_module(module, dtype)
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()
    return network


class FP16Model(nn.Module):
    """Runs a network in float16, except its affine batch norms, on inputs cast to float16.

    Attributes:
        network: the network itself, converted in place.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = convert_network(network, dtype=torch.half)

    def forward(self, *inputs: Tensor) -> Any:
        """Cast each input to float16 and return what the network returns."""
        return self.network(*(tensor.half() for tensor in inputs))


def prep_param_lists(
    model: nn.Module, flat_master: bool = False
) -> tuple[list[nn.Parameter], list[Tensor]]:
    """Make float32 masters of a model's trainable parameters.

    Args:
        flat_master: one flat master for all parameters, which must have one dtype.

    Returns:
        The model's trainable parameters, and their masters: as many, or the flat one alone.

    Raises:
        TypeError: flat_master, and the parameters have several dtypes.
    """
    model_params = [param for param in model.parameters() if param.requires_grad]
    if not flat_master:
        masters: list[Tensor] = [param.detach().clone().float() for param in model_params]
        return model_params, [master.requires_grad_() for master in masters]
    _refuse_several_dtypes(model_params)
    master = nn.Parameter(_flat([param.detach() for param in model_params]).float())
    master.grad = torch.zeros_like(master)
    return model_params, [master]


def model_grads_to_master_grads(
    model_params: Sequence[Tensor], master_params: Sequence[Tensor], flat_master: bool = False
) -> None:
    """Copy the model's gradients into those of the masters of `prep_param_lists`, in float32.

    A master's gradient becomes None where the parameter has none; in a flat master that part
    becomes 0.
    """
    if flat_master:
        master = master_params[0]
        gradients = [_gradient_or_zeros(param) for param in model_params]
        master.grad = _flat(gradients).to(master.dtype)
        return
    for param, master in zip(model_params, master_params, strict=True):
        if param.grad is None:
            master.grad = None
        elif master.grad is None:
            master.grad = param.grad.detach().to(master.dtype, copy=True)
        else:
            master.grad.detach().copy_(param.grad)


def master_params_to_model_params(
    model_params: Sequence[Tensor], master_params: Sequence[Tensor], flat_master: bool = False
) -> None:
    """Copy the masters of `prep_param_lists` into the model's parameters, in the dtype of each."""
    masters = list(master_params)
    if flat_master:
        parts = masters[0].detach().split([param.numel() for param in model_params])
        masters = [part.view_as(p) for part, p in zip(parts, model_params, strict=True)]
    with torch.no_grad():
        for param, master in zip(model_params, masters, strict=True):
            param.copy_(master)


def to_python_float(t: Any) -> Any:
    """Return the number in a tensor of one element, or the first entry of a sequence."""
    return t.item() if hasattr(t, "item") else t[0]


def _is_affine_batch_norm(module: nn.Module) -> bool:
    return isinstance(module, _BatchNorm) and module.affine


def _cast_in_place(tensor: Tensor, dtype: torch.dtype) -> None:
    if tensor.is_floating_point():
        tensor.data = tensor.data.to(dtype)


def _flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _gradient_or_zeros(param: Tensor) -> Tensor:
    return torch.zeros_like(param) if param.grad is None else param.grad.detach()


def _refuse_several_dtypes(params: Sequence[Tensor]) -> None:
    dtypes = sorted({str(param.dtype) for param in params})
    if len(dtypes) > 1:
        raise TypeError(
            "prep_param_lists(flat_master=True) takes parameters of one dtype; got "
            f"{', '.join(dtypes)}. Call prep_param_lists(model, flat_master=False)."
        )
