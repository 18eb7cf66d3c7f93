"""What to use in the place of the parts of apex that are not supplied: data only."""

_ATTENTION = "torch.nn.functional.scaled_dot_product_attention"
_SHARDED = "torch.distributed.optim.ZeroRedundancyOptimizer or torch.distributed.fsdp"
_SOFTMAX = f"torch.softmax, or {_ATTENTION}"

#: Name of a module or of what is in it -> what stands there today.
REPLACEMENTS = {
    "apex.contrib.bottleneck": "torchvision.models.resnet.Bottleneck",
    "apex.contrib.conv_bias_relu": "torch.compile over torch.nn.Conv2d and relu",
    "apex.contrib.cudnn_gbn": "torch.nn.SyncBatchNorm",
    "apex.contrib.fmha": _ATTENTION,
    "apex.contrib.focal_loss": "torchvision.ops.sigmoid_focal_loss",
    "apex.contrib.group_norm": "torch.nn.GroupNorm",
    "apex.contrib.groupbn": "torch.nn.SyncBatchNorm",
    "apex.contrib.index_mul_2d": "torch's indexing and multiplication under torch.compile",
    "apex.contrib.multihead_attn": "torch.nn.MultiheadAttention",
    "apex.contrib.openfold_triton": "torch.compile",
    "apex.contrib.optimizers.distributed_fused_adam": _SHARDED,
    "apex.contrib.optimizers.distributed_fused_lamb": _SHARDED,
    "apex.contrib.peer_memory": "torch.distributed's own transports",
    "apex.contrib.sparsity": "torch.sparse.to_sparse_semi_structured",
    "apex.contrib.transducer": "torchaudio.functional.rnnt_loss",
    "apex.normalization.InstanceNorm3dNVFuser": "torch.nn.InstanceNorm3d",
    "apex.parallel.optimized_sync_batchnorm_kernel": "torch.nn.SyncBatchNorm",
    "apex.parallel.sync_batchnorm_kernel": "torch.nn.SyncBatchNorm",
    "apex.pyprof": "torch.profiler",
    "apex.transformer": "megatron.core (the package megatron-core)",
}

#: What `amp_patch.amp` has and apex.amp never had; messages name it to scripts for apex as well.
ONLY_HERE = (
    "clip_grad_norm_",
    "deactivate",
    "float_region",
    "half_region",
    "loss_scale",
    "overflow_report",
    "register_forward_method",
    "register_library_function",
    "step_was_skipped",
    "summary",
)
REPLACEMENTS |= {f"apex.amp.{name}": f"amp_patch.amp.{name}" for name in ONLY_HERE}

#: Name of a module that apex compiled -> what stands there today, of what is supplied or of torch.
COMPILED = {
    "_apex_gpu_direct_storage": "torch.cuda.gds",
    "_apex_nccl_allocator": "torch.distributed's own allocator (register_mem_pool)",
    "bnp": "torch.nn.SyncBatchNorm, or torch.nn.BatchNorm2d and relu",
    "cudnn_gbn_lib": "torch.nn.SyncBatchNorm",
    "distributed_adam_cuda": _SHARDED,
    "distributed_lamb_cuda": _SHARDED,
    "fast_additive_mask_softmax_dropout": _ATTENTION,
    "fast_bottleneck": "torchvision.models.resnet.Bottleneck",
    "fast_encdec_multihead_attn": "torch.nn.MultiheadAttention",
    "fast_encdec_multihead_attn_norm_add": "torch.nn.MultiheadAttention",
    "fast_layer_norm": "apex.contrib.layer_norm.FastLayerNorm",
    "fast_mask_softmax_dropout": _ATTENTION,
    "fast_multihead_attn": "torch.nn.MultiheadAttention",
    "fast_self_multihead_attn": "torch.nn.MultiheadAttention",
    "fast_self_multihead_attn_bias": "torch.nn.MultiheadAttention",
    "fast_self_multihead_attn_bias_additive_mask": "torch.nn.MultiheadAttention",
    "fast_self_multihead_attn_norm_add": "torch.nn.MultiheadAttention",
    "fmhalib": _ATTENTION,
    "focal_loss_cuda": "torchvision.ops.sigmoid_focal_loss",
    "fused_bias_swiglu": "torch.nn.functional.silu under torch.compile",
    "fused_conv_bias_relu": "torch.compile over torch.nn.Conv2d and relu",
    "fused_dense_cuda": "apex.fused_dense.FusedDense",
    "fused_index_mul_2d": "torch's indexing and multiplication under torch.compile",
    "fused_lamb_cuda": "apex.optimizers.FusedLAMB, or amp_C.multi_tensor_lamb",
    "fused_layer_norm_cuda": "apex.normalization.FusedLayerNorm",
    "fused_rotary_positional_embedding": "its formula in torch under torch.compile",
    "fused_weight_gradient_mlp_cuda": "main_grad.addmm_(grad.T, input) of torch",
    "generic_scaled_masked_softmax_cuda": _SOFTMAX,
    "group_norm_cuda": "torch.nn.GroupNorm",
    "group_norm_v2_cuda": "torch.nn.GroupNorm",
    "instance_norm_nvfuser_cuda": "torch.nn.InstanceNorm3d",
    "mlp_cuda": "apex.mlp.MLP",
    "nccl_p2p_cuda": "torch.distributed's own transports",
    "peer_memory_cuda": "torch.distributed's own transports",
    "permutation_search_cuda": "torch.sparse.to_sparse_semi_structured",
    "scaled_masked_softmax_cuda": _SOFTMAX,
    "scaled_softmax_cuda": _SOFTMAX,
    "scaled_upper_triang_masked_softmax_cuda": _SOFTMAX,
    "syncbn": "apex.parallel.SyncBatchNorm",
    "transducer_joint_cuda": "torch's broadcast addition of the two",
    "transducer_loss_cuda": "torchaudio.functional.rnnt_loss",
    "xentropy_cuda": "apex.contrib.xentropy.SoftmaxCrossEntropyLoss",
}
