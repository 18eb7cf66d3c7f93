"""Names of apex.amp and torch.amp that `amp_patch.amp` has not, and what takes their place."""

from __future__ import annotations

_OF_APEX = "from apex import amp, in a script that amp-patch run starts"
#: Name -> what takes its place.
INSTEAD = {
    "GradScaler": (
        "with amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward(), then "
        "optimizer.step()"
    ),
    "_amp_state": (
        "amp.loss_scale() for the scale, amp.step_was_skipped(optimizer) for a skipped step, or "
        f"{_OF_APEX}"
    ),
    "autocast": (
        "amp.initialize(model, optimizer), from which on the model computes at its level, or "
        "with amp.half_region(): for a part"
    ),
    "init": "model, optimizer = amp.initialize(model, optimizer, opt_level='O1')",
    **dict.fromkeys(("amp", "handle", "lists", "opt", "scaler"), _OF_APEX),
}


def message(name: str) -> str:
    """Return what an AttributeError of `amp_patch.amp` says."""
    mend = f"; use {INSTEAD[name]}" if name in INSTEAD else ""
    return f"module 'amp_patch.amp' has no attribute {name!r}{mend}"
