"""Seams of megatron-core and Transformer Engine: layers, data parallelism, packed attention."""

from ..seam import GRAPHS, Feature, Seam, called, read, recorded, replayed, swapped, touched

CORE = "megatron.core"
LAYER = f"{CORE}.transformer.transformer_layer"
DDP = f"{CORE}.distributed.distributed_data_parallel"
TE_ATTENTION = "transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention"
TE_ATTENTION_BACKENDS = "transformer_engine.pytorch.attention.dot_product_attention.backends"
TE_ATTENTION_UTILS = "transformer_engine.pytorch.attention.dot_product_attention.utils"
TE_UTILS = "transformer_engine.pytorch.utils"
TE_LAYERNORM = "transformer_engine.pytorch.ops.basic.layer_norm"
TE_RMSNORM = "transformer_engine.pytorch.ops.basic.rmsnorm"
TE_LAYERNORM_LINEAR = "transformer_engine.pytorch.module.layernorm_linear"
TE_LINEAR = "transformer_engine.pytorch.module.linear"
TE_GEMM = "transformer_engine.pytorch.cpp_extensions.gemm"
CORE_ATTENTION = f"{CORE}.transformer.attention"
MLP = f"{CORE}.transformer.mlp"
EXTENSIONS = f"{CORE}.extensions.transformer_engine"


def _read_from_environment(name: str, variable: str) -> tuple[str, ...]:
    """Return how Transformer Engine's releases spell the reading of a variable: 2.18 and earlier call os.getenv."""
    return tuple(f"{name} = int({read}('{variable}', '1'))" for read in ("os.environ.get", "os.getenv"))


def cudnn_version(name: str, feature: str) -> Seam:
    """Return the seam, of this name, by which a feature knows what `attention_backward` is for."""
    return read(
        name,
        f"{TE_ATTENTION_UTILS}:get_cudnn_version",
        "up to 9.15.0, a backward of attention copies lengths from the host",
        feature,
    )


def attention_backward(name: str, feature: str) -> Seam:
    """Return the seam, of this name, of what a feature records unpacked attention's backward with."""
    return swapped(
        name,
        f"{TE_ATTENTION_BACKENDS}:fused_attn_bwd",
        "the device computes lengths that an older cuDNN would read from the host in every replay",
        feature,
        takes="max_seqlen_q max_seqlen_kv cu_seqlens_q cu_seqlens_kv attn_mask_type",
    )


SEAMS = (
    replayed(
        "layer_attention",
        f"{LAYER}:TransformerLayer._forward_attention",
        "the attention part of a layer replays a graph",
        (Feature.LAYER_PARTS, Feature.PACKED),
        takes="hidden_states attention_mask context rotary_pos_emb packed_seq_params",
    ),
    replayed(
        "layer_mlp",
        f"{LAYER}:TransformerLayer._forward_mlp",
        "the MLP part of a layer replays a graph",
        (Feature.LAYER_PARTS, Feature.PACKED),
        takes="hidden_states",
    ),
    read(
        "layer_parts",
        f"{LAYER}:TransformerLayer",
        "the modules whose parameters a layer's region owns",
        (Feature.LAYER_PARTS, Feature.PACKED),
        has="input_layernorm self_attention pre_mlp_layernorm mlp layer_number config",
    ),
    recorded(
        "layer_residuals",
        f"{LAYER}:TransformerLayer",
        "biases are added together with the residual while work is recorded",
        Feature.VISION_QWEN3_VL,
        has="self_attn_bda mlp_bda",
    ),
    recorded(
        "mlp_forward",
        f"{MLP}:MLP.forward",
        "the bias is added together with the activation while work is recorded",
        Feature.VISION_QWEN3_VL,
        takes="hidden_states per_token_scale",
    ),
    called(
        "packed_segments",
        f"{CORE}.packed_seq_params:PackedSeqParams",
        "attention inside segments given by cu_seqlens",
        (Feature.VISION_QWEN3_VL, Feature.PACKED),
        has="qkv_format cu_seqlens_q cu_seqlens_kv max_seqlen_q max_seqlen_kv",
    ),
    read(
        "parameter_gather",
        f"{DDP}:DistributedDataParallel",
        "a replay waits for the parameters that eager's module hooks wait for",
        GRAPHS,
        has="param_to_bucket_group remove_forward_pre_hook_handles ddp_config",
    ),
    called(
        "finish_param_sync",
        f"{CORE}.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup.finish_param_sync",
        "waits for a bucket of parameters",
        GRAPHS,
        takes="skip_next_bucket_dispatch",
    ),
    called(
        "register_grad_ready",
        f"{CORE}.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup.register_grad_ready",
        "tells the reduction of gradients; before the last microbatch it does nothing",
        GRAPHS,
        takes="param force_all_reduce",
        uses=("is_last_microbatch", "self.per_param_grad_ready_counts[param] += 1", "is_first_batch"),
    ),
    replayed(
        "start_grad_sync",
        f"{CORE}.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup.start_grad_sync",
        "reductions start in one order on all ranks, whether they replay or not",
        GRAPHS,
        takes="force_all_reduce",
    ),
    replayed(
        "finish_grad_sync",
        f"{CORE}.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup.finish_grad_sync",
        "a reduction that waits for another one's turn starts at the latest here",
        GRAPHS,
        takes="force_all_reduce",
    ),
    read(
        "gradient_hook",
        f"{DDP}:DistributedDataParallel._make_backward_post_hook",
        "a gradient that is in main_grad already is not added again; nothing else than the reduction needs it",
        GRAPHS,
        uses=("grad_added_to_main_grad", "register_grad_ready", "force_all_reduce"),
    ),
    read(
        "ddp_config",
        f"{CORE}.distributed.distributed_data_parallel_config:DistributedDataParallelConfig",
        "how parameters are gathered",
        GRAPHS,
        has="align_param_gather overlap_param_gather overlap_grad_reduce use_megatron_fsdp",
    ),
    called(
        "microbatches",
        f"{CORE}.num_microbatches_calculator:get_num_microbatches",
        "bounds the slots: how many microbatches a step has, and the largest one of a schedule of batch sizes",
        (Feature.VISION, Feature.PACKED),
        uses=("_GLOBAL_NUM_MICROBATCHES_CALCULATOR.get()",),
    ),
    recorded(
        "attention_forward",
        f"{EXTENSIONS}:TEDotProductAttention.forward",
        "one segment attends unpacked while work is recorded",
        Feature.VISION_QWEN3_VL,
        takes="query key value attention_mask packed_seq_params",
    ),
    called(
        "te_attention",
        f"{TE_ATTENTION}:DotProductAttention.forward",
        "attention of one segment",
        Feature.VISION_QWEN3_VL,
        takes="qkv_format attn_mask_type cu_seqlens_q cu_seqlens_kv max_seqlen_q max_seqlen_kv",
    ),
    swapped(
        "layernorm_backward",
        f"{TE_LAYERNORM_LINEAR}:_LayerNormLinear.backward",
        "vision_cuda_graph_tuning.kernels=fast has a kernel of its own for what it calls",
        Feature.FAST_KERNELS,
        uses=("tex.layernorm_bwd(dgrad, inputmat, mu, rsigma, ln_weight,",),
    ),
    swapped(
        "layernorm_linear_forward",
        f"{TE_LAYERNORM_LINEAR}:_LayerNormLinear.forward",
        "recompute of activations notes how the norm's and the product's outputs are made",
        Feature.OFFLOAD_IN_GRAPHS,
        uses=("ln_out, mu, rsigma = apply_normalization(", "reduce_scatter_out = general_gemm("),
    ),
    swapped(
        "layernorm_operation",
        f"{TE_LAYERNORM}:LayerNorm.op_backward",
        "what it calls is the plugin's kernel, too",
        Feature.FAST_KERNELS,
        uses=("layernorm_bwd(dy, x, means, rstdevs, w,",),
    ),
    swapped(
        "rmsnorm_operation",
        f"{TE_RMSNORM}:RMSNorm.op_backward",
        "norms over heads call the plugin's kernel, which gives the same bits",
        (Feature.PACKED, Feature.FULL_ITERATION),
        uses=("rmsnorm_bwd(dy, x, rstdevs, w, self._sm_margins['backward'], self.zero_centered_gamma)",),
    ),
    *(
        recorded(
            f"weight_gradients.{name}",
            f"transformer_engine.pytorch.module.{module}:{name}",
            "weight gradients are added to main_grad inside the GEMM while work is recorded",
            (Feature.VISION_QWEN3_VL, Feature.PACKED, Feature.FULL_ITERATION),
            kind="class",
            has="fuse_wgrad_accumulation",
        )
        for module, name in (("linear", "Linear"), ("layernorm_linear", "LayerNormLinear"))
    ),
    *(
        swapped(
            f"placeholder_gradients.{name}",
            f"{module}:get_dummy_wgrad",
            "a weight's gradient that is in main_grad already takes no memory while work is recorded",
            (Feature.VISION_QWEN3_VL, Feature.PACKED, Feature.FULL_ITERATION),
            takes="shape dtype zero",
        )
        for name, module in (("linear", TE_LINEAR), ("layernorm_linear", TE_LAYERNORM_LINEAR))
    ),
    swapped(
        "gemm_workspace",
        f"{TE_GEMM}:general_gemm",
        "weight gradients of two streams have a workspace each",
        Feature.VISION_QWEN3_VL,
        takes="A B layout out bias accumulate grad ub extra_output",
        uses=("get_cublas_workspace(A.device.index, ub is not None, False)",),
    ),
    *(
        swapped(
            f"side_products.{name}",
            f"{module}:{target}",
            "weight gradients run on a stream of their own while work is recorded",
            Feature.VISION_QWEN3_VL,
            kind="function",
            formerly=formerly,
            uses=("dw, db, *_ = general_gemm(x, dy, **wgrad_gemm_kwargs)",),
        )
        for name, module, target, formerly in (
            ("linear", TE_LINEAR, "_linear_backward_impl", ("_linear_backward", "_Linear.backward")),
            ("layernorm_linear", TE_LAYERNORM_LINEAR, "_LayerNormLinear.backward", ()),
        )
    ),
    touched(
        "read",
        "attention_selection",
        f"{TE_ATTENTION}:_attention_backends",
        "a cached choice of kernel that would read the device during a capture is dropped",
        (Feature.VISION_QWEN3_VL, Feature.PACKED, Feature.FULL_ITERATION),
        undo="Transformer Engine chooses again",
        kind="value",
    ),
    touched(
        "declared",
        "attention_choice",
        f"{TE_ATTENTION_UTILS}:get_attention_backend",
        "cuDNN is called directly only where eager attends by its kernels",
        Feature.VISION_QWEN3_VL,
        uses=(
            _read_from_environment("use_fused_attention", "NVTE_FUSED_ATTN"),
            _read_from_environment("use_flash_attention", "NVTE_FLASH_ATTN"),
            "if use_flash_attention and use_fused_attention and (device_compute_capability >= (9, 0)):",
        ),
    ),
    read(
        "flash_attention_installed",
        f"{TE_ATTENTION_UTILS}:FlashAttentionUtils",
        "whether eager may prefer the package flash-attn to cuDNN's kernels",
        Feature.VISION_QWEN3_VL,
        has="is_installed",
    ),
    cudnn_version("engine_cudnn_version", Feature.FULL_ITERATION),
    attention_backward("attention_backward", Feature.FULL_ITERATION),
    touched(
        "declared",
        "attention_backend",
        f"{CORE}.models.common.language_module.language_module:LanguageModule._set_attention_backend",
        "attention_backend is known by the variables that it is written into",
        Feature.VISION_QWEN3_VL,
        uses=("NVTE_FUSED_ATTN",),
    ),
)
