"""A Bridge training callback that keeps what a run did: losses, step times, throughput, memory, graph statistics."""

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from megatron.bridge.training.callbacks import Callback, CallbackContext
from torch import nn

from bridge_cg_plugin.announce import rank
from bridge_cg_plugin.cli.report.runs import GIB, KINDS, WARM_UP
from bridge_cg_plugin.upstream.encoders.registry import find_encoder


class Recorder(Callback):
    """Keeps a run's figures; `record()` has them after training, on every rank.

    Step times are from before a step's first launch to the end of its last kernel.
    """

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.grad_norms: list[float] = []
        self.step_ms: list[float] = []
        self.images: list[int] = []
        self.tflop: list[float] = []
        self.graphs: dict[str, dict[str, Any]] = {}
        self.tokens_per_step = self.samples_per_step = self._images = 0
        self._began, self._tflop_before = 0.0, 0.0
        self._parts: Sequence[dict[str, Any]] = ()

    def on_train_start(self, context: CallbackContext) -> None:
        """Read the sizes and begin to count images."""
        config = context.state.cfg
        self.samples_per_step = config.train.global_batch_size
        self.tokens_per_step = self.samples_per_step * config.model.seq_length
        found = find_encoder(context.model)
        if found is not None:
            found.model.register_forward_pre_hook(self._count_images, with_kwargs=True)

    def _count_images(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Rows of the grid; encoders of images of one size get the images alone.
        images = kwargs.get("grid_thw", args[1] if len(args) > 1 else kwargs.get("pixel_values"))
        self._images += 0 if images is None else images.shape[0]

    def on_train_step_start(self, context: CallbackContext) -> None:
        """Start the clock."""
        self._add_tflop(context)
        self._images = 0
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
        self.images.append(self._images if _counts_images() else 0)
        self.graphs = graph_statistics() or self.graphs
        if rank() == 0:
            print(f"[compare] step {len(self.step_ms)} of {context.state.cfg.train.train_iters}", flush=True)

    def on_train_end(self, context: CallbackContext) -> None:
        """Bring together what the ranks have."""
        self._add_tflop(context)
        own = {
            "losses": self.losses,
            "grad_norms": self.grad_norms,
            "images": self.images,
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
        images = [sum(counts) for counts in zip(*(part["images"] for part in self._parts), strict=True)]
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
            "images_per_s": sum(images[-count:]) / seconds if any(images) else None,
            "tflops_per_gpu": tflop / seconds / len(self._parts) if tflop else None,
            "peak_gb": max(part["peak_gb"] for part in self._parts),
            **{kind.field: graphs.get(kind.group) for kind in KINDS},
        }


def graph_statistics() -> dict[str, dict[str, Any]]:
    """Return the statistics of the plugin's graphs that exist now, by `GraphKind.group`."""
    from bridge_cg_plugin.upstream.hooks.graph_helper import active_graphs

    return {graphs.workload.group: graphs.statistics().as_dict() for graphs in active_graphs()}


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _counts_images() -> bool:
    """Whether this rank's images are no other rank's too: tensor and context parallelism share a batch."""
    from megatron.core import parallel_state

    if not parallel_state.is_initialized():
        return True
    return not (parallel_state.get_tensor_model_parallel_rank() or parallel_state.get_context_parallel_rank())
