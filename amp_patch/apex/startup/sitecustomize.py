"""Runs at the start of every process of ``amp-patch run``: apex can be imported in it.

Where a tool runs the script (``amp-patch sweep``), it comes in when amp_patch is imported.

Python imports the first sitecustomize of ``sys.path``; this one takes itself off the path again
and runs the one that it stands in front of. Imports no torch.
"""

import importlib
import importlib.util
import os
import sys


def _run_the_next() -> None:
    """Run the environment's own sitecustomize, if it has one."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != here]
    importlib.invalidate_caches()
    this = sys.modules.pop("sitecustomize", None)
    try:
        importlib.import_module("sitecustomize")
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        # The import system looks for the module that it is importing.
        if this is not None:
            sys.modules.setdefault("sitecustomize", this)


def _install() -> None:
    """Install the drop-in, if this is the Python that ``amp-patch run`` ran in."""
    if os.environ.get("AMP_PATCH_RUN") != sys.prefix:
        return
    if importlib.util.find_spec("amp_patch") is None:
        sys.path.append(os.path.abspath(os.path.join(os.path.dirname(__file__), *[os.pardir] * 3)))
    force = os.environ.get("AMP_PATCH_FORCE") == "1"
    importlib.import_module("amp_patch.apex").install(force=force)
    importlib.import_module("amp_patch.apex.unused").watch()
    if os.environ.get("AMP_PATCH_TOOL"):
        importlib.import_module("amp_patch.tools.attach").attach()
    if os.environ.get("AMP_PATCH_REPORT"):
        importlib.import_module("amp_patch.tools.run_report").start()


_run_the_next()
_install()
