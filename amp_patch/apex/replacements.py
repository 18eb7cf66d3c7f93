"""What to use in the place of the parts of apex that are not supplied: data only."""

#: Name of a module or of what is in it -> what stands there today.
REPLACEMENTS = {
    "apex.contrib.bottleneck": "torchvision.models.resnet.Bottleneck",
    "apex.contrib.conv_bias_relu": "torch.compile over torch.nn.Conv2d and relu",
    "apex.contrib.cudnn_gbn": "torch.nn.SyncBatchNorm",
    "apex.contrib.fmha": "torch.nn.functional.scaled_dot_product_attention",
    "apex.contrib.focal_loss": "torchvision.ops.sigmoid_focal_loss",
    "apex.contrib.group_norm": "torch.nn.GroupNorm",
    "apex.contrib.groupbn": "torch.nn.SyncBatchNorm",
    "apex.contrib.index_mul_2d": "torch's indexing and multiplication under torch.compile",
    "apex.contrib.multihead_attn": "torch.nn.MultiheadAttention",
    "apex.contrib.openfold_triton": "torch.compile",
    "apex.contrib.optimizers.distributed_fused_adam": (
        "torch.distributed.optim.ZeroRedundancyOptimizer or torch.distributed.fsdp"
    ),
    "apex.contrib.optimizers.distributed_fused_lamb": (
        "torch.distributed.optim.ZeroRedundancyOptimizer or torch.distributed.fsdp"
    ),
    "apex.contrib.peer_memory": "torch.distributed's own transports",
    "apex.contrib.sparsity": "torch.sparse.to_sparse_semi_structured",
    "apex.contrib.transducer": "torchaudio.functional.rnnt_loss",
    "apex.normalization.InstanceNorm3dNVFuser": "torch.nn.InstanceNorm3d",
    "apex.parallel.optimized_sync_batchnorm_kernel": "torch.nn.SyncBatchNorm",
    "apex.parallel.sync_batchnorm_kernel": "torch.nn.SyncBatchNorm",
    "apex.pyprof": "torch.profiler",
    "apex.transformer": "megatron.core (the package megatron-core)",
}
