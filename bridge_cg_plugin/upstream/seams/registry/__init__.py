"""The seam registry: every place where the plugin touches Bridge, megatron-core or Transformer Engine.

Data only, without torch. Someone who ports to a new release starts here: docs/releases.md.
"""

from ..seam import Seam
from . import bridge, encoders, engine

SEAMS: tuple[Seam, ...] = (*(*bridge.SEAMS, *encoders.SEAMS, *engine.SEAMS),)
_BY_NAME = {seam.name: seam for seam in SEAMS}


def seam(name: str) -> Seam:
    """Return a seam by its name.

    Raises:
        KeyError: There is none of this name.
    """
    return _BY_NAME[name]
