"""What `bridge-cg explain` makes of a command line of `bridge-cg train`, before anything heavy is imported.

    python -m bridge_cg_plugin.cli.runs.first_look --recipe NAME --dry-run

Its process has stand-ins for PyTorch and most of Megatron. Standard output has the
reason with exit status 2, else a dry run's answer, with status 3 where nothing else can give one.
"""

import argparse
import contextlib
import os
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from bridge_cg_plugin.cli.checks import check_start
from bridge_cg_plugin.cli.explain.models import asked
from bridge_cg_plugin.cli.explain.recipes import require_bridge, resolved, without_imports
from bridge_cg_plugin.cli.explain.start import check_training
from bridge_cg_plugin.cli.runs.recipe import mode_and_step, read, with_presets
from bridge_cg_plugin.cli.runs.results import ROOT
from bridge_cg_plugin.options import GraphOptions, OptionError
from bridge_cg_plugin.options.explain import in_words
from bridge_cg_plugin.options.flags import given_flags
from bridge_cg_plugin.upstream.hooks.recipes import build_recipe

_WORLD = ("WORLD_SIZE", "SLURM_NTASKS")
REFUSED, ALONE = 2, 3
NOT_BUILT = "read without the model's configuration on Hugging Face's hub and without a GPU: sizes were not checked"


# That the hub has to answer; Bridge itself would try for minutes.
SECONDS = 3.0


def answers_alone(names: Iterable[str]) -> bool:
    """Return whether a configuration of these models, by name or folder, is neither cached nor within reach."""
    return not all(map(_is_cached, names)) and not _is_reachable()


def _is_cached(model: str) -> bool:
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    cache = Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub").expanduser()
    found = (cache / f"models--{model.replace('/', '--')}").glob("snapshots/*/config.json")
    return Path(model).exists() or any(found)


def _is_reachable() -> bool:
    """Return whether the hub answers, or a proxy is set, behind which only a request would tell."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return False
    if urllib.request.getproxies():
        return True
    hub = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    try:
        address = hub.hostname or "", hub.port or (80 if hub.scheme == "http" else 443)
        socket.create_connection(address, timeout=SECONDS).close()
    except OSError:
        return False
    return True


def dry_run(recipe: str, mode: str, step: str, options: GraphOptions, missing: str) -> str:
    """Return what a dry run prints.

    Args:
        recipe, mode, step: What would be trained and how.
        options: Its graph options.
        missing: What training needs beside it; empty where it has all.
    """
    lines = [f"{recipe}: {mode}() with {step}", in_words(options), *([f"to train: {missing}"] if missing else [])]
    return "\n".join(lines)


def gpus_of(parsed: argparse.Namespace) -> int | None:
    """Return how many GPUs a command line or a launcher's environment names; None where nobody said."""
    if parsed.launcher != "none" or parsed.nodes * parsed.gpus_per_node > 1:
        return int(parsed.nodes * parsed.gpus_per_node)
    return next((int(os.environ[name]) for name in _WORLD if name in os.environ), None)


def looked(arguments: Sequence[str]) -> tuple[int, str]:
    """Return, after about two seconds, the exit status and the standard output of this module's process.

    Args:
        arguments: The command line of `bridge-cg train`.
    """
    command = [sys.executable, "-m", __name__, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=with_package())
    return done.returncode, done.stdout.strip()


def refusal(arguments: Sequence[str]) -> str:
    """Return what a command line is refused with; empty where it is not, or not known yet."""
    status, said = looked(arguments)
    return said if status == REFUSED else ""


def with_package() -> dict[str, str]:
    """Return this process's environment, in which Python finds these packages also where they are not installed."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}


def main(arguments: Sequence[str] | None = None) -> int:
    """Look at a command line of `bridge-cg train`; returns the exit status, 2 for input that is refused.

    This process has stand-ins for what Bridge imports, and cannot train afterwards.
    """
    given = sys.argv[1:] if arguments is None else arguments
    try:
        with contextlib.redirect_stdout(sys.stderr):
            parsed, words = read(given)
            require_bridge(parsed.recipe)
            without_imports()
            try:
                config = with_presets(build_recipe(parsed.recipe), parsed)
            except OptionError as error:
                if error.__cause__ is not None:  # it may build with what Bridge imports
                    return 0
                raise
            options, gpus = resolved(config, given_flags(parsed), words), gpus_of(parsed)
            mode, step = mode_and_step(parsed)
            missing = check_start(config, mode, gpus, parsed.dry_run)
            if parsed.dry_run:
                shipped = with_presets(build_recipe(parsed.recipe), parsed)
                check_training(parsed.recipe, shipped, config, options, gpus, parsed.graphs)
    except OptionError as error:
        print(error)
        return REFUSED
    if parsed.dry_run:
        print("\n".join([dry_run(parsed.recipe, mode, step, options, missing), f"note: {NOT_BUILT}"]))
    return ALONE if parsed.dry_run and answers_alone(asked()) else 0


if __name__ == "__main__":
    sys.exit(main())
