"""Looks at one forward and backward of a region: what they save, use and cost, and how that can be recomputed."""

import functools
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from .host import PinnedMemory
from .plan import Event, Inventory, Seen
from .registry import Record, raw_bytes
from .store import Packing, SavedStorage, rebuilt, usable_recipe

# Cycles that a GPU waits meanwhile, about 50 ms: the host needs less to submit a forward.
SUBMISSION_CYCLES = 100_000_000
# Of a copy that is timed: as much as some activations.
PROBE_BYTES = 1 << 26


class Observer(Packing):
    """Lets every activation stay and takes notes; see `graphs.recordings.activations.Activations`.

    Args:
        device: Where the work runs.
        least: Smallest storage, in bytes, that may leave the device.

    Attributes:
        forward_ms: Time of the forward in ms, about what it is in a graph.
        refused: Kinds that were not recomputed to the bit, with how many storages.
        others: Most bytes on the device in the backward that are no saved storages: gradients, workspaces.
    """

    def __init__(self, device: torch.device, least: int) -> None:
        super().__init__(least)
        self.forward_ms, self.others, self.refused = 0.0, 0, Counter[str]()
        self._device = device
        self._seen: list[Seen] = []
        self._alive: dict[int, SavedStorage] = {}
        self._events: list[Event] = []
        self._staying: dict[int, int] = {}
        self._before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        self._resident = 0  # bytes of saved storages that are there in the backward

    @property
    def inventory(self) -> Inventory:
        """What was seen in a forward and its backward."""
        return Inventory(tuple(self._seen), tuple(self._events))

    @property
    def stays(self) -> int:
        """Bytes of `others` that a forward leaves for its backward: small tensors, and marked ones."""
        return sum(self._staying.values())

    @contextmanager
    def saving(self, fixed: Iterable[Tensor]) -> Iterator[None]:
        """See `Activations`."""
        with timing(self._device) as spent, self.hooked(fixed):
            yield
        (self.forward_ms,) = spent
        self._check_recipes()
        self._resident = sum(saved.nbytes for saved in self._alive.values())
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        # From here on storages end when autograd drops them.
        self._alive = {}

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
        """Keep the recipes that give the storage back to the bit."""
        for place, saved in self._alive.items():
            recipe, sources = saved.recipe, saved.sources
            saved.recipe, saved.sources = None, ()
            if recipe is None:
                continue
            if not self._same(saved, rebuilt(recipe, sources)):
                self.refused[recipe.kind] += 1
                continue
            places = tuple(source.place for source in sources if source is not None)
            self._seen[place] = replace(self._seen[place], kind=recipe.kind, sources=places)

    @staticmethod
    def _same(saved: SavedStorage, again: torch.UntypedStorage) -> bool:
        return again.nbytes() == saved.nbytes and torch.equal(raw_bytes(saved.on_device), raw_bytes(again))

    def _used(self, saved: SavedStorage) -> None:
        self._events.append(Event("use", saved.place))
        self._look_at_memory()

    def _ended(self, place: int) -> None:
        self._events.append(Event("end", place))
        self._look_at_memory()
        self._resident -= self._seen[place].nbytes

    def _look_at_memory(self) -> None:
        """Take the most memory since the last look into account."""
        if self._device.type == "cuda":
            taken = torch.cuda.max_memory_allocated(self._device) - self._before
            self.others = max(self.others, taken - self._resident)
            torch.cuda.reset_peak_memory_stats(self._device)


def other_bytes(parts: Sequence[tuple[int, int]]) -> int:
    """Return the most bytes that are no saved storages in the backwards of parts that run one after the other.

    Args:
        parts: `others` and `stays` of each part's observer.
    """
    most = before = 0
    for others, stays in parts:
        most, before = max(most, before + others), before + stays
    return most


@contextmanager
def timing(device: torch.device) -> Iterator[list[float]]:
    """Yield a list to which the ms are added that the work inside took.

    A GPU is kept busy while its launches are submitted: as in a graph, they take no time.
    """
    spent: list[float] = []
    synchronize(device)
    if device.type != "cuda":
        began = time.perf_counter()
        yield spent
        spent.append((time.perf_counter() - began) * 1e3)
        return
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    torch.cuda._sleep(SUBMISSION_CYCLES)
    marks[0].record()
    yield spent
    marks[1].record()
    marks[1].synchronize()
    spent.append(marks[0].elapsed_time(marks[1]))


@functools.cache
def offload_rate(device: torch.device) -> float:
    """Return the rate of copies to page-locked memory in bytes a ms, measured once a process."""
    memory = PinnedMemory(page_locked=device.type == "cuda")
    host, source = memory.reserve(0, {0: PROBE_BYTES})[0], torch.empty(PROBE_BYTES, dtype=torch.uint8, device=device)
    host.copy_(source, non_blocking=True)
    with timing(device) as spent:
        host.copy_(source, non_blocking=True)
    del host
    memory.release()
    return PROBE_BYTES / spent[0]


def synchronize(device: torch.device) -> None:
    """Wait for a device that works on its own."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
