"""Triton's tilings of one kernel, compiled side by side: its autotuner compiles one after the other.

mamba-ssm has some ten tilings for each of fifteen kernels, flash-linear-attention as many for a dozen: minutes of
compiling before the first step.
"""

import importlib
import os
from collections.abc import Callable, Iterable, Iterator
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


def mamba_kernels() -> Iterator[Any]:
    """Return mamba-ssm's autotuned kernels."""
    names = ("ssd_bmm", "ssd_chunk_scan", "ssd_chunk_state", "ssd_combined", "ssd_state_passing")
    return _kernels(f"mamba_ssm.ops.triton.{name}" for name in names)


def delta_net_kernels() -> Iterator[Any]:
    """Return the autotuned kernels of flash-linear-attention that gated delta nets call."""
    names = (
        *("modules.convolution", "modules.l2norm", "ops.utils.cumsum", "ops.utils.solve_tril"),
        *(f"ops.common.{name}" for name in ("chunk_delta_h", "chunk_o", "chunk_scaled_dot_kkt")),
        "ops.gated_delta_rule.wy_fast",
    )
    return _kernels(f"fla.{name}" for name in names)


@contextmanager
def few_tilings(kernels: Callable[[], Iterator[Any]] = mamba_kernels) -> Iterator[None]:
    """Inside, kernels choose from two tilings each, which are compiled side by side.

    Args:
        kernels: Returns them.
    """
    given = {tuner: tuner.configs for tuner in kernels()}
    for tuner in given:
        tuner.configs = tuner.configs[-TILINGS:]
        tuner.cache.clear()
    with compiled_side_by_side():
        yield
    for tuner, configs in given.items():
        tuner.configs = configs
        tuner.cache.clear()


def _kernels(modules: Iterable[str]) -> Iterator[Any]:
    from triton.runtime.autotuner import Autotuner, Heuristics

    for name in modules:
        for value in vars(importlib.import_module(name)).values():
            kernel = value.fn if isinstance(value, Heuristics) else value
            if isinstance(kernel, Autotuner):
                yield kernel


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
