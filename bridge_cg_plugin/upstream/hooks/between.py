"""From Bridge's batch to Qwen3-VL's language model, without waiting for the device behind the encoder.

Where the host has the token ids, upstream's own functions run on these and on the host's copies of grids, masks and
offsets, once for all tensors of a microbatch, and what they give goes to the device: where images are, positions,
lengths, which rows of padded samples a pack has, which document a token has. Otherwise they run as upstream calls them.
"""

import copy
import functools
import inspect
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from ...graphs.host_copies import ByStorage, HostCopies, HostTensors, on_device
from ...language.packed.batch import OFFSETS, PADDED_OFFSETS, document_indices
from ...language.packed.workload import PackedWorkload
from ...vision.known_mask import KnownMask
from ..seams.patches import Patch, bridge_release
from ..seams.registry import seam
from ..seams.states import installed_state
from ..wrappers import pack_params
from .batches import GRIDS, KEPT, PACK_OFFSETS, TOKENS
from .helpers.graph_helper import active_graphs, any_on_graphs

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


def _padded_on_host(old: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """Pad tokens, and compute what describes a pack, on the host, by upstream's own code."""

    @functools.wraps(old)
    def pad_and_pack(tokens: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        host = TOKENS.known(tokens) if any_on_graphs() else None
        if host is None:
            return old(tokens, *args, **kwargs)
        padded, *others, params = old(host, *args, **kwargs)
        on = tokens if padded is host else on_device(padded, tokens.device)
        noted = on.as_subclass(_StepTokens)
        noted.host = padded
        return noted, *others, params_on_device(params, tokens.device)

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
    # Autograd may not save indices that were made for inference.
    usable = found is not None and (torch.is_inference_mode_enabled() or not found.places.is_inference())
    if found is not None and usable and found.layout == layout:
        return found
    numbers = torch.arange(1, on_host.numel() + 1, device="cpu").view(on_host.shape)
    packed, params = old(numbers, on_host, True, groups)
    rows = packed[0] - 1
    taken = rows[rows.numpy() >= 0].numpy()
    if len(set(taken.tolist())) < len(taken):
        return None
    missing, device = rows < 0, mask.device
    empty = on_device(missing, device) if bool(missing.numpy().any()) else None
    made = PackedRows(layout, rows, on_device(rows.clamp(min=0), device), empty, params_on_device(params, device))
    _ROWS.store(mask, made)
    return made


def packs_on_graphs() -> bool:
    """Whether layers over packs are on graphs, or are to be after warm-up steps."""
    return any(isinstance(graphs.workload, PackedWorkload) for graphs in active_graphs())


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
        indices = _indices(self) if packs_on_graphs() else None
        if indices is None:
            old(self)
        else:
            self.seq_idx = indices

    return __post_init__


Function = Callable[..., Any]
GRID_NAMES = ("image_grid_thw", "video_grid_thw")


def _on_host(call: dict[str, Any]) -> dict[str, Any] | None:
    """Return a call's arguments with host copies of its tokens and grids; None where the host lacks one."""
    tokens = call.get("input_ids")
    copies = {"input_ids": TOKENS.known(tokens) if any_on_graphs() and isinstance(tokens, Tensor) else None}
    copies |= {name: _host_copy(GRIDS, call[name]) for name in GRID_NAMES if call.get(name) is not None}
    return None if any(copy is None for copy in copies.values()) else {**call, **copies}


def _host_copy(copies: HostCopies, tensor: Tensor) -> Tensor | None:
    known = copies.known(tensor)
    return None if known is None else torch.tensor(known, dtype=tensor.dtype).view(tensor.shape)


def _image_tokens_on_host(old: Function) -> Function:
    """Find the places of images in the text on the host."""
    signature = inspect.signature(old)

    @functools.wraps(old)
    def reorganize_inputs(*args: Any, **kwargs: Any) -> Any:
        call = dict(signature.bind(*args, **kwargs).arguments)
        masked = call.get("image_input_mask") is not None or call.get("video_input_mask") is not None
        host = None if masked else _on_host(call)
        if host is None:
            return old(*args, **kwargs)
        device = call["input_ids"].device
        values, grid, mask = old(**host)
        return values, _given(grid, host, call, device), None if mask is None else _known(mask, device)

    return reorganize_inputs


def _given(grid: Tensor | None, host: dict[str, Any], call: dict[str, Any], device: torch.device) -> Tensor | None:
    """Return the device's tensor for a grid of the host: one of the call's, or a new one that mixes them."""
    for name in GRID_NAMES:
        if grid is host.get(name):
            return call.get(name)
    assert grid is not None
    mixed = on_device(grid, device)
    GRIDS.remember(mixed, grid)
    return mixed


def _known(mask: Tensor, device: torch.device) -> KnownMask:
    return KnownMask(on_device(mask, device), mask)


def _parts_on_host(old: Function) -> Function:
    """Count on the host how many image features each tensor-parallel and context-parallel rank has."""

    @functools.wraps(old)
    def split_deepstack_embs(visual_pos_masks: Any, deepstack_visual_embeds: Any, *args: Any, **kwargs: Any) -> Any:
        if not (isinstance(visual_pos_masks, KnownMask) and visual_pos_masks.current):
            return old(visual_pos_masks, deepstack_visual_embeds, *args, **kwargs)
        part, features = old(visual_pos_masks.host, deepstack_visual_embeds, *args, **kwargs)
        unsplit = part is visual_pos_masks.host
        return visual_pos_masks if unsplit else _known(part, visual_pos_masks.device), features

    return split_deepstack_embs


def _packed_at_once(old: Function) -> Function:
    """Put samples behind each other by what the host knows of their padding, where upstream looks for it in each."""

    @functools.wraps(old)
    def preprocess_packed_seqs(
        input_ids: Tensor, attention_mask: Tensor, pre_process: bool = True, pg_collection: Any = None
    ) -> Any:
        mask = attention_mask
        wanted = pre_process and pg_collection is not None and is_mask_of(mask, input_ids) and any_on_graphs()
        on_host = mask_on_host(input_ids, mask) if wanted else None
        found = None if on_host is None else _packed(old, input_ids, mask, on_host, pg_collection)
        if found is None:
            return old(input_ids, mask, pre_process, pg_collection)
        packed, params, known = found
        if known is not None:
            TOKENS.remember(packed, known)
        return packed, params

    return preprocess_packed_seqs


def _packed(
    old: Function, values: Tensor, mask: Tensor, on_host: Tensor, groups: Any
) -> tuple[Tensor, Any, Tensor | None] | None:
    """Return a pack, its description, and the pack of values that the host knows; None where upstream's code must."""
    known = TOKENS.known(values) if values.dim() == 2 else None  # embeddings and positions pass here, too
    context, rank = groups.cp.size(), groups.cp.rank()
    chunks = groups.tp.size() * (2 * context if context > 1 else 1)
    if values.shape[1] % chunks == 0 and on_host.numpy().all():
        one_row = partial(_one_row, context=context, rank=rank)
        return one_row(values), _params(values), None if known is None else one_row(known)
    rows = packed_rows(old, mask, on_host, groups)
    return None if rows is None else (rows.of(values), rows.params, None if known is None else rows.of_host(known))


def is_mask_of(mask: Any, values: Tensor) -> TypeGuard[Tensor]:
    """Whether this says which tokens of a batch are kept, on the batch's device."""
    fits = isinstance(mask, Tensor) and mask.shape == values.shape[:2] and mask.device == values.device
    return fits and mask.dtype == torch.bool


def mask_on_host(values: Tensor, mask: Tensor) -> Tensor | None:
    """Return which tokens of a batch are kept; None where the host does not know it.

    Args:
        values: The batch's tokens, or what stands for each of them.
        mask: The same on the device; `is_mask_of` holds.
    """
    host = KEPT.known(mask)
    if host is None and STEP_TOKENS.known(values) is not None and mask.shape == values.shape and _step_keeps_all():
        host = torch.ones(mask.shape, dtype=torch.bool, device="cpu")
        KEPT.remember(mask, host)
    return host


def _step_keeps_all() -> bool:
    """Whether Bridge's step, which packs, gives its model a mask that keeps every token, padding included."""
    return installed_state("step_packing", bridge_release())[0] == "native"


def _one_row(values: Tensor, context: int, rank: int) -> Tensor:
    """Return a rank's two chunks of each sample, `[1, batch * sequence / context, ...]` of `[batch, sequence, ...]`."""
    if context == 1:
        return values.reshape(1, -1, *values.shape[2:])
    chunks = values.unflatten(1, (2 * context, -1))
    return torch.stack((chunks[:, rank], chunks[:, -rank - 1]), dim=1).flatten(0, 2)[None]


def _params(values: Tensor) -> Any:
    """Return upstream's description of a pack of whole rows."""
    samples, length = values.shape[:2]
    offsets = torch.arange(samples + 1, dtype=torch.int32, device=values.device) * length
    return pack_params(dict.fromkeys((*OFFSETS, *PADDED_OFFSETS), offsets), length)


def _positions_on_host(old: Function) -> Function:
    """Compute positions on the host. Without images upstream computes them on the device, where it reads nothing."""
    signature = inspect.signature(old)

    @functools.wraps(old)
    def get_rope_index(*args: Any, **kwargs: Any) -> Any:
        call = dict(signature.bind(*args, **kwargs).arguments)
        has_images = any(call.get(name) is not None for name in GRID_NAMES)
        host = _on_host(call) if has_images and call.get("attention_mask") is None else None
        params = call.get("packed_seq_params")
        known = None if host is None or params is None else with_tensors(params, partial(_host_copy, PACK_OFFSETS))
        if host is None or (known is None and params is not None):
            return old(*args, **kwargs)
        made = old(**host if params is None else {**host, "packed_seq_params": known})
        return tuple(on_device(values, call["input_ids"].device) for values in made)

    return get_rope_index


PATCHES = (
    Patch(seam("image_tokens"), _image_tokens_on_host),
    Patch(seam("deepstack_parts"), _parts_on_host),
    Patch(seam("packed_rows"), _packed_at_once),
    Patch(seam("positions"), _positions_on_host),
    Patch(seam("step_padding"), _padded_on_host),
    Patch(seam("pack_indices"), _without_waiting),
)


BATCH = seam("batch_of_model")
Forget = Callable[[], None]


def early_reads(holder: nn.Module) -> ExitStack:
    """Let a Qwen3-VL model read its batch first; any other model is left alone. Returns what takes the hooks off.

    Args:
        holder: The module that holds the vision model and the language model.
    """
    forgets: list[Forget] = []
    handles = ExitStack()

    def began(holder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        forgets.extend(read_ahead(kwargs if not args else {"input_ids": args[0], **kwargs}))

    def ended(*unused: Any) -> None:
        for forget in forgets:
            forget()
        forgets.clear()

    if any(kind.__module__ == BATCH.module for kind in type(holder).__mro__):
        handles.enter_context(holder.register_forward_pre_hook(began, with_kwargs=True))
        handles.enter_context(holder.register_forward_hook(ended, always_call=True))
    return handles


def read_ahead(call: Mapping[str, Any]) -> list[Forget]:
    """Read what upstream would read of a call's batch, unless the host knows it.

    Args:
        call: Arguments of the forward, by name.

    Returns:
        What forgets tokens and mask that were read; sizes are kept as those of any batch.
    """
    tokens, mask, params = (call.get(name) for name in ("input_ids", "attention_mask", "packed_seq_params"))
    if not (any_on_graphs() and isinstance(tokens, Tensor) and tokens.dim() == 2 and tokens.is_contiguous()):
        return []
    grids = [call[name] for name in GRID_NAMES if isinstance(call.get(name), Tensor)]
    padded = params is not None and len(tokens) > 1
    if not (grids or padded) or (tokens.is_cuda and torch.cuda.is_current_stream_capturing()):
        return []
    forget = [] if TOKENS.known(tokens) is not None else [_read(TOKENS, tokens)]
    # Releases before 0.6.2 pack a single sample by its mask, too.
    if params is not None and is_mask_of(mask, tokens) and mask.is_contiguous() and mask_on_host(tokens, mask) is None:
        forget += [_read(KEPT, mask), lambda: _ROWS.forget(mask)]
    for grid in grids:
        GRIDS.values(grid)
    if params is not None and (not padded or packs_on_graphs()):
        for name in (*OFFSETS, *PADDED_OFFSETS):
            if isinstance(value := getattr(params, name, None), Tensor):
                PACK_OFFSETS.values(value)
    return forget


def _read(copies: HostTensors, tensor: Tensor) -> Forget:
    copies.remember(tensor, tensor.cpu())
    return lambda: copies.forget(tensor)
