"""Mixed-precision training for PyTorch by one line of code: ``from amp_patch import amp``.

This file owns the package's version and nothing else: the calls are in ``amp_patch.amp``.
Importing it imports no other module, and no torch attribute is touched before
``amp.initialize``.
"""

__all__ = ["__version__"]

__version__ = "0.1.0"
