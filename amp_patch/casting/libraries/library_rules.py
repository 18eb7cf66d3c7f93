"""Owns the data of how functions of other libraries run: those of graph neural networks, of torch.

Those of torch that have no half kernel are not here but in `rules.NO_HALF`.

It must not know how a function is wrapped, as `library_casts` does, or where one is imported, as
`library_functions` does.

Each row names a function by its module and its name there (``Class.method`` for a method), and says
how its floating arguments are cast, where half ones are computed in float32, and why. ``*.method``
stands for that method of every class that the module, or one inside of it, defines. The first word:

- "half": to the level's half dtype at O1 and O4; elsewhere as "promote".
- "promote": where dtypes are mixed, to the widest of them. In a model that is stored in half
  precision (O2, O3, O5) the result has the model's dtype.
- "stored": in such a model to its dtype, and its results too; elsewhere not at all. Where the
  second word says float32, all that is computed inside is, with the half weights of the model.
- "float": to float32 at every level but O0, with all that is computed inside; in such a model the
  results have its dtype.
- "result": not at all; at O1 and O4 the results are cast to the level's half dtype.
- "frames": as "stored", for what DGL makes of frames of features; those are cast when read.
- "rows": as "promote", for what writes rows of a column of DGL's, which is cast as well.
- "sums": as "promote", for PyTorch Geometric's ``scatter``: sums and means are made in float32
  without a float32 copy of all half rows.
- "told": to float32 where half, of what counts: it may be told a half dtype. The results have the
  dtype that they would have had.
- "loss": to float32 at every level but O0, with all that is computed inside, and not cast back. For
  methods of models, which scripts call beside the model's call, and what calls a model for them.
- "widened": half ones to float32 at every level, beside models as well.
- "first": as "widened", and the results have the dtype of the first argument.
- "wide": in such a model half ones to float32, and the results stay in it.
- "rounded": as "wide", and the results are cast to the model's dtype. For what calls no layer: it
  needs no region, in which each call of torch goes through Python.
- "lengths": as "rounded", where the first argument is half and no dtype is told.
- "steep": in a model that is stored in float16 as "rounded", where the first argument is half.
- "powers": as "steep", where the exponent is a number below 0; as "wide" where it is a tensor.
- "no_half": as `rules.NO_HALF` where a model is stored in half; O1 has another rule for it.
- "uncast": not at all, nor is what it calls, as if no level cast; left alone in such a model.
- "lookup": as it is, but the gradient of a half table is added up in float32 on a CPU.
- "counted": as it is, but a weight that is used very often is used in parts, see `many_uses`.
- "registered": where functions cast, to the dtype that a custom operator has registered.
- "logits": as "wide", and not where a CUDA kernel of ours takes them as they are.
- "product", "products": in such a model float32 ones that meet half ones to its dtype, as its
  layers cast them; not where a float32 parameter is among them, which came to the model later. Of
  a "product" the first two tell, of a "cell" the first and the third.
- "attention": as "products", but for the mask, which torch takes in float32 beside half ones.
- "joined", "norm": where they meet so, to float32, and the results are cast to the model's dtype.
  So are half ones of which torch's kernel would lose too much: see `meeting_dtypes`.
- "mixed": as "joined", for `torch.lerp`; of a float32 average and a half weight, beside a model as
  well, the results stay in float32.

The second word: "never", "cpu" (tensors on the CPU), "mixed" (there, and everywhere where half ones
come with float32 ones), "always", or "hubs" (in float16, with all that is computed inside, on a
graph of DGL of which a node has more neighbours than float16 counts to). Results come in the dtype
that they would have had.

The third, a key of `REASONS`, is for readers alone. A library that asks whether autocast is on in
order to cast stands in `autocast_questions.CAST_BY_RULES` as well, and what has no half kernel on
any device in a list of `rules`.
"""

from __future__ import annotations

REASONS = {
    "autocast": "DGL casts its arguments to half inside of torch.autocast",
    "autocast rule": "who wrote the operator says what it is cast to, by register_autocast",
    "bias": "the layer adds a float32 bias at O1, and what follows would keep float32 activations",
    "boxes": "half precision rounds corners of boxes by pixels, and the CPU has no half kernel",
    "cancels": "its result or its gradient is a small difference of numbers, which half rounds",
    "curved": "its second derivative is 1 over it: below 1.5e-5 that is more than float16 holds",
    "choices": "differences of large products say which points are near, and half rounds these",
    "CPU kernel": "torch has no half kernel for it on the CPU",
    "columns": "DGL refuses to write rows of one dtype to a column of another",
    "coordinates": "torch's backward finds pixels anew, in half: of 64 a quarter of one is lost",
    "counts": "more neighbours than 65504 are infinitely many in float16, and divide to zero",
    "hubs": "a sum of half numbers stops growing at 2048 in float16, at 256 in bfloat16",
    "kept": "it computes what is kept as a float32 weight, which half precision would round",
    "large": "it adds up over whole graphs, which soon leaves float16's range",
    "log": "a logarithm of probabilities plus 1e-15, which half precision rounds to 0 and 1",
    "loss": "half precision is too coarse for a loss, and its weights or targets may be float32",
    "layer": "features of edges that are no input of the model meet the layer's half weights",
    "drawn": "what is drawn rounds to 0 or 1, where log_prob is infinite; some have no CPU kernel",
    "float32 state": "it writes what it computes to float32 tensors of its own, by index",
    "matrix": "a matrix product, for which the CPU has no half kernel",
    "not finite": "torch's kernel for it makes inf and NaN of half numbers",
    "one dtype": "it takes one dtype, and forward makes float32 tensors: noise, positions, a mask",
    "no kernel": "it calls cdist, for which torch has no half kernel",
    "no kernel anywhere": "torch has no half kernel for it; losses and choices are made of it",
    "messages": "messages of the user's own functions may be float32",
    "own": "it makes float32 tensors of its own, which meet half features",
    "outside": "it hands on what layers inside of a model return, to layers that are no part of it",
    "parts": "a function that is made of others in this table",
    "power": "casts of vectors that change in each call take longer than products with them",
    "rows": "it computes numbers of rows, which half precision rounds to others",
    "sampled": "it refuses two dtypes, and torch has a half kernel for it on no device",
    "spectra": "torch has no half kernel for it, but on a GPU for sizes that are powers of two",
    "squares": "its gradient squares both: below 2e-4 they are 0 in float16, above 256 infinite",
    "sparse": "it refuses two dtypes, and half matrices in rows on the CPU",
    "steep": "its gradient takes the square or the cube of its result, which float16 may not hold",
    "tiny": "a constant that keeps it from dividing by zero, 1e-30 or 1e-12, is zero in float16",
    "uses": "autograd adds up in half what comes back from hundreds of uses",
    "weights": "float32 weights of edges would make float32 messages",
}

RULES = {
    "dgl.ops.spmm": {
        # the mean divides a sum that may leave float16's range: both are in float32 on the CPU
        "gspmm": ("half", "mixed", "autocast"),
    },
    "dgl.ops.sddmm": {
        "gsddmm": ("half", "mixed", "autocast"),
    },
    "dgl.ops.edge_softmax": {
        "edge_softmax": ("half", "cpu", "autocast"),
    },
    "dgl.ops.segment": {
        "segment_reduce": ("half", "cpu", "autocast"),
        "segment_softmax": ("half", "cpu", "parts"),
        "segment_mm": ("half", "never", "autocast"),
    },
    "dgl.ops.gather_mm": {
        "gather_mm": ("half", "never", "autocast"),
    },
    "dgl.backend.pytorch.sparse": {
        # which gather_mm above calls of few columns: it takes a matrix for each row
        "gather_mm": ("half", "cpu", "hubs"),
    },
    "dgl.core": {
        "message_passing": ("stored", "never", "messages"),
    },
    "dgl.frame": {
        "Column.extend": ("rows", "never", "columns"),
        "Column.update": ("rows", "never", "columns"),
    },
    "dgl.udf": {
        "EdgeBatch.__init__": ("frames", "never", "layer"),
        "NodeBatch.__init__": ("frames", "never", "layer"),
    },
    "dgl.nn.pytorch": {
        "*.__call__": ("stored", "never", "layer"),
    },
    "dgl.nn.pytorch.conv.appnpconv": {
        "APPNPConv.forward": ("stored", "hubs", "counts"),
    },
    "dgl.nn.pytorch.conv.chebconv": {
        "ChebConv.forward": ("stored", "hubs", "counts"),
    },
    "dgl.nn.pytorch.conv.gatconv": {
        "GATConv.forward": ("result", "never", "bias"),
    },
    "dgl.nn.pytorch.conv.gatv2conv": {
        "GATv2Conv.forward": ("result", "never", "bias"),
    },
    "dgl.nn.pytorch.conv.gcn2conv": {
        "GCN2Conv.forward": ("stored", "hubs", "counts"),
    },
    "dgl.nn.pytorch.conv.graphconv": {
        "GraphConv.forward": ("result", "hubs", "bias"),
    },
    "dgl.nn.pytorch.conv.relgraphconv": {
        "RelGraphConv.forward": ("result", "never", "bias"),
    },
    "dgl.nn.pytorch.conv.sageconv": {
        "SAGEConv.forward": ("result", "hubs", "bias"),
    },
    "dgl.nn.pytorch.conv.sgconv": {
        "SGConv.forward": ("stored", "hubs", "counts"),
    },
    "dgl.nn.pytorch.conv.tagconv": {
        "TAGConv.forward": ("stored", "hubs", "counts"),
    },
    "dgl.nn.pytorch.conv.egnnconv": {
        "EGNNConv.forward": ("stored", "always", "tiny"),
    },
    "dgl.nn.pytorch.conv.pnaconv": {
        "PNAConvTower.reduce_func": ("stored", "always", "tiny"),
    },
    "dgl.nn.pytorch.conv.dgnconv": {
        "DGNConvTower.reduce_func": ("stored", "always", "tiny"),
    },
    "dgl.transforms.functional": {
        "knn_graph": ("float", "always", "choices"),
        "segmented_knn_graph": ("float", "always", "choices"),
    },
    "torch._VF": {
        "gru_cell": ("cell", "never", "one dtype"),
        "lstm_cell": ("cell", "never", "one dtype"),
        "rnn_relu_cell": ("cell", "never", "one dtype"),
        "rnn_tanh_cell": ("cell", "never", "one dtype"),
        "gru": ("counted", "never", "uses"),
        "lstm": ("counted", "never", "uses"),
        "nuclear_norm": ("no_half", "always", "no kernel anywhere"),
        "rnn_relu": ("counted", "never", "uses"),
        "rnn_tanh": ("counted", "never", "uses"),
    },
    "torch": {
        "addbmm": ("products", "never", "one dtype"),
        "addmm": ("products", "never", "one dtype"),
        "addmv": ("products", "never", "one dtype"),
        "addr": ("products", "never", "one dtype"),
        "baddbmm": ("products", "never", "one dtype"),
        "bmm": ("product", "never", "one dtype"),
        "mm": ("product", "never", "one dtype"),
        "mv": ("product", "never", "one dtype"),
        "matmul": ("product", "never", "one dtype"),
        "prelu": ("product", "never", "one dtype"),
        "chain_matmul": ("products", "never", "one dtype"),
        "conv1d": ("product", "never", "one dtype"),
        "conv2d": ("product", "never", "one dtype"),
        "conv3d": ("product", "never", "one dtype"),
        "conv_transpose1d": ("product", "never", "one dtype"),
        "conv_transpose2d": ("product", "never", "one dtype"),
        "conv_transpose3d": ("product", "never", "one dtype"),
        "einsum": ("products", "never", "one dtype"),
        "gru_cell": ("products", "never", "one dtype"),
        "lstm_cell": ("products", "never", "one dtype"),
        "rnn_relu_cell": ("products", "never", "one dtype"),
        "rnn_tanh_cell": ("products", "never", "one dtype"),
        "Tensor.addbmm": ("products", "never", "one dtype"),
        "Tensor.addmm": ("products", "never", "one dtype"),
        "Tensor.addmv": ("products", "never", "one dtype"),
        "Tensor.addr": ("products", "never", "one dtype"),
        "Tensor.baddbmm": ("products", "never", "one dtype"),
        "Tensor.bmm": ("product", "never", "one dtype"),
        "Tensor.mm": ("product", "never", "one dtype"),
        "Tensor.mv": ("product", "never", "one dtype"),
        "Tensor.matmul": ("product", "never", "one dtype"),
        "Tensor.prelu": ("product", "never", "one dtype"),
        "Tensor.__matmul__": ("product", "never", "one dtype"),
        "Tensor.__rmatmul__": ("product", "never", "one dtype"),
        "allclose": ("joined", "never", "one dtype"),
        "bilinear": ("joined", "never", "one dtype"),
        "cartesian_prod": ("joined", "never", "one dtype"),
        "cross": ("joined", "never", "one dtype"),
        "dot": ("joined", "never", "one dtype"),
        "grid_sampler": ("joined", "never", "coordinates"),
        "heaviside": ("joined", "never", "one dtype"),
        "inner": ("joined", "never", "one dtype"),
        "isclose": ("joined", "never", "one dtype"),
        "lerp": ("mixed", "never", "one dtype"),
        "meshgrid": ("joined", "never", "one dtype"),
        "tensordot": ("joined", "never", "one dtype"),
        "vdot": ("joined", "never", "one dtype"),
        "Tensor.allclose": ("joined", "never", "one dtype"),
        "Tensor.cross": ("joined", "never", "one dtype"),
        "Tensor.dot": ("joined", "never", "one dtype"),
        "Tensor.heaviside": ("joined", "never", "one dtype"),
        "Tensor.inner": ("joined", "never", "one dtype"),
        "Tensor.isclose": ("joined", "never", "one dtype"),
        "Tensor.lerp": ("mixed", "never", "one dtype"),
        "Tensor.vdot": ("joined", "never", "one dtype"),
        "arctan2": ("lengths", "always", "squares"),
        "atan2": ("lengths", "always", "squares"),
        "logcumsumexp": ("lengths", "always", "cancels"),
        "logsumexp": ("lengths", "always", "cancels"),
        "nanmean": ("lengths", "always", "counts"),
        "sinc": ("lengths", "always", "cancels"),
        "Tensor.arctan2": ("lengths", "always", "squares"),
        "Tensor.atan2": ("lengths", "always", "squares"),
        "Tensor.logcumsumexp": ("lengths", "always", "cancels"),
        "Tensor.logsumexp": ("lengths", "always", "cancels"),
        "Tensor.nanmean": ("lengths", "always", "counts"),
        "Tensor.sinc": ("lengths", "always", "cancels"),
        "pow": ("powers", "always", "steep"),
        "reciprocal": ("steep", "always", "steep"),
        "rsqrt": ("steep", "always", "steep"),
        "Tensor.pow": ("powers", "always", "steep"),
        "Tensor.__pow__": ("powers", "always", "steep"),
        "Tensor.reciprocal": ("steep", "always", "steep"),
        "Tensor.rsqrt": ("steep", "always", "steep"),
        "corrcoef": ("lengths", "always", "squares"),
        "cov": ("lengths", "always", "squares"),
        "Tensor.corrcoef": ("lengths", "always", "squares"),
        "Tensor.cov": ("lengths", "always", "squares"),
        "cosine_similarity": ("rounded", "always", "tiny"),
        "matrix_exp": ("promote", "always", "not finite"),
        "Tensor.matrix_exp": ("promote", "always", "not finite"),
        "cdist": ("wide", "always", "no kernel anywhere"),
        "istft": ("rounded", "always", "spectra"),
        "pdist": ("wide", "always", "no kernel anywhere"),
        "embedding": ("lookup", "cpu", "hubs"),
        "embedding_bag": ("lookup", "cpu", "hubs"),
        "nuclear_norm": ("no_half", "always", "no kernel anywhere"),
        "segment_reduce": ("promote", "always", "hubs"),
        "spmm": ("stored", "cpu", "sparse"),
        "stft": ("rounded", "always", "spectra"),
    },
    "torch.special": {
        "logsumexp": ("lengths", "always", "cancels"),
        "sinc": ("lengths", "always", "cancels"),
    },
    "torch.fft": {
        "fft": ("rounded", "always", "spectra"),
        "fft2": ("rounded", "always", "spectra"),
        "fftn": ("rounded", "always", "spectra"),
        "hfft": ("rounded", "always", "spectra"),
        "hfft2": ("rounded", "always", "spectra"),
        "hfftn": ("rounded", "always", "spectra"),
        "ifft": ("rounded", "always", "spectra"),
        "ifft2": ("rounded", "always", "spectra"),
        "ifftn": ("rounded", "always", "spectra"),
        "ihfft": ("rounded", "always", "spectra"),
        "ihfft2": ("rounded", "always", "spectra"),
        "ihfftn": ("rounded", "always", "spectra"),
        "irfft": ("rounded", "always", "spectra"),
        "irfft2": ("rounded", "always", "spectra"),
        "irfftn": ("rounded", "always", "spectra"),
        "rfft": ("rounded", "always", "spectra"),
        "rfft2": ("rounded", "always", "spectra"),
        "rfftn": ("rounded", "always", "spectra"),
    },
    "torch.sparse": {
        "addmm": ("half", "cpu", "sparse"),
        "log_softmax": ("float", "always", "sparse"),
        "mm": ("half", "cpu", "sparse"),
        "sampled_addmm": ("half", "always", "sampled"),
        "softmax": ("float", "always", "sparse"),
    },
    "torch.linalg": {
        "cross": ("joined", "never", "one dtype"),
        "matmul": ("product", "never", "one dtype"),
        "multi_dot": ("products", "never", "one dtype"),
        "vecdot": ("product", "never", "one dtype"),
        "matrix_exp": ("promote", "always", "not finite"),
        "matrix_norm": ("no_half", "always", "no kernel anywhere"),
        # torch.norm and Tensor.norm call vector_norm
        "norm": ("lengths", "always", "curved"),
        "vector_norm": ("lengths", "always", "curved"),
    },
    "torch.nn.functional": {
        "conv1d": ("product", "never", "one dtype"),
        "conv2d": ("product", "never", "one dtype"),
        "conv3d": ("product", "never", "one dtype"),
        "conv_transpose1d": ("product", "never", "one dtype"),
        "conv_transpose2d": ("product", "never", "one dtype"),
        "conv_transpose3d": ("product", "never", "one dtype"),
        "linear": ("product", "never", "one dtype"),
        "prelu": ("product", "never", "one dtype"),
        "group_norm": ("norm", "never", "one dtype"),
        "instance_norm": ("counted", "never", "uses"),
        "layer_norm": ("norm", "never", "one dtype"),
        "multi_head_attention_forward": ("counted", "never", "uses"),
        "rms_norm": ("counted", "never", "uses"),
        "scaled_dot_product_attention": ("attention", "never", "one dtype"),
        "bilinear": ("joined", "never", "one dtype"),
        "affine_grid": ("wide", "always", "coordinates"),
        "grid_sample": ("joined", "never", "coordinates"),
        # rows of zeros are ordinary in graphs, and layers of both libraries normalize rows
        "normalize": ("rounded", "always", "tiny"),
        "local_response_norm": ("lengths", "always", "squares"),
        "lp_pool1d": ("lengths", "always", "squares"),
        "lp_pool2d": ("lengths", "always", "squares"),
        "lp_pool3d": ("lengths", "always", "squares"),
        "tanhshrink": ("lengths", "always", "cancels"),
        "cosine_similarity": ("rounded", "always", "tiny"),
        "cosine_embedding_loss": ("rounded", "always", "tiny"),
        "pairwise_distance": ("lengths", "always", "curved"),
        "pdist": ("wide", "always", "no kernel anywhere"),
        # those that torch's autocast computes in float32, and ctc_loss, which has no half kernel
        "binary_cross_entropy": ("wide", "always", "loss"),
        "binary_cross_entropy_with_logits": ("wide", "always", "loss"),
        "cross_entropy": ("logits", "always", "loss"),
        "ctc_loss": ("wide", "always", "loss"),
        "gaussian_nll_loss": ("wide", "always", "loss"),
        "hinge_embedding_loss": ("wide", "always", "loss"),
        "huber_loss": ("wide", "always", "loss"),
        "kl_div": ("wide", "always", "loss"),
        "l1_loss": ("wide", "always", "loss"),
        "margin_ranking_loss": ("wide", "always", "loss"),
        "mse_loss": ("wide", "always", "loss"),
        "multi_margin_loss": ("wide", "always", "loss"),
        "multilabel_margin_loss": ("wide", "always", "loss"),
        "multilabel_soft_margin_loss": ("wide", "always", "loss"),
        "nll_loss": ("wide", "always", "loss"),
        "poisson_nll_loss": ("wide", "always", "loss"),
        "smooth_l1_loss": ("wide", "always", "loss"),
        "soft_margin_loss": ("wide", "always", "loss"),
        "triplet_margin_loss": ("wide", "always", "loss"),
    },
    "torch._C._nn": {
        # of F.interpolate(antialias=True)
        "_upsample_bicubic2d_aa": ("stored", "cpu", "CPU kernel"),
        "_upsample_bilinear2d_aa": ("stored", "cpu", "CPU kernel"),
        # torch says that this one was called, which CausalBias compares with that of F
        "scaled_dot_product_attention": ("attention", "never", "one dtype"),
    },
    "torch._library.custom_ops": {
        "CustomOpDef.__call__": ("registered", "never", "autocast rule"),
    },
    "torch.distributions": {
        "*.__init__": ("widened", "always", "drawn"),
    },
    "torch.nn.attention.flex_attention": {
        "flex_attention": ("attention", "never", "one dtype"),
    },
    "torch.nn.utils.parametrizations": {
        "_SpectralNorm.forward": ("uncast", "never", "power"),
    },
    "torch.nn.utils.parametrize": {
        # both call what a parametrization has as its right_inverse
        "ParametrizationList.__init__": ("uncast", "never", "kept"),
        "ParametrizationList.right_inverse": ("uncast", "never", "kept"),
        "remove_parametrizations": ("uncast", "never", "kept"),
    },
    "torch.nn.utils.spectral_norm": {
        "SpectralNorm.compute_weight": ("uncast", "never", "power"),
    },
    "torch_geometric.nn": {
        "*.__call__": ("stored", "never", "layer"),
    },
    "torch_geometric.nn.aggr.equilibrium": {
        "*.__call__": ("stored", "never", "layer"),
        "EquilibriumAggregation.forward": ("stored", "always", "hubs"),
    },
    "torch_geometric.nn.aggr.fused": {
        "FusedAggregation.forward": ("promote", "always", "hubs"),
    },
    "torch_geometric.nn.aggr.quantile": {
        "QuantileAggregation.forward": ("stored", "always", "rows"),
    },
    "torch_geometric.nn.aggr.variance_preserving": {
        "VariancePreservingAggregation.forward": ("promote", "always", "hubs"),
    },
    "torch_geometric.nn.attention.polynormer": {
        "PolynormerAttention.forward": ("float", "always", "large"),
    },
    "torch_geometric.nn.attention.sgformer": {
        "SGFormerAttention.forward": ("float", "always", "large"),
    },
    "torch_geometric.nn.conv.gat_conv": {
        "GATConv.forward": ("result", "never", "bias"),
    },
    "torch_geometric.nn.conv.gatv2_conv": {
        "GATv2Conv.forward": ("result", "never", "bias"),
    },
    "torch_geometric.nn.conv.gcn_conv": {
        "gcn_norm": ("told", "always", "counts"),
        "GCNConv.forward": ("result", "never", "bias"),
    },
    "torch_geometric.nn.conv.gmm_conv": {
        "GMMConv.forward": ("stored", "always", "tiny"),
    },
    "torch_geometric.nn.conv.mf_conv": {
        "MFConv.forward": ("float", "always", "float32 state"),
    },
    "torch_geometric.nn.dense.diff_pool": {
        "dense_diff_pool": ("stored", "always", "tiny"),
    },
    "torch_geometric.nn.dense.dmon_pool": {
        "DMoNPooling.forward": ("float", "always", "tiny"),
    },
    "torch_geometric.nn.dense.mincut_pool": {
        "dense_mincut_pool": ("float", "always", "tiny"),
    },
    "torch_geometric.nn.models.autoencoder": {
        "ARGA.discriminator_loss": ("loss", "always", "log"),
        "ARGA.reg_loss": ("loss", "always", "log"),
        "GAE.recon_loss": ("loss", "always", "log"),
        "VGAE.kl_loss": ("loss", "always", "loss"),
    },
    "torch_geometric.nn.models.deep_graph_infomax": {
        "DeepGraphInfomax.loss": ("loss", "always", "log"),
    },
    "torch_geometric.nn.models.graph_unet": {
        "GraphUNet.augment_adj": ("half", "cpu", "matrix"),
    },
    "torch_geometric.nn.models.lightgcn": {
        "LightGCN.link_pred_loss": ("loss", "always", "loss"),
        "LightGCN.recommendation_loss": ("loss", "always", "loss"),
    },
    "torch_geometric.nn.models.metapath2vec": {
        "MetaPath2Vec.loss": ("loss", "always", "log"),
    },
    "torch_geometric.nn.models.node2vec": {
        "Node2Vec.loss": ("loss", "always", "log"),
    },
    "torch_geometric.nn.models.signed_gcn": {
        "SignedGCN.loss": ("loss", "always", "loss"),
    },
    "torch_geometric.nn.models.tgn": {
        "TimeEncoder.forward": ("float", "always", "large"),
        "TGNMemory.forward": ("float", "always", "float32 state"),
        "TGNMemory.update_state": ("float", "always", "float32 state"),
    },
    "torch_geometric.nn.models.visnet": {
        "CosineCutoff.forward": ("stored", "never", "own"),
    },
    "torch_geometric.nn.norm.graph_size_norm": {
        "GraphSizeNorm.forward": ("float", "always", "large"),
    },
    "torch_geometric.nn.norm.instance_norm": {
        "InstanceNorm.forward": ("float", "always", "large"),
    },
    "torch_geometric.nn.norm.layer_norm": {
        "LayerNorm.forward": ("float", "always", "large"),
    },
    "torch_geometric.nn.pool.asap": {
        "ASAPooling.forward": ("stored", "cpu", "matrix"),
    },
    "torch_geometric.nn.pool.cluster_pool": {
        "ClusterPooling.forward": ("stored", "always", "own"),
    },
    "torch_geometric.nn.pool.mem_pool": {
        "MemPooling.forward": ("stored", "always", "no kernel"),
    },
    "torch_geometric.nn.unpool.knn_interpolate": {
        "knn_interpolate": ("stored", "always", "tiny"),
    },
    "torch_geometric.utils._degree": {
        "degree": ("told", "always", "hubs"),
    },
    "torch_geometric.utils._scatter": {
        "scatter": ("sums", "always", "hubs"),
    },
    "torch_geometric.utils._segment": {
        "segment": ("promote", "always", "hubs"),
    },
    "torch_geometric.utils._softmax": {
        "softmax": ("half", "always", "weights"),
    },
    "torch_geometric.utils._spmm": {
        "spmm": ("half", "cpu", "matrix"),
    },
    "torch_geometric.utils.embedding": {
        "get_embeddings": ("loss", "always", "outside"),
        "get_embeddings_hetero": ("loss", "always", "outside"),
    },
    "torch_geometric.utils.laplacian": {
        "get_laplacian": ("told", "always", "counts"),
    },
    "torch_scatter.scatter": {
        "scatter_sum": ("promote", "always", "hubs"),
        "scatter_add": ("promote", "always", "hubs"),
        "scatter_mean": ("promote", "always", "hubs"),
        "scatter_mul": ("promote", "always", "hubs"),
        "scatter_min": ("promote", "always", "hubs"),
        "scatter_max": ("promote", "always", "hubs"),
    },
    "torch_scatter.segment_csr": {
        "segment_sum_csr": ("promote", "always", "hubs"),
        "segment_mean_csr": ("promote", "always", "hubs"),
    },
    "torch_scatter.segment_coo": {
        "segment_sum_coo": ("promote", "always", "hubs"),
        "segment_mean_coo": ("promote", "always", "hubs"),
    },
    "torchvision.models.detection._utils": {
        "BoxCoder.decode_single": ("widened", "always", "boxes"),
        "BoxLinearCoder.decode": ("widened", "always", "boxes"),
    },
    "torchvision.models.detection.anchor_utils": {
        "AnchorGenerator.set_cell_anchors": ("told", "always", "boxes"),
    },
    # as torchvision's autocast does
    "torchvision.ops.boxes": {
        "batched_nms": ("widened", "always", "boxes"),
        "nms": ("widened", "always", "boxes"),
    },
    "torchvision.ops.deform_conv": {
        "deform_conv2d": ("first", "always", "boxes"),
    },
    "torchvision.ops.ps_roi_align": {
        "ps_roi_align": ("first", "always", "boxes"),
    },
    "torchvision.ops.ps_roi_pool": {
        "ps_roi_pool": ("first", "always", "boxes"),
    },
    "torchvision.ops.roi_align": {
        "roi_align": ("first", "always", "boxes"),
    },
    "torchvision.ops.roi_pool": {
        "roi_pool": ("first", "always", "boxes"),
    },
}
