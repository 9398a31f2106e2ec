"""The training runs of bench_parallel.py: layouts over GPUs, what each is run for, and on which GPUs."""

from collections.abc import Sequence
from dataclasses import dataclass

from examples.photographs.hosts import ranks_per_gpu
from examples.photographs.layout import Layout

LAYERS, WIDTH = 4, 2048  # of the language model; a pipeline may need more layers
# Where ranks share GPUs, sockets carry what is reduced: half as much.
SHARED_WIDTH = 1024
LAYOUTS = {
    str(layout): layout
    for layout in (
        Layout(),
        Layout(data=2),
        Layout(tensor=2),
        Layout(pipeline=2),
        Layout(pipeline=2, chunks=2),
        Layout(context=2),
        Layout(tensor=2, pipeline=2),
        Layout(data=2, pipeline=2),
        Layout(data=4),
        Layout(tensor=4),
        Layout(pipeline=4),
    )
}
MUST = (str(Layout()), "DP2", "TP2", "PP2", "CP2", "TP2xPP2", "DP2xPP2", "DP4")
MODES = ("eager1", "eager2", "plugin")
# Of two eager runs the first one's times are enough.
TIMED = ("eager1", "plugin")
# Runs that show what graphs take: their microbatches, steps, and options by which they capture the same.
SLOTS, SLOTS_MICROBATCHES, SLOTS_STEPS = "plugin_slots", (8, 32), 5
SHARED_WORDS = ("vision_cuda_graph_cost_fallback=false",)
SLOTS_WORDS = ("vision_cuda_graph_buckets=[2304,4608]", *SHARED_WORDS)


@dataclass(frozen=True, slots=True)
class Job:
    """One training run of the benchmark.

    Attributes:
        turn: Its number in the order of the runs.
        layout: Its layout over GPUs.
        mode: Of `MODES`, or `SLOTS`.
        microbatches: Of a step, for each replica of the model.
        devices: The GPUs that it takes.
    """

    turn: int
    layout: Layout
    mode: str
    microbatches: int
    devices: tuple[int, ...]

    @property
    def sharing(self) -> int:
        """Ranks on each of its GPUs."""
        return ranks_per_gpu(self.layout.ranks, len(self.devices))

    @property
    def shared(self) -> bool:
        """Whether ranks share GPUs."""
        return self.sharing > 1


def in_order(
    layouts: Sequence[Layout], slots: Sequence[Layout], microbatches: int, gpus: int
) -> tuple[list[Job], list[Job]]:
    """Return the runs of `layouts` and those of `slots`, each layout's in turn: what has ended is recorded.

    One GPU comes first, as scaling is told by it. Layouts of more ranks than there are GPUs come last and share all.
    """
    first = sorted(layouts, key=lambda layout: (layout.ranks > gpus, layout.ranks > 1))
    runs = [(layout, mode, microbatches) for layout in first for mode in MODES]
    runs += [(layout, SLOTS, count) for layout in slots for count in SLOTS_MICROBATCHES]
    places = place([min(layout.ranks, gpus) for layout, *_ in runs], gpus)
    jobs = [Job(turn, *run, devices) for turn, (run, devices) in enumerate(zip(runs, places, strict=True))]
    trained = len(first) * len(MODES)
    return jobs[:trained], jobs[trained:]


def place(sizes: Sequence[int], gpus: int) -> list[tuple[int, ...]]:
    """Return GPUs for each of several runs, those that need as many in turn on disjoint sets."""
    turns: dict[int, int] = {}
    placed = []
    for size in sizes:
        turn = turns[size] = turns.get(size, -1) + 1
        first = turn % (gpus // size) * size
        placed.append(tuple(range(first, first + size)))
    return placed
