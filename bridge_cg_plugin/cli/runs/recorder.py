"""A Bridge training callback that keeps what a run did: losses, step times, throughput, memory, graph statistics."""

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from megatron.bridge.training.callbacks import Callback, CallbackContext

from bridge_cg_plugin.announce import rank
from bridge_cg_plugin.cli.report.runs import GIB, KINDS, WARM_UP


class Recorder(Callback):
    """Keeps a run's figures; `record()` has them after training, on every rank.

    Step times are from before a step's first launch to the end of its last kernel.
    """

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.grad_norms: list[float] = []
        self.step_ms: list[float] = []
        self.tflop: list[float] = []
        self.graphs: dict[str, dict[str, Any]] = {}
        self.tokens_per_step = self.samples_per_step = 0
        self._began, self._tflop_before = 0.0, 0.0
        self._parts: Sequence[dict[str, Any]] = ()

    def on_train_start(self, context: CallbackContext) -> None:
        """Read the sizes."""
        config = context.state.cfg
        self.samples_per_step = config.train.global_batch_size
        self.tokens_per_step = self.samples_per_step * config.model.seq_length

    def on_train_step_start(self, context: CallbackContext) -> None:
        """Start the clock."""
        self._add_tflop(context)
        _synchronize()
        self._began = time.perf_counter()

    def on_train_step_end(self, context: CallbackContext) -> None:
        """Stop the clock and keep the step's figures."""
        _synchronize()
        self.step_ms.append((time.perf_counter() - self._began) * 1e3)
        if context.loss_dict:  # the last pipeline stage has it
            self.losses.append(float(next(iter(context.loss_dict.values()))))
        if context.grad_norm is not None:
            self.grad_norms.append(float(context.grad_norm))
        self.graphs = graph_statistics() or self.graphs
        if rank() == 0:
            print(f"[compare] step {len(self.step_ms)} of {context.state.cfg.train.train_iters}", flush=True)

    def on_train_end(self, context: CallbackContext) -> None:
        """Bring together what the ranks have."""
        self._add_tflop(context)
        own = {
            "losses": self.losses,
            "grad_norms": self.grad_norms,
            "graphs": self.graphs,
            "peak_gb": torch.cuda.max_memory_allocated() / GIB if torch.cuda.is_available() else 0.0,
        }
        self._parts = [own]
        if torch.distributed.is_initialized():
            self._parts = [{} for _ in range(torch.distributed.get_world_size())]
            torch.distributed.all_gather_object(self._parts, own)

    def _add_tflop(self, context: CallbackContext) -> None:
        # Bridge counts a step after its end.
        so_far = float(context.state.train_state.floating_point_operations_so_far) / 1e12
        if self.step_ms and len(self.tflop) < len(self.step_ms):
            self.tflop.append(so_far - self._tflop_before)
        self._tflop_before = so_far

    def record(self) -> dict[str, Any]:
        """Return the fields of a benchmark record (docs/benchmarks/format.md)."""
        graphs: dict[str, Any] = {}
        for part in self._parts:
            graphs |= {name: found for name, found in part["graphs"].items() if name not in graphs}
        settled = self.step_ms[WARM_UP:] or self.step_ms
        seconds, count = sum(settled) / 1e3, len(settled)
        tflop = sum(self.tflop[-count:])
        return {
            "ms": statistics.median(settled),
            "step_ms": self.step_ms,
            "losses": next((part["losses"] for part in self._parts if part["losses"]), []),
            "grad_norms": next((part["grad_norms"] for part in self._parts if part["grad_norms"]), []),
            "samples_per_s": self.samples_per_step * count / seconds,
            "tokens_per_s": self.tokens_per_step * count / seconds,
            "tflops_per_gpu": tflop / seconds / len(self._parts) if tflop else None,
            "peak_gb": max(part["peak_gb"] for part in self._parts),
            **{kind.field: graphs.get(kind.group) for kind in KINDS},
        }


def graph_statistics() -> dict[str, dict[str, Any]]:
    """Return the statistics of the plugin's graphs that exist now, by `GraphKind.group`."""
    from bridge_cg_plugin.upstream.hooks.helpers.graph_helper import active_graphs

    return {graphs.workload.group: graphs.statistics().as_dict() for graphs in active_graphs()}


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
