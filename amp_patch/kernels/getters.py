"""What torch knows of a tensor, for `map` over many of them: it then calls no Python."""

import operator

DEVICE = operator.attrgetter("device")
DTYPE = operator.attrgetter("dtype")
GRAD = operator.attrgetter("grad")
IS_CPU = operator.attrgetter("is_cpu")
IS_CUDA = operator.attrgetter("is_cuda")
IS_SPARSE = operator.attrgetter("is_sparse")
LAYOUT = operator.attrgetter("layout")
REQUIRES_GRAD = operator.attrgetter("requires_grad")
VERSION = operator.attrgetter("_version")
