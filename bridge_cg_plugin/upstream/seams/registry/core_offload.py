"""Seams of megatron-core's and Transformer Engine's offloading of activations."""

from ..seam import Feature, called, patched, read
from .engine import CORE
from .models import QWEN3_VL

TE_OFFLOAD = "transformer_engine.pytorch.cpu_offload"
GPT_MODEL = f"{CORE}.models.gpt.gpt_model"
CORE_OFFLOAD = f"{CORE}.pipeline_parallel.fine_grained_activation_offload"

SEAMS = (
    read(
        "weights_stay",
        f"{TE_OFFLOAD}:NVTE_CPU_OFFLOAD_V1",
        "whether Transformer Engine leaves weights on the device while megatron-core offloads",
        Feature.CORE_OFFLOAD,
        kind="value",
    ),
    read(
        "offload_marks",
        f"{CORE_OFFLOAD}:ChunkOffloadHandler.tensor_need_offloading_checker",
        "a tensor marked with never_offload stays on the device in megatron-core's offloading, too",
        Feature.CORE_OFFLOAD,
        takes="self tensor",
    ),
    patched(
        "offloaded_microbatch_ends",
        f"{CORE_OFFLOAD}:ChunkOffloadHandler.finish_all_groups",
        "a microbatch is not over before its last group, whichever groups stay on the device",
        Feature.CORE_OFFLOAD,
        "decoder.offloaded_groups",
        takes="self name",
    ),
    patched(
        "offloaded_memory",
        f"{CORE_OFFLOAD}:ChunkOffloadHandler.bulk_offload",
        "memory that is given back is not that of saved tensors that stay",
        Feature.CORE_OFFLOAD,
        "decoder.offloaded_groups",
        takes="self forced_released_tensors",
        uses=(("self.should_bulk_offload(group_to_offload)", "self.should_bulk_offload()"),),
    ),
    read(
        "offloaded_microbatch",
        f"{CORE_OFFLOAD}:ChunkOffloadHandler",
        "groups of a microbatch: which are yet to leave and what each saved",
        Feature.CORE_OFFLOAD,
        has="_groups_to_offload offload_groups _offloaded_group_index "
        "find_next_group should_bulk_offload tensor_need_offloading_checker",
    ),
    read(
        "offloaded_backwards",
        f"{CORE_OFFLOAD}:PipelineOffloadManager",
        "which microbatches' backward has begun",
        Feature.CORE_OFFLOAD,
        has="get_instance _cached_chunks_backward _cached_chunks_index_backward",
    ),
    called(
        "offload_groups",
        f"{CORE_OFFLOAD}:FineGrainedActivationOffloadingInterface",
        "a step of attention is a group that megatron-core offloads",
        Feature.CORE_OFFLOAD,
        takes="offload tensor name",
        models=QWEN3_VL,
    ),
    called(
        "offload_group_ends",
        f"{CORE_OFFLOAD}:FineGrainedActivationOffloadingInterface.group_offload",
        "a group is offloaded once its step ended",
        Feature.CORE_OFFLOAD,
        takes="tensor forced_released_tensors",
        formerly=("FineGrainedActivationOffloadingInterface.group_commit",),
        models=QWEN3_VL,
    ),
    called(
        "offload_begins",
        f"{GPT_MODEL}:GPTModel.preprocess_for_fine_grained_offloading",
        "megatron-core's offloading is told that a microbatch of a language model begins",
        Feature.CORE_OFFLOAD,
        takes="self",
        models=QWEN3_VL,
    ),
)
