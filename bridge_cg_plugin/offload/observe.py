"""Looks at one forward and backward of a region: what they save, use, and how that can be recomputed."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from .inventory import Event, Inventory, Seen, joined
from .registry import Recipe, Record, raw_bytes
from .store import Packing, SavedStorage, rebuilt, usable_recipe

# Times that a storage is recomputed to be timed.
TIMED = 4
# Cycles that a GPU waits meanwhile, about 5 ms: the host needs less to submit the work.
SUBMISSION_CYCLES = 10_000_000


@dataclass(slots=True)
class Observed:
    """What was seen.

    Attributes:
        inventory: Storages and the moments of the backward.
        rebuild_ms: Time to make a storage of each group again, over its bytes, in ms.
        refused: Kinds that were not recomputed to the bit, with how many storages.
        others: Most bytes on the device in the backward that are no saved storages: gradients, workspaces.
        stays: Of them, bytes that a forward leaves for its backward: small tensors, and marked ones.
    """

    inventory: Inventory
    rebuild_ms: dict[tuple[str, str], float] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)
    others: int = 0
    stays: int = 0


def observed_together(parts: Sequence[Observed]) -> Observed:
    """Return what was seen of parts that run one after the other."""
    if len(parts) == 1:
        return parts[0]
    refused = Counter[str]()
    rebuild_ms: dict[tuple[str, str], float] = {}
    others = stays = 0
    for part in parts:
        refused.update(part.refused)
        rebuild_ms = part.rebuild_ms | rebuild_ms
        others, stays = max(others, stays + part.others), stays + part.stays
    return Observed(joined([part.inventory for part in parts]), rebuild_ms, dict(refused), others, stays)


class Observer(Packing):
    """Lets every activation stay and takes notes; see `graphs.recordings.activations.Activations`.

    Args:
        device: Where the work runs.
        least: Smallest storage, in bytes, that may leave the device.
    """

    def __init__(self, device: torch.device, least: int) -> None:
        super().__init__(least)
        self._device = device
        self._seen: list[Seen] = []
        self._alive: dict[int, SavedStorage] = {}
        self._events: list[Event] = []
        self._rebuild_ms: dict[tuple[str, str], float] = {}
        self._refused: dict[str, int] = {}
        self._staying: dict[int, int] = {}
        self._others = _OtherMemory(device)

    @property
    def copies(self) -> bool:
        """See `Activations`."""
        return False

    @contextmanager
    def saving(self, fixed: Iterable[Tensor]) -> Iterator[None]:
        """See `Activations`."""
        with self.hooked(fixed):
            yield
        self._check_recipes()
        self._others.begin(sum(saved.nbytes for saved in self._alive.values()))
        # From here on storages end when autograd drops them.
        self._alive = {}

    @contextmanager
    def restoring(self) -> Iterator[None]:
        """See `Activations`."""
        yield

    def join(self) -> None:
        """See `Activations`."""

    def forget(self) -> None:
        """See `Activations`."""

    def observed(self) -> Observed:
        """Return what was seen, after a forward and its backward."""
        inventory = Inventory(tuple(self._seen), tuple(self._events))
        return Observed(inventory, self._rebuild_ms, self._refused, self._others.most, sum(self._staying.values()))

    def _stays(self, tensor: Tensor) -> None:
        if tensor.device.type == self._device.type and not self._registry.is_fixed(tensor):
            storage = tensor.untyped_storage()
            self._staying[storage.data_ptr()] = storage.nbytes()

    def _first_saved(self, saved: SavedStorage, record: Record, tensor: Tensor) -> None:
        self._alive[saved.place] = saved
        recipe = usable_recipe(record, tensor)
        if recipe is not None:
            sources = tuple(part.saved() for part in recipe.sources)
            if all(
                part.record is None or source is not None for part, source in zip(recipe.sources, sources, strict=True)
            ):
                saved.recipe, saved.sources = recipe, sources
        self._seen.append(Seen(saved.nbytes, self._registry.scope))

    def _check_recipes(self) -> None:
        """Keep the recipes that give the storage back to the bit, and time them."""
        for place, saved in self._alive.items():
            recipe, sources = saved.recipe, saved.sources
            saved.recipe, saved.sources = None, ()
            if recipe is None:
                continue
            if not self._same(saved, rebuilt(recipe, sources)):
                self._refused[recipe.kind] = self._refused.get(recipe.kind, 0) + 1
                continue
            places = tuple(source.place for source in sources if source is not None)
            seen = self._seen[place] = replace(self._seen[place], kind=recipe.kind, sources=places)
            if seen.group is not None and seen.group not in self._rebuild_ms:
                self._rebuild_ms[seen.group] = self._time(recipe, sources) / max(seen.nbytes, 1)

    @staticmethod
    def _same(saved: SavedStorage, again: torch.UntypedStorage) -> bool:
        return again.nbytes() == saved.nbytes and torch.equal(raw_bytes(saved.on_device), raw_bytes(again))

    def _time(self, recipe: Recipe, sources: Sequence[SavedStorage | None]) -> float:
        """Return the ms that making a storage again takes: on a GPU its own, as in a graph, launches left out."""
        return timed(self._device, lambda: rebuilt(recipe, sources))

    def _used(self, saved: SavedStorage) -> None:
        self._events.append(Event("use", saved.place))
        self._others.look()

    def _ended(self, place: int) -> None:
        self._events.append(Event("end", place))
        self._others.look()
        self._others.resident -= self._seen[place].nbytes


class _OtherMemory:
    """Looks, from moment to moment, how much memory a backward takes besides the saved storages.

    Attributes:
        resident: Bytes of saved storages that are there.
        most: Most bytes besides.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        self._before = torch.cuda.memory_allocated(device) if self._device else 0
        self.resident = self.most = 0

    def begin(self, resident: int) -> None:
        """Begin to look, with so many bytes of saved storages on the device."""
        self.resident = resident
        if self._device:
            torch.cuda.reset_peak_memory_stats(self._device)

    def look(self) -> None:
        """Take the most memory since the last look into account."""
        if self._device:
            taken = torch.cuda.max_memory_allocated(self._device) - self._before
            self.most = max(self.most, taken - self.resident)
            torch.cuda.reset_peak_memory_stats(self._device)


def timed(device: torch.device, work: Callable[[], object]) -> float:
    """Return the ms that `work` takes, run once before; a GPU is kept busy while its launches are submitted."""
    synchronize(device)
    if device.type != "cuda":
        began = time.perf_counter()
        for _ in range(TIMED):
            work()
        return (time.perf_counter() - began) * 1e3 / TIMED
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    torch.cuda._sleep(SUBMISSION_CYCLES)
    marks[0].record()
    for _ in range(TIMED):
        work()
    marks[1].record()
    marks[1].synchronize()
    total_ms: float = marks[0].elapsed_time(marks[1])
    return total_ms / TIMED


def synchronize(device: torch.device) -> None:
    """Wait for a device that works on its own."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
