"""Seams of megatron-core's and Transformer Engine's offloading of activations."""

from ..seam import Feature, Seam
from .engine import CORE
from .models import QWEN3_VL
from .training import RESTORED

TE_OFFLOAD = "transformer_engine.pytorch.cpu_offload"
GPT_MODEL = f"{CORE}.models.gpt.gpt_model"
CORE_OFFLOAD = f"{CORE}.pipeline_parallel.fine_grained_activation_offload"

SEAMS = (
    Seam(
        name="weights_stay",
        module=TE_OFFLOAD,
        target="NVTE_CPU_OFFLOAD_V1",
        kind="value",
        touch="read",
        purpose="whether Transformer Engine leaves weights on the device while megatron-core offloads",
        features=(Feature.CORE_OFFLOAD,),
    ),
    Seam(
        name="offload_marks",
        module=CORE_OFFLOAD,
        target="ChunkOffloadHandler.tensor_need_offloading_checker",
        kind="function",
        touch="read",
        purpose="a tensor marked with never_offload stays on the device in megatron-core's offloading, too",
        features=(Feature.CORE_OFFLOAD,),
        parameters=("self", "tensor"),
    ),
    Seam(
        name="offloaded_microbatch_ends",
        module=CORE_OFFLOAD,
        target="ChunkOffloadHandler.finish_all_groups",
        kind="function",
        touch="extended",
        purpose="a microbatch is not over before its last group, whichever groups stay on the device",
        features=(Feature.CORE_OFFLOAD,),
        undo=RESTORED,
        parameters=("self", "name"),
        patched_by="decoder.offloaded_groups",
    ),
    Seam(
        name="offloaded_memory",
        module=CORE_OFFLOAD,
        target="ChunkOffloadHandler.bulk_offload",
        kind="function",
        touch="extended",
        purpose="memory that is given back is not that of saved tensors that stay",
        features=(Feature.CORE_OFFLOAD,),
        undo=RESTORED,
        parameters=("self", "forced_released_tensors"),
        uses=(("self.should_bulk_offload(group_to_offload)", "self.should_bulk_offload()"),),
        patched_by="decoder.offloaded_groups",
    ),
    Seam(
        name="offloaded_microbatch",
        module=CORE_OFFLOAD,
        target="ChunkOffloadHandler",
        kind="class",
        touch="read",
        purpose="groups of a microbatch: which are yet to leave and what each saved",
        features=(Feature.CORE_OFFLOAD,),
        attributes=(
            "_groups_to_offload",
            "offload_groups",
            "_offloaded_group_index",
            "find_next_group",
            "should_bulk_offload",
            "tensor_need_offloading_checker",
        ),
    ),
    Seam(
        name="offloaded_backwards",
        module=CORE_OFFLOAD,
        target="PipelineOffloadManager",
        kind="class",
        touch="read",
        purpose="which microbatches' backward has begun",
        features=(Feature.CORE_OFFLOAD,),
        attributes=("get_instance", "_cached_chunks_backward", "_cached_chunks_index_backward"),
    ),
    Seam(
        name="offload_groups",
        module=CORE_OFFLOAD,
        target="FineGrainedActivationOffloadingInterface",
        kind="class",
        touch="called",
        purpose="a step of attention is a group that megatron-core offloads",
        features=(Feature.CORE_OFFLOAD,),
        models=QWEN3_VL,
        parameters=("offload", "tensor", "name"),
    ),
    Seam(
        name="offload_group_ends",
        module=CORE_OFFLOAD,
        target="FineGrainedActivationOffloadingInterface.group_offload",
        formerly=("FineGrainedActivationOffloadingInterface.group_commit",),
        kind="function",
        touch="called",
        purpose="a group is offloaded once its step ended",
        features=(Feature.CORE_OFFLOAD,),
        models=QWEN3_VL,
        parameters=("tensor", "forced_released_tensors"),
    ),
    Seam(
        name="offload_begins",
        module=GPT_MODEL,
        target="GPTModel.preprocess_for_fine_grained_offloading",
        kind="function",
        touch="called",
        purpose="megatron-core's offloading is told that a microbatch of a language model begins",
        features=(Feature.CORE_OFFLOAD,),
        models=QWEN3_VL,
        parameters=("self",),
    ),
)
