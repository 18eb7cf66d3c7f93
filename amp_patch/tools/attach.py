"""Attaches the tool that the environment names, in the process of the user's script.

Knows the variables of the environment that `launch` sets; imports no torch.
"""

from __future__ import annotations

import os

from wrapt import register_post_import_hook

from . import early_notice

#: Names what is called in the script's process, as "module:function", when it imports amp_patch.
TOOL = "AMP_PATCH_TOOL"
#: JSON that this function finds there.
OPTIONS = "AMP_PATCH_TOOL_OPTIONS"


def attach() -> None:
    """Let the tool come in when amp_patch is imported, if there is one."""
    tool = os.environ.get(TOOL)
    if tool:
        register_post_import_hook(tool, "amp_patch.session")
        early_notice.watch(os.environ[OPTIONS])
