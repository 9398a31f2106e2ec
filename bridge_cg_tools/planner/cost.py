"""What a microbatch costs: a model with parameters measured on a GPU, kept as JSON."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from bridge_cg_plugin.attention_bounds import scan_cost

from .errors import PlanError

MILLION = 1e6
NAMES = ("packed", "vision")


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Time and memory of forward and backward of one microbatch; times in milliseconds.

    Attributes:
        origin: Where the numbers come from.
        fixed_ms: GPU time that does not grow with the microbatch.
        per_token_ms: GPU time of a token, padding included.
        per_square_ms: GPU time of attention, for a million of the sum of squared segment lengths.
        per_row_ms: GPU time of scanning, for a million rows of segments times largest segment.
        replay_ms: What a replay adds: copies in and out, and its launch.
        host_ms: Host time of eager, which it cannot be faster than.
        host_per_segment_ms: Host time that a segment adds.
        eager_busy: GPU time of eager over that of a replay, whose kernels are fused.
        stall_ms: What eager waits for the host while the GPU is the slower one.
        memory_fixed_mb: Memory of a slot that does not grow, in MiB.
        memory_per_token_mb: Memory of a slot for a token of its largest bucket, in MiB.
    """

    origin: str
    fixed_ms: float
    per_token_ms: float
    per_square_ms: float
    per_row_ms: float
    replay_ms: float
    host_ms: float
    host_per_segment_ms: float
    eager_busy: float
    stall_ms: float
    memory_fixed_mb: float
    memory_per_token_mb: float

    def busy_ms(self, tokens: int, lengths: Sequence[int], segments: int, largest: int) -> float:
        """Return GPU time.

        Args:
            tokens: Tokens with padding.
            lengths: Tokens of the real segments.
            segments: Segments that attention scans.
            largest: Tokens of the largest segment that attention scans for.
        """
        squares = sum(n * n for n in lengths) / MILLION
        rows = scan_cost(segments, max(largest, 1)) / MILLION
        return self.fixed_ms + self.per_token_ms * tokens + self.per_square_ms * squares + self.per_row_ms * rows

    def eager_ms(self, lengths: Sequence[int]) -> float:
        """Return the time of a microbatch run eager."""
        busy = self.busy_ms(sum(lengths), lengths, len(lengths), max(lengths))
        return max(self.host_ms + self.host_per_segment_ms * len(lengths), self.eager_busy * busy + self.stall_ms)

    def graph_ms(self, capacity: int, lengths: Sequence[int], segments: int, largest: int) -> float:
        """Return the time of a microbatch replayed in a bucket with these bounds."""
        return self.replay_ms + self.busy_ms(capacity, lengths, segments, largest)

    def memory_gb(self, capacity: int, slots: int = 1) -> float:
        """Return the memory of graphs whose largest bucket has this capacity, in GiB."""
        return slots * (self.memory_fixed_mb + self.memory_per_token_mb * capacity) / 1024

    def tokens_within(self, gigabytes: float) -> int:
        """Return the largest capacity whose graphs take at most this much memory, in GiB; 0 if none does."""
        return max(int((gigabytes * 1024 - self.memory_fixed_mb) / self.memory_per_token_mb), 0)


# Fitted to the project's own runs on an H200. The scan's price is that of cuDNN's backward in the vision tower (27
# layers, 16 heads of 72: 4.3 ms for 32 x 4096 rows, 17 ms for 512 x 1024), for the language model by layers and width.
DEFAULTS = {
    "packed": CostModel(
        origin="16 dense layers of 2048, MLP 6144, packs of 5 documents, eager profiles on an H200; replay, scan and "
        "memory are estimates until bench_packed.py has measured them",
        fixed_ms=8.7,
        per_token_ms=0.00969,
        per_square_ms=1.09,
        per_row_ms=34.0,
        replay_ms=1.0,
        host_ms=86.0,
        host_per_segment_ms=0.4,
        eager_busy=1.0,
        stall_ms=26.9,
        memory_fixed_mb=600.0,
        memory_per_token_mb=1.1,
    ),
    "vision": CostModel(
        origin="Qwen3-VL's vision encoder (27 layers of 1152) with default options, measured on an H200: "
        "vision_bench.jsonl of 2026-11-22",
        fixed_ms=4.59,
        per_token_ms=0.00625,
        per_square_ms=1.36,
        per_row_ms=0.0,
        replay_ms=0.0,
        host_ms=117.6,
        host_per_segment_ms=2.2,
        eager_busy=1.13,
        stall_ms=43.9,
        memory_fixed_mb=97.5,
        memory_per_token_mb=1.08,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The records that a default cost model was fitted to, and how far it is from them at most.

    Attributes:
        file: The records.
        date: Of the newest of them.
        gpu: That they were measured on.
        tokens: The smallest and the largest microbatch.
        eager, graphs, ratio, memory: Largest relative error of the times, of one over the other, and of the memory.
    """

    file: str
    date: str
    gpu: str
    tokens: tuple[int, int]
    eager: float
    graphs: float
    ratio: float
    memory: float


VISION_FIT = Fit(
    file="docs/benchmarks/vision_bench.jsonl",
    date="2026-11-22",
    gpu="NVIDIA H200",
    tokens=(784, 32768),
    eager=0.15,
    graphs=0.03,
    ratio=0.15,
    memory=0.1,
)


# With kernels="exact", whose records are of one stream.
VISION_EXACT = replace(
    DEFAULTS["vision"],
    origin="the same with kernels that round as eager's do, on one stream",
    fixed_ms=7.66,
    per_token_ms=0.00631,
    per_square_ms=1.34,
    memory_fixed_mb=43.7,
    memory_per_token_mb=1.055,
)
VISION_EXACT_FIT = replace(VISION_FIT, graphs=0.04)


def load_cost_model(path: Path, name: str) -> CostModel:
    """Read a cost model that a benchmark wrote: a JSON object with one model by name.

    Raises:
        PlanError: It cannot be read or lacks a parameter.
    """
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise PlanError(f"cost model {path}: it must be a JSON file that bench_packed.py wrote: {error}") from None
    if not isinstance(found, dict) or name not in found:
        raise PlanError(f"cost model {path} has no {name!r}: it must be an object with {', '.join(NAMES)}")
    values = found[name]
    names = {f.name for f in fields(CostModel)}
    if not isinstance(values, dict) or set(values) != names:
        wrong = names ^ set(values) if isinstance(values, dict) else names
        raise PlanError(f"cost model {path}, {name!r}: {', '.join(sorted(wrong))} missing or unknown; write it anew")
    for key, value in values.items():
        if key != "origin" and (isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0):
            raise PlanError(f"cost model {path}, {name!r}: {key}={value!r}: it must be a number of at least 0")
    return CostModel(**values)


def save_cost_model(path: Path, name: str, model: CostModel) -> None:
    """Write a cost model beside those that the file has already."""
    found = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**found, name: asdict(model)}, indent=2) + "\n")
