"""Seams of packed-sequence graphs of the language model."""

from ..releases import RELEASES
from ..seams import Kind, Seam
from .engine import CORE, DETACHED, RECORDED
from .models import BLOCK as QWEN_BLOCK
from .training import RESTORED, TRAIN

GPT_STEP = "megatron.bridge.training.gpt_step"
GPT_PROVIDER = "megatron.bridge.models.gpt_provider"
# (module, class, first release that has it)
PROVIDERS = (
    (GPT_PROVIDER, "GPTModelProvider", RELEASES[-1].bridge),
    ("megatron.bridge.models.hybrid.hybrid_provider", "HybridModelProvider", "0.6.2"),
    ("megatron.bridge.models.mamba.mamba_provider", "MambaModelProvider", RELEASES[-1].bridge),
)
BLOCK = f"{CORE}.transformer.transformer_block"
ATTENTION = f"{CORE}.transformer.attention"
ROUTER = f"{CORE}.transformer.moe.router"
EXPERTS = f"{CORE}.transformer.moe.experts"
ROPE = f"{CORE}.models.common.embeddings.rope_utils"
CONSTRUCTOR_AND_FIELDS: tuple[tuple[str, str, Kind], ...] = (
    ("init", "__init__", "function"),
    ("fields", "__dataclass_fields__", "value"),
)
OPTIONS = "packed-sequence options can be set, overridden and saved with the model's configuration"

SEAMS = (
    Seam(
        name="packed_helper",
        module=TRAIN,
        target="TECudaGraphHelper",
        kind="class",
        touch="extended",
        purpose="the train loop drives the plugin's graphs of packed sequences where they are asked for",
        undo=RESTORED,
        parameters=("model", "config", "seq_length", "micro_batch_size", "optimizers"),
        attributes=("create_cudagraphs", "graphs_created", "cuda_graph_set_manual_hooks", "delete_cuda_graphs"),
        patched_by="packed_helper",
    ),
    Seam(
        name="packed_loop",
        module=TRAIN,
        target="train",
        kind="function",
        touch="read",
        purpose="the loop makes the language model's helper, captures after warm-up and needs no more of it",
        uses=(
            "TECudaGraphHelper(",
            "cuda_graph_helper.graphs_created()",
            "cuda_graph_helper.create_cudagraphs()",
        ),
    ),
    Seam(
        name="host_offsets",
        module=GPT_STEP,
        target="get_batch_from_iterator",
        kind="function",
        touch="extended",
        purpose="replays know how a batch is packed without waiting for the device",
        undo=RESTORED,
        parameters=("data_iterator",),
        patched_by="batches",
    ),
    Seam(
        name="packed_decoder",
        module=BLOCK,
        target="TransformerBlock.forward",
        kind="function",
        touch="instance",
        purpose="the layers of a packed microbatch replay a graph",
        undo=DETACHED,
        parameters=("hidden_states", "attention_mask", "rotary_pos_emb", "packed_seq_params"),
    ),
    Seam(
        name="packed_block",
        module=BLOCK,
        target="TransformerBlock",
        kind="class",
        touch="instance",
        purpose="a later pipeline stage takes its input from here, also while it is recorded",
        undo=RECORDED,
        attributes=("layers", "pre_process", "input_tensor", "config"),
    ),
    Seam(
        name="packed_qwen3_vl_decoder",
        module=QWEN_BLOCK,
        target="Qwen3VLTransformerBlock.forward",
        kind="function",
        touch="instance",
        purpose="the layers of a packed microbatch of Qwen3-VL's language model replay a graph",
        undo=DETACHED,
        parameters=(
            *("hidden_states", "attention_mask", "rotary_pos_emb", "packed_seq_params"),
            *("visual_pos_masks", "deepstack_visual_embeds"),
        ),
        uses=("self._deepstack_process(hidden_states, visual_pos_masks, deepstack_visual_embeds[l_no])",),
    ),
    Seam(
        name="packed_deepstack",
        module=QWEN_BLOCK,
        target="Qwen3VLTransformerBlock._deepstack_process",
        kind="function",
        touch="instance",
        purpose="image features are added to every token, zero where there are none, while work is recorded",
        undo=RECORDED,
        parameters=("hidden_states", "visual_pos_masks", "visual_embeds"),
    ),
    Seam(
        name="packed_layers",
        module=f"{CORE}.transformer.module",
        target="GraphableMegatronModule._should_call_te_cudagraph",
        kind="function",
        touch="read",
        purpose="layers without graphs of megatron-core's own run their forward",
        uses=("self.cuda_graphs",),
    ),
    Seam(
        name="packed_attention",
        module=ATTENTION,
        target="SelfAttention",
        kind="class",
        touch="read",
        purpose="the attention that was looked at for packed graphs",
    ),
    Seam(
        name="packed_norm",
        module=f"{CORE}.transformer.transformer_layer",
        target="TransformerLayer._forward_pre_mlp_layernorm",
        kind="function",
        touch="instance",
        purpose="the norm before the experts is part of the router's graph",
        undo=DETACHED,
        parameters=("hidden_states",),
    ),
    Seam(
        name="packed_router",
        module=ROUTER,
        target="TopKRouter.forward",
        kind="function",
        touch="instance",
        purpose="a router that leaves no trace replays a graph",
        undo=DETACHED,
        parameters=("input", "padding_mask"),
        uses=(
            "self.apply_input_jitter(input)",
            "self.gating(input)",
            "self.routing(logits, padding_mask=padding_mask)",
        ),
    ),
    Seam(
        name="packed_gating",
        module=ROUTER,
        target="Router.gating",
        kind="function",
        touch="instance",
        purpose="of a router with losses or statistics the matrix product replays a graph",
        undo=DETACHED,
        parameters=("input",),
    ),
    Seam(
        name="packed_route",
        module=f"{CORE}.transformer.moe.moe_layer",
        target="MoELayer.route",
        kind="function",
        touch="read",
        purpose="the router is called once for what the norm gave",
        uses=("self.router",),
    ),
    Seam(
        name="packed_experts",
        module=f"{CORE}.transformer.moe.moe_layer",
        target="MoELayer.forward",
        kind="function",
        touch="instance",
        purpose="experts get their tokens by counts that stay on the device, while all layers are recorded",
        undo=RECORDED,
        parameters=("hidden_states",),
        uses=(
            "self.shared_experts_compute(hidden_states)",
            "self.route(hidden_states, padding_mask)",
            "self.postprocess(output, shared_expert_output)",
        ),
    ),
    Seam(
        name="packed_grouped_experts",
        module=EXPERTS,
        target="TEGroupedMLP.forward",
        kind="function",
        touch="read",
        purpose="what experts compute, and where the router's probability is applied",
        parameters=("permuted_local_hidden_states", "tokens_per_expert", "permuted_probs"),
        uses=("self.linear_fc1", "weighted_bias_swiglu_impl(", "weighted_bias_quick_geglu_impl(", "self.linear_fc2"),
    ),
    Seam(
        name="packed_sequential_experts",
        module=EXPERTS,
        target="SequentialMLP.forward",
        kind="function",
        touch="read",
        purpose="the same, where every expert is a module",
        uses=("self.local_experts",),
    ),
    Seam(
        name="packed_swiglu",
        module=f"{CORE}.fusions.fused_bias_swiglu",
        target="weighted_bias_swiglu_impl",
        kind="function",
        touch="called",
        purpose="the function between an expert's linear layers",
        parameters=("input", "bias", "weights", "fp8_input_store"),
    ),
    Seam(
        name="packed_quick_geglu",
        module=f"{CORE}.fusions.fused_bias_geglu",
        target="weighted_bias_quick_geglu_impl",
        kind="function",
        touch="called",
        purpose="the same, gated by quick GELU",
        parameters=("input", "bias", "weights", "fp8_input_store", "linear_offset", "clamp_value"),
    ),
    Seam(
        name="packed_rotary",
        module=ATTENTION,
        target="apply_rotary_pos_emb",
        kind="function",
        touch="replaced",
        purpose="tokens are rotated by angles of their own, where upstream reads the offsets on the host",
        undo=RECORDED,
        parameters=("t", "freqs", "config", "cu_seqlens", "mscale", "cp_group"),
    ),
    Seam(
        name="packed_rotary_positions",
        module=ROPE,
        target="_apply_rotary_pos_emb_thd",
        kind="function",
        touch="read",
        purpose="which positions upstream gives the tokens of a pack",
        parameters=("t", "cu_seqlens", "freqs"),
        uses=("freqs.size(0) == ", "_get_thd_freqs_on_this_cp_rank(cp_rank, cp_size, x, freqs)"),
    ),
    Seam(
        name="packed_files",
        module="megatron.bridge.utils.safe_pickle",
        target="safe_load_npy",
        kind="function",
        touch="called",
        purpose="the planner reads Bridge's packed files",
    ),
    *(
        Seam(
            name=f"{provider}.{name}",
            module=module,
            target=f"{provider}.{target}",
            kind=kind,
            touch="extended",
            purpose=OPTIONS,
            since=since,
            undo=RESTORED,
            patched_by="provider_fields",
        )
        for module, provider, since in PROVIDERS
        for name, target, kind in CONSTRUCTOR_AND_FIELDS
    ),
)
