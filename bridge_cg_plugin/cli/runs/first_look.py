"""What `bridge-cg explain` refuses of a command line of `bridge-cg train`, before anything heavy is imported.

    python -m bridge_cg_plugin.cli.runs.first_look --recipe NAME --dry-run

Its process has stand-ins for PyTorch and most of Megatron. The reason is on standard output, with exit status 2.
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
from bridge_cg_plugin.cli.runs.recipe import mode_and_step, read, with_presets
from bridge_cg_plugin.cli.runs.results import ROOT
from bridge_cg_plugin.options import OptionError
from bridge_cg_plugin.options.flags import as_typed, given_flags
from bridge_cg_plugin.upstream.hooks.recipes import build_recipe, no_configuration

_WORLD = ("WORLD_SIZE", "SLURM_NTASKS")
REFUSED = 2


# That the hub has to answer; Bridge itself would try for minutes.
SECONDS = 3.0


def check_hub(recipe: str, names: Iterable[str]) -> None:
    """Refuse a recipe of a model whose configuration is neither cached nor within reach.

    Args:
        recipe: The recipe's name.
        names: The names on the hub, or folders, of its models.

    Raises:
        OptionError: There is such a model.
    """
    if not all(map(_is_cached, names)) and not _is_reachable():
        raise OptionError.because("recipe", f"Cannot build recipe {recipe}: {no_configuration(recipe)}")


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


def gpus_of(parsed: argparse.Namespace) -> int | None:
    """Return how many GPUs a command line or a launcher's environment names; None where nobody said."""
    if parsed.launcher != "none" or parsed.nodes * parsed.gpus_per_node > 1:
        return int(parsed.nodes * parsed.gpus_per_node)
    return next((int(os.environ[name]) for name in _WORLD if name in os.environ), None)


def refusal(arguments: Sequence[str]) -> str:
    """Return what a command line is refused with, after about two seconds; empty where it is not, or not known yet.

    Args:
        arguments: The command line of `bridge-cg train`.
    """
    command = [sys.executable, "-m", __name__, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=with_package())
    return done.stdout.strip() if done.returncode == REFUSED else ""


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
            resolved(config, given_flags(parsed), words)
            check_start(config, mode_and_step(parsed)[0], gpus_of(parsed))
            if parsed.dry_run:
                check_hub(parsed.recipe, asked())
    except OptionError as error:
        print(as_typed(error, given))
        return REFUSED
    return 0


if __name__ == "__main__":
    sys.exit(main())
