"""megatron-core's pipeline schedules: how many microbatches the first stage holds between forward and backward."""

from typing import Any

# Runs one more forward ahead of the first backward.
OVERLAPS_EXPERTS = "overlap_moe_expert_parallel_comm"


def stages_of(config: Any) -> int:
    """Return the pipeline's stages."""
    return getattr(config, "pipeline_model_parallel_size", None) or 1


def microbatches_in_flight(config: Any, num_microbatches: int) -> int:
    """Return how many microbatches the first stage holds at once, in its first model chunk where it has several.

    Args:
        config: Has the pipeline's stages, the model chunks of each and how many microbatches a chunk takes in a row.
        num_microbatches: Microbatches of a step now; the run's largest step counts.
    """
    stages, most = stages_of(config), most_microbatches(num_microbatches)
    chunks = getattr(config, "virtual_pipeline_model_parallel_size", None) or 1
    if stages == 1 or chunks == 1:
        return max(1, min(stages, most))
    in_a_row = getattr(config, "microbatch_group_size_per_vp_stage", None) or stages
    ahead = 2 * (stages - 1) + (chunks - 1) * in_a_row + bool(getattr(config, OVERLAPS_EXPERTS, False))
    # Chunks take turns, `in_a_row` microbatches each. The first backwards are of the last chunk; the first chunk holds
    # most when its own begin.
    rounds, rest = divmod(ahead + 1 + (chunks - 1) * in_a_row, chunks * in_a_row)
    return max(1, min(most, rounds * in_a_row + min(rest, in_a_row)))


def most_microbatches(num_microbatches: int) -> int:
    """Return how many microbatches the run's largest step has: a schedule of batch sizes may begin with fewer.

    Args:
        num_microbatches: Microbatches of a step as passed by the caller; megatron-core may run more.
    """
    from megatron.core import num_microbatches_calculator

    calculator = num_microbatches_calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR
    if calculator is None:
        return num_microbatches
    samples = getattr(calculator, "micro_batch_times_data_parallel_size", None)
    if samples is None:  # every step has as many
        microbatches: int = calculator.get()
        return max(num_microbatches, microbatches)
    batches = [batch for _, batch in getattr(calculator, "schedule", ())]
    most: int = max(batch // samples for batch in (calculator.global_batch_size, *batches))
    return max(num_microbatches, most)
