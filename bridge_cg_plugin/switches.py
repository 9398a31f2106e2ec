"""Environment variables that switch something on or off. Imports neither torch nor Megatron."""

import os

# The plugin itself.
PLUGIN = "BRIDGE_CG_PLUGIN"
# Comparing replays with eager.
PROOF = "BRIDGE_CG_PROOF"
# Bounded room for tokens of more ranks' experts: off until it is measured on GPUs.
EXPERT_BOUNDS = "BRIDGE_CG_EXPERT_BOUNDS"
ON, OFF = ("1", "true", "on"), ("0", "false", "off")
ALLOWED = f"{', '.join(OFF)} (off) or {', '.join(ON)} (on)"


def switched_on(name: str, default: bool) -> bool | None:
    """Return whether a variable switches something on; None where its value is none of `ALLOWED`.

    Args:
        name: The variable.
        default: What holds where it is unset or empty.
    """
    value = os.environ.get(name, "").strip().lower()
    if not value:
        return default
    return value in ON if value in (*ON, *OFF) else None
