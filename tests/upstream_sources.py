"""Fingerprints of upstream's installed sources: no test may change them."""

import hashlib
import sys
from collections.abc import Iterable
from pathlib import Path

PACKAGES = ("megatron/core", "megatron/bridge", "transformer_engine")


def installed_folders(path: Iterable[str] | None = None) -> list[Path]:
    """Return every folder of upstream's packages on sys.path."""
    entries = [Path(entry or ".") for entry in (sys.path if path is None else path)]
    return [entry / package for entry in entries for package in PACKAGES if (entry / package).is_dir()]


def fingerprints(folders: Iterable[Path]) -> dict[str, str]:
    """Return source file -> hash."""
    return {
        str(file): hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest()
        for folder in folders
        for file in sorted(folder.rglob("*.py"))
    }


def changes(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """Return the files that were changed, added or removed."""
    return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
