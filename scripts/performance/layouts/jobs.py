"""The training runs of bench_parallel.py: layouts over GPUs and what each is run for."""

from collections.abc import Sequence
from dataclasses import dataclass

from examples.photographs.layout import Layout
from scripts.performance.hosts import ranks_per_gpu

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
GRAPHS = "plugin"
# Graphs, with images that data-parallel ranks encode for each other.
BALANCED = "plugin_balanced"
# Of the eager runs the first one's times are enough.
TIMED = ("eager1", GRAPHS)
# Runs that show what graphs take: their microbatches, steps, and options by which they capture the same.
SLOTS, SLOTS_MICROBATCHES, SLOTS_STEPS = "plugin_slots", (8, 32), 5
# Every microbatch that fits a bucket is replayed: what a disturbed host makes of measured times decides nothing.
GRAPHS_WORDS = ("vision_cuda_graph_tuning.cost_fallback=false",)
BALANCED_WORDS = ("vision_cuda_graph_balance=0.1", *GRAPHS_WORDS)
SLOTS_WORDS = ("vision_cuda_graph_buckets=[2304,4608]", *GRAPHS_WORDS)
MODE_WORDS = {GRAPHS: GRAPHS_WORDS, BALANCED: BALANCED_WORDS, SLOTS: SLOTS_WORDS}


@dataclass(frozen=True, slots=True)
class Job:
    """One training run of the benchmark.

    Attributes:
        layout: Its layout over GPUs.
        mode: "eager1", "eager2" and so on, `GRAPHS`, `BALANCED` or `SLOTS`.
        microbatches: Of a step, for each replica of the model.
        steps: Optimizer steps.
        devices: The GPUs that it takes.
    """

    layout: Layout
    mode: str
    microbatches: int
    steps: int
    devices: tuple[int, ...]

    @property
    def case(self) -> tuple[Layout, bool]:
        """What it is compared within: the layout, and whether it shows what graphs take."""
        return self.layout, self.mode == SLOTS

    @property
    def told(self) -> str:
        """What the training processes are told to train."""
        return "graphs" if self.mode in MODE_WORDS else "eager"

    @property
    def sharing(self) -> int:
        """Ranks on each of its GPUs."""
        return ranks_per_gpu(self.layout.ranks, len(self.devices))

    @property
    def shared(self) -> bool:
        """Whether ranks share GPUs."""
        return self.sharing > 1

    def words(self, small: bool) -> list[str]:
        """Return the words of the run's command line.

        Args:
            small: Whether the tower is small.
        """
        words = ["--steps", str(self.steps), "--global-batch", str(self.microbatches * self.layout.data)]
        words += self.layout.words()
        layers, width = self.layout.fitting_layers(LAYERS), SHARED_WIDTH if self.shared else WIDTH
        words += ["--language-model", f"{layers}x{width}"] if (layers, width) != (LAYERS, WIDTH) else []
        words += MODE_WORDS.get(self.mode, ())
        return [*words, "--small", "--loader-workers", "0"] if small else words

    def __str__(self) -> str:
        many = f" of {self.microbatches} microbatches" if self.mode == SLOTS else ""
        return f"{self.layout} {self.mode}{many}"


def modes(layout: Layout, eager_runs: int, balance: bool = False) -> list[str]:
    """Return the modes of a layout's runs; those that are timed come first, beside each other if they fit.

    Args:
        layout: The layout.
        eager_runs: How many of them are eager.
        balance: Whether to train with images of other ranks, too, where ranks can take them.
    """
    first, *others = (f"eager{number + 1}" for number in range(eager_runs))
    balanced = [BALANCED] if balance and layout.data > 1 and layout.context == 1 else []
    return [first, GRAPHS, *balanced, *others]


def waves(
    layouts: Sequence[Layout],
    slots: Sequence[Layout],
    microbatches: int,
    steps: int,
    eager_runs: int,
    gpus: int,
    balance: bool = False,
) -> list[list[Job]]:
    """Return the runs of `layouts` and those of `slots`, in turn, as waves: runs on GPUs of their own that go together.

    One GPU comes first, as scaling is told by it. Layouts of more ranks than there are GPUs come last and take all.
    """
    ordered = sorted(dict.fromkeys(layouts), key=lambda layout: (layout.ranks > gpus, layout.ranks > 1))
    runs = [(layout, mode, microbatches, steps) for layout in ordered for mode in modes(layout, eager_runs, balance)]
    runs += [(each, SLOTS, count, SLOTS_STEPS) for each in dict.fromkeys(slots) for count in SLOTS_MICROBATCHES]
    found: list[list[Job]] = []
    free = 0
    for layout, mode, count, length in runs:
        size = min(layout.ranks, gpus)
        if size > free:
            found.append([])
            free = gpus
        first = gpus - free
        found[-1].append(Job(layout, mode, count, length, tuple(range(first, first + size))))
        free -= size
    return found
