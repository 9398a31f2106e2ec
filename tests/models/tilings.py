"""Triton's tilings of one kernel, compiled side by side: its autotuner compiles one after the other.

mamba-ssm has some ten tilings for each of fifteen kernels, minutes of compiling before the first step.
"""

import importlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from bridge_cg_plugin.upstream.wrappers import overridden

# Tilings that Triton chooses from, of some ten for each kernel: to compile all of them takes minutes.
TILINGS = 2


@contextmanager
def compiled_side_by_side() -> Iterator[None]:
    """Inside, a kernel's tilings are compiled by as many threads as there are cores before they are timed."""
    from triton.runtime.autotuner import Autotuner

    with overridden(Autotuner, "prune_configs", _compiling(Autotuner.prune_configs)):
        yield


@contextmanager
def few_tilings() -> Iterator[None]:
    """Inside, mamba-ssm's kernels choose from two tilings each, which are compiled side by side."""
    given = {tuner: tuner.configs for tuner in mamba_kernels()}
    for tuner in given:
        tuner.configs = tuner.configs[-TILINGS:]
        tuner.cache.clear()
    with compiled_side_by_side():
        yield
    for tuner, configs in given.items():
        tuner.configs = configs
        tuner.cache.clear()


def mamba_kernels() -> Iterator[Any]:
    """Return mamba-ssm's autotuned kernels."""
    from triton.runtime.autotuner import Autotuner

    for name in ("ssd_bmm", "ssd_chunk_scan", "ssd_chunk_state", "ssd_combined", "ssd_state_passing"):
        module = importlib.import_module(f"mamba_ssm.ops.triton.{name}")
        yield from (value for value in vars(module).values() if isinstance(value, Autotuner))


def _compiling(original: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    from triton import AsyncCompileMode

    def prune_configs(self: Any, kwargs: dict[str, Any]) -> list[Any]:
        configs = original(self, kwargs)
        # One that cannot be compiled fails again when it is timed, where the autotuner expects it.
        with ThreadPoolExecutor(os.cpu_count()) as pool, AsyncCompileMode(pool, ignore_errors=True):
            for config in configs:
                self.fn.run(*self.nargs.values(), **{**kwargs, **config.all_kwargs(), "warmup": True})
        return configs

    return prune_configs
