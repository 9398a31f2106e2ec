"""Records of training runs as JSON Lines, with where they come from."""

import datetime
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("torch", "transformer-engine", "megatron-core", "megatron-bridge")


def provenance(repeats: int, seed: int) -> dict[str, Any]:
    """Return the fields that say where and how a record was measured."""
    import torch  # takes seconds; a benchmark that trains in other processes starts these first

    return {
        "repeats": repeats,
        "seed": seed,
        "date": datetime.date.today().isoformat(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "host": _host(),
        "versions": {**{name: _version(name) for name in PACKAGES}, "commit": _commit()},
        "command": command_line(),
    }


def _host() -> str:
    """Return the processor and how many CPUs there are: eager's time depends on them."""
    file = Path("/proc/cpuinfo")
    named = re.search(r"model name\s*: (.+)", file.read_text()) if file.exists() else None
    return f"{named[1] if named else platform.processor() or 'unknown processor'}, {os.cpu_count()} CPUs"


def command_line() -> str:
    """Return this process's command line for a record, without the folders where a machine keeps its results."""
    words = (os.path.basename(word) if os.path.isabs(word) else word for word in sys.argv[1:])
    return " ".join(["python", os.path.relpath(sys.argv[0], ROOT), *words])


def write_records(path: Path, records: list[dict[str, Any]]) -> None:
    """Replace the file by these records."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")
    fresh.write_text("".join(json.dumps(record) + "\n" for record in records))
    fresh.replace(path)


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _commit() -> str:
    given = os.environ.get("BENCHMARK_COMMIT")
    if given:
        return given
    result = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return result.stdout.strip() or "unknown"
