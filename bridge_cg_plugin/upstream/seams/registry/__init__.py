"""The seam registry: every place where the plugin touches Bridge, megatron-core or Transformer Engine.

Data only, without torch. Someone who ports to a new release starts here: docs/releases.md.
"""

from ..encoders import declared
from ..seam import Seam
from . import engine, language_model, models, packed, training

SEAMS: tuple[Seam, ...] = (
    *training.SEAMS,
    *models.SEAMS,
    *language_model.BETWEEN_SEAMS,
    *(seam for encoder in declared() for seam in encoder.seams(encoder.feature)),
    *language_model.SEAMS,
    *packed.SEAMS,
    *packed.HYBRID_SEAMS,
    *training.RECIPE_SEAMS,
    *training.PERFORMANCE_SEAMS,
    *training.LOOP_SEAMS,
    *engine.SEAMS,
    *language_model.CORE_OFFLOAD_SEAMS,
)
_BY_NAME = {seam.name: seam for seam in SEAMS}


def seam(name: str) -> Seam:
    """Return a seam by its name.

    Raises:
        KeyError: There is none of this name.
    """
    return _BY_NAME[name]


def patch_modules() -> dict[str, tuple[str, ...]]:
    """Return upstream module -> modules of this package that patch it when it is imported."""
    found: dict[str, dict[str, None]] = {}
    for entry in SEAMS:
        if entry.patched_by:
            found.setdefault(entry.module, {})[entry.patched_by] = None
    return {module: tuple(names) for module, names in found.items()}
