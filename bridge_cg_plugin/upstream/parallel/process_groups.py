"""Megatron's ranks: which must be on graphs together, work that waits for none of them, and microbatches in flight."""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import distributed, nn

from ...graphs.program import SINGLE_RANK, GroupConsensus, RankConsensus
from ...graphs.recordings.executor import Isolated
from ...options import OptionError
from ...options.language_model import MODULES
from ...upstream_types import UpstreamModule
from ..wrappers import overridden

# What layers exchange tensors by, besides batches of sends and receives.
EXCHANGES = (
    "all_reduce",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "all_to_all_single",
    "isend",
    "irecv",
)


# What a rank goes on with where an exchange is left out, by the exchange's arguments: its own part in place of others'.
# Memory as it was could hold NaN, which even a gradient of zero takes into sums, or counts that kernels follow.
OWN_PART: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "all_gather_into_tensor": lambda given: _repeat(given["output_tensor"], given["input_tensor"]),
    "reduce_scatter_tensor": lambda given: given["output"].copy_(given["input"].view(-1, *given["output"].shape)[0]),
    "all_to_all_single": lambda given: _repeat(given["output"], given["input"]),
    "irecv": lambda given: given["tensor"].zero_(),
}


def _repeat(out: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """Fill a tensor with another as often as it goes in; with zeros where it does not fit."""
    return out.zero_() if out.numel() % own.numel() else out.view(-1, *own.shape).copy_(own)


def tensor_group(model: nn.Module) -> distributed.ProcessGroup | None:
    """Return the ranks that share a model's layers; None where there is one."""
    return _several(getattr(getattr(model, "pg_collection", None), "tp", None))


def sharing_groups(model: nn.Module) -> tuple[distributed.ProcessGroup, ...]:
    """Return the groups inside which a model's layers exchange tensors: tensor and context parallelism."""
    groups = getattr(model, "pg_collection", None)
    found = (_several(getattr(groups, name, None)) for name in ("tp", "cp"))
    return tuple(group for group in found if group is not None)


def shared_group(
    model: UpstreamModule, experts: distributed.ProcessGroup | None = None
) -> distributed.ProcessGroup | None:
    """Return the ranks that share a model's layers or sequences; None where there is one.

    The smallest group that has them: a communicator that nothing else uses takes memory of its own.

    Args:
        model: The model.
        experts: Ranks of expert parallelism that must be on graphs together as well; None without any.

    Raises:
        OptionError: No group has all of them.
    """
    found = sharing_groups(model)
    group: distributed.ProcessGroup | None = model.pg_collection.tp_cp if len(found) > 1 else next(iter(found), None)
    if experts is None or group is None:
        return experts or group
    few, many = sorted((group, experts), key=distributed.ProcessGroup.size)
    if many.size() % few.size() or not has_ranks(many, few):  # by sizes, too: they are the same on every rank
        raise OptionError(
            "model.expert_model_parallel_size",
            experts.size(),
            f"a multiple or divisor of tensor times context parallelism ({group.size()}) with experts inside the graph",
            f"Change it, or set {MODULES}=attn,moe_router, where experts stay eager.",
        )
    return many


def expert_group(model: UpstreamModule) -> distributed.ProcessGroup | None:
    """Return the ranks that hold a part of a model's experts each; None where there is one."""
    return _several(getattr(model.pg_collection, "tp_ep" if expert_shards(model) > 1 else "ep", None))


def expert_shards(model: UpstreamModule) -> int:
    """Return how many ranks, one after the other, hold a part of the same experts each."""
    group = _several(getattr(model.pg_collection, "expt_tp", None))
    return 1 if group is None else group.size()


def has_ranks(group: distributed.ProcessGroup, other: distributed.ProcessGroup) -> bool:
    """Whether a group has all ranks of another."""
    ranks = distributed.get_process_group_ranks
    return set(ranks(other)) <= set(ranks(group))


def new_group(ranks: list[int], backend: str) -> distributed.ProcessGroup:
    """Make a group with the time-out of the job's own; only its ranks call it."""
    device = torch.device("cuda" if "nccl" in distributed.get_backend() else "cpu")
    world: Any = distributed.group.WORLD
    timeout = world._get_backend(device).options._timeout
    group: distributed.ProcessGroup = distributed.new_group(
        ranks, timeout=timeout, backend=backend, use_local_synchronization=True
    )
    return group


def _several(group: Any) -> distributed.ProcessGroup | None:
    return group if group is not None and group.size() > 1 else None


def consensus_of(group: distributed.ProcessGroup | None) -> RankConsensus:
    """Return how the ranks of a group agree."""
    if group is None:
        return SINGLE_RANK
    on_gpu = distributed.get_backend(group) == "nccl"
    return GroupConsensus(group, torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu"))


def without_collectives(*groups: distributed.ProcessGroup | None) -> Isolated:
    """Return a context in which exchanges inside groups are left out: each rank goes on with its own part.

    A pass whose values nobody reads then waits for no other rank, so a rank that fails in it keeps none waiting.
    """
    silent = tuple(group for group in groups if group is not None)
    if not silent:
        return nullcontext

    @contextmanager
    def isolated() -> Iterator[None]:
        originals = {name: getattr(distributed, name) for name in EXCHANGES}
        made = {name: _left_out(name, exchange, silent) for name, exchange in originals.items()}
        made["P2POp"] = _operations({made[name]: originals[name] for name in originals})
        made["batch_isend_irecv"] = _batch_left_out(silent)
        with ExitStack() as stack:
            for name, standin in made.items():
                stack.enter_context(overridden(distributed, name, standin))
            yield

    return isolated


def _left_out(
    name: str, exchange: Callable[..., Any], silent: Sequence[distributed.ProcessGroup]
) -> Callable[..., Any]:
    """Return a stand-in for one of torch's exchanges, which inside some groups leaves each rank with its own part."""
    takes = inspect.signature(exchange)

    @functools.wraps(exchange)
    def exchanged(*args: Any, **kwargs: Any) -> Any:
        given = takes.bind(*args, **kwargs).arguments
        if given.get("group") not in silent:
            return exchange(*args, **kwargs)
        if name in OWN_PART:
            OWN_PART[name](given)
        return _Done() if given.get("async_op") or "async_op" not in takes.parameters else None

    return exchanged


def _operations(originals: Mapping[Callable[..., Any], Callable[..., Any]]) -> Callable[..., Any]:
    """Return what makes one operation of a batch, from torch's own sends and receives or their stand-ins."""
    make = distributed.P2POp
    return lambda op, *args, **kwargs: make(originals.get(op, op), *args, **kwargs)


def _batch_left_out(silent: Sequence[distributed.ProcessGroup]) -> Callable[..., Any]:
    """Return the same as `_left_out` of a batch of sends and receives."""
    receive, batch = distributed.irecv, distributed.batch_isend_irecv

    def batched(operations: Sequence[distributed.P2POp]) -> list[Any]:
        for operation in operations:
            if operation.group in silent and operation.op is receive:
                OWN_PART["irecv"]({"tensor": operation.tensor})
        left = [operation for operation in operations if operation.group not in silent]
        return batch(left) if left else [_Done()]

    return batched


class _Done:
    """Stands in for an exchange that has ended: as a real one, it came after the work of the stream that began it."""

    def __init__(self) -> None:
        self._begun = torch.cuda.current_stream().record_event() if torch.cuda.is_initialized() else None

    def wait(self, *unused: Any) -> bool:
        """Let the current stream wait for the work that was there when the exchange began."""
        if self._begun is not None:
            torch.cuda.current_stream().wait_event(self._begun)
        return True


# Runs one more forward ahead of the first backward.
OVERLAPS_EXPERTS = "overlap_moe_expert_parallel_comm"


def stages_of(config: Any) -> int:
    """Return the pipeline's stages."""
    return getattr(config, "pipeline_model_parallel_size", None) or 1


def microbatches_in_flight(config: Any, num_microbatches: int) -> int:
    """Return how many microbatches the first stage holds at once, in its first model chunk where it has several.

    Args:
        config: Has the pipeline's stages, the model chunks of each and how many microbatches a chunk takes in a row.
        num_microbatches: Microbatches of a step now; the run's largest step counts.
    """
    stages, most = stages_of(config), most_microbatches(num_microbatches)
    chunks = getattr(config, "virtual_pipeline_model_parallel_size", None) or 1
    if stages == 1 or chunks == 1:
        return max(1, min(stages, most))
    in_a_row = getattr(config, "microbatch_group_size_per_vp_stage", None) or stages
    ahead = 2 * (stages - 1) + (chunks - 1) * in_a_row + bool(getattr(config, OVERLAPS_EXPERTS, False))
    # Chunks take turns, `in_a_row` microbatches each. The first backwards are of the last chunk; the first chunk holds
    # most when its own begin.
    rounds, rest = divmod(ahead + 1 + (chunks - 1) * in_a_row, chunks * in_a_row)
    return max(1, min(most, rounds * in_a_row + min(rest, in_a_row)))


def most_microbatches(num_microbatches: int) -> int:
    """Return how many microbatches the run's largest step has: a schedule of batch sizes may begin with fewer.

    Args:
        num_microbatches: Microbatches of a step as passed by the caller; megatron-core may run more.
    """
    from megatron.core import num_microbatches_calculator

    calculator = num_microbatches_calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR
    if calculator is None:
        return num_microbatches
    samples = getattr(calculator, "micro_batch_times_data_parallel_size", None)
    if samples is None:  # every step has as many
        microbatches: int = calculator.get()
        return max(num_microbatches, microbatches)
    batches = [batch for _, batch in getattr(calculator, "schedule", ())]
    most: int = max(batch // samples for batch in (calculator.global_batch_size, *batches))
    return max(num_microbatches, most)
