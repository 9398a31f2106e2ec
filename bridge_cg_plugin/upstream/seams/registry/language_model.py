"""Seams of language-model graphs: per-layer inputs and the length of sequences."""

from ..seam import Feature, Seam
from .engine import CORE, LAYER, RECORDED
from .models import BLOCK, MODELLING, QWEN3_VL
from .training import RESTORED, STEPS

STEP = STEPS[0]
FULL_ITERATION = f"{CORE}.full_cuda_graph"
LANGUAGE_MODEL = f"{MODELLING}.text_model"

SEAMS = (
    Seam(
        name="language_model_rotary",
        module=LAYER,
        target="TransformerLayer.get_layer_static_inputs",
        kind="function",
        touch="extended",
        purpose="per-layer graphs of a model with multimodal rotary embedding contain it",
        features=(Feature.MULTIMODAL_ROTARY,),
        undo=RESTORED,
        parameters=("self", "seq_length", "micro_batch_size"),
        patched_by="decoder.per_layer_graphs",
    ),
    Seam(
        name="language_model_length",
        module=STEP,
        target="get_batch",
        kind="function",
        touch="extended",
        purpose="sequences have the one length that language-model graphs replay",
        features=(Feature.LANGUAGE_MODEL, Feature.FULL_ITERATION),
        models=QWEN3_VL,
        undo=RESTORED,
        parameters=("data_iterator", "cfg"),
        patched_by="decoder.per_layer_graphs",
    ),
    *(
        Seam(
            name=f"language_model_length.{target.rpartition('_to_')[0]}",
            module=STEP,
            target=target,
            kind="function",
            touch="called",
            purpose="pads one tensor of a batch to that length",
            features=(Feature.LANGUAGE_MODEL, Feature.FULL_ITERATION),
            models=QWEN3_VL,
            parameters=("target_len", "max_cap"),
        )
        for target in ("pad_or_truncate_2d_to_len", "pad_or_truncate_attn_to_len", "pad_or_truncate_pos_to_len")
    ),
    Seam(
        name="full_iteration",
        module=FULL_ITERATION,
        target="FullCudaGraphWrapper.__call__",
        kind="function",
        touch="extended",
        purpose="a step of a model that takes images runs eager, its language model on graphs",
        features=(Feature.FULL_ITERATION,),
        undo=RESTORED,
        parameters=("self",),
        uses=("self.forward_backward_func(*args, **kwargs)", "kwargs['forward_only']", "kwargs['num_microbatches']"),
        patched_by="hooks.full_iteration",
    ),
    Seam(
        name="full_iteration_wrapper",
        module=FULL_ITERATION,
        target="FullCudaGraphWrapper",
        kind="class",
        touch="read",
        purpose="the schedule that the wrapper holds, and its warm-up steps",
        features=(Feature.FULL_ITERATION,),
        parameters=("forward_backward_func", "cuda_graph_warmup_steps"),
        attributes=("forward_backward_func", "cuda_graph_warmup_steps"),
    ),
    Seam(
        name="language_model_forward",
        module=LANGUAGE_MODEL,
        target="Qwen3VLGPTModel.forward",
        kind="function",
        touch="instance",
        purpose="a microbatch's language model replays a graph",
        features=(Feature.FULL_ITERATION,),
        undo="the end of training and deactivate() take the instance's own forward off",
        parameters=("decoder_input", "position_ids", "labels", "visual_pos_masks", "deepstack_visual_embeds"),
    ),
    Seam(
        name="language_model_offload",
        module=LANGUAGE_MODEL,
        target="Qwen3VLGPTModel.forward",
        kind="function",
        touch="extended",
        purpose="megatron-core's activation offloading is told that a microbatch begins, as in GPTModel.forward",
        features=(Feature.CORE_OFFLOAD,),
        models=QWEN3_VL,
        undo=RESTORED,
        parameters=("self",),
        patched_by="decoder.offload",
    ),
    Seam(
        name="language_model_parts",
        module=LANGUAGE_MODEL,
        target="Qwen3VLGPTModel",
        kind="class",
        touch="read",
        purpose="the modules whose parameters the language model's region owns",
        features=(Feature.FULL_ITERATION,),
        attributes=("decoder", "embedding", "output_layer", "share_embeddings_and_output_weights"),
    ),
    Seam(
        name="deepstack_addition",
        module=BLOCK,
        target="Qwen3VLTransformerBlock._deepstack_process",
        kind="function",
        touch="instance",
        purpose="features of images are added as dense tensors while work is recorded",
        features=(Feature.FULL_ITERATION,),
        undo=RECORDED,
        parameters=("hidden_states", "visual_pos_masks", "visual_embeds"),
    ),
    Seam(
        name="random_states",
        module=f"{CORE}.tensor_parallel.random",
        target="get_all_rng_states",
        kind="function",
        touch="called",
        purpose="a capture knows the generators that dropout draws from",
        features=(Feature.PACKED, Feature.FULL_ITERATION),
    ),
)
