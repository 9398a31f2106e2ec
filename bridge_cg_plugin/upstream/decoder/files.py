"""Bridge's packed NumPy files."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def load_packed_numpy(path: Path) -> Sequence[Any]:
    """Return the rows of a file that Bridge packed, through Bridge's own restricted reader."""
    from megatron.bridge.utils.safe_pickle import safe_load_npy

    rows = safe_load_npy(path.read_bytes())
    return list(rows) if rows.ndim else [rows.item()]
