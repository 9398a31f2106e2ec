"""Switching the plugin on and off. Imports neither torch nor Megatron."""

import os

from .announce import LOGGER
from .upstream.seams.activation import activate, deactivate, status

__all__ = ["SWITCH", "activate", "autoload", "deactivate", "status"]
SWITCH = "BRIDGE_CG_PLUGIN"


def autoload() -> None:
    """Entry point that PyTorch calls at its import: activate unless the environment says no; never raises."""
    if os.environ.get(SWITCH, "1").strip().lower() in ("0", "false", "off"):
        return
    try:
        activate()
    except Exception:
        LOGGER.exception("bridge_cg_plugin could not be activated; training runs without it")
