"""Device memory: what is taken at the peak, and giving back what nothing refers to."""

import gc

import torch

from scripts.performance.measuring.measure import on_gpu, synchronize

GIB = 2**30


class PeakMemory:
    """Device memory that is taken at the peak from here on, 0 without a GPU."""

    def __init__(self) -> None:
        synchronize()
        if on_gpu():
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()

    def read(self) -> float:
        """Return it in GiB."""
        return (torch.cuda.max_memory_allocated() - self._before) / GIB if on_gpu() else 0.0


def collect() -> None:
    """Give memory that nothing refers to back to the device."""
    gc.collect()
    if on_gpu():
        torch.cuda.empty_cache()
