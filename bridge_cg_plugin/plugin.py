"""Switching the plugin on and off. Imports neither torch nor Megatron."""

import os
from typing import Any

from .announce import LOGGER, warn
from .switches import ALLOWED, PLUGIN, switched_on
from .upstream.seams.activation import activate, deactivate, observe, status

__all__ = ["SWITCH", "activate", "autoload", "deactivate", "enable", "release_memory", "status"]
SWITCH = PLUGIN


def enable(model: Any, *options: Any, **fields: Any) -> None:
    """Put a model on graphs that a training loop other than Bridge's trains, by megatron-core's schedules.

    Call it once the model is built, before the loop's first step. Graphs that the model has with other options are
    dropped; call it between steps then. The environment variable `BRIDGE_CG_OPTIONS` does the
    same for every model of a process.

    Args:
        model: The model under any wrapper, or the list of its chunks on this rank.
        options: Graph options in any spelling of `options.graph_options`, later ones winning.
        fields: Graph options by their names, which win over all of these.

    Raises:
        OptionError: The options cannot work, a field is no option, or the model has no config.
    """
    from .options.sources import refuse_unknown
    from .upstream.hooks.any_loop import LOOPS

    for name, value in fields.items():
        refuse_unknown(name, value)
    LOOPS.set(model, *options, fields)


def release_memory() -> int:
    """Take the memory of graphs off the device, of every model that a loop other than Bridge's trains.

    Only with `BRIDGE_CG_RELEASE_MEMORY=1` in the environment before the first schedule call; else nothing leaves.
    It returns to the same addresses with the next schedule call. Call it between steps: inside one, or while a
    microbatch is between its forward and its backward, nothing leaves, and a warning is logged. Where the driver or the
    layout cannot do it, nothing leaves either.

    Returns:
        How many bytes left.
    """
    from .upstream.hooks.any_loop import LOOPS

    return LOOPS.release_memory()


def autoload() -> None:
    """Entry point that PyTorch calls at its import: activate unless the environment disables it; never raises."""
    try:
        on = switched_on(SWITCH, True)
        if on is None:
            warn(f"{SWITCH}={os.environ[SWITCH]!r} is no switch, so the plugin stays on. It must be {ALLOWED}")
        (observe if on is False else activate)()
    except Exception:
        LOGGER.exception("bridge_cg_plugin could not be activated; training runs without it")
