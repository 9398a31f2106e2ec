"""What recordings were made from: if it does not hold any more, they compute something else than the model."""

import operator
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from ..buckets import Bucket
from ..errors import Retry
from ..fallback import Fallback
from ..program import RegionProgram
from ..recordings.executor import Recording
from ..recordings.recording import Mode, ParameterAliases
from ..replays.gradients import GradientSinks, ParameterHooks, Reduction, static_bytes_of
from .state import State

_requires_grad, _dtype, _version = map(operator.attrgetter, ("requires_grad", "dtype", "_version"))
_main_grad = operator.attrgetter("main_grad")
_address = Tensor.data_ptr
# How many of a list of tensors a look inside a step takes at least: hundreds, of which the host's caches hold none any
# more, take 0.4 ms.
SAMPLE = 12
# Microbatches that ask for a recording that failed, before it is first tried again.
TRIED_AGAIN = 16

# What PyTorch 2.9 and later read a precision with; the older getter raises where somebody used the newer setting.
_PRECISION = getattr(torch._C, "_get_fp32_precision_getter", None)
_BACKENDS = {"cuda": "cuda", "cpu": "mkldnn"}


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


def numerics_of(device_type: str) -> Callable[[], Numerics]:
    """Return what reads this thread's settings for a device; precision that nobody has set is IEEE's."""
    products, convolutions = torch._C._get_float32_matmul_precision, torch._C._get_cudnn_allow_tf32
    if _PRECISION is not None:
        backend = _BACKENDS.get(device_type, device_type)
        products, convolutions = (partial(_PRECISION, backend, kind) for kind in ("matmul", "conv"))

    def read() -> Numerics:
        autocast = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
        of_products, of_convolutions = str(products()), str(convolutions())
        ieee = {"none": "ieee"}
        return Numerics(autocast, ieee.get(of_products, of_products), ieee.get(of_convolutions, of_convolutions))

    return read


@dataclass(slots=True)
class Recorded:
    """A recording.

    Attributes:
        recording: The recording.
        output_gradients: The buffers that its backward reads.
        place: The slot's number, bucket and mode.
        nbytes: What it needs of its slot's memory.
    """

    recording: Recording
    output_gradients: tuple[Tensor, ...]
    place: tuple[int, Bucket, Mode]
    nbytes: int = 0


class Source:
    """What recordings were made from, and these recordings: a state of the model, and where its memory lies.

    Args:
        program: The piece of the model.
        state: The state of its modules.
        numerics: The settings that recordings are made with.
        reduction: What waits for gradients; None hands every gradient over to autograd.
        hooks: The region's hooks on parameters.
        device_type: Of the region.
        read: Tensors besides parameters that the piece reads. Kernels get those of another device by value.
        number: Of the state: that of no other one, whatever happens to this rank's memory.
        lasting: Whether it was asked for before, so that what is missing is recorded at once.
        instead_of: The source of the same state from before this rank's memory was moved.

    Attributes:
        state, numerics, number, lasting: See above.
        reads: Parameters and the other tensors that the piece reads.
        aliases: Stand-ins for the parameters.
        sinks: Where parameter gradients go.
        recordings: By the slot's number, bucket and mode.
        failed: When a bucket that could not be captured in a mode is tried again, by both.
        recorded_by_other_ranks: What ranks whose memory was not moved need not recapture.
        moved_here: Whether this rank's memory was moved since the state's first source.
        warm: Modes that were recorded in this state.
        unproven: Recordings that were not compared with eager, by the same; equal on ranks that recorded together.
        kinds: Of layers, by the mode; see `one_layer_of_each_kind`.
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
        number: int = 1,
        lasting: bool = False,
        instead_of: "Source | None" = None,
    ) -> None:
        self.state, self.numerics, self.number = state, numerics, number
        self.lasting, self.moved_here, self._device_type = lasting, instead_of is not None, device_type
        self.aliases = ParameterAliases(program.modules())
        self.sinks = GradientSinks(self.aliases.trainable, reduction, hooks)
        self._trained = list(map(_requires_grad, self.aliases.originals))
        self.recordings: dict[tuple[int, Bucket, Mode], Recorded] = {}
        # Shared: a rank whose memory was moved must not try again what others do not.
        self.failed: dict[tuple[Bucket, Mode], Retry] = {} if instead_of is None else instead_of.failed
        self.recorded_by_other_ranks: frozenset[tuple[int, Bucket, Mode]] = frozenset()
        self.warm: set[Mode] = set()
        self.kinds: dict[Mode, dict[nn.Module, Hashable]] = {}
        self.unproven: set[tuple[int, Bucket, Mode]] = set() if instead_of is None else instead_of.unproven
        if instead_of is not None:
            self.follow(instead_of)
        self._constants = [tensor for tensor in read if tensor.device.type != device_type]
        self._versions = list(map(_version, self._constants))
        self.reads: tuple[Tensor, ...] = (*self.aliases.originals, *read)
        self._types, self._layouts = list(map(_dtype, self.reads)), _layouts_of(self.reads)
        self._storages = [_storage_of(tensor) for tensor in self.reads]
        given = list(zip(self.sinks.parameters, self.sinks.given, strict=True))
        self._with_main_grad = [parameter for parameter, gradient in given if gradient is not None]
        self._without = [parameter for parameter, gradient in given if gradient is None]
        self._read_at = list(map(_address, self.reads))
        self._written_at = [gradient.data_ptr() for gradient in self.sinks.given if gradient is not None]
        self._found_none = self.gradients_left()
        self._unreplaced_at = -1

    def refuse(self, place: tuple[Bucket, Mode], reason: Fallback) -> None:
        """Note why a bucket could not be captured in a mode."""
        self.failed.setdefault(place, Retry(TRIED_AGAIN)).failed(reason)

    def autocasting(self) -> torch.autocast:
        """Return the autocast that recordings were made in: a backward runs outside of it."""
        autocast = self.numerics.autocast
        return torch.autocast(self._device_type, autocast, enabled=autocast is not None)

    def follow(self, before: "Source") -> None:
        """Take over what is known of the state from the source that was used before memory was moved."""
        self.recorded_by_other_ranks = before.recorded_by_other_ranks.union(before.recordings)
        self.warm |= before.warm

    def take_over(self, stale: "Source") -> bool:
        """Use recordings of a source whose memory was moved; returns whether it may stay, for when it moves back.

        Where gradients alone were moved, recordings without a backward hold on. A source stays only if it keeps no
        tensor and no gradient that this one does not have.
        """
        if _same(self.reads, stale.reads) and not stale.moved(gradients=False, layouts=True):
            alone = {place: made for place, made in stale.recordings.items() if not place[2].gradients}
            self.recordings |= alone
            stale.recordings = {place: made for place, made in stale.recordings.items() if place not in alone}
        alike = (self._layouts, self._types) == (stale._layouts, stale._types)
        shares = (alike and self.sinks.share_with(stale.sinks)) or not static_bytes_of([stale.sinks])
        return shares and _same((*self.reads, *self.sinks.given), (*stale.reads, *stale.sinks.given))

    def is_of(self, state: State, numerics: Numerics, generation: int) -> bool:
        """Whether recordings compute what a model in some state does, if memory lies where they expect it.

        Args:
            state: Of the modules.
            numerics: The settings now.
            generation: What `ModelWatch.look` returned: parameters are replaced only where it grows.
        """
        if self._unreplaced_at != generation:
            if self.aliases.replaced():
                return False
            self._unreplaced_at = generation
        alike = self.numerics == numerics and self.state == state and not self.trained_otherwise()
        return alike and list(map(_dtype, self.reads)) == self._types

    # Hundreds of tensors, before replays: no line of Python for each.

    def trained_otherwise(self, turn: int | None = None) -> bool:
        """Whether other parameters require a gradient than when the object was made; of some where it is a turn's."""
        some = _of_turn(self._trained, turn)
        return list(map(_requires_grad, self.aliases.originals[some])) != self._trained[some]

    def moved(self, gradients: bool, layouts: bool = False, turn: int | None = None) -> bool:
        """Whether memory that recordings read or, with gradients, write lies elsewhere now.

        Args:
            gradients: Whether gradients are written.
            layouts: Also whether what is read has other shapes or strides.
            turn: Which of the samples is looked at; None is all.
        """
        return (
            list(map(_version, self._constants)) != self._versions
            or self._read_elsewhere(turn)
            or (gradients and self._found_none)
            or (gradients and self._written_elsewhere(turn))
            or (layouts and _layouts_of(self.reads) != self._layouts)
        )

    def _read_elsewhere(self, turn: int | None) -> bool:
        some = _of_turn(self.reads, turn)
        return list(map(_address, self.reads[some])) != self._read_at[some]

    def _written_elsewhere(self, turn: int | None) -> bool:
        """Whether `main_grad`s lie elsewhere, or a parameter has lost or got one."""
        some, others = _of_turn(self._with_main_grad, turn), _of_turn(self._without, turn)
        try:
            if list(map(_address, map(_main_grad, self._with_main_grad[some]))) != self._written_at[some]:
                return True
        except (AttributeError, TypeError):
            return True
        return any(getattr(parameter, "main_grad", None) is not None for parameter in self._without[others])

    def gradients_left(self) -> bool:
        """Whether memory of a `main_grad` has left the device, so that no backward can be recorded or replayed."""
        there = map(getattr, self.sinks.parameters, repeat("main_grad"), repeat(None))
        # The storage's size: a part of a storage that was freed has an address, too, unless it begins there.
        return any(type(g) is Tensor and g.numel() and not g.untyped_storage().nbytes() for g in there)

    def reads_elsewhere(self) -> list[Tensor]:
        """Return what recordings read that lies elsewhere now.

        With it comes what was given other memory that happens to be at the same address: next time it may not be.
        """
        elsewhere = list(map(operator.ne, map(_address, self.reads), self._read_at))
        held = zip(self.reads, elsewhere, self._storages, strict=True) if any(elsewhere) else ()
        return [t for t, away, s in held if away or (s is not None and t.untyped_storage()._cdata != s.cdata)]


def _of_turn(tensors: Sequence[Any], turn: int | None) -> slice:
    """Return which tensors are looked at in a turn: each in one of a few turns."""
    apart = 1 if turn is None else max(1, len(tensors) // SAMPLE)
    return slice((turn or 0) % apart, None, apart)


def _layouts_of(tensors: Sequence[Tensor]) -> list[int | tuple[int, ...]]:
    return [*map(Tensor.numel, tensors), *map(Tensor.stride, tensors)]


def _same(objects: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(objects) == len(others) and all(map(operator.is_, objects, others))


def _storage_of(tensor: Tensor) -> StorageWeakRef | None:
    """Return what stands for a tensor's storage and keeps no memory; None for a tensor that has others inside."""
    return StorageWeakRef(tensor.untyped_storage()) if type(tensor) in (Tensor, nn.Parameter) else None
