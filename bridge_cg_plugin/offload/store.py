"""Keeps a recording's activations: packs what autograd saves, as planned, and gives it back."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ..graphs.errors import CaptureError
from ..graphs.recordings.activations import returned_storages
from .device_only import is_marked
from .inventory import Inventory
from .registry import Recipe, Record, Registry, Source, View, can_travel, raw_bytes, registering, view_of
from .schedule import Fate, Plan, Schedule


class Transfers(Protocol):
    """Copies bytes to the host and back beside the main work."""

    def begin(self) -> None:
        """Take the current stream as the main work's."""

    def offload(self, source: Tensor, host: Tensor) -> Any:
        """Begin to copy `[bytes]` uint8 to the host, once the main work has come here; returns what to wait for."""

    def load(self, host: Tensor) -> tuple[Tensor, Any]:
        """Begin to copy bytes to fresh device memory; returns them and what to wait for."""

    def wait(self, token: Any) -> None:
        """Let the main work wait for a copy."""


class CudaTransfers:
    """Copies on a stream of their own that forks from the main one and joins it, by events.

    Memory is taken and given back by the main stream alone: a source is given back behind its wait, and what is fetched
    goes to memory whose last use lies before the fork. So PyTorch's allocator may reuse both at once, in a capture too,
    where `record_stream` could not hold memory back.

    Args:
        device: The GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)
        self._main = torch.cuda.current_stream(device)

    def begin(self) -> None:
        """See `Transfers`."""
        self._main = torch.cuda.current_stream(self._device)

    def offload(self, source: Tensor, host: Tensor) -> torch.cuda.Event:
        """See `Transfers`."""
        return self._copy(host, source)

    def load(self, host: Tensor) -> tuple[Tensor, torch.cuda.Event]:
        """See `Transfers`."""
        with torch.cuda.stream(self._main):
            tensor = torch.empty(host.numel(), dtype=torch.uint8, device=self._device)
        return tensor, self._copy(tensor, host)

    def wait(self, token: torch.cuda.Event) -> None:
        """See `Transfers`."""
        self._main.wait_event(token)

    def _copy(self, target: Tensor, source: Tensor) -> torch.cuda.Event:
        fork, done = torch.cuda.Event(), torch.cuda.Event()
        fork.record(self._main)
        self._side.wait_event(fork)
        with torch.cuda.stream(self._side):
            target.copy_(source, non_blocking=True)
        done.record(self._side)
        return done


class HostTransfers:
    """Copies at once; for the reference executor."""

    def begin(self) -> None:
        """See `Transfers`."""

    def offload(self, source: Tensor, host: Tensor) -> None:
        """See `Transfers`."""
        host.copy_(source)

    def load(self, host: Tensor) -> tuple[Tensor, None]:
        """See `Transfers`."""
        return host.clone(), None

    def wait(self, token: None) -> None:
        """See `Transfers`."""


@dataclass(slots=True)
class _Stays:
    """A saved tensor that the store leaves alone."""

    tensor: Tensor
    version: int


class SavedStorage:
    """One storage that autograd saved tensors of; it ends with the last of them."""

    __slots__ = ("__weakref__", "address", "_ended", "nbytes", "place", "recipe", "sources", "storage", "watched")

    def __init__(self, place: int, storage: torch.UntypedStorage, ended: Callable[[int], None]) -> None:
        self.place, self.nbytes, self.address = place, storage.nbytes(), storage.data_ptr()
        self.storage: torch.UntypedStorage | None = storage
        self.recipe: Recipe | None = None
        self.sources: tuple[Any, ...] = ()
        # (tensor, version) that must not be written to while the storage is copied or kept.
        self.watched: list[tuple[Tensor, int]] = []
        self._ended = ended

    @property
    def on_device(self) -> torch.UntypedStorage:
        """The storage.

        Raises:
            CaptureError: It is not on the device now.
        """
        if self.storage is None:
            raise CaptureError(f"storage {self.place} of activations is not on the device where it is read")
        return self.storage

    def __del__(self) -> None:
        self._ended(self.place)


@dataclass(slots=True)
class _Packed:
    """A saved tensor as a view of a storage."""

    saved: SavedStorage
    view: View


def is_candidate(tensor: Tensor, registry: Registry, least: int) -> bool:
    """Whether a saved tensor's storage may leave the device: large, made in this forward, unmarked."""
    if not can_travel(tensor) or is_marked(tensor) or registry.is_fixed(tensor):
        return False
    return tensor.untyped_storage().nbytes() >= max(least, 1) and not registry.record(tensor).pinned


class Packing:
    """The part of autograd's hooks that a store and an observer share.

    Args:
        least: Smallest storage, in bytes, that may leave the device.
    """

    def __init__(self, least: int) -> None:
        self._least = least
        self._registry = Registry()
        self._count = self._forwards = 0

    @contextmanager
    def hooked(self, fixed: Iterable[Tensor]) -> Iterator[None]:
        """Let what autograd saves inside go through the hooks."""
        self._count = 0
        self._forwards += 1
        with registering(fixed) as self._registry, saved_tensors_hooks(self._pack, self._unpack):
            yield
        self._registry = Registry()

    def _pack(self, tensor: Tensor) -> _Stays | _Packed:
        if not is_candidate(tensor, self._registry, self._least):
            self._stays(tensor)
            return _Stays(tensor if tensor.grad_fn is None else tensor.detach(), tensor._version)
        record = self._registry.record(tensor)
        saved = record.saved() if record.saved is not None else None
        if saved is None:
            saved = SavedStorage(self._count, tensor.untyped_storage(), partial(self._dropped, self._forwards))
            record.saved = weakref.ref(saved)
            self._count += 1
            self._first_saved(saved, record, tensor)
        if saved.storage is not None:
            saved.watched.append((tensor.detach(), tensor._version))
        return _Packed(saved, view_of(tensor))

    def _unpack(self, packed: _Stays | _Packed) -> Tensor:
        if isinstance(packed, _Stays):
            check_unchanged([(packed.tensor, packed.version)])
            return packed.tensor
        self._used(packed.saved)
        check_unchanged(packed.saved.watched)
        return packed.view.over(packed.saved.on_device)

    def _dropped(self, forward: int, place: int) -> None:
        # What is left of an earlier forward, whose backward never came, is dropped as late as in the next one.
        if forward == self._forwards:
            self._ended(place)

    def _stays(self, tensor: Tensor) -> None:
        """Note a saved tensor that stays on the device."""

    def _first_saved(self, saved: SavedStorage, record: Record, tensor: Tensor) -> None:
        raise NotImplementedError

    def _used(self, saved: SavedStorage) -> None:
        raise NotImplementedError

    def _ended(self, place: int) -> None:
        raise NotImplementedError


def check_unchanged(watched: Sequence[tuple[Tensor, int]]) -> None:
    """Make sure that nothing was written to tensors that autograd saved.

    Raises:
        CaptureError: Something was.
    """
    for tensor, version in watched:
        if tensor._version != version:
            raise CaptureError(
                f"a tensor {tuple(tensor.shape)} {tensor.dtype} that autograd saved for the backward was written to "
                f"since: it is at version {tensor._version}, saved was version {version}"
            )


def usable_recipe(record: Record, tensor: Tensor) -> Recipe | None:
    """Return how a storage is recomputed, None where that is unknown or it was written to since."""
    recipe = record.recipe
    return recipe if recipe is not None and recipe.version == tensor._version else None


def rebuilt(recipe: Recipe, sources: Sequence[SavedStorage | None]) -> torch.UntypedStorage:
    """Make a storage again from its recipe and the saved storages it reads, None for fixed tensors."""
    tensors = [
        part.fixed if saved is None else part.view.over(saved.on_device)
        for part, saved in zip(recipe.sources, sources, strict=True)
    ]
    with torch.no_grad():
        return recipe.build(*tensors).untyped_storage()


class ActivationStore(Packing):
    """Carries out a plan in the forward and backward of one recording; see `graphs.recordings.activations.Activations`.

    Args:
        inventory: What the pass before the recording saved.
        plan: What becomes of it.
        hosts: `[bytes]` uint8 on the host for each storage that is offloaded, by its place.
        transfers: Copies.
        least: Smallest storage, in bytes, that may leave the device.

    Attributes:
        peak_of_last: Most bytes of activations that were on the device at once in the last forward and backward.
    """

    def __init__(
        self, inventory: Inventory, plan: Plan, hosts: dict[int, Tensor], transfers: Transfers, least: int
    ) -> None:
        super().__init__(least)
        self._inventory, self._plan, self._hosts, self._transfers = inventory, plan, hosts, transfers
        self.peak_of_last = 0
        self._schedule: Schedule | None = None
        self._leaving: dict[int, SavedStorage] = {}
        self._saved: weakref.WeakValueDictionary[int, SavedStorage] = weakref.WeakValueDictionary()
        self._tokens: dict[int, Any] = {}
        self._moved: dict[int, int] = {}

    @property
    def copies(self) -> bool:
        """See `Activations`."""
        return bool(self._hosts)

    @contextmanager
    def saving(self, fixed: Iterable[Tensor]) -> Iterator[None]:
        """See `Activations`."""
        self.forget()
        self._schedule = Schedule(self._inventory, self._plan, self)
        self._transfers.begin()
        with self.hooked(fixed):
            yield
        if self._count != len(self._inventory.seen):
            self._inventory.check(self._count, 0)

    @contextmanager
    def restoring(self) -> Iterator[None]:
        """See `Activations`."""
        self._transfers.begin()
        with returned_storages() as self._moved:
            schedule = self._under_way()
            schedule.begin_backward()
            yield
            schedule.end_backward()
            self.peak_of_last = schedule.peak

    def join(self) -> None:
        """See `Activations`."""
        self._under_way().join()

    def _under_way(self) -> Schedule:
        if self._schedule is None:
            raise CaptureError("activations are asked for outside a forward and its backward")
        return self._schedule

    def forget(self) -> None:
        """See `Activations`."""
        self._schedule = None
        self._leaving, self._tokens, self._moved = {}, {}, {}

    # Autograd's side.

    def _first_saved(self, saved: SavedStorage, record: Record, tensor: Tensor) -> None:
        self._inventory.check(saved.place, saved.nbytes)
        self._saved[saved.place] = saved
        if self._plan.fates[saved.place] is Fate.REBUILD:
            saved.recipe = usable_recipe(record, tensor)
            if saved.recipe is None:
                raise CaptureError(f"storage {saved.place} cannot be recomputed as in the pass before")
            saved.sources = tuple(self._source(part) for part in saved.recipe.sources)
            saved.storage = None
        self._under_way().saved(saved.place)

    @staticmethod
    def _source(part: Source) -> SavedStorage | None:
        saved: SavedStorage | None = part.saved()
        if saved is None and part.record is not None:
            raise CaptureError("a tensor that another is recomputed from was not saved, other than in the pass before")
        return saved

    def _used(self, saved: SavedStorage) -> None:
        self._under_way().used(saved.place)
        self._moved[saved.on_device.data_ptr()] = saved.address

    def _ended(self, place: int) -> None:
        if self._schedule is not None:
            self._tokens.pop(place, None)
            self._schedule.ended(place)

    # The schedule's side: see `Mover`.

    def offload(self, place: int) -> None:
        """See `Mover`."""
        saved = self._saved[place]
        self._leaving[place] = saved
        self._tokens[place] = self._transfers.offload(raw_bytes(saved.on_device), self._hosts[place])

    def settle(self, place: int) -> None:
        """See `Mover`."""
        saved = self._leaving.pop(place)
        check_unchanged(saved.watched)
        self._transfers.wait(self._tokens.pop(place))
        saved.watched.clear()
        saved.storage = None

    def load(self, place: int) -> None:
        """See `Mover`."""
        tensor, self._tokens[place] = self._transfers.load(self._hosts[place])
        self._saved[place].storage = tensor.untyped_storage()

    def arrive(self, place: int) -> None:
        """See `Mover`."""
        self._transfers.wait(self._tokens.pop(place))

    def rebuild(self, place: int) -> None:
        """See `Mover`."""
        saved = self._saved[place]
        if saved.recipe is None:
            raise CaptureError(f"storage {place} was recomputed before")
        saved.storage = rebuilt(saved.recipe, saved.sources)
        saved.recipe, saved.sources = None, ()
