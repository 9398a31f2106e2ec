"""megatron-core's pipeline schedules: how many microbatches the first stage holds between forward and backward."""

from typing import Any


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
    return max(1, _interleaved(most, chunks, in_a_row, ahead))


# Runs one more forward ahead of the first backward.
OVERLAPS_EXPERTS = "overlap_moe_expert_parallel_comm"


def _interleaved(microbatches: int, chunks: int, in_a_row: int, ahead: int) -> int:
    """Return the most microbatches that the first of a rank's chunks holds in the interleaved schedule.

    Args:
        microbatches: Microbatches of a step.
        chunks: Model chunks of the rank.
        in_a_row: Microbatches that one chunk takes before the next chunk takes the same.
        ahead: Forwards before the first backward; then they take turns.
    """
    order = [
        chunk
        for first in range(0, microbatches, in_a_row)
        for chunk in range(chunks)
        for _ in range(first, min(first + in_a_row, microbatches))
    ]
    held = most = 0
    for turn, chunk in enumerate(order):
        held += chunk == 0
        most = max(most, held)
        if turn >= ahead:  # backwards go through the chunks from the last to the first
            held -= order[turn - ahead] == chunks - 1
    return most


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
