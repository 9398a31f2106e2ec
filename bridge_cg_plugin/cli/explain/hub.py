"""Whether models' configurations can be had from the hub, told without its library, which retries for minutes."""

import os
import socket
import urllib.request
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import urlsplit

from bridge_cg_plugin.options import OptionError
from bridge_cg_plugin.upstream.hooks.configuration.recipes import no_configuration

SECONDS = 3.0


def check(recipe: str, models: Iterable[str]) -> None:
    """Refuse a recipe of a model whose configuration is neither cached nor within reach.

    Args:
        recipe: The recipe's name.
        models: The names on the hub, or folders, of its models.

    Raises:
        OptionError: There is such a model.
    """
    if not all(map(_is_cached, models)) and not _is_reachable():
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
