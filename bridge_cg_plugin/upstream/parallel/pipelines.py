"""Pipelines: how many microbatches their first stage holds, and the virtual stage of an interleaved one.

Qwen3-VL's providers get the virtual stage that they build and do not pass it to their model. The model takes `vp_stage`
and megatron-core refuses to number layers without it, so as released no interleaved pipeline of Qwen3-VL can be built.
Qwen3.5-VL's providers pass it on.
"""

import functools
import sys
from collections.abc import Callable
from types import CodeType
from typing import Any

from ..seams.patches import Patch, arguments_of
from ..seams.registry import seam
from ..seams.registry.models import DROPS_STAGE, MODEL_OF_PROVIDER
from ..seams.seam import Seam
from ..wrappers import overridden

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


STAGE = "vp_stage"


def _tells_stage(entry: Seam) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return what makes a module's `provide` build the model of the virtual stage that it was asked for."""

    def make(old: Callable[..., Any]) -> Callable[..., Any]:
        argument = arguments_of(entry, old)

        @functools.wraps(old)
        def provide(*args: Any, **kwargs: Any) -> Any:
            stage = argument(STAGE, args, kwargs)
            if stage is None:
                return old(*args, **kwargs)
            owner = sys.modules[entry.module]
            model = getattr(owner, MODEL_OF_PROVIDER)
            with overridden(owner, MODEL_OF_PROVIDER, functools.partial(model, **{STAGE: stage})):
                return old(*args, **kwargs)

        return provide

    return make


def _drops_stage(old: Callable[..., Any]) -> bool:
    """Whether a `provide` passes its stage to nothing: no call in it has a keyword of that name."""
    code = getattr(old, "__code__", None)
    return isinstance(code, CodeType) and not any(isinstance(c, tuple) and STAGE in c for c in code.co_consts)


PATCHES = tuple(
    Patch(entry, _tells_stage(entry), needed=_drops_stage)
    for entry in (seam(f"{model.provider}.provide") for model in DROPS_STAGE)
)
