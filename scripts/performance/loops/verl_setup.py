"""What rounds of verl's cases are made of: adapters, and options of graphs."""

from typing import Any

from scripts.performance.loops.rounds import WARM_UP
from scripts.performance.loops.samples import PAIR

ENCODER = {
    "vision_cuda_graph_impl": "transformer_engine",
    "max_vision_cuda_graph_seq_length": 6144,
    "cuda_graph_warmup_steps": WARM_UP,
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
    "cuda_graph_packed_gradient_accumulation_fusion": False,
    "use_te_rng_tracker": True,
}
PLUGIN, PLUGIN_PACKED, EAGER_PADDED = "plugin", "plugin_packed", "eager_padded"
# Modes in which decoders compute all rows of a pack's bucket, where they run eager.
PADDED = (PLUGIN_PACKED, EAGER_PADDED)


# verl's settings of the policy's adapters, without which it is the reference, by the name of the case; None are two
# models.
ADAPTERS: dict[str, dict[str, Any] | None] = {"verl": None, "verl_lora": {"rank": 8, "alpha": 16, "dropout": 0.0}}


def options_of(mode: str) -> dict[str, Any]:
    """Return the options of a mode's graphs; none where it is eager."""
    if mode not in (PLUGIN, PLUGIN_PACKED):
        return {}
    return {**ENCODER, **(PACKED if mode == PLUGIN_PACKED else {})}
