"""Seams of packed-sequence graphs of Mamba-Transformer hybrids."""

from ..seam import Feature, patched, read, recorded, replayed
from .engine import CORE

STACK = f"{CORE}.models.hybrid.hybrid_block"
MAMBA = f"{CORE}.ssm"

SEAMS = (
    replayed(
        "hybrid_decoder",
        f"{STACK}:HybridStack.forward",
        "the layers of a packed microbatch of a hybrid replay a graph",
        Feature.PACKED_HYBRIDS,
        takes="hidden_states attention_mask rotary_pos_emb packed_seq_params",
    ),
    recorded(
        "hybrid_block",
        f"{STACK}:HybridStack",
        "a later pipeline stage takes its input from here, also while it is recorded",
        Feature.PACKED_HYBRIDS,
        has="layers pre_process input_tensor pg_collection",
    ),
    replayed(
        "mamba_layer",
        f"{MAMBA}.mamba_layer:MambaLayer.forward",
        "a Mamba layer of a packed microbatch replays a graph",
        Feature.PACKED_HYBRIDS,
        takes="hidden_states packed_seq_params",
        uses=("self.mixer(",),
    ),
    read(
        "mamba_mixer",
        f"{MAMBA}.mamba_mixer:MambaMixer._ssm_training",
        "a state stays in its document by every token's number alone; parameters come from the mixer's helper",
        Feature.PACKED_HYBRIDS,
        takes="zxBCdt packed_seq_params",
        uses=(
            "packed_seq_params.seq_idx",
            *(f"self.cp.get_{name}()" for name in ("A_log", "conv1d_weight", "conv1d_bias", "dt_bias", "D")),
        ),
    ),
    recorded(
        "mamba_parameters",
        f"{MAMBA}.mamba_context_parallel:MambaContextParallel",
        "the mixer computes with what stands in for its parameters while work is recorded",
        Feature.PACKED_HYBRIDS,
        has="dt_bias_cp1 A_log_cp1 D_cp1",
    ),
    patched(
        "pack_indices",
        f"{CORE}.packed_seq_params:PackedSeqParams.__post_init__",
        "where packs are on graphs, a step finds every token's document without waiting for the device",
        Feature.PACKED_HYBRIDS,
        "hooks.data.pack_indices",
        uses=("self.total_tokens", "self.seq_idx", "repeat_interleave"),
    ),
)
