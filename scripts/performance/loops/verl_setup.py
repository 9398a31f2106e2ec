"""What rounds of verl's cases are made of: images of samples, adapters, and options of graphs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from scripts.performance.loops.rounds import WARM_UP
from scripts.performance.loops.samples import MIXES, PAIR, SMALLER_MIXES, Grid

ENCODER = {
    "vision_cuda_graph_impl": "transformer_engine",
    "max_vision_cuda_graph_seq_length": 6144,
    "cuda_graph_warmup_steps": WARM_UP,
}
# Deterministic kernels take no more patches. Weight gradients are rounded as eager's: training is compared to the bit.
DETERMINISTIC_ENCODER = {
    **ENCODER,
    "max_vision_cuda_graph_seq_length": 4096,
    "vision_cuda_graph_tuning": {"max_frames": 8, "gradient_accumulation_fusion": False},
}
# Tokens. The first round needs the largest that others need: no later pack waits for a capture.
PACK_BUCKETS = (1024, 1280, 1600, 2048)
# Of the language model's layers, for the packs that verl makes of a microbatch. Weight gradients are rounded as eager's
# are, so that updates stay inside its spread, which is narrow here.
PACKED = {
    "cuda_graph_impl": "transformer_engine",
    "cuda_graph_modules": [],
    "cuda_graph_max_packed_seqs": 2 * PAIR,
    "cuda_graph_packed_buckets": list(PACK_BUCKETS),
    "cuda_graph_packed_tuning": {"gradient_accumulation_fusion": False},
    "use_te_rng_tracker": True,
}
PLUGIN, PLUGIN_PACKED, EAGER_PADDED = "plugin", "plugin_packed", "eager_padded"
# Modes in which decoders compute all rows of a pack's bucket, where they run eager.
PADDED = (PLUGIN_PACKED, EAGER_PADDED)


@dataclass(frozen=True, slots=True)
class Setup:
    """What the rounds of a case are made of.

    Attributes:
        mixes: Images of samples, by their patches.
        encoder: Options of the encoder's graphs.
        lora: verl's settings of the policy's adapters, without which it is the reference; None for two models.
    """

    mixes: Mapping[int, Sequence[tuple[Grid, ...]]] = field(default_factory=lambda: MIXES)
    encoder: Mapping[str, Any] = field(default_factory=lambda: ENCODER)
    lora: Mapping[str, Any] | None = None

    def options(self, mode: str) -> dict[str, Any]:
        """Return the options of a mode's graphs; none where it is eager."""
        if mode not in (PLUGIN, PLUGIN_PACKED):
            return {}
        return {**self.encoder, **(PACKED if mode == PLUGIN_PACKED else {})}


PLAIN = Setup()
LORA = Setup(lora={"rank": 8, "alpha": 16, "dropout": 0.0})
DETERMINISTIC = Setup(SMALLER_MIXES, DETERMINISTIC_ENCODER)
