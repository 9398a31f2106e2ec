"""Seams of megatron-core and Transformer Engine: layers, data parallelism, packed attention."""

from ..encoders import NEMOTRON_OMNI, NEMOTRON_VL
from ..seam import GRAPHS, called, read, replayed, seams_of, swapped
from ..seam import Feature as F

CORE = "megatron.core"
TRANSFORMER_LAYER = f"{CORE}.transformer.transformer_layer:TransformerLayer"
CORE_ATTENTION = f"{CORE}.transformer.attention"
MLP = f"{CORE}.transformer.mlp"
EXTENSIONS = f"{CORE}.extensions.transformer_engine"
DDP = f"{CORE}.distributed.distributed_data_parallel:DistributedDataParallel"
BUCKET_GROUP = f"{CORE}.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup"
TE = "transformer_engine.pytorch"
TE_ATTENTION = f"{TE}.attention.dot_product_attention.dot_product_attention"
TE_ATTENTION_BACKENDS = f"{TE}.attention.dot_product_attention.backends"
TE_ATTENTION_UTILS = f"{TE}.attention.dot_product_attention.utils"
TE_LAYERNORM = f"{TE}.ops.basic.layer_norm"
TE_RMSNORM = f"{TE}.ops.basic.rmsnorm"
TE_LAYERNORM_LINEAR = f"{TE}.module.layernorm_linear"
TE_LINEAR = f"{TE}.module.linear"
TE_GEMM = f"{TE}.cpp_extensions.gemm"
# How releases of Transformer Engine spell the reading of a variable: 2.18 and earlier call os.getenv.
_READ_FROM_ENVIRONMENT = tuple(
    tuple(f"{name} = int({read}('{variable}', '1'))" for read in ("os.environ.get", "os.getenv"))
    for name, variable in (("use_fused_attention", "NVTE_FUSED_ATTN"), ("use_flash_attention", "NVTE_FLASH_ATTN"))
)
_LAYERS = seams_of(
    F.PACKED,
    layer_attention=replayed(
        f"{TRANSFORMER_LAYER}._forward_attention",
        "the attention part of a layer replays a graph",
        takes="hidden_states attention_mask context rotary_pos_emb packed_seq_params",
    ),
    layer_mlp=replayed(f"{TRANSFORMER_LAYER}._forward_mlp(hidden_states)", "the MLP part of a layer replays a graph"),
    layer_parts=read(
        f"{TRANSFORMER_LAYER}[input_layernorm, self_attention, pre_mlp_layernorm, mlp, layer_number, config]",
        "the modules whose parameters a layer's region owns",
    ),
)
_VISION = seams_of(
    F.VISION_QWEN3_VL,
    layer_residuals=swapped(
        f"{TRANSFORMER_LAYER}[self_attn_bda, mlp_bda]",
        "biases are added together with the residual while work is recorded",
    ),
    mlp_forward=swapped(
        f"{MLP}:MLP.forward(hidden_states, per_token_scale)",
        "the bias is added together with the activation while work is recorded",
    ),
    attention_forward=swapped(
        f"{EXTENSIONS}:TEDotProductAttention.forward(query, key, value, attention_mask, packed_seq_params)",
        "one segment attends unpacked while work is recorded",
    ),
    te_attention=called(
        f"{TE_ATTENTION}:DotProductAttention.forward",
        "attention of one segment",
        takes="qkv_format attn_mask_type cu_seqlens_q cu_seqlens_kv max_seqlen_q max_seqlen_kv",
    ),
    gemm_workspace=swapped(
        f"{TE_GEMM}:general_gemm(A, B, layout, out, bias, accumulate, grad, ub, extra_output)",
        "weight gradients of two streams have a workspace each",
        "get_cublas_workspace(A.device.index, ub is not None, False)",
    ),
    **{
        f"side_products.{name}": swapped(
            f"{module}:{target}",
            "weight gradients run on a stream of their own while work is recorded",
            "dw, db, *_ = general_gemm(x, dy, **wgrad_gemm_kwargs)",
            kind="function",
            formerly=formerly,
        )
        for name, module, target, formerly in (
            ("linear", TE_LINEAR, "_linear_backward_impl", ("_linear_backward", "_Linear.backward")),
            ("layernorm_linear", TE_LAYERNORM_LINEAR, "_LayerNormLinear.backward", ()),
        )
    },
    attention_choice=read(
        f"{TE_ATTENTION_UTILS}:get_attention_backend",
        "cuDNN is called directly only where eager attends by its kernels",
        *_READ_FROM_ENVIRONMENT,
        "if use_flash_attention and use_fused_attention and (device_compute_capability >= (9, 0)):",
    ),
    flash_attention_installed=read(
        f"{TE_ATTENTION_UTILS}:FlashAttentionUtils[is_installed]",
        "whether eager may prefer the package flash-attn to cuDNN's kernels",
    ),
    attention_backend=read(
        f"{CORE}.models.common.language_module.language_module:LanguageModule._set_attention_backend",
        "attention_backend is known by the variables that it is written into",
        "NVTE_FUSED_ATTN",
    ),
)
_SEGMENTS = seams_of(
    (F.VISION_QWEN3_VL, F.PACKED),
    packed_segments=called(
        f"{CORE}.packed_seq_params:PackedSeqParams",
        "attention inside segments given by cu_seqlens",
        has="qkv_format cu_seqlens_q cu_seqlens_kv max_seqlen_q max_seqlen_kv",
    ),
)
_DATA_PARALLEL = seams_of(
    GRAPHS,
    parameter_gather=read(
        f"{DDP}[param_to_bucket_group, remove_forward_pre_hook_handles, ddp_config]",
        "a replay waits for the parameters that eager's module hooks wait for",
    ),
    finish_param_sync=called(
        f"{BUCKET_GROUP}.finish_param_sync(skip_next_bucket_dispatch)", "waits for a bucket of parameters"
    ),
    register_grad_ready=called(
        f"{BUCKET_GROUP}.register_grad_ready(param, force_all_reduce)",
        "tells the reduction of gradients; before the last microbatch it does nothing",
        *("is_last_microbatch", "self.per_param_grad_ready_counts[param] += 1", "is_first_batch"),
    ),
    start_grad_sync=replayed(
        f"{BUCKET_GROUP}.start_grad_sync(force_all_reduce)",
        "reductions start in one order on all ranks, whether they replay or not",
    ),
    finish_grad_sync=replayed(
        f"{BUCKET_GROUP}.finish_grad_sync(force_all_reduce)",
        "a reduction that waits for another one's turn starts at the latest here",
    ),
    gradient_hook=read(
        f"{DDP}._make_backward_post_hook",
        "a gradient that is in main_grad already is not added again; nothing else than the reduction needs it",
        *("grad_added_to_main_grad", "register_grad_ready", "force_all_reduce"),
    ),
    ddp_config=read(
        f"{CORE}.distributed.distributed_data_parallel_config:DistributedDataParallelConfig",
        "how parameters are gathered",
        has="align_param_gather overlap_param_gather overlap_grad_reduce use_megatron_fsdp",
    ),
)
_MICROBATCHES = seams_of(
    (F.VISION, F.PACKED),
    microbatches=called(
        f"{CORE}.num_microbatches_calculator:get_num_microbatches",
        "bounds the slots: how many microbatches a step has, and the largest one of a schedule of batch sizes",
        "_GLOBAL_NUM_MICROBATCHES_CALCULATOR.get()",
    ),
)
_FAST = seams_of(
    F.FAST_KERNELS,
    layernorm_backward=swapped(
        f"{TE_LAYERNORM_LINEAR}:_LayerNormLinear.backward",
        "vision_cuda_graph_tuning.kernels=fast has a kernel of its own for what it calls",
        "tex.layernorm_bwd(dgrad, inputmat, mu, rsigma, ln_weight,",
    ),
    layernorm_operation=swapped(
        f"{TE_LAYERNORM}:LayerNorm.op_backward",
        "what it calls is the plugin's kernel, too",
        "layernorm_bwd(dy, x, means, rstdevs, w,",
    ),
)
_OFFLOAD = seams_of(
    F.OFFLOAD_IN_GRAPHS,
    recompute=swapped(
        f"{CORE}.tensor_parallel.random:checkpoint(function, distribute_saved_activations)",
        "layers are recomputed inside a recorded backward",
    ),
    layernorm_linear_forward=swapped(
        f"{TE_LAYERNORM_LINEAR}:_LayerNormLinear.forward",
        "recompute of activations notes how the norm's and the product's outputs are made",
        *("ln_out, mu, rsigma = apply_normalization(", "reduce_scatter_out = general_gemm("),
    ),
)
_HEAD_NORMS = seams_of(
    (F.PACKED, F.FULL_ITERATION),
    rmsnorm_operation=swapped(
        f"{TE_RMSNORM}:RMSNorm.op_backward",
        "norms over heads call the plugin's kernel, which gives the same bits",
        "rmsnorm_bwd(dy, x, rstdevs, w, self._sm_margins['backward'], self.zero_centered_gamma)",
    ),
)
_EVERY = seams_of(
    (F.VISION_QWEN3_VL, F.PACKED, F.FULL_ITERATION),
    **{
        f"weight_gradients.{name}": swapped(
            f"{module}:{name}[fuse_wgrad_accumulation]",
            "weight gradients are added to main_grad inside the GEMM while work is recorded",
        )
        for module, name in ((TE_LINEAR, "Linear"), (TE_LAYERNORM_LINEAR, "LayerNormLinear"))
    },
    **{
        f"placeholder_gradients.{module.rpartition('.')[2]}": swapped(
            f"{module}:get_dummy_wgrad(shape, dtype, zero)",
            "a weight's gradient that is in main_grad already takes no memory while work is recorded",
        )
        for module in (TE_LINEAR, TE_LAYERNORM_LINEAR)
    },
    attention_selection=read(
        f"{TE_ATTENTION}:_attention_backends",
        "a cached choice of kernel that would read the device during a capture is dropped",
        kind="value",
    ),
)
_UNPACKED = seams_of(
    (F.FULL_ITERATION, NEMOTRON_OMNI.feature, NEMOTRON_VL.feature),
    engine_cudnn_version=read(
        f"{TE_ATTENTION_UTILS}:get_cudnn_version", "up to 9.15.0, a backward of attention copies lengths from the host"
    ),
    attention_backward=swapped(
        f"{TE_ATTENTION_BACKENDS}:fused_attn_bwd",
        "the device computes lengths that an older cuDNN would read from the host in every replay",
        takes="max_seqlen_q max_seqlen_kv cu_seqlens_q cu_seqlens_kv attn_mask_type",
    ),
)
SEAMS = (
    *(*_LAYERS, *_VISION, *_SEGMENTS, *_DATA_PARALLEL, *_MICROBATCHES, *_FAST, *_OFFLOAD, *_HEAD_NORMS, *_EVERY),
    *_UNPACKED,
)
