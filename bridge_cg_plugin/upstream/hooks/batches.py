"""Bridge's batch steps: grids, packs' offsets and token ids are noted on the host before they go to the device.

Where graphs are on, batches go to the device out of page-locked memory, on a stream of their own: a copy does not wait
for what the device computes, and the host waits for no copy. Which batch a step gets is the data loader's affair:
nothing is prefetched here.

Graphs of a language model replay one length or a few, and Bridge pads to one under pipeline and expert parallelism
only: rows are padded here.
"""

import copy
import functools
import importlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ...graphs.host_copies import HostCopies, HostTensors, on_host
from ...language.packed.batch import OFFSETS, PADDED_OFFSETS, row_lengths
from ...options import OptionError
from ...options.combinations import DRIVEN_BY_BRIDGE
from ...options.graph_options import asks_for_packed_graphs
from ...options.language_model import IMPL
from ...vision.batch import HostGrids
from ..seams.patches import Additions, Patch
from ..seams.registry import SEAMS, seam
from ..seams.registry.bridge import PADDING
from .helpers.graph_helper import any_on_graphs

TOKENS = HostTensors()
"""Token ids, from where they are copied or read to the model's forward."""

KEPT = HostTensors()
"""Which tokens are kept, of batches that were padded to one length."""

GRIDS = HostGrids()
"""Grids of images and videos."""

PACK_OFFSETS = HostCopies()
"""Offsets of the documents of packs."""


GRID_FIELDS = ("image_grid_thw", "video_grid_thw", "image_sizes")
# Today's names, then those of older batches.
OFFSET_FIELDS = (*OFFSETS, *PADDED_OFFSETS, "cu_seqlens", "cu_seqlens_unpadded")
# Where the host's copies of a batch's fields are kept.
KEEPERS: dict[str, HostCopies | HostTensors] = {
    **dict.fromkeys(GRID_FIELDS, GRIDS),
    **dict.fromkeys(OFFSET_FIELDS, PACK_OFFSETS),
    **dict.fromkeys(("tokens", "input_ids"), TOKENS),
}


class _Noting:
    """Passes an iterator through and keeps the host tensors of the last batch that the host must know later."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator
        self._fetched: list[Any] = []
        self.noted: dict[str, Tensor] = {}

    def __iter__(self) -> "_Noting":
        return self

    def fetch(self) -> None:
        """Take the next batch now, and give it to whoever asks next.

        Raises:
            StopIteration: There is none.
        """
        self._fetched.append(next(self))

    def __next__(self) -> Any:
        if self._fetched:
            return self._fetched.pop()
        batch = next(self._iterator)
        on_graphs = any_on_graphs()
        self.noted = {
            name: tensor
            for name, tensor in _fields_of(batch).items()
            if on_host(tensor) and (on_graphs or KEEPERS[name] is not TOKENS)
        }
        return batch


def _fields_of(batch: Any) -> dict[str, Tensor]:
    """Return the tensors of a batch whose values the host may need."""
    if not isinstance(batch, dict):
        return {}
    visual = batch.get("visual_inputs")
    found = {name: getattr(visual, name, None) if name in GRID_FIELDS else batch.get(name) for name in KEEPERS}
    return {name: tensor for name, tensor in found.items() if isinstance(tensor, Tensor)}


def _with_host_copies(old: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    @functools.wraps(old)
    def get_batch_from_iterator(data_iterator: Iterator[Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        noting = _Noting(data_iterator)
        copying: AbstractContextManager[None] = nullcontext()
        if copies_aside():
            noting.fetch()  # what makes a batch runs as without the plugin, its copies do not
            copying = COPIES.copying()
        with copying:
            batch = old(noting, *args, **kwargs)
        for name, moved in _fields_of(batch).items():
            if name in noting.noted:
                KEEPERS[name].remember(moved, noting.noted[name])
        return batch

    return get_batch_from_iterator


def _at_fixed_length(old: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    @functools.wraps(old)
    def get_batch(data_iterator: Any, cfg: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        batch = old(data_iterator, cfg, *args, **kwargs)
        impl = getattr(cfg.model, IMPL, "none")
        if impl not in DRIVEN_BY_BRIDGE or asks_for_packed_graphs(cfg.model):
            return batch
        length, tokens = cfg.model.seq_length, batch[0]
        if impl == "transformer_engine":  # megatron-core's graphs replay one length
            return padded(batch, (length,))
        # Layers that are one region have a recording for each length, or run eager.
        longer = tokens is not None and tokens.shape[1] > length
        return batch if longer else padded(batch, row_lengths(length))

    return get_batch


def padded(batch: tuple[Any, ...], lengths: Sequence[int]) -> tuple[Any, ...]:
    """Return what one of Bridge's steps calls a batch with every sequence padded to one length.

    Args:
        batch: The batch.
        lengths: In tokens, ascending: it gets the first that it fits.

    Raises:
        OptionError: A sequence is longer.
    """
    tokens, labels, loss_mask, attention_mask, position_ids, *rest = batch
    if tokens is None or tokens.shape[1] in lengths:  # stages between the first and the last may get nothing
        return batch
    longest = tokens.shape[1]
    length = next((each for each in lengths if each > longest), None)
    if length is None:
        raise OptionError(
            "model.seq_length",
            lengths[-1],
            f"at least {longest}, the tokens of this microbatch, with language-model graphs",
            "Raise it or shorten the samples.",
        )
    padding = importlib.import_module(PADDING)
    flat = functools.partial(padding.pad_or_truncate_2d_to_len, target_len=length, max_cap=length)
    longer = flat(tokens, pad_value=0)
    host = TOKENS.known(tokens)
    if host is not None:
        TOKENS.remember(longer, flat(host, pad_value=0))
    return (
        longer,
        flat(labels, pad_value=-100),
        flat(loss_mask, pad_value=0),
        padding.pad_or_truncate_attn_to_len(attention_mask, target_len=length, max_cap=length),
        padding.pad_or_truncate_pos_to_len(position_ids, target_len=length, max_cap=length),
        *rest,
    )


# The most batches on the device whose computation has not begun: each takes memory.
MAX_BATCHES_IN_FLIGHT = 2


class _OrderStreams(TorchDispatchMode):
    """Keeps two streams apart while work of the one is launched.

    Every tensor that is created on the device is recorded as used by the computing stream. What was made before
    may be the computing stream's: work that reads it waits for that stream.

    Args:
        stream: The current stream.
        computing: The computing stream.
    """

    def __init__(self, stream: torch.cuda.Stream, computing: torch.cuda.Stream) -> None:
        super().__init__()
        self._stream, self._computing = stream, computing
        self._made: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        given = _on_device((args, kwargs))
        if not self._made.issuperset(map(_storage, given)):
            self._stream.wait_stream(self._computing)
        result = func(*args, **(kwargs or {}))
        for tensor in _on_device(result):
            tensor.record_stream(self._computing)
            self._made.add(_storage(tensor))
        return result


def _on_device(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and not on_host(leaf)]


def _storage(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


class CopyStream:
    """The stream that a device's batches are copied on.

    What is made there is memory of this stream. The allocator gives it out again only when the computing stream, which
    it is told of, is past its last use.
    """

    def __init__(self) -> None:
        self._stream_of = functools.cache(torch.cuda.Stream)
        self._begun: deque[torch.cuda.Event] = deque()

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Make copies inside. The current stream waits for them behind it, the host for a batch of long before."""
        computing = torch.cuda.current_stream()
        stream = self._stream_of(computing.device)
        if len(self._begun) == MAX_BATCHES_IN_FLIGHT:
            self._begun.popleft().synchronize()
        try:
            with torch.cuda.stream(stream), _OrderStreams(stream, computing):
                yield
        finally:
            computing.wait_stream(stream)
        begun = torch.cuda.Event(blocking=True)
        begun.record(computing)
        self._begun.append(begun)


def copies_aside() -> bool:
    """Whether a batch is copied on a stream of its own: some module is on graphs, and nothing records the copies."""
    return any_on_graphs() and torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing()


def pin_memory(self: Any) -> Any:
    """Return a batch's images in page-locked memory. PyTorch's data loaders call it, in a thread of theirs."""
    if not any_on_graphs():
        return self
    pinned = copy.copy(self)
    for name, value in vars(self).items():
        if isinstance(value, Tensor) and on_host(value):
            setattr(pinned, name, value.pin_memory())
    return pinned


COPIES = CopyStream()
PATCHES = (
    *(Patch(entry, _with_host_copies) for entry in SEAMS if entry.target == "get_batch_from_iterator"),
    *(Patch(entry, _at_fixed_length) for entry in SEAMS if entry.target == "get_batch"),
    Additions(seam("page_locked_images"), {"pin_memory": pin_memory}),
)
