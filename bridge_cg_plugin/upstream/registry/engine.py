"""Seams of megatron-core and Transformer Engine: layers, data parallelism, packed attention."""

from ..seams import Seam

CORE = "megatron.core"
LAYER = f"{CORE}.transformer.transformer_layer"
DDP = f"{CORE}.distributed.distributed_data_parallel"
TE_ATTENTION = "transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention"
TE_LAYERNORM = "transformer_engine.pytorch.ops.basic.layer_norm"
TE_LAYERNORM_LINEAR = "transformer_engine.pytorch.module.layernorm_linear"
TE_LINEAR = "transformer_engine.pytorch.module.linear"
TE_GEMM = "transformer_engine.pytorch.cpp_extensions.gemm"
TE_OFFLOAD = "transformer_engine.pytorch.cpu_offload"
GPT_MODEL = f"{CORE}.models.gpt.gpt_model"
CORE_OFFLOAD = f"{CORE}.pipeline_parallel.fine_grained_activation_offload"
MLP = f"{CORE}.transformer.mlp"
EXTENSIONS = f"{CORE}.extensions.transformer_engine"
RECORDED = "put back when the recording ends"
DETACHED = "the end of training and deactivate() take the object's own attribute off"

SEAMS = (
    Seam(
        name="layer_attention",
        module=LAYER,
        target="TransformerLayer._forward_attention",
        kind="function",
        touch="instance",
        purpose="the attention part of a layer replays a graph",
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
        attributes=("input_layernorm", "self_attention", "pre_mlp_layernorm", "mlp", "layer_number", "config"),
    ),
    Seam(
        name="layer_residuals",
        module=LAYER,
        target="TransformerLayer",
        kind="class",
        touch="instance",
        purpose="biases are added together with the residual while work is recorded",
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
        attributes=("qkv_format", "cu_seqlens_q", "cu_seqlens_kv", "max_seqlen_q", "max_seqlen_kv"),
    ),
    Seam(
        name="parameter_gather",
        module=DDP,
        target="DistributedDataParallel",
        kind="class",
        touch="read",
        purpose="a replay waits for the parameters that eager's module hooks wait for",
        attributes=("param_to_bucket_group", "remove_forward_pre_hook_handles", "ddp_config"),
    ),
    Seam(
        name="finish_param_sync",
        module=f"{CORE}.distributed.param_and_grad_buffer",
        target="_ParamAndGradBucketGroup.finish_param_sync",
        kind="function",
        touch="called",
        purpose="waits for a bucket of parameters",
        parameters=("skip_next_bucket_dispatch",),
    ),
    Seam(
        name="register_grad_ready",
        module=f"{CORE}.distributed.param_and_grad_buffer",
        target="_ParamAndGradBucketGroup.register_grad_ready",
        kind="function",
        touch="called",
        purpose="tells the reduction of gradients; before the last microbatch it does nothing",
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
        uses=("grad_added_to_main_grad", "register_grad_ready", "force_all_reduce"),
    ),
    Seam(
        name="ddp_config",
        module=f"{CORE}.distributed.distributed_data_parallel_config",
        target="DistributedDataParallelConfig",
        kind="class",
        touch="read",
        purpose="how parameters are gathered",
        attributes=("align_param_gather", "overlap_param_gather", "overlap_grad_reduce", "use_megatron_fsdp"),
    ),
    Seam(
        name="microbatches",
        module=f"{CORE}.num_microbatches_calculator",
        target="get_num_microbatches",
        kind="function",
        touch="called",
        purpose="bounds the slots: how many microbatches a step has, and the largest one of a schedule of batch sizes",
        uses=("_GLOBAL_NUM_MICROBATCHES_CALCULATOR.get()",),
    ),
    Seam(
        name="attention_forward",
        module=EXTENSIONS,
        target="TEDotProductAttention.forward",
        kind="function",
        touch="instance",
        purpose="one segment attends unpacked while work is recorded",
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
        parameters=("qkv_format", "attn_mask_type", "cu_seqlens_q", "cu_seqlens_kv", "max_seqlen_q", "max_seqlen_kv"),
    ),
    Seam(
        name="layernorm_backward",
        module=TE_LAYERNORM_LINEAR,
        target="_LayerNormLinear.backward",
        kind="function",
        touch="replaced",
        purpose="vision_cuda_graph_kernels=fast has a kernel of its own for what it calls",
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
        undo=RECORDED,
        uses=("layernorm_bwd(dy, x, means, rstdevs, w,",),
    ),
    *(
        Seam(
            name=f"weight_gradients.{name}",
            module=f"transformer_engine.pytorch.module.{module}",
            target=name,
            kind="class",
            touch="instance",
            purpose="weight gradients are added to main_grad inside the GEMM while work is recorded",
            undo=RECORDED,
            attributes=("fuse_wgrad_accumulation",),
        )
        for module, name in (("linear", "Linear"), ("layernorm_linear", "LayerNormLinear"))
    ),
    Seam(
        name="gemm_workspace",
        module=TE_GEMM,
        target="general_gemm",
        kind="function",
        touch="replaced",
        purpose="weight gradients of two streams have a workspace each",
        undo=RECORDED,
        parameters=("A", "B", "layout", "out", "bias", "accumulate", "grad", "ub", "extra_output"),
        uses=("get_cublas_workspace(A.device.index, ub is not None, False)",),
    ),
    *(
        Seam(
            name=f"side_products.{name}",
            module=module,
            target=target,
            kind="function",
            touch="replaced",
            purpose="weight gradients run on a stream of their own while work is recorded",
            undo=RECORDED,
            uses=("dw, db, *_ = general_gemm(x, dy, **wgrad_gemm_kwargs)",),
        )
        for name, module, target in (
            ("linear", TE_LINEAR, "_linear_backward_impl"),
            ("layernorm_linear", TE_LAYERNORM_LINEAR, "_LayerNormLinear.backward"),
        )
    ),
    Seam(
        name="attention_selection",
        module=TE_ATTENTION,
        target="_attention_backends",
        kind="value",
        touch="read",
        purpose="a cached choice of kernel that would read the device during a capture is dropped",
        undo="Transformer Engine chooses again",
    ),
    Seam(
        name="weights_stay",
        module=TE_OFFLOAD,
        target="NVTE_CPU_OFFLOAD_V1",
        kind="value",
        touch="read",
        purpose="whether Transformer Engine leaves weights on the device while megatron-core offloads",
    ),
    Seam(
        name="offload_marks",
        module=CORE_OFFLOAD,
        target="ChunkOffloadHandler.tensor_need_offloading_checker",
        kind="function",
        touch="read",
        purpose="a tensor marked with never_offload stays on the device in megatron-core's offloading, too",
        parameters=("self", "tensor"),
    ),
    Seam(
        name="offload_begins",
        module=GPT_MODEL,
        target="GPTModel.preprocess_for_fine_grained_offloading",
        kind="function",
        touch="called",
        purpose="megatron-core's offloading is told that a microbatch of a language model begins",
        parameters=("self",),
    ),
)
