"""Owns the data of how functions of other libraries run: those of graph neural networks.

It must not know how a function is wrapped or where one is imported; `library_functions` does.

Each row names a function by its module and its name there (``Class.method`` for a method), and says
how its floating arguments are cast, where half ones are computed in float32, and why. ``*.method``
stands for that method of every class that the module has. The first word:

- "half": to the level's half dtype at O1 and O4; elsewhere as "promote".
- "promote": where dtypes are mixed, to the widest of them. In a model that is stored in half
  precision (O2, O3, O5) the result has the model's dtype.
- "stored": in such a model to its dtype, and its results too; elsewhere not at all.

The second word: "never", "cpu" (tensors on the CPU) or "always". Results come in the dtype that they would
have had.
"""

from __future__ import annotations

HALF_AS_IN_AUTOCAST = "DGL casts its arguments to half inside of torch.autocast"
FROM_ELSEWHERE = "features of edges that are no input of the model meet the layer's half weights"
HUBS = "a sum of half numbers stops growing at 2048 in float16, at 256 in bfloat16"

RULES = {
    "dgl.ops.spmm": {
        # the mean divides a sum that may leave float16's range: both are in float32 on the CPU
        "gspmm": ("half", "cpu", HALF_AS_IN_AUTOCAST),
    },
    "dgl.ops.sddmm": {
        "gsddmm": ("half", "cpu", HALF_AS_IN_AUTOCAST),
    },
    "dgl.ops.edge_softmax": {
        "edge_softmax": ("half", "cpu", HALF_AS_IN_AUTOCAST),
    },
    "dgl.ops.segment": {
        "segment_reduce": ("half", "cpu", HALF_AS_IN_AUTOCAST),
        "segment_softmax": ("half", "cpu", "made of segment_reduce"),
        "segment_mm": ("half", "never", HALF_AS_IN_AUTOCAST),
    },
    "dgl.ops.gather_mm": {
        "gather_mm": ("half", "never", HALF_AS_IN_AUTOCAST),
    },
    "dgl.core": {
        "message_passing": ("stored", "never", "messages of a user's function may be float32"),
    },
    "dgl.nn.pytorch.conv": {
        "*.__call__": ("stored", "never", FROM_ELSEWHERE),
    },
    "torch_geometric.nn.conv.message_passing": {
        "MessagePassing.__call__": ("stored", "never", FROM_ELSEWHERE),
    },
    "torch_geometric.utils._scatter": {
        "scatter": ("promote", "always", HUBS),
    },
    "torch_geometric.utils._segment": {
        "segment": ("promote", "always", HUBS),
    },
    "torch_geometric.utils._softmax": {
        "softmax": ("half", "always", "float32 weights of edges would make float32 messages"),
    },
    "torch_geometric.utils._spmm": {
        "spmm": ("half", "cpu", "a matrix product, for which the CPU has no half kernel"),
    },
    "torch_geometric.nn.aggr.base": {
        "Aggregation.__call__": ("stored", "never", "float32 weights of edges make such messages"),
    },
    "torch_scatter.scatter": {
        "scatter_sum": ("promote", "always", HUBS),
        "scatter_add": ("promote", "always", HUBS),
        "scatter_mean": ("promote", "always", HUBS),
        "scatter_mul": ("promote", "always", "as torch_geometric's scatter"),
        "scatter_min": ("promote", "always", "as torch_geometric's scatter"),
        "scatter_max": ("promote", "always", "as torch_geometric's scatter"),
    },
    "torch_scatter.segment_csr": {
        "segment_sum_csr": ("promote", "always", HUBS),
        "segment_mean_csr": ("promote", "always", HUBS),
    },
    "torch_scatter.segment_coo": {
        "segment_sum_coo": ("promote", "always", HUBS),
        "segment_mean_coo": ("promote", "always", HUBS),
    },
}
