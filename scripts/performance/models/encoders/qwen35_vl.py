"""Qwen3.5-VL: Bridge's own tower, as Qwen3-VL's without deepstack features."""

from torch import Tensor, nn

from scripts.performance.models.encoder_case import Batch, Encoder
from scripts.performance.models.reference import Fp32Tower
from scripts.performance.models.workloads import CASES, Grid


def build_qwen35_vl(layers: int) -> nn.Module:
    """Build Bridge's tower without deepstack features."""
    from scripts.performance.models.tower import build_tower

    return build_tower(layers=layers, deepstack=False)


def qwen35_vl_batch(model: nn.Module, rows: Grid, seed: int) -> Batch:
    """Make random patches; the grid is announced to the plugin as Bridge's batch step does."""
    from scripts.performance.models.tower import make_batch

    made = make_batch(rows, model, seed)
    arguments = {"hidden_states": made.pixels, "grid_thw": made.grid}
    return Batch(arguments, made.gradients, made.tokens, len(rows))


class Fp32Qwen35:
    """See `Reference`."""

    def __init__(self, encoder: Encoder, model: nn.Module) -> None:
        self._tower = Fp32Tower(model)

    def step(self, batch: Batch) -> tuple[list[Tensor], list[Tensor]]:
        """See `Reference`."""
        from scripts.performance.models import tower

        pixels, grid = batch.arguments["hidden_states"], batch.arguments["grid_thw"]
        return self._tower.step(tower.Batch(pixels, grid, batch.gradients, [tuple(row) for row in grid.tolist()]))


ENCODER = Encoder(
    27,
    build_qwen35_vl,
    qwen35_vl_batch,
    lambda returned: [returned[0], *returned[1]],
    {name: CASES[name] for name in ("1x448", "8mix")},
    reference=Fp32Qwen35,
)
