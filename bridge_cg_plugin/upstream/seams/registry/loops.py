"""Seams of megatron-core's schedules, which every training loop calls."""

from ..seam import Feature, read, touched

MODULE = "megatron.core.pipeline_parallel.schedules"
SCHEDULES = {
    "schedule_alone": "forward_backward_no_pipelining",
    "schedule_pipeline": "forward_backward_pipelining_without_interleaving",
    "schedule_interleaved": "forward_backward_pipelining_with_interleaving",
}

SEAMS = (
    *(
        touched(
            "extended",
            name,
            f"{MODULE}:{target}",
            "a loop that calls the schedule itself trains with graphs",
            Feature.LOOPS,
            undo="deactivate() puts the same object back",
            patched_by="hooks.loops.any_loop",
            kind="function",
            takes="model num_microbatches forward_only",
        )
        for name, target in SCHEDULES.items()
    ),
    read(
        "schedule_lookup",
        f"{MODULE}:get_forward_backward_func",
        "loops get the schedules from here, by name when they ask",
        Feature.LOOPS,
        uses=tuple(SCHEDULES.values()),
    ),
)
