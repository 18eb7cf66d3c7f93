"""The names of NVIDIA's apex, over amp_patch: what scripts written for apex import."""

from . import amp as amp
from . import fp16_utils as fp16_utils
from . import normalization as normalization
from . import parallel as parallel
