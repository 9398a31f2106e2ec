"""Seams of packed-sequence graphs of Mamba-Transformer hybrids."""

from ..seam import Feature, Seam
from .engine import CORE, DETACHED, RECORDED
from .training import RESTORED

STACK = f"{CORE}.models.hybrid.hybrid_block"
MAMBA = f"{CORE}.ssm"

SEAMS = (
    Seam(
        name="hybrid_decoder",
        module=STACK,
        target="HybridStack.forward",
        kind="function",
        touch="instance",
        purpose="the layers of a packed microbatch of a hybrid replay a graph",
        features=(Feature.PACKED_HYBRIDS,),
        undo=DETACHED,
        parameters=("hidden_states", "attention_mask", "rotary_pos_emb", "packed_seq_params"),
    ),
    Seam(
        name="hybrid_block",
        module=STACK,
        target="HybridStack",
        kind="class",
        touch="instance",
        purpose="a later pipeline stage takes its input from here, also while it is recorded",
        features=(Feature.PACKED_HYBRIDS,),
        undo=RECORDED,
        attributes=("layers", "pre_process", "input_tensor", "pg_collection"),
    ),
    Seam(
        name="mamba_layer",
        module=f"{MAMBA}.mamba_layer",
        target="MambaLayer.forward",
        kind="function",
        touch="instance",
        purpose="a Mamba layer of a packed microbatch replays a graph",
        features=(Feature.PACKED_HYBRIDS,),
        undo=DETACHED,
        parameters=("hidden_states", "packed_seq_params"),
        uses=("self.mixer(",),
    ),
    Seam(
        name="mamba_mixer",
        module=f"{MAMBA}.mamba_mixer",
        target="MambaMixer._ssm_training",
        kind="function",
        touch="read",
        purpose="a state stays in its document by every token's number alone; parameters come from the mixer's helper",
        features=(Feature.PACKED_HYBRIDS,),
        parameters=("zxBCdt", "packed_seq_params"),
        uses=(
            "packed_seq_params.seq_idx",
            *(f"self.cp.get_{name}()" for name in ("A_log", "conv1d_weight", "conv1d_bias", "dt_bias", "D")),
        ),
    ),
    Seam(
        name="mamba_parameters",
        module=f"{MAMBA}.mamba_context_parallel",
        target="MambaContextParallel",
        kind="class",
        touch="instance",
        purpose="the mixer computes with what stands in for its parameters while work is recorded",
        features=(Feature.PACKED_HYBRIDS,),
        undo=RECORDED,
        attributes=("dt_bias_cp1", "A_log_cp1", "D_cp1"),
    ),
    Seam(
        name="pack_indices",
        module=f"{CORE}.packed_seq_params",
        target="PackedSeqParams.__post_init__",
        kind="function",
        touch="extended",
        purpose="where packs are on graphs, a step finds every token's document without waiting for the device",
        features=(Feature.PACKED_HYBRIDS,),
        undo=RESTORED,
        uses=("self.total_tokens", "self.seq_idx", "repeat_interleave"),
        patched_by="hooks.data.pack_indices",
    ),
)
