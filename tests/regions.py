"""Regions as tests make them."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from bridge_cg_plugin.graphs.buckets import Bucket
from bridge_cg_plugin.graphs.changes.model_watch import ModelWatch
from bridge_cg_plugin.graphs.errors import OtherRankFailed
from bridge_cg_plugin.graphs.program import Agreed, Piece, RegionProgram, Surroundings
from bridge_cg_plugin.graphs.recordings.chain import NOTHING_LEAVES, Chain
from bridge_cg_plugin.graphs.recordings.executor import Executor
from bridge_cg_plugin.graphs.region import Region

AROUND = {field.name for field in dataclasses.fields(Surroundings)}


class LoneRegion(Region):
    """A region that no manager captures."""

    def capture(self) -> None:
        """Record every bucket in every slot; of a piece that grows as training asks for."""
        try:
            with self.statistics.recording():
                self.prepare()
                self.chain.capture()
        except BaseException:
            self.reset()
            raise


def new_region(program: RegionProgram, executor: Executor, buckets: Sequence[Bucket], **settings: Any) -> LoneRegion:
    """Return a region that is not captured yet.

    Args:
        program: The piece of the model.
        executor: Makes the recordings.
        buckets: What to record for.
        settings: Fields of `Piece` and `Surroundings`, `watch` and `strict` of `Region`, and `offloading` of its chain.
    """
    chain = Chain(executor, settings.pop("offloading", None) or NOTHING_LEAVES)
    around = Surroundings(**{name: settings.pop(name) for name in AROUND & settings.keys()})
    watch, strict = settings.pop("watch", None), settings.pop("strict", False)
    piece = Piece(program=program, buckets=buckets, **settings)
    return LoneRegion(piece, chain, around, watch or ModelWatch(program.modules()), strict)


class Counted:
    """Ranks that agree; counts how often.

    Args:
        fails: The agreement in which another rank fails; None without one.
    """

    ranks = (0, 1)

    def __init__(self, fails=None):
        self.times, self._fails = 0, fails

    def agree(self, work):
        self.times += 1
        value = work()
        if self.times == self._fails:
            raise OtherRankFailed("rank 1 failed: made to fail")
        return Agreed(value, value)
