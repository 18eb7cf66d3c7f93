"""Lets every process of this environment import apex, from amp_patch; see `amp-patch enable`.

`amp-patch disable` removes this file. Python runs it when it starts, by amp_patch_apex.pth, so it
imports nothing before somebody asks for apex.
"""

import sys

NAMES = ("apex", "amp_C", "apex_C", "fused_adam_cuda")


class Hook:
    """Stands in ``sys.meta_path`` until apex is asked for; then the drop-in takes its place."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> object:
        """Return where a module of apex lies; None for other names, and without amp_patch."""
        if fullname not in NAMES or not self._install():
            return None
        found = (one.find_spec(fullname, None, None) for one in list(sys.meta_path))
        return next(filter(None, found), None)

    def find_distributions(self, context: object = None) -> tuple[()]:
        """Have the drop-in tell apex's version, where importlib.metadata asks for that alone."""
        if str(getattr(context, "name", None)).lower() == "apex":
            self._install()
        return ()

    def _install(self) -> bool:
        try:
            from amp_patch.apex import install
        except ModuleNotFoundError:
            return False
        if Hook in map(type, sys.meta_path):
            sys.meta_path.remove(self)  # type: ignore[arg-type]  # of no class of importlib's
            install()
        return True


# No start of Python is to pay for the import of a type.
sys.meta_path.insert(0, Hook())  # type: ignore[arg-type]  # of no class of importlib's
