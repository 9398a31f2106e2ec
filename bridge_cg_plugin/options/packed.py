"""Options of packed (thd) sequences in language-model graphs."""

from dataclasses import dataclass
from typing import Literal

from .declaration import Group, capacities, flag, option, whole_number
from .vision import OFFLOADED, RECOMPUTED, TARGET, CapturedOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedOptions(CapturedOptions):
    """Packed-sequence graphs, typed. What each option means is in its declaration."""

    max_packed_seqs: int | Literal["auto"] | None = option(
        None,
        whole_number(1, "auto"),
        "graphs of packed sequences with up to this many documents, or auto",
        "A smaller number is faster, a larger one has fewer fallbacks. `auto` is 1.5 times the most documents of "
        "warm-up steps, plus one for padding; automatic buckets double it for packs with more. "
        "`bridge-cg plan packed` recommends a number. None captures no packs",
        field="cuda_graph_max_packed_seqs",
        flags=("max_packed_seqs", "cuda_graph_max_packed_seqs"),
    )
    buckets: tuple[int, ...] | Literal["auto"] = option(
        "auto",
        capacities,
        "bucket sizes in tokens of packs, ascending, or auto",
        "`auto` chooses them from the packs of warm-up steps",
    )
    slots: int | Literal["auto"] = option(
        "auto",
        whole_number(1, "auto"),
        "most packs between forward and backward at the same time, or auto",
        "As for vision graphs",
    )
    offload: tuple[str, ...] | None = option(*OFFLOADED, "As for vision graphs")
    recompute: tuple[str, ...] | None = option(*RECOMPUTED, "As for vision graphs")
    offload_above_gb: float | None = option(*TARGET, "As for vision graphs")
    gradient_accumulation_fusion: bool = option(
        True,
        flag,
        "add weight gradients of packs to main_grad inside the GEMM, in fp32",
        "If false, they are first rounded to the weight's dtype, as in eager without Megatron's option of this name, "
        "and bit-identical to eager's",
    )
    strict: bool = option(
        False, flag, "a failed capture of packed-sequence graphs, or replays unlike eager, stop the run"
    )
    grows: bool = False

    @property
    def enabled(self) -> bool:
        """Whether packed-sequence graphs are asked for."""
        return self.max_packed_seqs is not None


PACKED = Group(name="packed", kind=PackedOptions, prefix="cuda_graph_packed_")
# Option -> field of a model provider. The first keeps the name that the field has in upstream's later work.
PACKED_FIELDS = PACKED.fields
MAX_PACKED_SEQS = PACKED_FIELDS["max_packed_seqs"]
