"""How context-parallel ranks exchange a pack's keys and values: Transformer Engine's ring, or heads for tokens."""

import importlib
import importlib.metadata
from typing import Any

from torch import distributed, nn

from ...announce import warn
from ...options import OptionError
from ...options.packed import MAX_PACKED_SEQS

HEADS, HEADS_AND_RING = "a2a", "a2a+p2p"
TE_CONTEXT = "transformer_engine.pytorch.attention.dot_product_attention.context_parallel"
# Came with Transformer Engine 2.20. Earlier releases order a pack's tokens by offsets that the host reads.
ON_DEVICE = "thd_cp_rank_order_to_sequence_order"
FIRST = "2.20"
# The first release that always computes by the real lengths of padded documents (NVIDIA/TransformerEngine issue 3331).
RIGHT_PADDING = (2, 18)


def check_exchange(config: Any) -> None:
    """Refuse an exchange for which the installed Transformer Engine reads offsets on the host; warn of its errors.

    Args:
        config: The decoder's transformer config.

    Raises:
        OptionError: Names the exchange.
    """
    if config.context_parallel_size == 1:
        return
    version = importlib.metadata.version("transformer-engine")
    if tuple(map(int, version.split(".")[:2])) < RIGHT_PADDING:
        warn(
            f"Transformer Engine {version} computes wrong attention under context parallelism, eager too, where only "
            "the last document of a pack is padded. Install 2.18 or newer, or give every document padding"
        )
    wanted = exchanges(config) & {HEADS, HEADS_AND_RING}
    if not wanted or orders_on_device():
        return
    raise OptionError(
        "model.cp_comm_type",
        ",".join(sorted(wanted)),
        f"p2p with {MAX_PACKED_SEQS} and Transformer Engine {version}",
        f"This release reads a pack's offsets on the host. Set it to p2p, or install Transformer Engine {FIRST}.",
    )


def exchanges(config: Any) -> set[str]:
    """Return the ways in which layers exchange keys and values; empty is upstream's default."""
    named = getattr(config, "cp_comm_type", None) or ()
    return {named} if isinstance(named, str) else set(named)


def orders_on_device() -> bool:
    """Whether the installed Transformer Engine orders a pack's tokens without the host."""
    try:
        return hasattr(importlib.import_module(TE_CONTEXT), ON_DEVICE)
    except ImportError:
        return False


def levels(decoder: nn.Module) -> tuple[distributed.ProcessGroup, ...]:
    """Return the groups of a hierarchical exchange, by level; none where there is none."""
    groups = getattr(getattr(decoder, "pg_collection", None), "hcp", None)
    return tuple(group for group in groups or () if group.size() > 1)
