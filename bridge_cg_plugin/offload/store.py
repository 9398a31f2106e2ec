"""Keeps a recording's activations: packs what autograd saves, as planned, and gives it back."""

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ..graphs.errors import CaptureError
from ..graphs.recordings.recording import Activations, returned_storages
from .plan import Fate, Plan
from .registry import Recipe, Record, Registry, View, can_travel, is_marked, raw_bytes, registering, view_of


class Transfers:
    """Copies bytes to the host and back at once, as the reference executor needs it."""

    def begin(self) -> None:
        """Take the current stream as the main work's."""

    def offload(self, source: Tensor, host: Tensor) -> Any:
        """Begin to copy `[bytes]` uint8 to the host, once the main work has come here; returns what to wait for."""
        host.copy_(source)

    def load(self, host: Tensor) -> tuple[Tensor, Any]:
        """Begin to copy bytes to fresh device memory; returns them and what to wait for."""
        return host.clone(), None

    def wait(self, token: Any) -> None:
        """Let the main work wait for a copy."""


class CudaTransfers(Transfers):
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


class SavedStorage:
    """One storage that autograd saved tensors of; it ends with the last of them."""

    __slots__ = ("__weakref__", "address", "_ended", "nbytes", "place", "rebuilding", "storage", "watched")

    def __init__(self, place: int, storage: torch.UntypedStorage, ended: Callable[[int], None]) -> None:
        self.place, self.nbytes, self.address = place, storage.nbytes(), storage.data_ptr()
        self.storage: torch.UntypedStorage | None = storage
        self.rebuilding: Rebuilding | None = None
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


# What stands for a saved tensor: a view of a storage, or the tensor itself, which stays where it is, with its version.
_Saved = tuple[SavedStorage, View] | list[tuple[Tensor, int]]


# A recipe, and what its sources were saved as; None for those that stay on the device.
Rebuilding = tuple[Recipe, tuple[SavedStorage | None, ...]]


class Packing(Activations):
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

    def _may_leave(self, tensor: Tensor) -> bool:
        """Whether a saved tensor's storage may leave the device: large, made in this forward, unmarked."""
        if not can_travel(tensor) or is_marked(tensor) or self._registry.is_fixed(tensor):
            return False
        return tensor.untyped_storage().nbytes() >= max(self._least, 1) and not self._registry.record(tensor).pinned

    def _pack(self, tensor: Tensor) -> _Saved:
        if not self._may_leave(tensor):
            self._stays(tensor)
            return [(tensor if tensor.grad_fn is None else tensor.detach(), tensor._version)]
        record = self._registry.record(tensor)
        saved = record.saved() if record.saved is not None else None
        if saved is None:
            saved = SavedStorage(self._count, tensor.untyped_storage(), partial(self._dropped, self._forwards))
            record.saved = weakref.ref(saved)
            self._count += 1
            self._first_saved(saved, record, tensor)
        if saved.storage is not None:
            saved.watched.append((tensor.detach(), tensor._version))
        return saved, view_of(tensor)

    def _unpack(self, packed: _Saved) -> Tensor:
        if isinstance(packed, list):
            check_unchanged(packed)
            return packed[0][0]
        saved, view = packed
        self._used(saved)
        check_unchanged(saved.watched)
        return view.over(saved.on_device)

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


def rebuilding_of(record: Record, tensor: Tensor) -> Rebuilding | None:
    """Return how a storage is recomputed, None where that is unknown, it was written to, or a source was not saved."""
    recipe = record.recipe
    if recipe is None or recipe.version != tensor._version:
        return None
    records = [None if isinstance(held, Tensor) else held for held, _ in recipe.sources]
    sources = tuple(None if each is None or each.saved is None else each.saved() for each in records)
    there = (each is None or source is not None for each, source in zip(records, sources, strict=True))
    return (recipe, sources) if all(there) else None


def rebuilt(recipe: Recipe, sources: Sequence[SavedStorage | None]) -> torch.UntypedStorage:
    """Make a storage again from its recipe and the saved storages it reads, None for fixed tensors."""
    tensors = [
        held if saved is None else view.over(saved.on_device)
        for (held, view), saved in zip(recipe.sources, sources, strict=True)
    ]
    with torch.no_grad():
        return recipe.build(*tensors).untyped_storage()


class ActivationStore(Packing):
    """Carries out a plan in the forward and backward of one recording; see `graphs.recordings.recording.Activations`.

    Args:
        plan: What becomes of what the pass before the recording saved.
        hosts: `[bytes]` uint8 on the host for each storage that is offloaded, by its place.
        transfers: Copies.
        least: Smallest storage, in bytes, that may leave the device.

    Attributes:
        peak_of_last: Most bytes of activations that were on the device at once in the last forward and backward.
    """

    def __init__(self, plan: Plan, hosts: dict[int, Tensor], transfers: Transfers, least: int) -> None:
        super().__init__(least)
        self._inventory, self._plan, self._hosts, self._transfers = plan.inventory, plan, hosts, transfers
        self._saved: weakref.WeakValueDictionary[int, SavedStorage] = weakref.WeakValueDictionary()
        self.peak_of_last, self.copies = 0, bool(hosts)
        self.forget()

    def forget(self) -> None:
        """See `Activations`."""
        # On the host, in the order of their return. The first to go: storages that end below would fetch others.
        self._away: dict[int, None] = {}
        self._leaving: deque[SavedStorage] = deque()
        self._arriving: set[int] = set()
        self._there: set[int] = set()
        self._tokens: dict[int, Any] = {}
        self._moved: dict[int, int] = {}
        self._resident = self._peak = 0

    @contextmanager
    def saving(self, fixed: Iterable[Tensor]) -> Iterator[None]:
        """See `Activations`."""
        self.forget()
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
            self._away = self._order_of_return()
            self._fetch()
            yield
            for place in sorted(self._arriving):  # fetched and never asked for
                self._arrive(place)
            self.peak_of_last = self._peak

    def join(self) -> None:
        """See `Activations`."""
        while self._leaving:
            self._settle()

    def _first_saved(self, saved: SavedStorage, record: Record, tensor: Tensor) -> None:
        place = saved.place
        self._inventory.check(place, saved.nbytes)
        self._saved[place] = saved
        if self._plan.fates[place] is Fate.REBUILD:
            saved.rebuilding, saved.storage = rebuilding_of(record, tensor), None
            if saved.rebuilding is None:
                raise CaptureError(f"storage {place} cannot be recomputed as in the pass before")
            return
        self._grow(place)
        if self._plan.fates[place] is Fate.OFFLOAD:
            self._tokens[place] = self._transfers.offload(raw_bytes(saved.on_device), self._hosts[place])
            self._leaving.append(saved)
        while self._resident > self._plan.room and self._leaving:
            self._settle()

    def _settle(self) -> None:
        """Let the main work wait until the next storage was copied, then give its memory back."""
        saved = self._leaving.popleft()
        check_unchanged(saved.watched)
        self._transfers.wait(self._tokens.pop(saved.place))
        saved.watched.clear()
        saved.storage = None
        self._shrink(saved.place)

    def _used(self, saved: SavedStorage) -> None:
        self._bring(saved.place)
        self._fetch()
        self._moved[saved.on_device.data_ptr()] = saved.address

    def _ended(self, place: int) -> None:
        self._away.pop(place, None)
        self._tokens.pop(place, None)
        self._arriving.discard(place)
        if place in self._there:
            self._shrink(place)
        self._fetch()

    def _bring(self, place: int) -> None:
        """Have a storage on the device, as autograd asks for it or another is recomputed from it."""
        if place not in self._there:
            if self._plan.fates[place] is Fate.REBUILD:
                for source in self._inventory.seen[place].sources:
                    self._bring(source)
                self._grow(place)
                saved = self._saved[place]
                if saved.rebuilding is None:
                    raise CaptureError(f"storage {place} was recomputed before")
                saved.storage, saved.rebuilding = rebuilt(*saved.rebuilding), None
            else:
                self._load(place)
        if place in self._arriving:
            self._arrive(place)

    def _fetch(self) -> None:
        """Begin to copy back what is used next, as far as there is room."""
        while self._away:
            place = next(iter(self._away))
            if self._resident + self._inventory.seen[place].nbytes > self._plan.room:
                return
            self._load(place)

    def _load(self, place: int) -> None:
        del self._away[place]
        self._grow(place)
        self._arriving.add(place)
        tensor, self._tokens[place] = self._transfers.load(self._hosts[place])
        self._saved[place].storage = tensor.untyped_storage()

    def _arrive(self, place: int) -> None:
        self._arriving.remove(place)
        self._transfers.wait(self._tokens.pop(place))

    def _grow(self, place: int) -> None:
        self._there.add(place)
        self._resident += self._inventory.seen[place].nbytes
        self._peak = max(self._peak, self._resident)

    def _shrink(self, place: int) -> None:
        self._there.remove(place)
        self._resident -= self._inventory.seen[place].nbytes

    def _order_of_return(self) -> dict[int, None]:
        """Return the storages on the host in the order in which the backward needs them, for others' rebuilding too."""
        order: dict[int, None] = {}

        def need(place: int) -> None:
            if place not in order:
                if self._plan.fates[place] is Fate.REBUILD:
                    for source in self._inventory.seen[place].sources:
                        need(source)
                order[place] = None

        for what, place in self._inventory.backward:
            if what == "use":
                need(place)
        return {place: None for place in order if self._plan.fates[place] is Fate.OFFLOAD and place in self._saved}
