"""The names that rules know functions by, however a script imports them."""

from __future__ import annotations

#: Where amp's functions are, of apex and of amp_patch.
_AMP = ("apex.amp.", "amp_patch.amp.", "apex.amp.amp.", "apex.amp.frontend.", "apex.amp.handle.")
_TORCH_AMP = (
    "torch.",
    "torch.amp.",
    "torch.cuda.amp.",
    "torch.cpu.amp.",
    "torch.amp.autocast_mode.",
    "torch.amp.grad_scaler.",
    "torch.cuda.amp.autocast_mode.",
    "torch.cuda.amp.grad_scaler.",
)
_CLIPPING = ("torch.nn.utils.", "torch.nn.utils.clip_grad.", "apex.contrib.clip_grad.")
_PARALLEL = {
    "torch.nn.DataParallel",
    "torch.nn.parallel.DataParallel",
    "torch.nn.parallel.DistributedDataParallel",
    "torch.nn.parallel.distributed.DistributedDataParallel",
    "torch.distributed.fsdp.FullyShardedDataParallel",
    "apex.parallel.DistributedDataParallel",
    "apex.parallel.distributed.DistributedDataParallel",
}
_OPTIMIZERS = (
    "torch.optim.",
    "apex.optimizers.",
    "apex.contrib.optimizers.",
    "amp_patch.optimizers.",
)
_NO_OPTIMIZERS = ("torch.optim.lr_scheduler.", "torch.optim.swa_utils.")
#: dtypes by the names that torch has for them, and for tensors of them.
DTYPES = {
    **{f"torch.{name}": "float16" for name in ("float16", "half", "HalfTensor")},
    **{f"torch.{name}": "bfloat16" for name in ("bfloat16", "BFloat16Tensor")},
    **{f"torch.{name}": "float32" for name in ("float32", "float", "FloatTensor")},
    **{f"torch.{name}": "float64" for name in ("float64", "double", "DoubleTensor")},
    "torch.cuda.HalfTensor": "float16",
    "torch.cuda.FloatTensor": "float32",
}
#: Methods that cast a tensor, or a module in place.
CASTING_METHODS = {
    "half": "float16",
    "bfloat16": "bfloat16",
    "float": "float32",
    "double": "float64",
}
#: Classes that are not written as such, and what returns an object of a class for sure.
_OBJECTS = {
    *("amp.scale_loss", "autocast", "contextlib.nullcontext", "contextlib.suppress"),
    *("torch.device", "torch.no_grad", "torch.enable_grad"),
}
#: Classes whose attributes are options with defaults: of yacs, fvcore, easydict, ml_collections.
_CONFIGS = {"CfgNode", "EasyDict", "ConfigDict"}
HALVES = ("float16", "bfloat16")


def canonical(dotted: str) -> str:
    """Return one name for all spellings: ``amp.scale_loss``, ``GradScaler``, ``clip_grad_norm_``.

    Args:
        dotted: where a script finds it, ``"apex.amp.scale_loss"``.
    """
    prefix, _, last = dotted.rpartition(".")
    prefix += "."
    if prefix in _AMP:
        return f"amp.{last}"
    if prefix in _TORCH_AMP and last in ("GradScaler", "autocast"):
        return last
    if prefix in _CLIPPING and last.startswith("clip_grad_"):
        return f"{last.removesuffix('_')}_"
    if dotted in _PARALLEL:
        return "parallel"
    return dotted


def is_class(dotted: str) -> bool:
    """Return whether a name is written as that of a class."""
    return dotted.rpartition(".")[2][:1].isupper()


def makes_object(dotted: str) -> bool:
    """Return whether what a call of this returns certainly is no number, text or None."""
    return is_class(dotted) or is_module(dotted) or canonical(dotted) in _OBJECTS


def is_optimizer(dotted: str) -> bool:
    """Return whether a class is an optimizer's, by where it lies."""
    return (
        dotted.startswith(_OPTIMIZERS)
        and not dotted.startswith(_NO_OPTIMIZERS)
        and is_class(dotted)
    )


def is_config(dotted: str) -> bool:
    """Return whether a class is that of options, which files and command lines may set."""
    return dotted.rpartition(".")[2] in _CONFIGS


def is_module(dotted: str) -> bool:
    """Return whether calling this makes a module, by its name."""
    last = dotted.rpartition(".")[2]
    in_torch = dotted.startswith(("torch.nn.", "apex.normalization.")) and is_class(dotted)
    return (in_torch and last not in ("Parameter", "Buffer")) or dotted.startswith(
        "torchvision.models."
    )
