"""An executor with the semantics of CUDA graphs and of their memory on a CPU.

As on tape, a replay runs the operations that one pass recorded. In addition what they made lies in a pool, and its
memory is free for what the same recording makes later from the moment that nothing holds it any more. The worst is
assumed: a replay overwrites all of its pool but what was held when it was recorded, and all of the slot's other pools,
whose recordings use the same memory.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor, nan, no_grad
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from bridge_cg_plugin.graphs.memory import pools

from .tape import UNWRITTEN, Replayed, TapeExecutor, results_of, tensors

GARBAGE = 255  # NaN of every floating-point type


class Block:
    """Memory of one storage that was made while something was recorded."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._storage = StorageWeakRef(storage)
        self.memory = torch.full((storage.nbytes(),), GARBAGE, dtype=torch.uint8)

    @property
    def held(self) -> bool:
        """Whether anything holds the storage, so that its memory is not free."""
        return not self._storage.expired()


class View:
    """A tensor over a block."""

    def __init__(self, block: Block, tensor: Tensor) -> None:
        self._block, self._dtype = block, tensor.dtype
        self._place = tuple(tensor.shape), tensor.stride(), tensor.storage_offset()

    def tensor(self) -> Tensor:
        """Return it."""
        size = self._dtype.itemsize
        whole = self._block.memory[: self._block.memory.numel() // size * size].view(self._dtype)
        return whole.as_strided(*self._place)


class Memory:
    """Memory of one slot, which all of its recordings use from the beginning."""

    def __init__(self) -> None:
        self.pools: list[Pool] = []

    @property
    def nbytes(self) -> int:
        return max((pool.nbytes for pool in self.pools), default=0)

    def begin(self) -> "Pool":
        self.pools.append(Pool(self))
        return self.pools[-1]

    def keep(self, nbytes: int) -> None:
        self.pools = [pool for pool in self.pools if pool.nbytes <= nbytes]


class Pool(pools.Pool):
    """What one recording makes."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._blocks: dict[int, Block] = {}
        self.all: list[Block] = []

    @property
    def nbytes(self) -> int:
        return sum(len(block.memory) for block in self.all)

    def settle(self) -> int:
        alive = [len(block.memory) for block in self.all if block.held]
        assert not alive, f"{alive} bytes that a capture made live on, where other recordings use the same memory"
        return self.nbytes

    def held(self) -> set[Block]:
        """Return the blocks that are not free now."""
        return {block for block in self.all if block.held}

    def add(self, tensor: Tensor) -> None:
        """Take memory for a tensor that an operation made."""
        storage = tensor.untyped_storage()
        block = self._blocks[storage._cdata] = Block(storage)
        self.all.append(block)

    def view(self, tensor: Tensor) -> View | Tensor:
        """Return a tensor as a view of its block, itself where it is in none."""
        block = self._blocks.get(tensor.untyped_storage()._cdata)
        return tensor if block is None or not block.held else View(block, tensor)

    def spoil(self, kept: set[Block]) -> None:
        """Overwrite all blocks but some of this recording's."""
        for block in (block for pool in (self, *self._memory.pools) for block in pool.all):
            if block not in kept:
                block.memory.fill_(GARBAGE)


class PooledTape(TorchDispatchMode):
    """The operations that reach PyTorch's kernels inside, over blocks of a pool."""

    def __init__(self, pool: Pool) -> None:
        super().__init__()
        self._pool, self._calls = pool, []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record what runs inside."""
        self._before = self._pool.held()
        with self:
            yield
        self._after = self._pool.held()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = tree_map_only(Tensor, self._pool.view, (args, kwargs))
        there = {tensor.untyped_storage()._cdata for tensor in tensors((args, kwargs))}
        made = func(*args, **kwargs)
        is_view, in_place = results_of(func)
        if is_view or "set_" in func.overloadpacket.__name__:
            return made
        found = [] if in_place else tensors(made)
        for tensor in found:
            if (place := tensor.untyped_storage()._cdata) not in there:
                self._pool.add(tensor)
                there.add(place)
        self._calls.append((func, *given, list(map(self._pool.view, found))))
        return made

    @no_grad()
    def replay(self) -> None:
        """Run the operations again."""
        self._pool.spoil(self._before)
        for func, args, kwargs, made in self._calls:
            args, kwargs = tree_map_only(View, View.tensor, (args, kwargs))
            fresh = func(*args, **kwargs)
            for place, new in zip(made, tensors(fresh) if made else (), strict=True):
                old = place.tensor() if isinstance(place, View) else place
                if old.numel() and old.data_ptr() != new.data_ptr():
                    old.copy_(new)
                if old.is_floating_point() and func.overloadpacket._qualified_op_name in UNWRITTEN:
                    old.fill_(nan)
        self._pool.spoil(self._after)


class PooledRecording(Replayed):
    """A forward and a backward over memory of a pool."""

    def __init__(self, body, pool: Pool, isolated=nullcontext) -> None:
        self._body, self._pool, self._isolated = body, pool, isolated
        self._forward, self._backward = PooledTape(pool), PooledTape(pool)
        with isolated(), self._forward.recording():
            self._made = [body.forward()]
            body.activations.join()
        self.outputs = self._in_pool(self._made[0])

    def _in_pool(self, made):
        views = (None if tensor is None else self._pool.view(tensor) for tensor in made)
        return tuple(view.tensor() if isinstance(view, View) else view for view in views)

    def record_backward(self) -> None:
        if self._body.has_backward:
            with self._isolated(), self._backward.recording():
                gradients = self._body.backward()
                self._made.append(gradients)
            kept = {name: self._in_pool(getattr(gradients, name)) for name in ("inputs", "parameters")}
            self._gradients = replace(gradients, **kept)
        self._body.forget()
        self._made = []


class PooledExecutor(TapeExecutor):
    """Records over memory of pools."""

    name = "pooled"

    def new_memory(self) -> Memory:
        return Memory()

    def record_forward(self, body, pool: Pool):
        return PooledRecording(body, pool, self.isolated)
