"""The names of NVIDIA's apex, over amp_patch: what scripts written for apex import."""

from . import amp as amp

from . import parallel as parallel
