"""The names of NVIDIA's apex, over amp_patch: what scripts written for apex import."""

from . import amp as amp
from . import fp16_utils as fp16_utils
from . import multi_tensor_apply as multi_tensor_apply
from . import normalization as normalization
from . import optimizers as optimizers
from . import parallel as parallel
