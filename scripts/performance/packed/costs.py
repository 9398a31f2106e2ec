"""Fitting the planner's cost model to measured packs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bridge_cg_plugin.attention_bounds import scan_cost
from bridge_cg_plugin.cli.planner.cost import MILLION, CostModel
from scripts.performance.measuring.least_squares import HOST_BOUND, non_negative


@dataclass(frozen=True, slots=True)
class Measured:
    """One pack, eager and on graphs.

    Attributes:
        lengths: Tokens of every document.
        limits: Documents and tokens of the longest, of the bucket that replayed it.
        eager_ms: Time eager.
        busy_ms: Time in which the GPU worked, eager.
        graphs_ms: Time on graphs of exactly the pack's tokens.
        memory_mb: Memory of those graphs, in MiB.
    """

    lengths: tuple[int, ...]
    limits: tuple[int, int]
    eager_ms: float
    busy_ms: float
    graphs_ms: float
    memory_mb: float

    @property
    def tokens(self) -> int:
        """Tokens of the pack."""
        return sum(self.lengths)


def fit(packs: Sequence[Measured], origin: str) -> CostModel:
    """Return the cost model that fits the packs best; a replay's own cost is part of its fixed time."""
    rows = [
        [1.0, pack.tokens, sum(n * n for n in pack.lengths) / MILLION, scan_cost(*pack.limits) / MILLION]
        for pack in packs
    ]
    fixed, per_token, per_square, per_row = non_negative(rows, [pack.graphs_ms for pack in packs])
    # Where the host is the slower one its time shows, where the GPU is, what it waits.
    bound = [pack for pack in packs if pack.eager_ms > HOST_BOUND * pack.busy_ms]
    stalls = sorted(pack.eager_ms - pack.graphs_ms for pack in packs if pack not in bound) or [0.0]
    host, per_segment = (
        non_negative([[1.0, len(p.lengths)] for p in bound], [p.eager_ms for p in bound]) if bound else (0.0, 0.0)
    )
    memory: Mapping[int, float] = {pack.tokens: pack.memory_mb for pack in packs}
    memory_fixed, memory_per_token = non_negative([[1.0, tokens] for tokens in memory], list(memory.values()))
    return CostModel(
        origin=origin,
        fixed_ms=fixed,
        per_token_ms=per_token,
        per_square_ms=per_square,
        per_row_ms=per_row,
        replay_ms=0.0,
        host_ms=host,
        host_per_segment_ms=per_segment,
        eager_busy=1.0,
        stall_ms=max(stalls[len(stalls) // 2], 0.0),
        memory_fixed_mb=memory_fixed,
        memory_per_token_mb=memory_per_token,
    )
