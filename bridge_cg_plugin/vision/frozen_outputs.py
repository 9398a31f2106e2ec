"""Outputs of a frozen encoder, kept on the host: the same images are encoded once, whoever asks for them again.

A training loop may show one batch to a policy several times, and to a reference model. Where their encoders are frozen
and alike, all of these calls return the same.
"""

import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..graphs.changes.source import Source
from ..graphs.region import Region
from ..graphs.workload import Manager
from .adapter import EncoderBatch
from .kernels.fingerprint import fingerprint

Outputs = tuple[Tensor, ...]
# Runs a batch on graphs; None where it is to run eager.
Replay = Callable[[Region, EncoderBatch], Outputs | None]


@dataclass(frozen=True, slots=True)
class _Origin:
    """Which encoder made outputs, in which state and mode.

    Attributes:
        owner: Number of the encoder.
        source: What its recordings were made from, kept alive, so that the state stays its own.
        training: The mode of its modules.
    """

    owner: int
    source: Source
    training: bool | tuple[bool, ...]

    @property
    def alike(self) -> Hashable:
        """What outputs may depend on besides weights and images."""
        return self.owner, self.source.state, self.source.autocast, self.training


class _Kept:
    """Outputs on the host, page-locked where they come from a GPU.

    Attributes:
        origin: Who made them.
        nbytes: What they take.
    """

    def __init__(self, origin: _Origin, outputs: Outputs) -> None:
        self.origin, self.nbytes = origin, sum(output.nbytes for output in outputs)
        self._outputs = tuple(map(_on_host, outputs))
        self._copied = torch.cuda.current_stream().record_event() if outputs[0].is_cuda else None

    def on(self, device: torch.device) -> Outputs:
        """Return copies on a device, made by its current stream."""
        if self._copied is not None:
            torch.cuda.current_stream(device).wait_event(self._copied)
        return tuple(torch.empty_like(each, device=device).copy_(each, non_blocking=True) for each in self._outputs)


class OutputStore:
    """Outputs in page-locked host memory, by what they were made of; the oldest leave when there are too many.

    Encoders may share outputs of equal weights. The first time that one is given what another has made, or itself in
    another state or mode, it computes them all the same, and both are compared to the bit.

    Attributes:
        most_bytes: Bound of what is kept.
        nbytes: What is kept.
    """

    def __init__(self) -> None:
        self.most_bytes = self.nbytes = 0
        self._kept: OrderedDict[Hashable, _Kept] = OrderedDict()
        self._compared: dict[frozenset[Hashable], bool] = {}

    def find(self, key: Hashable, origin: _Origin) -> tuple[_Kept | None, bool]:
        """Return what is kept, and whether it may be used without a comparison."""
        kept = self._kept.get(key)
        if kept is None:
            return None, False
        self._kept.move_to_end(key)
        if kept.origin.alike == origin.alike:
            return kept, True
        same = self._compared.get(_pair(kept, origin))
        return (None if same is False else kept), same is True

    def compared(self, kept: _Kept, origin: _Origin, same: bool) -> None:
        """Note whether an encoder's outputs are those that another has made, or itself otherwise."""
        self._compared[_pair(kept, origin)] = same

    def keep(self, key: Hashable, origin: _Origin, outputs: Outputs) -> None:
        """Keep a copy of outputs; without effect where they alone are too large, or others hold their place."""
        if key in self._kept or sum(output.nbytes for output in outputs) > self.most_bytes:
            return
        kept = self._kept[key] = _Kept(origin, outputs)
        self.nbytes += kept.nbytes
        while self.nbytes > self.most_bytes:
            self.nbytes -= self._kept.popitem(last=False)[1].nbytes


def _pair(kept: _Kept, origin: _Origin) -> frozenset[Hashable]:
    return frozenset((kept.origin.alike, origin.alike))


def _on_host(output: Tensor) -> Tensor:
    host = torch.empty(output.shape, dtype=output.dtype, pin_memory=output.is_cuda)
    return host.copy_(output.detach(), non_blocking=True)


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
        most_bytes: Bound of the store.
        replay: Runs a batch on graphs.

    Attributes:
        replays: Microbatches that ran.
        found: Microbatches whose outputs were kept.
        trained: Whether a microbatch could not be looked up because the encoder is trained.
    """

    _encoders = 0

    def __init__(self, manager: Manager, most_bytes: int, replay: Replay) -> None:
        self._manager, self._replay = manager, replay
        self._store = shared_store()
        self._store.most_bytes = max(self._store.most_bytes, most_bytes)
        FrozenOutputs._encoders += 1
        self._owner = FrozenOutputs._encoders
        self._weights: tuple[Hashable, tuple[int, int]] | None = None
        self.replays = self.found = 0
        self.trained = False

    def replay(self, region: Region, batch: EncoderBatch) -> Outputs | None:
        """Return a batch's outputs, kept or replayed; None where it is to run eager."""
        origin = self._origin(region)
        if origin is None:
            return self._replay(region, batch)
        key = self._key(origin.source, batch)
        kept, usable = self._store.find(key, origin)
        if kept is not None and usable:
            self.found += 1
            return kept.on(batch.pixels.device)
        return self._run(region, batch, key, origin, kept)

    def _run(
        self, region: Region, batch: EncoderBatch, key: Hashable, origin: _Origin, kept: _Kept | None
    ) -> Outputs | None:
        """Replay a batch, and compare or keep its outputs."""
        before = self._random_states()
        outputs = self._replay(region, batch)
        if outputs is None:
            return None
        self.replays += 1
        if any(output.requires_grad for output in outputs) or self._random_states() != before:
            return outputs
        if kept is None:
            self._store.keep(key, origin, outputs)
        else:
            pairs = zip(outputs, kept.on(outputs[0].device), strict=True)
            self._store.compared(kept, origin, all(torch.equal(new, old) for new, old in pairs))
        return outputs

    def _random_states(self) -> list[bytes]:
        return [each.get_state().numpy().tobytes() for each in self._manager.executor.generators()]

    def _origin(self, region: Region) -> _Origin | None:
        """Return what would make outputs now; None where a gradient may be asked for, or nothing can be replayed."""
        source = region.sources.known()
        if source is None:
            return None
        if trains(self._manager.model, torch.is_grad_enabled()):
            self.trained = True
            return None
        return _Origin(self._owner, source, region.sources.training)

    def _key(self, source: Source, batch: EncoderBatch) -> Hashable:
        pixels = batch.pixels
        images = (pixels.dtype, tuple(pixels.shape), batch.rows, fingerprint([pixels]))
        return type(self._manager.model), source.autocast, self._weights_of(source), images

    def _weights_of(self, source: Source) -> tuple[int, int]:
        """Return the fingerprint of parameters and buffers, taken once in a step: nobody writes to them inside."""
        at = self._manager.step_number if self._manager.in_step else None
        if at is None or self._weights is None or self._weights[0] != (at, source):
            model = self._manager.model
            self._weights = (at, source), fingerprint([*model.parameters(), *model.buffers()])
        return self._weights[1]

    def note(self) -> str:
        """Return a line of the report."""
        why = "; the encoder is trained, so others run every time" if self.trained else ""
        asked, gib = self.found + self.replays, self._store.nbytes / 2**30
        return f"{self.found} of {asked} microbatches had been encoded before; {gib:.2f} GiB on the host{why}"


def trains(model: nn.Module, gradients: bool) -> bool:
    """Whether an encoder's outputs may need a gradient, or an optimizer changes its weights between steps."""
    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return bool(wanted) and (gradients or any(hasattr(each, "main_grad") for each in wanted))
