"""What the host knows of a batch from where Bridge's Qwen3-VL step copies it to its model's forward.

What upstream asks the device (where images are, positions, lengths, which rows of padded samples a pack has, which
document a token belongs to), behind the encoder that still computes, the host can then answer itself, once for all
tensors of a microbatch.
"""

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ...graphs.host_copies import ByStorage, HostTensors, on_device
from ...language.packed.batch import document_indices
from ..host_batch import PACK_OFFSETS, TOKENS
from ..seams.patches import Patch
from ..seams.registry import seam
from .graph_helper import active_helpers, any_on_graphs
from .packed_helper import DecoderHelper

# Those that the step's padding returned and the step then cloned: its model gets no others.
STEP_TOKENS = HostTensors()


class _StepTokens(Tensor):
    """Tokens as the step's padding returns them: a clone keeps their host values.

    Any other operation gives plain tensors.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    host: Tensor

    def clone(self, **kwargs: Any) -> Tensor:
        """Return a plain tensor of these tokens."""
        made = self.as_subclass(Tensor).clone(**kwargs)
        for known in (TOKENS, STEP_TOKENS):
            known.remember(made, self.host)
        return made


def _with_host_copy(tokens: Tensor, host: Tensor) -> Tensor:
    noted = tokens.as_subclass(_StepTokens)
    noted.host = host
    return noted


def _padded_on_host(old: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """Pad tokens, and compute what describes a pack, on the host, by upstream's own code."""

    @functools.wraps(old)
    def pad_and_pack(tokens: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        host = TOKENS.known(tokens) if any_on_graphs() else None
        if host is None:
            return old(tokens, *args, **kwargs)
        padded, *others, params = old(host, *args, **kwargs)
        on = tokens if padded is host else on_device(padded, tokens.device)
        return _with_host_copy(on, padded), *others, params_on_device(params, tokens.device)

    return pad_and_pack


def with_tensors(params: Any, moved: Callable[[Tensor], Tensor | None]) -> Any:
    """Return a pack's description with other tensors in the place of its own; None where there is none for one."""
    made, others = copy.copy(params), dict[int, Tensor | None]()
    for name, value in vars(params).items():
        if isinstance(value, Tensor):
            if id(value) not in others:
                others[id(value)] = moved(value)
            setattr(made, name, others[id(value)])
    return None if any(each is None for each in others.values()) else made


def params_on_device(params: Any, device: torch.device) -> Any:
    """Return a pack's description with its offsets on the device, where packed graphs know them without reading."""

    def moved(offsets: Tensor) -> Tensor:
        made = on_device(offsets, device)
        PACK_OFFSETS.remember(made, offsets)
        return made

    return with_tensors(params, moved)


Packing = Callable[[Tensor, Tensor, bool, Any], tuple[Tensor, Any]]
# Tensor-parallel and context-parallel ranks, which of the latter this is, and the shape of the batch.
Layout = tuple[int, int, int, torch.Size]


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Where a rank's rows of a pack come from.

    Attributes:
        layout: For which batch and rank.
        host: Rows of the flattened batch, int64 `[rows]`; -1 where alignment adds one of zeros.
        places: The same on the device, 0 in place of -1.
        empty: bool `[rows]` on the device, the rows of zeros; None without any.
        params: Upstream's description of the pack.
    """

    layout: Layout
    host: Tensor
    places: Tensor
    empty: Tensor | None
    params: Any

    def of(self, values: Tensor) -> Tensor:
        """Return the pack's rows, `[1, rows, ...]`, of `[samples, length, ...]`."""
        rows = values.flatten(0, 1).index_select(0, self.places)
        if self.empty is not None:
            rows = rows.masked_fill(self.empty.view(-1, *[1] * (rows.dim() - 1)), 0)
        return rows[None]

    def of_host(self, values: Tensor) -> Tensor:
        """Return what `of` does, of a host tensor."""
        return values.flatten(0, 1)[self.host.clamp(min=0)].masked_fill(self.host < 0, 0)[None]


# By the mask that keeps a batch's tokens.
_ROWS: ByStorage[PackedRows] = ByStorage(8)


def packed_rows(old: Packing, mask: Tensor, on_host: Tensor, groups: Any) -> PackedRows | None:
    """Return the rows that upstream's own code takes; None where it takes one twice, as it does of short samples.

    Args:
        old: Upstream's function.
        mask: bool `[samples, length]`, the tokens that are kept.
        on_host: The same on the host.
        groups: Process groups, `tp` and `cp`.
    """
    layout = (groups.tp.size(), groups.cp.size(), groups.cp.rank(), mask.shape)
    found = _ROWS.find(mask)
    if found is not None and found.layout == layout and _usable(found.places):
        return found
    numbers = torch.arange(1, on_host.numel() + 1, device="cpu").view(on_host.shape)
    packed, params = old(numbers, on_host, True, groups)
    rows = packed[0] - 1
    taken = rows[rows.numpy() >= 0].numpy()
    if len(set(taken.tolist())) < len(taken):
        return None
    made = _on_device(layout, rows, params, mask.device)
    _ROWS.store(mask, made)
    return made


def forget_rows(mask: Tensor) -> None:
    """Keep nothing for a mask any more."""
    _ROWS.forget(mask)


def _usable(places: Tensor) -> bool:
    """Whether autograd may save indices, which it may not if they were made for inference."""
    return torch.is_inference_mode_enabled() or not places.is_inference()


def _on_device(layout: Layout, rows: Tensor, params: Any, device: torch.device) -> PackedRows:
    missing = rows < 0
    empty = on_device(missing, device) if bool(missing.numpy().any()) else None
    return PackedRows(layout, rows, on_device(rows.clamp(min=0), device), empty, params_on_device(params, device))


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


PATCHES = (Patch(seam("step_padding"), _padded_on_host), Patch(seam("pack_indices"), _without_waiting))
