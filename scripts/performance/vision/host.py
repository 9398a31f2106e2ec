"""The host's time of a replayed microbatch, phase by phase."""

import statistics
import time
from bisect import bisect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
from torch import nn

from scripts.performance.measuring import measure
from scripts.performance.models import tower

MICROBATCHES = 4
WARMUP_STEPS = 3
LAYERS = 27
# What lies between two marks of a microbatch, in their order.
PHASES = (
    "choose",  # read the grid, check the batch, choose bucket and slot, look at parameters
    "load",  # copy the batch into the graph's buffers
    "enter",  # what autograd does around a function's forward
    "launch",
    "copy out",
    "reach",  # from the call of backward to the replay's node
    "copy in",
    "launch back",
    "hand over",  # gradients to autograd, or the news of them to the reduction
    "return",
    "start of reductions",  # the communication's own, taken out of the phase that it falls into
)


class Marks:
    """Points in time of one microbatch after another.

    Attributes:
        times: Since the last `begin`, in seconds.
        reductions: When starting a reduction began and ended since then.
    """

    def __init__(self) -> None:
        self.times: list[float] = []
        self.reductions: list[tuple[float, float]] = []

    def begin(self) -> None:
        """Forget what was noted and note the time."""
        self.times.clear()
        self.reductions.clear()
        self.mark()

    def reduction(self, start: Callable[..., None]) -> Callable[..., None]:
        """Return a function that starts a reduction, timed."""

        def called(*args: Any, **kwargs: Any) -> None:
            began = time.perf_counter()
            start(*args, **kwargs)
            self.reductions.append((began, time.perf_counter()))

        return called

    def mark(self) -> None:
        """Note the time."""
        self.times.append(time.perf_counter())

    def before(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that notes when it is called."""

        def called(*args: Any, **kwargs: Any) -> Any:
            self.mark()
            return function(*args, **kwargs)

        return called

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that notes when it is called and when it returns."""

        def called(*args: Any, **kwargs: Any) -> Any:
            self.mark()
            returned = function(*args, **kwargs)
            self.mark()
            return returned

        return called


class Marked:
    """A recording whose launches are noted; without a GPU nothing runs in their place."""

    def __init__(self, recording: Any, marks: Marks) -> None:
        self.outputs = recording.outputs
        forward, backward = recording.forward, recording.backward
        if not measure.on_gpu():
            forward()
            left = backward()
            forward, backward = (lambda: None), (lambda: left)
        self.forward, self.backward = marks.around(forward), marks.around(backward)


class Holder(nn.Module):
    """A model that is a vision encoder alone."""

    def __init__(self, vision_model: nn.Module) -> None:
        super().__init__()
        self.vision_model = vision_model


class Training:
    """The tower under data parallelism, captured for some batches.

    Args:
        grids: Cases by name.
    """

    def __init__(self, grids: dict[str, Any]) -> None:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.transformer import TransformerConfig

        from bridge_cg_plugin.options import VisionGraphOptions
        from bridge_cg_plugin.upstream.hooks.helpers.vision_helper import VisionTECudaGraphHelper

        encoder = build()
        self.batches = {name: tower.make_batch(grid, encoder) for name, grid in grids.items()}
        config = TransformerConfig(num_layers=1, hidden_size=64, num_attention_heads=1)
        parallel = DistributedDataParallelConfig(overlap_grad_reduce=True, grad_reduce_in_fp32=True)
        self.model = DistributedDataParallel(config, parallel, Holder(encoder))
        self.encoder = encoder
        capacities = tuple(sorted({batch.tokens for batch in self.batches.values()}))
        frames = max(batch.frames for batch in self.batches.values())
        options = VisionGraphOptions(
            impl="transformer_engine", buckets=capacities, slots=1, max_frames=frames, evaluation=False, strict=True
        )
        self.helper = VisionTECudaGraphHelper([self.model], encoder.config, options=options)
        self.helper.create_cudagraphs()
        self.marks = Marks()
        assert self.helper.graphs is not None
        self.graphs = self.helper.graphs
        for group in set(self.model.param_to_bucket_group.values()):
            group.start_grad_sync = self.marks.reduction(group.start_grad_sync)

    @contextmanager
    def marked(self) -> Iterator[None]:
        """Note the phases of microbatches inside."""
        from bridge_cg_plugin.graphs.replays.slot import Lease

        (region,), marks = self.graphs._regions, self.marks
        source = region.sources.current
        for (_, _, mode), recorded in source.recordings.items():
            if mode.gradients:
                recorded.recording = Marked(recorded.recording, marks)
        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(region.program, "load", marks.around(region.program.load)))
            stack.enter_context(mock.patch.object(Lease, "check", marks.before(Lease.check)))
            stack.enter_context(mock.patch.object(source.sinks, "hand_over", marks.around(source.sinks.hand_over)))
            yield

    def step(self, batch: tower.Batch, idle: bool) -> list[list[float]]:
        """Run one training step; returns the ms of each microbatch's phases."""
        found = []
        self.model.zero_grad_buffer()
        measure.synchronize()
        with self.graphs.step():
            for number in range(MICROBATCHES):
                last = number == MICROBATCHES - 1
                if idle:
                    measure.synchronize()
                with nullcontext() if last else self.model.no_sync():
                    found.append(self._microbatch(batch))
        self.model.finish_grad_sync()
        return found

    def _microbatch(self, batch: tower.Batch) -> list[float]:
        marks = self.marks
        marks.begin()
        outputs = tower.forward(self.encoder, batch)
        marks.mark()
        torch.autograd.backward(outputs, batch.gradients)
        marks.mark()
        # Loading ends where entering begins, and so on; what `hand_over` follows is part of handing over.
        begin, load, loaded, launch, launched, out, node, back, backed, _, handed, end = marks.times
        points = [begin, load, loaded, launch, launched, out, node, back, backed, handed, end]
        phases = [(later - before) * 1e3 for before, later in pairwise(points)]
        for began, ended in marks.reductions:
            phases[bisect(points, began) - 1] -= (ended - began) * 1e3
        return [*phases, sum(ended - began for began, ended in marks.reductions) * 1e3]


def build() -> nn.Module:
    """Return the tower; without a GPU a narrow one of as many layers."""
    if measure.on_gpu():
        return tower.build_tower(layers=LAYERS)
    from scripts.performance.models.small_tower import build_tower

    small: nn.Module = build_tower(layers=LAYERS, width=32, heads=2, out=24)
    return small


@contextmanager
def devices() -> Iterator[None]:
    """Let data parallelism work without a GPU, too."""
    if measure.on_gpu():
        yield
        return
    with mock.patch.multiple(torch.cuda, current_device=lambda: "cpu", current_stream=mock.MagicMock()):
        yield


def measure_steps(training: Training, steps: int) -> None:
    """Time so many steps of every case, microbatches in a row and each begun idle, and print the phases."""
    with training.marked():
        for name, batch in training.batches.items():
            for idle in (False, True):
                for _ in range(WARMUP_STEPS):
                    training.step(batch, idle)
                show_steps(name, idle, [training.step(batch, idle) for _ in range(steps)])


def show_steps(name: str, idle: bool, steps: Sequence[Sequence[Sequence[float]]]) -> None:
    """Print the phases of the steps' microbatches: of those between, of the first and of the one that is awaited."""
    where = "idle" if idle else "in a row"
    show(name, where, [times for step in steps for times in step[1:-1]])
    show(name, f"{where}, first", [step[0] for step in steps])
    show(name, f"{where}, awaited", [step[-1] for step in steps])


def show(name: str, kind: str, times: Sequence[Sequence[float]]) -> None:
    """Print the medians of phases and of their sum, in ms."""
    total = statistics.median(map(sum, times))
    phases = map(statistics.median, zip(*times, strict=True))
    cells = ", ".join(f"{phase} {ms:.3f}" for phase, ms in zip(PHASES, phases, strict=True))
    print(f"{name} {kind}: {total:.3f} ms = {cells}", flush=True)
