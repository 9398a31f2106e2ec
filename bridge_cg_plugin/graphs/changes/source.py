"""What recordings were made from: if it does not hold any more, they compute something else than the model."""

import operator
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, cycle, repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ..planning.buckets import Bucket
from ..program import RegionProgram
from ..recordings.parameters import ParameterAliases
from ..recordings.recording import Mode, Recording
from ..replays.gradients import GradientSinks, ParameterHooks, Reduction
from ..replays.slot import Slot, Turn
from ..retries import Failures
from .identity import storage_of

_requires_grad, _dtype = operator.attrgetter("requires_grad"), operator.attrgetter("dtype")
# Parameters that a look inside a step takes.
SAMPLE = 48
# Microbatches that ask for a recording that failed, before it is first tried again.
TRIED_AGAIN = 16


# What PyTorch 2.9 and later read a precision with; the older getter raises where somebody used the newer setting.
_PRECISION = getattr(torch._C, "_get_fp32_precision_getter", None)
_BACKENDS = {"cuda": "cuda", "cpu": "mkldnn"}


def precision_getters(device_type: str) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return what reads the precision of fp32 matrix products and that of convolutions on a device."""
    if _PRECISION is None:
        return torch._C._get_float32_matmul_precision, torch._C._get_cudnn_allow_tf32
    backend = _BACKENDS.get(device_type, device_type)
    return partial(_PRECISION, backend, "matmul"), partial(_PRECISION, backend, "conv")


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """Return what autocast casts to in this thread; None without autocast."""
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


class Numerics(NamedTuple):
    """Settings by which kernels are chosen, besides deterministic algorithms.

    Attributes:
        autocast: What autocast casts to; None without it.
        products: Precision of fp32 matrix products, as PyTorch names it.
        convolutions: That of fp32 convolutions.
    """

    autocast: torch.dtype | None
    products: str
    convolutions: str

    @classmethod
    def of(cls, autocast: torch.dtype | None, *precisions: Any) -> "Numerics":
        """Return settings as they were read: precision that nobody has set is IEEE's."""
        products, convolutions = ("ieee" if name == "none" else str(name) for name in precisions)
        return cls(autocast, products, convolutions)


_numbers = count()

# How a model differs from what it was when its watch began: places and what stands for their values.
State = frozenset[tuple[Hashable, Hashable]]


@dataclass(slots=True)
class Recorded:
    """A recording.

    Attributes:
        recording: The recording.
        output_gradients: The buffers that its backward reads.
        nbytes: What it needs of its slot's memory.
        in_place: Whether memory was where its source found it when the recording was made.
        turn: When it was made, with a backward and as a part of a chain; None for any other.
    """

    recording: Recording
    output_gradients: tuple[Tensor, ...]
    nbytes: int = 0
    in_place: bool = True
    turn: Turn | None = None


class Source:
    """What recordings were made from, and these recordings.

    Args:
        program: The piece of the model.
        state: The state of its modules.
        numerics: The settings that recordings are made with.
        reduction: What waits for gradients; None hands every gradient over to autograd.
        hooks: The region's hooks on parameters.
        device_type: Of the region.
        read: Tensors besides parameters that the piece reads. Kernels get those of another device by value.
        held: Objects whose identity the state names; kept alive, so that no other object takes it.
        lasting: Whether it was asked for before, so that what is missing is recorded at once.
        instead_of: The source whose place it takes because this rank's memory was moved.

    Attributes:
        number: Of what the model is: that of no other source of this process, except one whose place it takes.
        reads: Parameters and the other tensors that the piece reads.
        aliases: Stand-ins for the parameters.
        sinks: Where parameter gradients go.
        recordings: By the slot's number, bucket and mode.
        failed: Why a bucket could not be captured in a mode, by both.
        recorded_by_other_ranks: What ranks whose memory was not moved need not recapture.
        lasting: See above.
        moved_here: Whether it took the place of another one because this rank's memory was moved.
        warm: Modes that were recorded here, or before memory was moved.
        earlier: The source before memory was moved, whose recordings hold once all lies there again.
    """

    def __init__(
        self,
        program: RegionProgram,
        state: State,
        numerics: Numerics,
        reduction: Reduction | None,
        hooks: ParameterHooks,
        device_type: str,
        read: Sequence[Tensor] = (),
        held: Sequence[object] = (),
        lasting: bool = False,
        instead_of: "Source | None" = None,
    ) -> None:
        self.state, self.numerics, self._held = state, numerics, tuple(held)
        self.lasting, self.moved_here, self._device_type = lasting, instead_of is not None, device_type
        self.number: int = next(_numbers) if instead_of is None else instead_of.number
        self.aliases = ParameterAliases(program.modules())
        self.sinks = GradientSinks(self.aliases.trainable, reduction, hooks)
        self._trained = list(map(_requires_grad, self.aliases.originals))
        self.recordings: dict[tuple[int, Bucket, Mode], Recorded] = {}
        # Shared: a rank whose memory was moved must not try again what others do not.
        self.failed: Failures = Failures(TRIED_AGAIN) if instead_of is None else instead_of.failed
        self.recorded_by_other_ranks: frozenset[tuple[int, Bucket, Mode]] = frozenset()
        self.warm: set[Mode] = set()
        self.earlier: Source | None = None
        if instead_of is not None:
            self.recorded_by_other_ranks = instead_of.recorded_by_other_ranks.union(instead_of.recordings)
            self.warm = set(instead_of.warm)
        self._constants = tuple((tensor, tensor._version) for tensor in read if tensor.device.type != device_type)
        self.reads: tuple[Tensor, ...] = (*self.aliases.originals, *read)
        self._read = _Memory(self.reads)
        self._layouts = self._read.layouts()
        self._types = list(map(_dtype, self.reads))
        self._storages = list(map(storage_of, self.reads))
        self._writes = _Memory([g for g in self.sinks.given if g is not None])
        self._found_none = self.gradients_left()
        # A list: a generator would hold this object, and with it the memory of its recordings.
        self._samples = cycle(list(self._some()))

    def autocasting(self) -> torch.autocast:
        """Return the autocast that recordings were made in: a backward runs outside of it."""
        autocast = self.numerics.autocast
        return torch.autocast(self._device_type, autocast, enabled=autocast is not None)

    def in_slot(self, slot: Slot) -> list[tuple[int, Bucket, Mode]]:
        """Return the recordings in a slot: number of the slot, bucket and mode."""
        return [place for place in self.recordings if place[0] == slot.index]

    def forget(self, slot: Slot) -> None:
        """Drop the recordings in a slot."""
        self.recordings = {place: made for place, made in self.recordings.items() if place[0] != slot.index}

    def take_place_of(self, moved: "Source") -> None:
        """Keep what was recorded before memory was moved, unless its gradients would need memory of their own."""
        moved.earlier = None
        moved.recorded_by_other_ranks = self.recorded_by_other_ranks
        for source in (self, moved):
            source.forget_elsewhere()
        if moved._reads_alike(self):
            self.recordings |= moved._without_forward_only()
        shares = (self._layouts, self._types) == (moved._layouts, moved._types) and self.sinks.share_with(moved.sinks)
        if moved.same_tensors(self) and (shares or not moved.sinks.static_bytes):
            self.earlier = moved
        else:
            moved.recordings.clear()

    def _reads_alike(self, other: "Source") -> bool:
        """Whether another source reads the same where this one's recordings read it: gradients alone were moved."""
        same = len(self.reads) == len(other.reads) and all(map(operator.is_, self.reads, other.reads))
        return same and not self.moved(gradients=False, layouts=True)

    def _without_forward_only(self) -> dict[tuple[int, Bucket, Mode], Recorded]:
        """Drop recordings without a backward, which write no gradient, and return them."""
        taken = {place: made for place, made in self.recordings.items() if not place[2].gradients}
        self.recordings = {place: made for place, made in self.recordings.items() if place[2].gradients}
        return taken

    def forget_elsewhere(self) -> None:
        """Drop recordings that were made while memory was elsewhere; other ranks may keep theirs."""
        elsewhere = [place for place, made in self.recordings.items() if not made.in_place]
        self.recorded_by_other_ranks = self.recorded_by_other_ranks.union(elsewhere)
        for place in elsewhere:
            del self.recordings[place]

    def same_tensors(self, other: "Source") -> bool:
        """Whether recordings of both read the same tensors, wherever they lie, and add to the same gradients."""
        ours, theirs = ((*each.reads, *each.sinks.given) for each in (self, other))
        return len(ours) == len(theirs) and all(map(operator.is_, ours, theirs))

    def lies_as(self, other: "Source") -> bool:
        """Whether recordings of both compute the same: what they read and write is the same, in the same places."""
        return self.same_tensors(other) and self._places() == other._places()

    def _places(self) -> tuple[object, ...]:
        versions = [version for _, version in self._constants]
        handed = self.sinks.handed
        return self._read.addresses, self._writes.addresses, self._layouts, self._trained, versions, handed

    def trained_otherwise(self) -> bool:
        """Whether other parameters require a gradient than when the object was made."""
        # Hundreds of parameters: no line of Python for each.
        return list(map(_requires_grad, self.aliases.originals)) != self._trained

    def retyped(self) -> bool:
        """Whether what recordings read is of another type than when the object was made."""
        return list(map(_dtype, self.reads)) != self._types

    def sample_trained_otherwise(self) -> bool:
        """Whether some of the parameters, others in every call, require a gradient otherwise.

        A look at all 353 of a tower takes 0.15 ms, since the host's caches hold none of them any more. Who freezes
        layers is seen at once by a few, and a single parameter within a few calls.
        """
        parameters, trained, *_ = next(self._samples)
        return list(map(_requires_grad, parameters)) != trained

    def sample_differs(self) -> bool:
        """Whether some of the parameters are trained otherwise, or they or their `main_grad` lie elsewhere.

        Memory that many of them share, as buffers of data parallelism, is seen in every call.
        """
        parameters, trained, tensors, addresses, owners, given = next(self._samples)
        return (
            list(map(_requires_grad, parameters)) != trained
            or list(map(Tensor.data_ptr, tensors)) != addresses
            or list(map(id, map(getattr, owners, repeat("main_grad"), repeat(None)))) != given
        )

    def _some(self) -> Iterator[tuple[Sequence[Any], ...]]:
        """Yield what each look inside a step takes: parameters, tensors and owners of gradients, each with values."""
        tensors = self._read.tensors + self._writes.tensors
        addresses = self._read.addresses + self._writes.addresses
        owners = [p for p, g in zip(self.sinks.parameters, self.sinks.given, strict=True) if g is not None]
        given = [id(g) for g in self.sinks.given if g is not None]
        every = -(-len(self._trained) // SAMPLE) or 1
        for first in range(every):
            yield tuple(
                each[first::every]
                for each in (self.aliases.originals, self._trained, tensors, addresses, owners, given)
            )

    def moved(self, gradients: bool, layouts: bool = False) -> bool:
        """Whether memory that recordings read or, with gradients, write lies elsewhere now.

        Args:
            gradients: Whether gradients are written.
            layouts: Also whether what is read has other shapes or strides.
        """
        if any(tensor._version != version for tensor, version in self._constants):
            return True
        if self._read.moved() or (gradients and self._gradients_moved()):
            return True
        return layouts and self._read.layouts() != self._layouts

    def _gradients_moved(self) -> bool:
        return self._found_none or self.sinks.replaced() or self._writes.moved()

    def gradients_left(self) -> bool:
        """Whether memory of a `main_grad` has left the device, so that no backward can be recorded or replayed."""
        there = map(getattr, self.sinks.parameters, repeat("main_grad"), repeat(None))
        # The storage's size: a part of a storage that was freed has an address, too, unless it begins there.
        return any(type(g) is Tensor and g.numel() and not g.untyped_storage().nbytes() for g in there)

    def reads_elsewhere(self) -> list[Tensor]:
        """Return what recordings read that lies elsewhere now.

        With it comes what was given other memory that happens to be at the same address: next time it may not be.
        """
        elsewhere = self._read.elsewhere()
        if not any(elsewhere):
            return []
        held = zip(self.reads, elsewhere, self._storages, strict=True)
        return [tensor for tensor, is_elsewhere, storage in held if is_elsewhere or not _has(tensor, storage)]


class _Memory:
    """Where tensors lie when the object is made."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tuple(tensors)
        self.addresses = self._find()

    # Hundreds of tensors, before every replay: no line of Python for each.

    def _find(self) -> list[int]:
        return list(map(Tensor.data_ptr, self.tensors))

    def layouts(self) -> list[int | tuple[int, ...]]:
        """Return how many elements the tensors have, and their strides."""
        return [*map(Tensor.numel, self.tensors), *map(Tensor.stride, self.tensors)]

    def moved(self) -> bool:
        return self._find() != self.addresses

    def elsewhere(self) -> list[bool]:
        """Return whether each tensor is at another address."""
        return list(map(operator.ne, self._find(), self.addresses))


def _has(tensor: Tensor, storage: StorageWeakRef | None) -> bool:
    """Whether a tensor has a storage that it had before."""
    return storage is None or tensor.untyped_storage()._cdata == storage.cdata
