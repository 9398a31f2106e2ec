"""Switching the plugin on and off. Imports neither torch nor Megatron."""

import logging
import os

from .upstream.seams.activation import activate, deactivate, status

__all__ = ["SWITCH", "activate", "autoload", "deactivate", "status"]
LOGGER = logging.getLogger("bridge_cg_plugin")
SWITCH = "BRIDGE_CG_PLUGIN"
# Values of the variable that keep the plugin off.
OFF = ("0", "false", "off")


def autoload() -> None:
    """Entry point that PyTorch calls at its import: activate unless the environment says no; never raises."""
    if os.environ.get(SWITCH, "1").strip().lower() in OFF:
        return
    try:
        activate()
    except Exception:
        LOGGER.exception("bridge_cg_plugin could not be activated; training runs without it")
