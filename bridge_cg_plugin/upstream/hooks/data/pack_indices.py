"""Which document a pack's tokens belong to, as megatron-core's Mamba layers take it, without waiting for the device."""

import functools
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from torch import Tensor

from ....language.packed.batch import document_indices
from ...host_batch import PACK_OFFSETS
from ...seams.patches import Patch
from ...seams.registry import seam
from ..helpers.graph_helper import active_helpers
from ..helpers.packed_helper import DecoderHelper


def _indices(params: Any) -> Tensor | None:
    """Return what upstream would find for a pack, None where only upstream can say.

    Under context parallelism Bridge's step counts the tokens of one rank; the offsets, and upstream's indices, go on to
    the pack's end. Offsets that decrease stay upstream's.
    """
    padded = params.cu_seqlens_q_padded
    offsets = params.cu_seqlens_q if padded is None else padded
    if params.total_tokens is None or not isinstance(offsets, Tensor) or offsets.dim() != 1:
        return None
    values = PACK_OFFSETS.known(offsets)
    if not values or any(after < before for before, after in pairwise(values)):
        return None
    return document_indices(offsets, max(values[-1], params.total_tokens))


def _without_waiting(old: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(old)
    def __post_init__(self: Any) -> None:
        on_graphs = any(isinstance(helper, DecoderHelper) for helper in active_helpers())
        indices = _indices(self) if on_graphs else None
        if indices is None:
            old(self)
        else:
            self.seq_idx = indices

    return __post_init__


PATCHES = (Patch(seam("pack_indices"), _without_waiting),)
