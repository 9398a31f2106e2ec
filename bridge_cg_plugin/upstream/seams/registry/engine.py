"""Seams of megatron-core and Transformer Engine: layers, packs, data parallelism; and of language models in them."""

from ..encoders import NEMOTRON_OMNI, NEMOTRON_VL
from ..seam import GRAPHS, called, patched, read, replayed, seams_of, swapped
from ..seam import Feature as F
from .bridge import TRAIN

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
    attention_settings=read(
        f"{TE_ATTENTION}:DotProductAttention.__init__",
        "other kernels attend only where it is set up for plain softmax",
        "self.attention_dropout = attention_dropout",
        "self.softmax_type = softmax_type",
        "self.return_max_logit = return_max_logit",
        "self.window_size = dpa_utils.check_set_window_size(attn_mask_type, window_size)",
    ),
    attention_scale=read(
        f"{TE_ATTENTION_BACKENDS}:FusedAttention.__init__",
        "what other kernels multiply products of queries and keys by",
        "self.softmax_scale = softmax_scale",
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
    layernorm_backward=swapped(
        f"{TE_LAYERNORM_LINEAR}:_LayerNormLinear.backward",
        "vision_cuda_graph_kernels=fast has a kernel of its own for what it calls",
        "tex.layernorm_bwd(dgrad, inputmat, mu, rsigma, ln_weight,",
    ),
    layernorm_operation=swapped(
        f"{TE_LAYERNORM}:LayerNorm.op_backward",
        "what it calls is the plugin's kernel, too",
        "layernorm_bwd(dy, x, means, rstdevs, w,",
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
_PARALLEL = seams_of(
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
    microbatches=called(
        f"{CORE}.num_microbatches_calculator:get_num_microbatches",
        "bounds the slots: how many microbatches a step has, and the largest one of a schedule of batch sizes",
        "_GLOBAL_NUM_MICROBATCHES_CALCULATOR.get()",
    ),
)
_OFFLOAD = seams_of(
    F.OFFLOAD_IN_GRAPHS,
    recompute=swapped(
        f"{CORE}.tensor_parallel.random:checkpoint(function, distribute_saved_activations)",
        "layers are recomputed inside a recorded backward",
    ),
    recomputed_outputs=swapped(
        f"{CORE}.tensor_parallel.random:CheckpointWithoutOutput.checkpoint(run_function)",
        "outputs of norms and activations are recomputed inside a recorded backward",
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
_CUDNN = seams_of(
    (F.PACKED, F.FULL_ITERATION, NEMOTRON_OMNI.feature, NEMOTRON_VL.feature),
    engine_cudnn_version=read(
        f"{TE_ATTENTION_UTILS}:get_cudnn_version",
        "up to 9.15.0, a backward of attention copies lengths from the host; before 9.18, of packs, it may be wrong",
    ),
)
_UNPACKED = seams_of(
    (F.FULL_ITERATION, NEMOTRON_OMNI.feature, NEMOTRON_VL.feature),
    attention_backward=swapped(
        f"{TE_ATTENTION_BACKENDS}:fused_attn_bwd",
        "the device computes lengths that an older cuDNN would read from the host in every replay",
        takes="max_seqlen_q max_seqlen_kv cu_seqlens_q cu_seqlens_kv attn_mask_type",
    ),
)
GPT_STEP = "megatron.bridge.training.gpt_step"
BLOCK = f"{CORE}.transformer.transformer_block:TransformerBlock"
MOE = f"{CORE}.transformer.moe"
ROUTER, EXPERTS = f"{MOE}.router", f"{MOE}.experts"
ROPE = f"{CORE}.models.common.embeddings.rope_utils"
STACK = f"{CORE}.models.hybrid.hybrid_block:HybridStack"
MAMBA = f"{CORE}.ssm"
TE_STORAGE = f"{TE}.tensor.storage"
FULL_GRAPH = f"{CORE}.full_cuda_graph:FullCudaGraphWrapper"
RANDOM = f"{CORE}.tensor_parallel.random"

_ROTARY = seams_of(
    F.MULTIMODAL_ROTARY,
    language_model_rotary=patched(
        f"{TRANSFORMER_LAYER}.get_layer_static_inputs(self, seq_length, micro_batch_size)",
        "per-layer graphs of a model with multimodal rotary embedding contain it",
    ),
)
_FULL_ITERATION = seams_of(
    F.FULL_ITERATION,
    full_iteration=patched(
        f"{FULL_GRAPH}.__call__(self)",
        "a step of a model that takes images runs as it is, its layers on graphs",
        "self.forward_backward_func(*args, **kwargs)",
    ),
    delta_net_layers=swapped(
        f"{CORE}.ssm.gated_delta_net:GatedDeltaNet[_resolve_cu_seqlens]",
        "layers on graphs, over packs with documents that the device finds",
    ),
)
_RANDOM_STATES = seams_of(
    (F.PACKED, F.FULL_ITERATION, F.VISION_QWEN3_VL),
    random_states=called(f"{RANDOM}:get_all_rng_states", "a capture knows the generators that dropout draws from"),
    random_state_forks=swapped(
        f"{RANDOM}:CudaRNGStatesTracker.fork(name)",
        "recorded work that draws nothing runs where random states are none that a graph can use",
    ),
    random_state_tracker=called(f"{RANDOM}:get_cuda_rng_tracker", "the tracker that a decoder's layers fork"),
)
_PACKED = seams_of(
    F.PACKED,
    packed_helper=patched(
        f"{TRAIN}:TECudaGraphHelper(model, config, seq_length, micro_batch_size, optimizers)",
        "the train loop drives the plugin's graphs of packed sequences where they are asked for",
        has="create_cudagraphs graphs_created cuda_graph_set_manual_hooks delete_cuda_graphs",
    ),
    packed_loop=read(
        f"{TRAIN}:train",
        "the loop makes the language model's helper, captures after warm-up and needs no more of it",
        *("TECudaGraphHelper(", "cuda_graph_helper.graphs_created()", "cuda_graph_helper.create_cudagraphs()"),
    ),
    packed_layers=read(
        f"{CORE}.transformer.module:GraphableMegatronModule._should_call_te_cudagraph",
        "layers without graphs of megatron-core's own run their forward",
        "self.cuda_graphs",
    ),
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
_PACKED_ROTARY = seams_of(
    (F.PACKED_ATTENTION, F.PACKED_HYBRIDS),
    packed_attention=read(f"{CORE_ATTENTION}:SelfAttention", "the attention that was looked at for packed graphs"),
    packed_rotary=swapped(
        f"{CORE_ATTENTION}:apply_rotary_pos_emb(t, freqs, config, cu_seqlens, mscale, cp_group)",
        "tokens are rotated by angles of their own, where upstream reads the offsets on the host",
    ),
    packed_rotary_positions=read(
        f"{ROPE}:_apply_rotary_pos_emb_thd(t, cu_seqlens, freqs)",
        "which positions upstream gives the tokens of a pack",
        ("freqs.size(0) == ", "freqs.size(0) > max_seqlen"),
        ("_get_thd_freqs_on_this_cp_rank(cp_rank, cp_size, x, freqs)", "freq_pos = freq_pos + global_seq_start"),
    ),
    host_offsets=patched(
        f"{GPT_STEP}:get_batch_from_iterator(data_iterator)",
        "replays know how a batch is packed without waiting for the device",
    ),
)
_DECODER = seams_of(
    (F.PACKED_ATTENTION, F.FULL_ITERATION),
    packed_decoder=replayed(
        f"{BLOCK}.forward(hidden_states, attention_mask, rotary_pos_emb, packed_seq_params)",
        "the layers of a packed microbatch replay a graph",
    ),
)
_BLOCK = seams_of(
    (F.PACKED_ATTENTION, F.PACKED_QWEN3_VL, F.FULL_ITERATION),
    packed_block=swapped(
        f"{BLOCK}[layers, pre_process, input_tensor, config]",
        "a later pipeline stage takes its input from here, also while it is recorded",
    ),
)
# What a router gets on megatron-core's branch dev, too: it goes by them where its configuration asks for that alone.
_MORE_OF_ROUTER = ("", ", input_ids=input_ids, packed_seq_params=packed_seq_params")
_EXPERTS = seams_of(
    F.PACKED_EXPERTS,
    packed_norm=replayed(
        f"{TRANSFORMER_LAYER}._forward_pre_mlp_layernorm(hidden_states)",
        "the norm before the experts is part of the router's graph",
    ),
    packed_router=replayed(
        f"{ROUTER}:TopKRouter.forward(input, padding_mask)",
        "a router that leaves no trace replays a graph",
        *("self.apply_input_jitter(input)", "self.gating(input)"),
        tuple(f"self.routing(logits, padding_mask=padding_mask{more})" for more in _MORE_OF_ROUTER),
    ),
    packed_router_metrics=called(f"{MOE}.moe_logging:get_moe_metrics_tracker", "passes before a capture log no losses"),
    packed_route=read(
        f"{MOE}.moe_layer:MoELayer.route", "the router is called once for what the norm gave", "self.router"
    ),
    packed_gating=replayed(
        f"{ROUTER}:Router.gating(input)", "of a router with losses or statistics the matrix product replays a graph"
    ),
)
_EXPERTS_INSIDE = seams_of(
    F.EXPERTS_INSIDE,
    packed_masked_router=called(
        f"{ROUTER}:TopKRouter.routing(logits, padding_mask)",
        "a router's losses count the tokens that are no padding",
        *("padding_mask.reshape(-1)", "self.apply_z_loss(logits, padding_mask=padding_mask)"),
    ),
    packed_expert_bias=swapped(
        f"{ROUTER}:TopKRouter._apply_expert_bias(routing_map, padding_mask)",
        "tokens of each expert are counted without padding, while all layers are recorded",
        "self.local_tokens_per_expert += routing_map.sum(dim=0)",
    ),
    packed_experts=swapped(
        f"{MOE}.moe_layer:MoELayer.forward(hidden_states)",
        "experts get their tokens by counts that stay on the device, while all layers are recorded",
        "self.shared_experts_compute(hidden_states)",
        (
            "self.route(hidden_states, padding_mask)",
            "self.route(hidden_states, padding_mask, input_ids, packed_seq_params)",
        ),
        "self.postprocess(output, shared_expert_output)",
    ),
    packed_grouped_experts=read(
        f"{EXPERTS}:TEGroupedMLP.forward(permuted_local_hidden_states, tokens_per_expert, permuted_probs)",
        "what experts compute, and where the router's probability is applied",
        *("self.linear_fc1", "self.linear_fc2", "permuted_probs"),
    ),
    packed_sequential_experts=read(
        f"{EXPERTS}:SequentialMLP.forward", "the same, where every expert is a module", "self.local_experts"
    ),
    packed_swiglu=called(
        f"{CORE}.fusions.fused_bias_swiglu:weighted_bias_swiglu_impl(input, bias, weights, fp8_input_store)",
        "the function between an expert's linear layers",
    ),
    packed_quick_geglu=called(
        f"{CORE}.fusions.fused_bias_geglu:weighted_bias_quick_geglu_impl",
        "the same, gated by quick GELU",
        takes="input bias weights fp8_input_store linear_offset clamp_value",
    ),
)
_FP8 = seams_of(
    F.PACKED_FP8,
    packed_fp8_context=called(
        f"{CORE}.fp8_utils:get_fp8_context(config, layer_no)", "a part of a layer is recorded in the layer's precision"
    ),
    packed_fp8_block=read(
        f"{BLOCK}.forward",
        "delayed scaling surrounds all layers, other recipes each layer",
        *("self.config.fp8_recipe == Fp8Recipe.delayed", "get_fp8_context(self.config, layer.layer_number - 1)"),
    ),
    packed_fp8_state=swapped(
        f"{TE}.quantization:FP8GlobalStateManager[is_fp8_enabled, reduce_and_update_fp8_tensors]",
        "a flag on the device says whether weights changed, and delayed scales are updated after replays",
    ),
    **{
        f"packed_fp8_{module.rpartition('.')[2]}": read(
            f"{module}:{target}.forward(is_first_microbatch)",
            "a captured product reads the flag, and writes the quantized weight that eager keeps",
            (
                "FP8GlobalStateManager.quantization_state.skip_fp8_weight_update_tensor",
                "FP8GlobalStateManager.get_skip_fp8_weight_update_tensor()",
            ),
        )
        for module, target in ((TE_LINEAR, "Linear"), (TE_LAYERNORM_LINEAR, "LayerNormLinear"))
    },
    packed_fp8_copies=read(
        f"{TE}.module.base:TransformerEngineBaseModule[_fp8_workspaces, fp8_meta, quantizers]",
        "where a module keeps its quantized weights and its scales",
    ),
    packed_fp8_gathered=read(
        f"{CORE}.fp8_utils:post_all_gather_processing",
        "after an optimizer's step data parallelism makes what a backward reads of parameters in fp8",
        "te_post_all_gather_processing(",
    ),
    packed_fp8_transpose=read(
        f"{TE_STORAGE}.float8_tensor_storage:Float8TensorStorage._create_transpose",
        "what a backward reads of a parameter in fp8 is made where it was before",
        "out=self._transpose",
    ),
    packed_fp8_columns=read(
        f"{TE_STORAGE}.float8_blockwise_tensor_storage:Float8BlockwiseQTensorStorage._create_columnwise",
        "what a backward reads of a parameter in fp8 is made where it was before",
        "out=self._columnwise_data",
    ),
    packed_fp8_microbatches=read(
        f"{CORE}.transformer.module:MegatronModule.set_is_first_microbatch",
        "the first microbatch of a step quantizes weights",
        "m.is_first_microbatch = True",
    ),
)
_HYBRIDS = seams_of(
    F.PACKED_HYBRIDS,
    hybrid_decoder=replayed(
        f"{STACK}.forward(hidden_states, attention_mask, rotary_pos_emb, packed_seq_params)",
        "the layers of a packed microbatch of a hybrid replay a graph",
    ),
    hybrid_block=swapped(
        f"{STACK}[layers, pre_process, input_tensor, pg_collection]",
        "a later pipeline stage takes its input from here, also while it is recorded",
    ),
    mamba_layer=replayed(
        f"{MAMBA}.mamba_layer:MambaLayer.forward(hidden_states, packed_seq_params)",
        "a Mamba layer of a packed microbatch replays a graph",
        "self.mixer(",
    ),
    mamba_mixer=read(
        f"{MAMBA}.mamba_mixer:MambaMixer._ssm_training(zxBCdt, packed_seq_params)",
        "a state stays in its document by every token's number alone; parameters come from the mixer's helper",
        "packed_seq_params.seq_idx",
        *(f"self.cp.get_{name}()" for name in ("A_log", "conv1d_weight", "conv1d_bias", "dt_bias", "D")),
    ),
    mamba_parameters=swapped(
        f"{MAMBA}.mamba_context_parallel:MambaContextParallel[dt_bias_cp1, A_log_cp1, D_cp1]",
        "the mixer computes with what stands in for its parameters while work is recorded",
    ),
    pack_indices=patched(
        f"{CORE}.packed_seq_params:PackedSeqParams.__post_init__",
        "where packs are on graphs, a step finds every token's document without waiting for the device",
        *("self.total_tokens", "self.seq_idx", "repeat_interleave"),
    ),
)
SEAMS = (
    *(*_ROTARY, *_FULL_ITERATION, *_RANDOM_STATES),
    *(*_PACKED, *_PACKED_ROTARY, *_DECODER, *_BLOCK, *_EXPERTS, *_EXPERTS_INSIDE),
    *(*_FP8, *_HYBRIDS),
    *(*_VISION, *_SEGMENTS, *_PARALLEL, *_OFFLOAD, *_HEAD_NORMS, *_EVERY),
    *(*_CUDNN, *_UNPACKED),
)
