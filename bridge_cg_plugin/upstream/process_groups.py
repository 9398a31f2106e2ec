"""Megatron's process groups: which ranks must be on graphs together, and work that waits for none of them."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import distributed, nn

from ..graphs.executor import Isolated
from ..graphs.peers import Alone, GroupPeers, Peers
from .replaced import replaced


def tensor_group(model: nn.Module) -> distributed.ProcessGroup | None:
    """Return the ranks that share a model's layers; None where there is one."""
    return _several(getattr(getattr(model, "pg_collection", None), "tp", None))


def shared_group(model: nn.Module) -> distributed.ProcessGroup | None:
    """Return the ranks that share a model's layers or sequences; None where there is one.

    The smallest group that has them: a communicator that nothing else uses takes memory of its own.
    """
    groups = getattr(model, "pg_collection", None)
    tensor, context = (_several(getattr(groups, name, None)) for name in ("tp", "cp"))
    if tensor is not None and context is not None:
        return groups.tp_cp
    return tensor or context


def _several(group: Any) -> distributed.ProcessGroup | None:
    return group if group is not None and group.size() > 1 else None


def peers_of(group: distributed.ProcessGroup | None) -> Peers:
    """Return how the ranks of a group agree."""
    if group is None:
        return Alone()
    on_gpu = distributed.get_backend(group) == "nccl"
    return GroupPeers(group, torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu"))


def without_reductions(group: distributed.ProcessGroup | None) -> Isolated:
    """Return a context in which sums over a group are left out: each rank goes on with its own part.

    A pass whose values nobody reads then waits for no other rank, so a rank that fails in it keeps none waiting.
    """
    if group is None:
        return nullcontext

    @contextmanager
    def isolated() -> Iterator[None]:
        reduce, left_out = distributed.all_reduce, group

        def all_reduce(tensor: torch.Tensor, op: Any = distributed.ReduceOp.SUM, group: Any = None, **others: Any):
            if group is not left_out:
                return reduce(tensor, op, group, **others)
            return _Done() if others.get("async_op") else None

        with replaced(distributed, "all_reduce", all_reduce):
            yield

    return isolated


class _Done:
    """Stands in for a collective that has ended."""

    def wait(self, *unused: Any) -> bool:
        """Return at once."""
        return True

    def is_completed(self) -> bool:
        """Whether it has ended: always."""
        return True
