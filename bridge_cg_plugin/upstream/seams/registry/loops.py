"""Seams of megatron-core's schedules, which every training loop calls."""

from ..seam import Feature, Seam

MODULE = "megatron.core.pipeline_parallel.schedules"
SCHEDULES = {
    "schedule_alone": "forward_backward_no_pipelining",
    "schedule_pipeline": "forward_backward_pipelining_without_interleaving",
    "schedule_interleaved": "forward_backward_pipelining_with_interleaving",
}

SEAMS = (
    *(
        Seam(
            name=name,
            module=MODULE,
            target=target,
            kind="function",
            touch="extended",
            purpose="a loop that calls the schedule itself trains with graphs",
            features=(Feature.LOOPS,),
            undo="deactivate() puts the same object back",
            parameters=("model", "num_microbatches", "forward_only"),
            patched_by="hooks.loops.any_loop",
        )
        for name, target in SCHEDULES.items()
    ),
    Seam(
        name="schedule_lookup",
        module=MODULE,
        target="get_forward_backward_func",
        kind="function",
        touch="read",
        purpose="loops get the schedules from here, by name when they ask",
        features=(Feature.LOOPS,),
        uses=tuple(SCHEDULES.values()),
    ),
)
