"""The cases of bench_offload.py."""

from collections.abc import Sequence
from typing import Any

from scripts.performance.models.workloads import Grid
from scripts.performance.offload.replays import Replays, TowerReplays

# Case -> slots.
SLOTS = {"1x2048": 1, "tokens_32768": 1, "8mix": 4, "experts_8192": 1}
# Cases of packed documents; the others are images.
PACKS = ("experts_8192",)


class Bench:
    """Cases one after the other, those of images on one tower.

    Args:
        repeats: Timed runs of each mode.
        modules: Parts of layers on graphs; none are the whole tower, or all layers.
    """

    def __init__(self, repeats: int, modules: Sequence[str] = ()) -> None:
        from scripts.performance.models import tower

        tower.start_process()
        self._repeats, self._modules = repeats, modules
        self._tower: tuple[Any, Any] | None = None

    def case(self, name: str, grid: Grid | None, slots: int) -> Replays:
        """Return a case.

        Args:
            name: Its name.
            grid: Of its images; None is a case of packs.
            slots: Batches in flight.
        """
        from scripts.performance.models import tower

        if grid is None:
            from scripts.performance.offload.packs import PackReplays

            self._tower = None
            return PackReplays(name, slots, self._repeats, self._modules)
        if self._tower is None:
            model = tower.build_tower()
            self._tower = model, tower.MainGrads(model)
        model, grads = self._tower
        return TowerReplays(name, grid, slots, model, grads, self._repeats, self._modules)
