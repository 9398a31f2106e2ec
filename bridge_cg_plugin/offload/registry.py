"""What is known of the storages of one forward: what must stay, how to rebuild it, what part of the model made it."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

_MARK = "_bridge_cg_never_offload"
# What megatron-core asks of a tensor before it offloads it, release 0.19 and earlier ones.
CORE_MARKS = {"_do_not_offload": True, "offloading_activation": False}
OTHER = "other"

# Makes a storage's content again, to the bit, from the recipe's sources.
Build = Callable[..., Tensor]


def never_offload(tensor: Tensor) -> Tensor:
    """Keep a tensor, and what shares its memory, on the device whatever the policy says; returns the tensor.

    megatron-core, where it offloads, keeps the tensor itself.

    A mark counts once autograd saves the marked tensor itself or a tensor over the same memory after it: mark a tensor
    before it is used.
    """
    for name, value in {_MARK: True, **CORE_MARKS}.items():
        setattr(tensor, name, value)
    if _current is not None:
        _current.record(tensor).pinned = True
    return tensor


def is_marked(tensor: Tensor) -> bool:
    """Whether `never_offload` was called with this very tensor."""
    return getattr(tensor, _MARK, False)


class View(NamedTuple):
    """One tensor over a storage; strides and offset count elements."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def over(self, storage: torch.UntypedStorage) -> Tensor:
        """Return a new tensor object that sees the storage through this view."""
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
        return tensor.set_(storage, self.offset, self.shape, self.strides)


def view_of(tensor: Tensor) -> View:
    """Return how a tensor sees its storage."""
    return View(tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))


def raw_bytes(storage: torch.UntypedStorage) -> Tensor:
    """Return a storage as `[bytes]` uint8, sharing its memory."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))


def can_travel(tensor: Tensor) -> bool:
    """Whether a tensor is bytes and a view of them, and nothing more.

    Parameters stay, and so do tensor classes with state of their own, which pass their parts to autograd themselves,
    sparse tensors, and lazily conjugated or negated ones.
    """
    plain = type(tensor) is Tensor and tensor.layout is torch.strided and not isinstance(tensor, nn.Parameter)
    return plain and not tensor.is_quantized and not tensor.is_conj() and not tensor.is_neg()


# What a recipe reads: a storage, or a tensor that stays on the device; and how it sees that.
type Source = tuple[Record | Tensor, View]


@dataclass(slots=True)
class Recipe:
    """How a storage is recomputed.

    Attributes:
        kind: What is done, for options and costs.
        sources: What is read, in the order in which `build` takes it.
        build: Makes a tensor over a storage of the same content.
        version: Version of the output when this was noted: written to since, it is another tensor.
    """

    kind: str
    sources: tuple[Source, ...]
    build: Build
    version: int


@dataclass(slots=True)
class Record:
    """One storage of the forward.

    Attributes:
        reference: Tells whether the storage still exists: its address may be another's later.
        recipe: How to make it again, if that is known.
        pinned: Whether it must stay on the device.
        saved: What the store made of it once autograd saved it.
    """

    reference: StorageWeakRef
    recipe: Recipe | None = None
    pinned: bool = False
    saved: weakref.ref[Any] | None = None


class Registry:
    """The storages of one forward, by address.

    Args:
        fixed: Tensors over memory that outlives the forward.

    Attributes:
        scopes: The parts of the model that run now, the innermost last.
    """

    def __init__(self, fixed: Iterable[Tensor] = ()) -> None:
        self._fixed = set(map(_address, fixed))
        self._records: dict[int, Record] = {}
        self.scopes: list[str] = []

    @property
    def scope(self) -> str:
        """The part of the model that runs now."""
        return self.scopes[-1] if self.scopes else OTHER

    def is_fixed(self, tensor: Tensor) -> bool:
        """Whether a tensor's memory outlives the forward."""
        return _address(tensor) in self._fixed

    def record(self, tensor: Tensor) -> Record:
        """Return what is known of a tensor's storage."""
        address = _address(tensor)
        found = self._records.get(address)
        if found is None or found.reference.expired():
            found = self._records[address] = Record(StorageWeakRef(tensor.untyped_storage()))
        return found

    def sources(self, tensors: Sequence[Tensor]) -> tuple[Source, ...]:
        """Return tensors as what a recipe reads."""
        stays = [self.is_fixed(tensor) or self.record(tensor).pinned for tensor in tensors]
        held = (t.detach() if fixed else self.record(t) for t, fixed in zip(tensors, stays, strict=True))
        return tuple(zip(held, map(view_of, tensors), strict=True))


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


# Set while a forward is recorded or observed, which is on one thread.
_current: Registry | None = None


@contextmanager
def registering(fixed: Iterable[Tensor]) -> Iterator[Registry]:
    """Note what happens to storages inside."""
    global _current
    before, _current = _current, Registry(fixed)
    try:
        yield _current
    finally:
        _current = before


def current_registry() -> Registry | None:
    """Return the registry of the forward that runs now; None where activations are left alone."""
    return _current


def derive(output: Tensor, kind: str, sources: Sequence[Tensor], build: Build) -> None:
    """Note that `build(*sources)` makes the storage of `output` again, to the bit and of the same size.

    Args:
        output: Just made.
        kind: What was done: `layernorm`, `gelu`, `linear` and the like.
        sources: What `build` reads. They are not kept for it: it is used where autograd saves them as well.
        build: Draws no random numbers and depends on nothing else that changes.
    """
    if _current is not None:
        _current.record(output).recipe = Recipe(kind, _current.sources(sources), build, output._version)


def rewrite(output: Tensor, sources: Sequence[Tensor], write: Callable[..., object]) -> None:
    """Note that `write(output, *sources)` was done in place, unseen by autograd, to what a recipe may exist for."""
    if _current is None:
        return
    record = _current.record(output)
    before = record.recipe
    if before is None or before.version != output._version:
        record.recipe = None
        return
    view, count = view_of(output), len(before.sources)

    def build(*tensors: Tensor) -> Tensor:
        made = before.build(*tensors[:count])
        write(view.over(made.untyped_storage()), *tensors[count:])
        return made

    record.recipe = Recipe(before.kind, (*before.sources, *_current.sources(sources)), build, output._version)


def scoped(scope: str) -> tuple[Callable[..., None], Callable[..., None]]:
    """Return hooks for `register_forward_pre_hook` and `register_forward_hook` that name what a module's work is."""

    def enter(*unused: Any) -> None:
        if _current is not None:
            _current.scopes.append(scope)

    def leave(*unused: Any) -> None:
        if _current is not None:
            _current.scopes.pop()

    return enter, leave
