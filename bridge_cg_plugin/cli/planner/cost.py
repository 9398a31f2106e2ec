"""What a microbatch costs: a model with parameters measured on a GPU."""

from collections.abc import Sequence
from dataclasses import dataclass

from bridge_cg_plugin.attention_bounds import scan_cost

MILLION = 1e6


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
        stall_share: The same as a part of the host's time.
        host_per_token_ms: Host time that a token adds.
        graph_host_ms: Host time of a replay whose experts run eager, which it cannot be faster than.
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
    stall_share: float = 0.0
    host_per_token_ms: float = 0.0
    graph_host_ms: float = 0.0

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
        host = self.host_ms + self.host_per_segment_ms * len(lengths) + self.host_per_token_ms * sum(lengths)
        return max(host, self.eager_busy * busy + self.stall_ms + self.stall_share * host)

    def graph_ms(self, capacity: int, lengths: Sequence[int], segments: int, largest: int) -> float:
        """Return the time of a microbatch replayed in a bucket with these bounds."""
        return max(self.graph_host_ms, self.replay_ms + self.busy_ms(capacity, lengths, segments, largest))

    def memory_gb(self, capacity: int, slots: int = 1) -> float:
        """Return the memory of graphs whose largest bucket has this capacity, in GiB."""
        return slots * (self.memory_fixed_mb + self.memory_per_token_mb * capacity) / 1024

    def tokens_within(self, gigabytes: float) -> int:
        """Return the largest capacity whose graphs take at most this much memory, in GiB; 0 if none does."""
        return max(int((gigabytes * 1024 - self.memory_fixed_mb) / self.memory_per_token_mb), 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The records that a default cost model was fitted to, and how far it is from those that are left out of the fit.

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
