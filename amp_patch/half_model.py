"""Where models that amp_patch 0.1.0 pickled look for their hooks; nothing else imports it."""

from .weights.half_model import ForwardCasts

__all__ = ["ForwardCasts"]
