"""The host's time of a replayed microbatch, from pixel values to embeddings and back; prints, writes no record.

    python scripts/performance/bench_host.py
    python scripts/performance/bench_host.py --cases 1x448,8mix --steps 40

Steps of four microbatches under Megatron's data parallelism with overlapping reductions, as Bridge's loop runs them:
the last one's gradients are awaited, so what hooks do for it is in its time. Microbatches follow one another without
waiting for the GPU, or each begins with the GPU and the host idle. Without a GPU a small tower with as many parameters
stands in, and nothing is computed in place of the graphs, so that only the host's work is left.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch
from torch import nn

from bridge_cg_plugin.options import VisionGraphOptions
from examples.photographs.small_tower import build_tower
from scripts.performance.measure import on_gpu, synchronize
from scripts.performance.words import names_of
from tests.models import tower
from tests.models.workloads import CASES, Grid

MICROBATCHES = 4
WARMUP_STEPS = 3
LAYERS = 27


class Holder(nn.Module):
    """A model that is a vision encoder alone."""

    def __init__(self, vision_model: nn.Module) -> None:
        super().__init__()
        self.vision_model = vision_model


class Idle:
    """A recording in whose place nothing runs, for a machine without a GPU."""

    def __init__(self, recording: Any) -> None:
        self.outputs = recording.outputs
        recording.forward()
        left = recording.backward()
        self.forward = self.record_backward = lambda: None
        self.backward = lambda: left


class Training:
    """The tower under data parallelism, captured for some batches.

    Args:
        grids: Cases by name.
    """

    def __init__(self, grids: dict[str, Grid]) -> None:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.transformer import TransformerConfig

        from bridge_cg_plugin.upstream.hooks.helpers.vision_helper import VisionTECudaGraphHelper

        small = {"width": 32, "heads": 2, "out": 24}
        self.encoder: Any = tower.build_tower(layers=LAYERS) if on_gpu() else build_tower(layers=LAYERS, **small)
        self.batches = {name: tower.make_batch(grid, self.encoder) for name, grid in grids.items()}
        config = TransformerConfig(num_layers=1, hidden_size=64, num_attention_heads=1)
        parallel = DistributedDataParallelConfig(overlap_grad_reduce=True, grad_reduce_in_fp32=True)
        self.model = DistributedDataParallel(config, parallel, Holder(self.encoder))
        capacities = tuple(sorted({batch.tokens for batch in self.batches.values()}))
        frames = max(batch.frames for batch in self.batches.values())
        options = VisionGraphOptions(
            impl="transformer_engine", buckets=capacities, slots=1, max_frames=frames, strict=True
        )
        helper = VisionTECudaGraphHelper([self.model], self.encoder.config, options=options)
        helper.create_cudagraphs()
        assert helper.graphs is not None
        self.graphs = helper.graphs
        if not on_gpu():
            for region in self.graphs._regions:
                for recorded in region.sources.current.recordings.values():
                    recorded.recording = Idle(recorded.recording)

    def step(self, batch: tower.Batch, idle: bool) -> list[float]:
        """Run one training step; returns the host's ms of each microbatch."""
        found = []
        self.model.zero_grad_buffer()
        synchronize()
        with self.graphs.step():
            for number in range(MICROBATCHES):
                if idle:
                    synchronize()
                with nullcontext() if number == MICROBATCHES - 1 else self.model.no_sync():
                    began = time.perf_counter()
                    torch.autograd.backward(tower.forward(self.encoder, batch), batch.gradients)
                    found.append((time.perf_counter() - began) * 1e3)
        self.model.finish_grad_sync()
        return found


@contextmanager
def devices() -> Iterator[None]:
    """Let data parallelism work without a GPU, too."""
    if on_gpu():
        yield
        return
    with mock.patch.multiple(torch.cuda, current_device=lambda: "cpu", current_stream=mock.MagicMock()):
        yield


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    default = ("1x448", "8mix", "video16")
    parser.add_argument("--cases", type=names_of(*CASES), default=default, help=f"of {', '.join(CASES)}")
    parser.add_argument("--steps", type=int, default=30, help="timed steps of each case and kind")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Time steps of every case, and print medians: of microbatches between, of the first, of the one awaited."""
    args = parse(arguments)
    tower.start_process()
    with devices():
        training = Training({name: CASES[name] for name in args.cases})
        for name, batch in training.batches.items():
            for idle in (False, True):
                steps = [training.step(batch, idle) for _ in range(WARMUP_STEPS + args.steps)][WARMUP_STEPS:]
                between = median(ms for step in steps for ms in step[1:-1])
                first, last = (median(step[place] for step in steps) for place in (0, -1))
                where = "idle" if idle else "in a row"
                print(f"{name} {where}: {between:.3f} ms, first {first:.3f} ms, awaited {last:.3f} ms", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
