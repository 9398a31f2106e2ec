"""The cost models that ship with the package, from the records."""

import json
from pathlib import Path
from typing import Any

from scripts.performance.packed import full_size, rates
from scripts.performance.vision import costs

DIGITS = 5


def fitted(folder: Path) -> str:
    """Return the text of `bridge_cg_plugin.cli/planner/measured.json`.

    Args:
        folder: With the records.
    """
    found = {
        "vision": costs.fitted(folder),
        "language_model": rates.fitted(folder),
        "steps": full_size.steps(folder),
    }
    return json.dumps(_rounded(found), indent=1) + "\n"


def _rounded(value: Any) -> Any:
    """Return plain values with as many digits as a fit has."""
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(each) for each in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value
