"""Seams of megatron-core and Transformer Engine: layers, data parallelism, packed attention."""

from ..seam import GRAPHS, Feature, Seam

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
RECORDED = "put back when the recording ends"
DETACHED = "the end of training and deactivate() take the object's own attribute off"


def _read_from_environment(name: str, variable: str) -> tuple[str, ...]:
    """Return how Transformer Engine's releases spell the reading of a variable: 2.18 and earlier call os.getenv."""
    return tuple(f"{name} = int({read}('{variable}', '1'))" for read in ("os.environ.get", "os.getenv"))


def cudnn_version(name: str, feature: str) -> Seam:
    """Return the seam, of this name, by which a feature knows what `attention_backward` is for."""
    return Seam(
        name=name,
        module=TE_ATTENTION_UTILS,
        target="get_cudnn_version",
        kind="function",
        touch="read",
        purpose="up to 9.15.0, a backward of attention copies lengths from the host",
        features=(feature,),
    )


def attention_backward(name: str, feature: str) -> Seam:
    """Return the seam, of this name, of what a feature records unpacked attention's backward with."""
    return Seam(
        name=name,
        module=TE_ATTENTION_BACKENDS,
        target="fused_attn_bwd",
        kind="function",
        touch="replaced",
        purpose="the device computes lengths that an older cuDNN would read from the host in every replay",
        features=(feature,),
        undo=RECORDED,
        parameters=("max_seqlen_q", "max_seqlen_kv", "cu_seqlens_q", "cu_seqlens_kv", "attn_mask_type"),
    )


SEAMS = (
    Seam(
        name="layer_attention",
        module=LAYER,
        target="TransformerLayer._forward_attention",
        kind="function",
        touch="instance",
        purpose="the attention part of a layer replays a graph",
        features=(Feature.LAYER_PARTS, Feature.PACKED),
        undo=DETACHED,
        parameters=("hidden_states", "attention_mask", "context", "rotary_pos_emb", "packed_seq_params"),
    ),
    Seam(
        name="layer_mlp",
        module=LAYER,
        target="TransformerLayer._forward_mlp",
        kind="function",
        touch="instance",
        purpose="the MLP part of a layer replays a graph",
        features=(Feature.LAYER_PARTS, Feature.PACKED),
        undo=DETACHED,
        parameters=("hidden_states",),
    ),
    Seam(
        name="layer_parts",
        module=LAYER,
        target="TransformerLayer",
        kind="class",
        touch="read",
        purpose="the modules whose parameters a layer's region owns",
        features=(Feature.LAYER_PARTS, Feature.PACKED),
        attributes=("input_layernorm", "self_attention", "pre_mlp_layernorm", "mlp", "layer_number", "config"),
    ),
    Seam(
        name="layer_residuals",
        module=LAYER,
        target="TransformerLayer",
        kind="class",
        touch="instance",
        purpose="biases are added together with the residual while work is recorded",
        features=(Feature.VISION_QWEN3_VL,),
        undo=RECORDED,
        attributes=("self_attn_bda", "mlp_bda"),
    ),
    Seam(
        name="mlp_forward",
        module=MLP,
        target="MLP.forward",
        kind="function",
        touch="instance",
        purpose="the bias is added together with the activation while work is recorded",
        features=(Feature.VISION_QWEN3_VL,),
        undo=RECORDED,
        parameters=("hidden_states", "per_token_scale"),
    ),
    Seam(
        name="packed_segments",
        module=f"{CORE}.packed_seq_params",
        target="PackedSeqParams",
        kind="class",
        touch="called",
        purpose="attention inside segments given by cu_seqlens",
        features=(Feature.VISION_QWEN3_VL, Feature.PACKED),
        attributes=("qkv_format", "cu_seqlens_q", "cu_seqlens_kv", "max_seqlen_q", "max_seqlen_kv"),
    ),
    Seam(
        name="parameter_gather",
        module=DDP,
        target="DistributedDataParallel",
        kind="class",
        touch="read",
        purpose="a replay waits for the parameters that eager's module hooks wait for",
        features=GRAPHS,
        attributes=("param_to_bucket_group", "remove_forward_pre_hook_handles", "ddp_config"),
    ),
    Seam(
        name="finish_param_sync",
        module=f"{CORE}.distributed.param_and_grad_buffer",
        target="_ParamAndGradBucketGroup.finish_param_sync",
        kind="function",
        touch="called",
        purpose="waits for a bucket of parameters",
        features=GRAPHS,
        parameters=("skip_next_bucket_dispatch",),
    ),
    Seam(
        name="register_grad_ready",
        module=f"{CORE}.distributed.param_and_grad_buffer",
        target="_ParamAndGradBucketGroup.register_grad_ready",
        kind="function",
        touch="called",
        purpose="tells the reduction of gradients; before the last microbatch it does nothing",
        features=GRAPHS,
        parameters=("param", "force_all_reduce"),
        uses=("is_last_microbatch", "self.per_param_grad_ready_counts[param] += 1", "is_first_batch"),
    ),
    Seam(
        name="start_grad_sync",
        module=f"{CORE}.distributed.param_and_grad_buffer",
        target="_ParamAndGradBucketGroup.start_grad_sync",
        kind="function",
        touch="instance",
        purpose="reductions start in one order on all ranks, whether they replay or not",
        features=GRAPHS,
        undo=DETACHED,
        parameters=("force_all_reduce",),
    ),
    Seam(
        name="finish_grad_sync",
        module=f"{CORE}.distributed.param_and_grad_buffer",
        target="_ParamAndGradBucketGroup.finish_grad_sync",
        kind="function",
        touch="instance",
        purpose="a reduction that waits for another one's turn starts at the latest here",
        features=GRAPHS,
        undo=DETACHED,
        parameters=("force_all_reduce",),
    ),
    Seam(
        name="gradient_hook",
        module=DDP,
        target="DistributedDataParallel._make_backward_post_hook",
        kind="function",
        touch="read",
        purpose="a gradient that is in main_grad already is not added again; nothing else than the reduction needs it",
        features=GRAPHS,
        uses=("grad_added_to_main_grad", "register_grad_ready", "force_all_reduce"),
    ),
    Seam(
        name="ddp_config",
        module=f"{CORE}.distributed.distributed_data_parallel_config",
        target="DistributedDataParallelConfig",
        kind="class",
        touch="read",
        purpose="how parameters are gathered",
        features=GRAPHS,
        attributes=("align_param_gather", "overlap_param_gather", "overlap_grad_reduce", "use_megatron_fsdp"),
    ),
    Seam(
        name="microbatches",
        module=f"{CORE}.num_microbatches_calculator",
        target="get_num_microbatches",
        kind="function",
        touch="called",
        purpose="bounds the slots: how many microbatches a step has, and the largest one of a schedule of batch sizes",
        features=(Feature.VISION, Feature.PACKED),
        uses=("_GLOBAL_NUM_MICROBATCHES_CALCULATOR.get()",),
    ),
    Seam(
        name="attention_forward",
        module=EXTENSIONS,
        target="TEDotProductAttention.forward",
        kind="function",
        touch="instance",
        purpose="one segment attends unpacked while work is recorded",
        features=(Feature.VISION_QWEN3_VL,),
        undo=RECORDED,
        parameters=("query", "key", "value", "attention_mask", "packed_seq_params"),
    ),
    Seam(
        name="te_attention",
        module=TE_ATTENTION,
        target="DotProductAttention.forward",
        kind="function",
        touch="called",
        purpose="attention of one segment",
        features=(Feature.VISION_QWEN3_VL,),
        parameters=("qkv_format", "attn_mask_type", "cu_seqlens_q", "cu_seqlens_kv", "max_seqlen_q", "max_seqlen_kv"),
    ),
    Seam(
        name="layernorm_backward",
        module=TE_LAYERNORM_LINEAR,
        target="_LayerNormLinear.backward",
        kind="function",
        touch="replaced",
        purpose="vision_cuda_graph_tuning.kernels=fast has a kernel of its own for what it calls",
        features=(Feature.FAST_KERNELS,),
        undo=RECORDED,
        uses=("tex.layernorm_bwd(dgrad, inputmat, mu, rsigma, ln_weight,",),
    ),
    Seam(
        name="layernorm_linear_forward",
        module=TE_LAYERNORM_LINEAR,
        target="_LayerNormLinear.forward",
        kind="function",
        touch="replaced",
        purpose="recompute of activations notes how the norm's and the product's outputs are made",
        features=(Feature.OFFLOAD_IN_GRAPHS,),
        undo=RECORDED,
        uses=("ln_out, mu, rsigma = apply_normalization(", "reduce_scatter_out = general_gemm("),
    ),
    Seam(
        name="layernorm_operation",
        module=TE_LAYERNORM,
        target="LayerNorm.op_backward",
        kind="function",
        touch="replaced",
        purpose="what it calls is the plugin's kernel, too",
        features=(Feature.FAST_KERNELS,),
        undo=RECORDED,
        uses=("layernorm_bwd(dy, x, means, rstdevs, w,",),
    ),
    Seam(
        name="rmsnorm_operation",
        module=TE_RMSNORM,
        target="RMSNorm.op_backward",
        kind="function",
        touch="replaced",
        purpose="norms over heads call the plugin's kernel, which gives the same bits",
        features=(Feature.PACKED, Feature.FULL_ITERATION),
        undo=RECORDED,
        uses=("rmsnorm_bwd(dy, x, rstdevs, w, self._sm_margins['backward'], self.zero_centered_gamma)",),
    ),
    *(
        Seam(
            name=f"weight_gradients.{name}",
            module=f"transformer_engine.pytorch.module.{module}",
            target=name,
            kind="class",
            touch="instance",
            purpose="weight gradients are added to main_grad inside the GEMM while work is recorded",
            features=(Feature.VISION_QWEN3_VL, Feature.PACKED, Feature.FULL_ITERATION),
            undo=RECORDED,
            attributes=("fuse_wgrad_accumulation",),
        )
        for module, name in (("linear", "Linear"), ("layernorm_linear", "LayerNormLinear"))
    ),
    *(
        Seam(
            name=f"placeholder_gradients.{name}",
            module=module,
            target="get_dummy_wgrad",
            kind="function",
            touch="replaced",
            purpose="a weight's gradient that is in main_grad already takes no memory while work is recorded",
            features=(Feature.VISION_QWEN3_VL, Feature.PACKED, Feature.FULL_ITERATION),
            undo=RECORDED,
            parameters=("shape", "dtype", "zero"),
        )
        for name, module in (("linear", TE_LINEAR), ("layernorm_linear", TE_LAYERNORM_LINEAR))
    ),
    Seam(
        name="gemm_workspace",
        module=TE_GEMM,
        target="general_gemm",
        kind="function",
        touch="replaced",
        purpose="weight gradients of two streams have a workspace each",
        features=(Feature.STREAMS,),
        undo=RECORDED,
        parameters=("A", "B", "layout", "out", "bias", "accumulate", "grad", "ub", "extra_output"),
        uses=("get_cublas_workspace(A.device.index, ub is not None, False)",),
    ),
    *(
        Seam(
            name=f"side_products.{name}",
            module=module,
            target=target,
            formerly=formerly,
            kind="function",
            touch="replaced",
            purpose="weight gradients run on a stream of their own while work is recorded",
            features=(Feature.STREAMS,),
            undo=RECORDED,
            uses=("dw, db, *_ = general_gemm(x, dy, **wgrad_gemm_kwargs)",),
        )
        for name, module, target, formerly in (
            ("linear", TE_LINEAR, "_linear_backward_impl", ("_linear_backward", "_Linear.backward")),
            ("layernorm_linear", TE_LAYERNORM_LINEAR, "_LayerNormLinear.backward", ()),
        )
    ),
    Seam(
        name="attention_selection",
        module=TE_ATTENTION,
        target="_attention_backends",
        kind="value",
        touch="read",
        purpose="a cached choice of kernel that would read the device during a capture is dropped",
        features=(Feature.VISION_QWEN3_VL, Feature.PACKED, Feature.FULL_ITERATION),
        undo="Transformer Engine chooses again",
    ),
    Seam(
        name="attention_choice",
        module=TE_ATTENTION_UTILS,
        target="get_attention_backend",
        kind="function",
        touch="declared",
        purpose="cuDNN is called directly only where eager attends by its kernels",
        features=(Feature.VISION_QWEN3_VL,),
        uses=(
            _read_from_environment("use_fused_attention", "NVTE_FUSED_ATTN"),
            _read_from_environment("use_flash_attention", "NVTE_FLASH_ATTN"),
            "if use_flash_attention and use_fused_attention and (device_compute_capability >= (9, 0)):",
        ),
    ),
    Seam(
        name="flash_attention_installed",
        module=TE_ATTENTION_UTILS,
        target="FlashAttentionUtils",
        kind="class",
        touch="read",
        purpose="whether eager may prefer the package flash-attn to cuDNN's kernels",
        features=(Feature.VISION_QWEN3_VL,),
        attributes=("is_installed",),
    ),
    cudnn_version("engine_cudnn_version", Feature.FULL_ITERATION),
    attention_backward("attention_backward", Feature.FULL_ITERATION),
    Seam(
        name="attention_backend",
        module=f"{CORE}.models.common.language_module.language_module",
        target="LanguageModule._set_attention_backend",
        kind="function",
        touch="declared",
        purpose="attention_backend is known by the variables that it is written into",
        features=(Feature.VISION_QWEN3_VL,),
        uses=("NVTE_FUSED_ATTN",),
    ),
)
