"""The names of NVIDIA's apex, over amp_patch: what scripts written for apex import."""

from . import RNN as RNN
from . import _autocast_utils as _autocast_utils
from . import amp as amp
from . import contrib as contrib
from . import fp16_utils as fp16_utils
from . import fused_dense as fused_dense
from . import mlp as mlp
from . import multi_tensor_apply as multi_tensor_apply
from . import normalization as normalization
from . import optimizers as optimizers
from . import parallel as parallel
from . import reparameterization as reparameterization
