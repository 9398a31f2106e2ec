"""Parts of a module as regions of their own, each replayed where an attribute of a submodule is called."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .fallback import Fallback
from .instance import InstanceMethod
from .piece import Answer, CallSite, ReadPart
from .region import Region


class _Chosen(NamedTuple):
    """A batch that all parts replay, and the slot in which they do."""

    batch: Any
    slot: int


class Parts:
    """The parts of one module, installed on it until `restore`.

    Args:
        slots: Slots of every region.
        is_paused: Whether all is to run eager.
        looking_once: Entered around looks at all parts in a row, between which the model cannot change.
        chained: Whether the parts share a slot's memory, so that each microbatch has one slot for all of them.
    """

    def __init__(
        self,
        slots: int,
        is_paused: Callable[[], bool],
        looking_once: Callable[[], AbstractContextManager[None]],
        chained: bool = False,
    ) -> None:
        self.followers: list[FollowerCall] = []
        self.chained = chained
        self._in_chain: int | Fallback | None = None
        self._slots, self._is_paused, self._looking_once = slots, is_paused, looking_once
        self._regions: list[Region] = []
        self._methods: list[InstanceMethod] = []
        self._current: _Chosen | None = None
        self._untraced: Callable[..., tuple[Tensor, ...] | None] = torch.compiler.disable(self.replay)

    @property
    def patched(self) -> tuple[tuple[nn.Module, str], ...]:
        """Modules and the attributes of theirs that replay."""
        return tuple((method.module, method.name) for method in self._methods)

    def install(self, region: Region, site: CallSite) -> None:
        """Let a call site replay a region."""
        followers = [FollowerCall(getattr(f.owner, f.attribute), f.answer) for f in site.followers]
        self._regions.append(region)
        self._put(site.owner, site.attribute, PartCall(self, region, site, followers))
        for place, follower in zip(site.followers, followers, strict=True):
            self._put(place.owner, place.attribute, follower)
        self.followers += followers

    def _put(self, owner: nn.Module, attribute: str, call: Callable[..., Any]) -> None:
        self._methods.append(InstanceMethod(owner, attribute, call))

    def restore(self) -> None:
        """Put back what was called before."""
        for method in reversed(self._methods):
            method.restore()
        # What stood in for the attributes holds this object: regions are given back now, not by a collection.
        self._methods, self._regions, self.followers = [], [], []

    def common_slot(self, batch: Any) -> int | Fallback:
        """Return a slot in which every part can replay the batch; without one, the first part's reason."""
        free = self._free_slot()
        if free is None and self.chained:
            return Fallback.NO_FREE_SLOT
        slot = free or 0
        with self._looking_once():
            reasons = [region.why_not(batch, slot) for region in self._regions]  # each records what it was asked for
        return next((reason for reason in reasons if reason is not None), slot)

    def _free_slot(self) -> int | None:
        """Return the first slot that is free in every part, None without one."""
        free = (index for index in range(self._slots) if all(region.is_free(index) for region in self._regions))
        return next(free, None)

    def run_in_a_free_slot(self, eager: Callable[[], Any]) -> Any:
        """Run the module's forward, whose parts replay each as it can, in a slot that is free in all of them.

        What the last microbatches missed there is recorded before: a recording of one part is one of all.
        """
        slot = self._free_slot()
        with self._looking_once():
            for region in self._regions if slot is not None and not self._is_paused() else []:
                region.catch_up(slot or 0)
        before, self._in_chain = self._in_chain, Fallback.NO_FREE_SLOT if slot is None else slot
        try:
            return eager()
        finally:
            self._in_chain = before

    def run(self, batch: Any, slot: int, eager: Callable[[], Any]) -> Any:
        """Run the module's forward, whose parts replay the batch in a slot."""
        self._current = _Chosen(batch, slot)
        try:
            return eager()
        finally:
            self._current = None
            for follower in self.followers:
                follower.outputs = None

    def replay(
        self, region: Region, read: ReadPart | None, hidden: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Tensor, ...] | None:
        """Return the outputs of a part's replay; None where it runs eager."""
        if torch.compiler.is_dynamo_compiling():  # as in `GraphManager`, where a loop compiles around the part alone
            return None if region.is_in_one_graph() else self._untraced(region, read, hidden, args, kwargs)
        if read is None:
            return self._replay_together(region, hidden)
        batch = None if self._is_paused() else read(hidden, args, kwargs)
        if batch is None:
            return None
        return self._replay_in_chain(region, batch) if self.chained else region.run(batch)

    def _replay_in_chain(self, region: Region, batch: Any) -> tuple[Tensor, ...] | None:
        """Replay in the slot of the microbatch; outside of one, as in a recompute of the forward, run eager."""
        if isinstance(self._in_chain, Fallback):
            region.refuse(batch, self._in_chain)
            return None
        return None if self._in_chain is None else region.run(batch, index=self._in_chain)

    def _replay_together(self, region: Region, hidden: Tensor) -> tuple[Tensor, ...] | None:
        """Replay with what the module was called with; the first part writes it for all."""
        if self._current is None:
            return None
        batch, slot = self._current
        outputs = region.run(batch.of_part(hidden), index=slot)
        if outputs is not None and not batch.loaded:
            self._current = _Chosen(batch.once_loaded(), slot)
        return outputs


class FollowerCall:
    """Stands in for an attribute whose next call a replayed part has answered.

    Attributes:
        outputs: Of the replay, until the call; None where nothing was replayed.
    """

    def __init__(self, eager: Callable[..., Any], answer: Answer) -> None:
        self._eager, self._answer = eager, answer
        self.outputs: tuple[Tensor, ...] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Answer the call from the replay, once."""
        outputs, self.outputs = self.outputs, None
        return self._eager(*args, **kwargs) if outputs is None else self._answer(outputs)


class PartCall:
    """Stands in for the attribute that calls a part."""

    def __init__(self, parts: Parts, region: Region, site: CallSite, followers: Sequence[FollowerCall]) -> None:
        self._parts, self._region, self._read, self._answer = parts, region, site.read, site.answer
        self._eager: Callable[..., Any] = getattr(site.owner, site.attribute)
        self._followers = followers

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Replay the part, or run it eager."""
        outputs = self._parts.replay(self._region, self._read, hidden_states, args, kwargs)
        if outputs is None:
            return self._eager(hidden_states, *args, **kwargs)
        for follower in self._followers:
            follower.outputs = outputs
        return self._answer(outputs)
