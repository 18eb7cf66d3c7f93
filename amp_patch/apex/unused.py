"""Says at the end of ``amp-patch run`` that it had no effect, for the script never called amp.

It speaks where the options of the command need amp, and where the script trained without: it has
made an optimizer, and imported nothing of apex or amp_patch.

Runs in the script's process; imports no torch.
"""

from __future__ import annotations

import atexit
import os
import sys

#: The process that becomes the script, by its id: what it starts is not spoken of.
SCRIPT = "AMP_PATCH_SCRIPT"
_OPTIONS = {"AMP_PATCH_OPT_LEVEL": "--opt-level", "AMP_PATCH_RULES": "--rules"}


def watch() -> None:
    """Speak at the end of this process, if it is the script's."""
    own = os.getpid()
    given = [f"{option} {os.environ[name]}" for name, option in _OPTIONS.items() if _is_set(name)]
    if os.environ.get(SCRIPT) == str(own) and os.environ.get("RANK", "0") == "0":
        atexit.register(_speak, own, " ".join(given))


def _is_set(name: str) -> bool:
    return bool(os.environ.get(name))


def _speak(own: int, given: str) -> None:
    session = sys.modules.get("amp_patch.session")
    was_used = session is not None and session.session.was_used
    # a fork ends here, too; an error says enough; a launcher of torch's only starts scripts
    if was_used or os.getpid() != own or hasattr(sys, "last_type") or _is_a_launcher():
        return
    if not given and not _trained_without():
        return
    print(
        f"amp-patch: {sys.argv[0]} never called amp.initialize(), so that "
        f"{given or 'amp-patch run'} had no effect: "
        "it ran as without amp-patch. Add `from amp_patch import amp`, `model, optimizer = "
        "amp.initialize(model, optimizer)`, and `with amp.scale_loss(loss, optimizer) as "
        "scaled_loss: scaled_loss.backward()`.",
        file=sys.stderr,
    )


def _trained_without() -> bool:
    """Return whether the script has made an optimizer of torch's, and imported no amp."""
    if "apex" in sys.modules or "amp_patch.session" in sys.modules:
        return False
    optim = sys.modules.get("torch.optim")
    classes = [] if optim is None else [optim.Optimizer]
    for one in classes:  # torch marks the step of each class of which there was an optimizer
        if getattr(one.step, "hooked", False):
            return True
        classes += one.__subclasses__()
    return False


def _is_a_launcher() -> bool:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec is not None and spec.name.startswith("torch.distributed.")
