"""Qwen3.5-VL: Bridge's own tower, as Qwen3-VL's without deepstack features."""

from torch import Tensor, nn

from tests.models import tower
from tests.models.encoder_case import Batch, Encoder
from tests.models.reference import Fp32Tower
from tests.models.workloads import CASES, Grid


def bridge_batch(model: nn.Module, rows: Grid, seed: int) -> Batch:
    """Make random patches; the grid is announced to the plugin as Bridge's batch step does."""
    made = tower.make_batch(rows, model, seed)
    arguments = {"hidden_states": made.pixels, "grid_thw": made.grid}
    return Batch(arguments, made.gradients, made.tokens, len(rows))


class Fp32Bridge:
    """See `Reference`."""

    def __init__(self, encoder: Encoder, model: nn.Module) -> None:
        self._tower = Fp32Tower(model)

    def step(self, batch: Batch) -> tuple[list[Tensor], list[Tensor]]:
        """See `Reference`."""
        pixels, grid = batch.arguments["hidden_states"], batch.arguments["grid_thw"]
        return self._tower.step(tower.Batch(pixels, grid, batch.gradients, [tuple(row) for row in grid.tolist()]))


ENCODER = Encoder(
    27,
    lambda layers: tower.build_tower(layers=layers, deepstack=False),
    bridge_batch,
    lambda returned: [returned[0], *returned[1]],
    {name: CASES[name] for name in ("1x448", "8mix")},
    reference=Fp32Bridge,
)
