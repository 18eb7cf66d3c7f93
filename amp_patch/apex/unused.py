"""Says at the end of ``amp-patch run`` that the script never called amp, if its options need that.

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
    """Speak at the end of this process, if it is the script's and an option was given."""
    own = os.getpid()
    given = [f"{option} {os.environ[name]}" for name, option in _OPTIONS.items() if _is_set(name)]
    if given and os.environ.get(SCRIPT) == str(own) and os.environ.get("RANK", "0") == "0":
        atexit.register(_speak, own, " ".join(given))


def _is_set(name: str) -> bool:
    return bool(os.environ.get(name))


def _speak(own: int, given: str) -> None:
    session = sys.modules.get("amp_patch.session")
    was_used = session is not None and session.session.was_used
    # a fork ends here, too; an error says enough; a launcher of torch's only starts scripts
    if was_used or os.getpid() != own or hasattr(sys, "last_type") or _is_a_launcher():
        return
    print(
        f"amp-patch: {sys.argv[0]} never called amp.initialize(), so that {given} had no effect: "
        "it ran as without amp-patch. Add `from apex import amp`, `model, optimizer = "
        "amp.initialize(model, optimizer)`, and `with amp.scale_loss(loss, optimizer) as "
        "scaled_loss: scaled_loss.backward()`.",
        file=sys.stderr,
    )


def _is_a_launcher() -> bool:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec is not None and spec.name.startswith("torch.distributed.")
