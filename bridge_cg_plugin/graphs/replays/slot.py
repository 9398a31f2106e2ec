"""Slots: the memory of one microbatch between its forward and its backward."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from ..buckets import Bucket
from ..memory.pools import Making, SlotMemory

Buffers = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype of one static input of a region.

    Attributes:
        shape: Shape in one bucket.
        dtype: Element type; the batch's tensor is converted on copy as eager would.
        differentiable: Whether the region returns a gradient for this input.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool = False


class StaticTensors:
    """Named flat storages, each as large as its largest view; smaller buckets see a prefix.

    A later, larger request gets a storage of its own: views of the one before stay where recordings know them.
    Floating-point storages start as NaN: a value that was never written cannot pass unnoticed.

    Args:
        device: Where they are.
        making: Entered around the making of each.
    """

    def __init__(self, device: torch.device, making: Making = nullcontext) -> None:
        self._device, self._making = device, making
        self._flat: dict[tuple[str, torch.dtype], list[Tensor]] = defaultdict(list)

    def view(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a contiguous tensor over the largest storage called `name`."""
        numel = torch.Size(shape).numel()
        flats = self._flat[name, dtype]
        if not flats or flats[-1].numel() < numel:
            fill = torch.nan if dtype.is_floating_point else 0
            with self._making(), torch.inference_mode(False):  # a pass in it may be the first to ask for a slot
                flats.append(torch.full((numel,), fill, dtype=dtype, device=self._device))
        return flats[-1][:numel].view(shape)

    def keep(self, used: Iterable[Tensor]) -> None:
        """Give the storages back that none of these tensors is in."""
        kept = {tensor.untyped_storage().data_ptr() for tensor in used}
        for flats in self._flat.values():
            flats[:] = [flat for flat in flats if flat.untyped_storage().data_ptr() in kept]

    @property
    def storages(self) -> list[Tensor]:
        """All storages, each one-dimensional."""
        return list(chain.from_iterable(self._flat.values()))

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(flat.nbytes for flat in self.storages)


class SharedInputs:
    """Static inputs that several regions hold in common, a set for each slot.

    A microbatch must use the same slot in all of these regions, and one that is free in all of them.

    Args:
        names: Of the inputs.
        device: Where they are.
    """

    def __init__(self, names: Collection[str], device: torch.device) -> None:
        self.names = frozenset(names)
        self._device = device
        self._tensors: dict[int, StaticTensors] = {}

    def tensors(self, slot: int) -> StaticTensors:
        """Return the storages of a slot."""
        if slot not in self._tensors:
            self._tensors[slot] = StaticTensors(self._device)
        return self._tensors[slot]

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(tensors.nbytes for tensors in self._tensors.values())


class Slot:
    """A region's static tensors for every bucket, used by one microbatch at a time.

    Args:
        index: Its number in the region.
        device: Where its memory is.
        common: Memory of its recordings.
        shared: Inputs that are not the region's own.
        making: Entered around the making of each of its static tensors.

    Attributes:
        buffers: Static inputs of each bucket.
        lease: Number of the lease that a microbatch holds; None while the slot is free.
    """

    def __init__(
        self,
        index: int,
        device: torch.device,
        common: "ChainSlot",
        shared: SharedInputs | None = None,
        making: Making = nullcontext,
    ) -> None:
        self.index, self.common = index, common
        self.static = StaticTensors(device, making)
        self.shared = shared
        self.buffers: dict[Bucket, Buffers] = {}
        self.lease: int | None = None
        self._leases = 0
        self._device = device

    def input_buffers(self, specs: Mapping[str, TensorSpec]) -> Buffers:
        """Return views for all of a bucket's static inputs."""
        shared = self.shared
        tensors = {
            name: self.static if shared is None or name not in shared.names else shared.tensors(self.index)
            for name in specs
        }
        return {name: tensors[name].view(f"input:{name}", spec.shape, spec.dtype) for name, spec in specs.items()}

    @property
    def free(self) -> bool:
        """Whether no microbatch holds the slot, nor memory that it has in turn with others."""
        last = self.common.last
        return self.lease is None and (last is None or last.lease is None)

    def take(self) -> int:
        """Hand the slot to a microbatch; returns the number of its lease."""
        self._leases += 1
        self.lease = self._leases
        if self.common.in_turn:
            self.common.last = self
        self.order_after_last_use()
        return self.lease

    def order_after_last_use(self) -> None:
        """Make the current stream wait for the slot's last work if that ran on another stream."""
        if self._device.type != "cuda":
            return
        current, common = torch.cuda.current_stream(self._device), self.common
        if common.last_stream is not None and common.last_stream != current:
            current.wait_stream(common.last_stream)
        common.last_stream = current


class ChainSlot:
    """What the parts of a chain have in common in a slot; a whole region is one part.

    A forward overwrites what later parts keep for their backwards, and so does a backward: they come in the order of
    the capture.

    Args:
        device: Where the memory is.
        new_memory: Makes memory of recordings.
        in_parts: Whether several parts use it: recordings without a backward are in memory of their own then.
        in_turn: Whether a part has all of it from its forward to its backward, before another runs.

    Attributes:
        border: Where parts have outputs and gradients, one part at a time; None leaves them with the recording.
        last: The slot of the part that had it last, where parts have it in turn.
        last_stream: Where a part replayed last.
    """

    def __init__(
        self, device: torch.device, new_memory: Callable[[], SlotMemory], in_parts: bool, in_turn: bool = False
    ) -> None:
        self._new_memory, self._in_parts, self.in_turn = new_memory, in_parts, in_turn
        self.last: Slot | None = None
        self._memory = {True: new_memory()}
        self.border = StaticTensors(device) if in_parts else None
        self.last_stream: torch.cuda.Stream | None = None

    def memory(self, gradients: bool) -> SlotMemory:
        """Return the memory of recordings with or without a backward."""
        own = gradients or not self._in_parts
        if own not in self._memory:
            self._memory[own] = self._new_memory()
        return self._memory[own]

    @property
    def nbytes(self) -> int:
        """Device memory of the recordings in bytes."""
        return sum(memory.nbytes for memory in self._memory.values())

    def keep(self, recordings: Iterable[tuple[bool, int]]) -> None:
        """Give memory back that recordings do without; no replay is under way.

        Args:
            recordings: Whether each has a backward, and its bytes.
        """
        needed = [(gradients or not self._in_parts, nbytes) for gradients, nbytes in recordings]
        for own, memory in self._memory.items():
            memory.keep(max((nbytes for of, nbytes in needed if of == own), default=0))
