"""Parts of a module as regions of their own, each replayed where an attribute of a submodule is called.

A microbatch replays all parts or none, in one slot.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .buckets import Bucket
from .fallback import Fallback
from .instance import InstanceMethod
from .program import Answer, PartCall
from .proofs.eager_pass import Pass
from .region import Region
from .replays.replay import Replay

# Lets what a module runs now and again in the backward run inside a context, which is made anew each time.
RunsLater = Callable[[Callable[[], AbstractContextManager[None]]], AbstractContextManager[None]]


class Parts:
    """The parts of one module, installed on it until `restore`.

    Args:
        runs_later: Of parts that the module runs without gradients first, and again in its backward, where each part's
            backward follows its forward; None where parts run once.

    Attributes:
        methods: What stands in for the attributes that call parts and followers.
        followers: Calls that a replayed part answers.
    """

    def __init__(self, runs_later: RunsLater | None = None) -> None:
        self._runs_later = runs_later
        self.followers: list[FollowerCall] = []
        self._regions: list[Region] = []
        self.methods: list[InstanceMethod] = []
        # Of the microbatch under way: itself, and what was decided for the parts that have not run yet.
        self._batch: Any = None
        self._decided: dict[Region, Replay] = {}
        self._slot = 0
        # Which microbatch is under way; whose inputs all parts find in the slot, and for which bucket.
        self._mark: object = None
        self._loaded: tuple[object, Bucket] | None = None
        self._untraced: Callable[..., tuple[Tensor, ...] | None] = torch.compiler.disable(self.replay)

    def install(self, region: Region, calls: Sequence[PartCall]) -> None:
        """Let the first of some calls replay a region, and those after it be answered by it."""
        (owner, attribute, answer), *others = calls
        followers = [FollowerCall(getattr(module, name), each) for module, name, each in others]
        self._regions.append(region)
        call = self._part_call(region, getattr(owner, attribute), answer, followers)
        self.methods.append(InstanceMethod(owner, attribute, call))
        for (module, name, _), follower in zip(others, followers, strict=True):
            self.methods.append(InstanceMethod(module, name, follower))
        self.followers += followers

    def _part_call(
        self, region: Region, eager: Callable[..., Any], answer: Answer, followers: Sequence["FollowerCall"]
    ) -> Callable[..., Any]:
        """Return what stands in for the attribute that calls a part: it replays the part, or runs it eager."""

        def computed(hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
            """Return eager's outputs of the part."""
            outputs = tensors_of(eager(hidden_states, *args, **kwargs))
            for follower in followers:
                outputs += tensors_of(follower.eager(outputs[-1]))
            return outputs

        def call(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            outputs = self.replay(region, computed, hidden_states, *args, **kwargs)
            if outputs is None:
                return eager(hidden_states, *args, **kwargs)
            for follower in followers:
                follower.outputs = outputs
            return answer(outputs)

        return call

    def restore(self) -> None:
        """Put back what was called before."""
        for method in reversed(self.methods):
            method.restore()
        # What stood in for the attributes holds this object: regions are given back now, not by a collection.
        self.methods, self._regions, self.followers = [], [], []

    def decide(self, batch: Any) -> dict[Region, Replay] | Fallback:
        """Return how every part replays the batch, all in one slot; without one, the first part's reason."""
        slots, chain, self._loaded = range(self._regions[0].slot_count), self._regions[0].chain, None
        free = next((i for i in slots if all(region.slots[i].free for region in self._regions)), None)
        if not chain.in_parts:  # each part has memory apart
            return self._decide(batch, free or 0)
        if free is None:
            return Fallback.NO_FREE_SLOT
        captures = chain.captures
        decided = self._decide(batch, free)
        recorded = chain.captures > captures  # what was decided for parts before that one is gone
        return self._decide(batch, free, records=False) if recorded and isinstance(decided, dict) else decided

    def _decide(self, batch: Any, slot: int, records: bool = True) -> dict[Region, Replay] | Fallback:
        decided: dict[Region, Replay] = {}
        reason: Fallback | None = None
        with self._regions[0].watch.looked_at_once():  # nothing changes the model in between
            for region in self._regions:  # each records what it was asked for
                found = region.decide(batch, slot, records)
                if found is Fallback.DIFFERS_FROM_EAGER:
                    continue  # this part alone runs eager
                if isinstance(found, Fallback):
                    reason = reason or found
                else:
                    decided[region] = found
        if not (decided or reason):
            return Fallback.DIFFERS_FROM_EAGER
        return decided if reason is None else reason

    def run(self, batch: Any, decided: dict[Region, Replay], eager: Callable[[], Any]) -> Any:
        """Run the module's forward, whose parts replay the batch as was decided."""
        within = partial(self._replaying, batch, decided, object())
        with within(), nullcontext() if self._runs_later is None else self._runs_later(within):
            return eager()

    @contextmanager
    def _replaying(self, batch: Any, decided: dict[Region, Replay], mark: object) -> Iterator[None]:
        before = self._batch, self._decided, self._mark
        self._batch, self._decided, self._mark = batch, dict(decided), mark
        self._slot = next(iter(decided.values())).slot.index
        try:
            yield
        finally:
            self._batch, self._decided, self._mark = before
            for follower in self.followers:
                follower.outputs = None

    def replay(
        self, region: Region, eager: Callable[..., tuple[Tensor, ...]], hidden: Tensor, /, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, ...] | None:
        """Return the outputs of a part's replay; None where it runs eager. The first part loads the batch for all.

        Args:
            region: The part.
            eager: Returns eager's outputs of the part.
            hidden: Hidden states.
            args, kwargs: Further arguments of the call.
        """
        if torch.compiler.is_dynamo_compiling():  # as in `GraphManager`, where a loop compiles around the part alone
            return self._untraced(region, eager, hidden, *args, **kwargs)
        if self._batch is None:
            return None
        batch = self._batch.of_part(hidden, False)
        decided = self._decided.pop(region, None)
        if decided is not None and self._runs_later is not None:  # it runs more than once
            decided = replace(decided, gradients=decided.gradients and torch.is_grad_enabled())
        if decided is None or not region.still_holds(decided, batch):
            # What one part has loaded for all must not be overwritten: nothing is recorded now.
            again = region.decide(batch, self._slot, records=False)
            if isinstance(again, Fallback):
                region.fell_back(again, batch)
                return None
            decided = again
        loads = self._mark, decided.bucket
        if self._loaded == loads:
            batch = self._batch.of_part(hidden, True)
        proofs = region.proofs if self._runs_later is None or torch.is_grad_enabled() else None
        if proofs is not None:
            proofs.call = Pass(partial(eager, hidden, *args, **kwargs))
        outputs = decided.run(batch) if proofs is None else region.compared(proofs, decided, batch)
        self._loaded = loads
        return outputs


def tensors_of(returned: Any) -> tuple[Tensor, ...]:
    """Return the tensors that a call returned, alone or in a tuple."""
    return tuple(
        each for each in (returned if isinstance(returned, tuple) else (returned,)) if isinstance(each, Tensor)
    )


class FollowerCall:
    """Stands in for an attribute whose next call a replayed part has answered.

    Attributes:
        eager: What was called before.
        outputs: Of the replay, until the call; None where nothing was replayed.
    """

    def __init__(self, eager: Callable[..., Any], answer: Answer) -> None:
        self.eager, self._answer = eager, answer
        self.outputs: tuple[Tensor, ...] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Answer the call from the replay, once."""
        outputs, self.outputs = self.outputs, None
        return self.eager(*args, **kwargs) if outputs is None else self._answer(outputs)
