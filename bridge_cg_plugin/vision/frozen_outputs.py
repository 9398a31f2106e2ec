"""Outputs of a frozen encoder, kept on the host: the same images are encoded once, whoever asks for them again.

A training loop may show one batch to a policy several times, and to a reference model. Where their encoders are frozen
and alike, all of these calls return the same.
"""

import operator
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..announce import warn
from ..graphs.changes.likeness import likeness
from ..graphs.changes.source import Source
from ..graphs.changes.sources import are_deterministic
from ..graphs.planning.buckets import round_up
from ..graphs.recordings.generators import provide_aside
from ..graphs.region import Region
from ..graphs.replays.inputs import want_gradients
from ..graphs.seen_operations import operations_are_seen
from ..graphs.workload import Manager
from ..options import VisionGraphOptions
from .adapter import EncoderBatch
from .kernels.fingerprint import Fingerprint, begun, fingerprint

Outputs = tuple[Tensor, ...]
# Runs a batch on graphs; None where it is to run eager.
Replay = Callable[[Region, EncoderBatch], Outputs | None]
# Comparisons of encoders that are remembered.
MOST_COMPARED = 1024
# Where an output may begin in memory that several have.
ALIGNED_BYTES = 512
# Hundreds of weights, in every look-up: no line of Python for each.
_requires_grad, _version = operator.attrgetter("requires_grad"), operator.attrgetter("_version")


class _Key(NamedTuple):
    """What outputs are made of.

    Attributes:
        encoder: Code, settings, numerics and weights.
        images: Pixels and their grid.
    """

    encoder: Hashable
    images: Hashable


class _Origin(NamedTuple):
    """Who made outputs, beyond the key.

    Attributes:
        source: Number of the source of the recordings.
        training: The mode of the modules.
    """

    source: int
    training: bool | tuple[bool, ...]


class _Kept:
    """Outputs on the host, page-locked where they come from a GPU.

    Attributes:
        origin: Who made them.
        nbytes: What they take.
    """

    def __init__(self, origin: _Origin, outputs: Outputs) -> None:
        self.origin, self.nbytes = origin, sum(output.nbytes for output in outputs)
        self._outputs = _on_host(outputs)
        self._copied = _recorded(outputs[0].device) if outputs[0].is_cuda else None

    def on(self, device: torch.device) -> Outputs:
        """Return copies on a device, made by its current stream."""
        if self._copied is not None:
            torch.cuda.current_stream(device).wait_event(self._copied)
        return tuple(torch.empty_like(each, device=device).copy_(each, non_blocking=True) for each in self._outputs)


class OutputStore:
    """Outputs in page-locked host memory, by what they were made of; the oldest leave when there are too many.

    Encoders of equal code, settings and weights may share outputs. The first time that one is given what another has
    made, or itself in another mode, it computes them all the same, and both are compared to the bit.

    Attributes:
        most_bytes: Bound of what is kept.
        nbytes: What is kept.
    """

    def __init__(self) -> None:
        self.most_bytes = self.nbytes = 0
        self._kept: OrderedDict[_Key, _Kept] = OrderedDict()
        self._compared: OrderedDict[Hashable, bool] = OrderedDict()

    def find(self, key: _Key, origin: _Origin) -> tuple[_Kept | None, bool]:
        """Return what is kept, and whether it may be used without a comparison."""
        kept = self._kept.get(key)
        if kept is None:
            return None, False
        self._kept.move_to_end(key)
        if kept.origin == origin:
            return kept, True
        same = self._compared.get(_pair(key, kept, origin))
        return (None if same is False else kept), same is True

    def compared(self, key: _Key, kept: _Kept, origin: _Origin, same: bool) -> None:
        """Note whether an encoder's outputs are those that another has made, or itself otherwise."""
        self._compared[_pair(key, kept, origin)] = same
        while len(self._compared) > MOST_COMPARED:
            self._compared.popitem(last=False)

    def keep(self, key: _Key, origin: _Origin, outputs: Outputs) -> None:
        """Keep a copy of outputs; without effect where they alone are too large, or others hold their place.

        Where the host has no memory for them, it keeps no more than it has.
        """
        if key in self._kept or sum(output.nbytes for output in outputs) > self.most_bytes:
            return
        try:
            kept = self._kept[key] = _Kept(origin, outputs)
        except RuntimeError as error:
            self.most_bytes = self.nbytes
            held = f"{self.nbytes / 2**30:.2f} GiB are kept, and no more"
            warn(
                f"vision_cuda_graph_tuning.frozen_outputs_gb: the host has no page-locked memory left, {held}: {error}"
            )
            return
        self.nbytes += kept.nbytes
        while self.nbytes > self.most_bytes:
            self.nbytes -= self._kept.popitem(last=False)[1].nbytes


def _pair(key: _Key, kept: _Kept, origin: _Origin) -> Hashable:
    return key.encoder, frozenset((kept.origin, origin))


def _recorded(device: torch.device) -> torch.cuda.Event:
    event: torch.cuda.Event = torch.cuda.current_stream(device).record_event()
    return event


def _on_host(outputs: Outputs) -> Outputs:
    """Return copies in one piece of memory: to lock some takes the driver milliseconds, of any size."""
    sizes = [round_up(output.nbytes, ALIGNED_BYTES) for output in outputs]
    memory = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu", pin_memory=outputs[0].is_cuda).split(sizes)
    return tuple(
        place[: output.nbytes].view(output.dtype).view(output.shape).copy_(output.detach(), non_blocking=True)
        for output, place in zip(outputs, memory, strict=True)
    )


_shared: "weakref.ReferenceType[OutputStore] | None" = None


def shared_store() -> OutputStore:
    """Return this process's store; it lives as long as an encoder uses it."""
    global _shared
    found = _shared() if _shared is not None else None
    if found is None:
        found = OutputStore()
        _shared = weakref.ref(found)
    return found


class FrozenOutputs:
    """Looks up what one encoder would return, in place of a replay.

    Args:
        manager: The encoder's.
        options: What the user asked for; `frozen_outputs_gb` bounds the store.
        replay: Runs a batch on graphs.

    Attributes:
        replays: Microbatches that ran.
        found: Microbatches whose outputs were kept.
        drawn: Microbatches among `replays` that drew random numbers.
        trained: Whether a microbatch could not be looked up because the encoder is trained.
    """

    def __init__(self, manager: Manager, options: VisionGraphOptions, replay: Replay) -> None:
        self._manager, self._replay = manager, replay
        self._store = shared_store()
        self._store.most_bytes = max(self._store.most_bytes, int((options.frozen_outputs_gb or 0.0) * 2**30))
        self._options = repr(options)
        self._likeness: tuple[int, bytes] | None = None
        self._weights: tuple[Hashable, Fingerprint] | None = None
        provide_aside(manager.executor.device)
        self.replays = self.found = self.drawn = 0
        self.trained = False

    def replay(self, region: Region, batch: EncoderBatch) -> Outputs | None:
        """Return a batch's outputs, kept or replayed; None where it is to run eager."""
        maker = self._maker(region)
        if maker is None or want_gradients((batch.pixels,)) or operations_are_seen():
            return self._replay(region, batch)
        key, origin = self._key(*maker, batch), _Origin(maker[0].number, region.sources.training)
        kept, usable = self._store.find(key, origin)
        if kept is not None and usable:
            self.found += 1
            return kept.on(batch.pixels.device)
        return self._run(region, batch, key, origin, kept)

    def _run(
        self, region: Region, batch: EncoderBatch, key: _Key, origin: _Origin, kept: _Kept | None
    ) -> Outputs | None:
        """Replay a batch, and compare or keep its outputs."""
        before = self._random_states()
        outputs = self._replay(region, batch)
        if outputs is None:
            return None
        self.replays += 1
        drawn = self._random_states() != before
        self.drawn += drawn
        if drawn or any(output.requires_grad for output in outputs):
            return outputs
        if kept is None:
            self._store.keep(key, origin, outputs)
        else:
            pairs = zip(outputs, kept.on(outputs[0].device), strict=True)
            self._store.compared(key, kept, origin, all(torch.equal(new, old) for new, old in pairs))
        return outputs

    def _random_states(self) -> list[bytes]:
        return [each.get_state().numpy().tobytes() for each in self._manager.executor.generators()]

    def _maker(self, region: Region) -> tuple[Source, bool] | None:
        """Return what would make outputs now, and whether some of what it reads is trained elsewhere.

        None where a gradient may be asked for, an optimizer changes weights between steps, or nothing can be replayed.
        """
        source = region.sources.known()
        if source is None:
            return None
        trained = any(map(_requires_grad, source.reads))
        if trained and (torch.is_grad_enabled() or _is_optimized(source.reads)):
            self.trained = True
            return None
        return source, trained

    def _key(self, source: Source, trained: bool, batch: EncoderBatch) -> _Key:
        read = batch.tensors
        content = begun(read)  # the GPU goes on while the host looks at the encoder
        numerics = source.numerics, are_deterministic()
        encoder = self._likeness_of(source), self._options, numerics, self._weights_of(source, trained)
        images = tuple((each.dtype, tuple(each.shape)) for each in read), batch.rows, content()
        return _Key(encoder, images)

    def _likeness_of(self, source: Source) -> bytes:
        if self._likeness is None or self._likeness[0] != source.number:
            self._likeness = source.number, likeness((self._manager.model,), self._manager.surroundings.exempt)
        return self._likeness[1]

    def _weights_of(self, source: Source, trained: bool) -> Fingerprint:
        """Return the fingerprint of all tensors that recordings read, taken once in a step where nobody writes them."""
        at = None if trained else self._written_at(source)
        if at is None or self._weights is None or self._weights[0] != at:
            self._weights = at, fingerprint(source.reads)
        return self._weights[1]

    def _written_at(self, source: Source) -> Hashable:
        """Return what changes when tensors are written; None where an optimizer may do so behind PyTorch's back."""
        read = source.reads
        # Nobody counts writes to what inference mode has made, which `.data` may make of any parameter.
        if not self._manager.in_step or any(map(Tensor.is_inference, read)):
            return None
        versions, places = tuple(map(_version, read)), tuple(map(Tensor.data_ptr, read))
        return self._manager.step_number, source.number, versions, places

    def note(self) -> str:
        """Return a line of the report."""
        why = f"; {self.drawn} drew random numbers and are not kept" if self.drawn else ""
        why += "; the encoder is trained, so others run every time" if self.trained else ""
        asked, gib = self.found + self.replays, self._store.nbytes / 2**30
        return f"{self.found} of {asked} microbatches had been encoded before; {gib:.2f} GiB on the host{why}"


def _is_optimized(read: Sequence[Tensor]) -> bool:
    """Whether an optimizer changes between steps what outputs are made of."""
    return any(each.requires_grad and hasattr(each, "main_grad") for each in read)
