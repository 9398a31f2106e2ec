"""Gradients of Qwen3-VL's vision encoder that upstream gets wrong: the plugin leaves them, and says so."""

from .facts import Facts

_PAGE = "docs/parallel.md#sequence-parallelism-and-deepstack"


def deepstack_warnings(facts: Facts) -> tuple[str, ...]:
    """Return what to tell of a run that trains its vision encoder by wrong gradients.

    Args:
        facts: What decides it; what is unknown warns of nothing.
    """
    ranks = facts.tensor_ranks or 1
    shared = facts.sequence_parallel or facts.moe
    if not (ranks > 1 and shared and facts.deepstack and facts.encoder_trained):
        return ()
    how, instead = "sequence_parallel=true", "sequence_parallel=false"
    if facts.moe:
        how = "mixture of experts, where Bridge sets sequence_parallel=true"
        instead = "tensor_model_parallel_size=1 with expert_model_parallel_size and pipeline_model_parallel_size"
    untrained = "freeze_vision_model=true and freeze_vision_projection=true"
    if facts.adapters:
        untrained = "peft.target_modules=language_model.*.linear_qkv and its like, without the encoder"
    return (
        f"tensor_model_parallel_size={ranks} with {how}: the vision encoder is trained by wrong gradients, eager as on "
        "graphs, because upstream does not sum those of deepstack's features over the tensor-parallel ranks. "
        f"Write {instead}, or {untrained}; see {_PAGE}",
    )
