"""Importing Bridge: in two thirds of the time, and without what other libraries say of the machine."""

import contextlib
import gc
import importlib
import logging
import warnings
from collections.abc import Iterator

from bridge_cg_plugin.options import GraphOptionWarning


@contextlib.contextmanager
def quick_imports() -> Iterator[None]:
    """Spare a `with` block garbage collections, and imports in it searches of all modules that there are by then.

    Pydantic makes such a search for each of wandb's classes: 5 s after Bridge, 1 s before it.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        with contextlib.suppress(Exception):  # Bridge's import tells what is broken
            importlib.import_module("wandb")
        yield
    finally:
        if collects:
            gc.enable()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Show inside a `with` block errors and the plugin's warnings only."""
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("default", GraphOptionWarning)
            yield
    finally:
        logging.disable(before)
