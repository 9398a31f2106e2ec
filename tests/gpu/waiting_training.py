"""Bridge's `pretrain()` of a small Qwen3-VL on packs, all on graphs, and where its host waits for the device."""

import json
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from megatron.bridge.models.qwen_vl import qwen3_vl_step
from megatron.bridge.training.callbacks import Callback, CallbackContext
from megatron.bridge.training.pretrain import pretrain

import bridge_cg_plugin
from bridge_cg_plugin.cli.runs.recorder import graph_statistics
from bridge_cg_plugin.options import graph_options
from bridge_cg_plugin.upstream.hooks import train_loop
from bridge_cg_plugin.upstream.hooks.graph_fields import apply_options
from bridge_cg_plugin.upstream.hooks.recipes import helper_as_shipped
from examples.photographs import training as photographs
from examples.photographs.images import PhotographDataset, PhotographProvider
from examples.photographs.training import Run

from .document_training import worker_parser

# Steps before waits are counted: warm-up, capture, the first replays.
BEFORE = 10
# cuDNN plans attention anew for every shape that it has not met, so images have one size.
SAMPLES, MICROBATCHES, SIZES = 2, 2, [(448, 448)]
OPTIONS = {
    "cuda_graph_impl": "transformer_engine",
    "cuda_graph_modules": "",
    "cuda_graph_max_packed_seqs": 2 * SAMPLES,
    "cuda_graph_packed_strict": True,
    "vision_cuda_graph_impl": "transformer_engine",
    "vision_cuda_graph_buckets": [2048],
    "vision_cuda_graph_strict": True,
    "cuda_graph_packed_buckets": [1024],
}
SCHEDULE = "forward_backward_no_pipelining"
PACKAGES = ("megatron", "bridge_cg_plugin")


class Waits(Callback):
    """Counts the host's waits by the function of upstream's or the plugin's that waits.

    Attributes:
        in_schedule: Those between a step's first forward and its last backward.
        others: All others.
    """

    def __init__(self) -> None:
        self._left = BEFORE
        self.in_schedule: Counter[str] = Counter()
        self.others: Counter[str] = Counter()

    def on_train_step_start(self, context: CallbackContext) -> None:
        """Begin to count once graphs have replayed."""
        if self._left == 0:
            warnings.simplefilter("always")
            warnings.showwarning = self._note
            torch.cuda.set_sync_debug_mode("warn")
            train_loop.StepChecks.settle = self._counting(train_loop.StepChecks.settle)
        self._left -= 1

    def on_train_end(self, context: CallbackContext) -> None:
        """Stop."""
        torch.cuda.set_sync_debug_mode("default")

    def _counting(self, settle: Callable[[train_loop.StepChecks], None]) -> Callable[[train_loop.StepChecks], None]:
        """Count waits for a step's verdicts, which are for an event: PyTorch does not warn of them."""

        def counted(checks: train_loop.StepChecks) -> None:
            self.others["loss_checks.settle"] += 1
            settle(checks)

        return counted

    def _note(self, message: Warning | str, *unused: Any, **more: Any) -> None:
        if "synchronizing CUDA operation" not in str(message):
            return
        stack = traceback.extract_stack()
        named = [f"{Path(f.filename).stem}.{f.name}" for f in stack if any(f"/{p}/" in f.filename for p in PACKAGES)]
        inside = any(f.name == SCHEDULE for f in stack)
        (self.in_schedule if inside else self.others)[named[-1] if named else "elsewhere"] += 1


class PackedPhotographs(PhotographDataset):
    """Photographs with captions, whose microbatches are as long as their longest sample."""

    def collate_fn(self, items: list[dict[str, Any]]) -> dict[str, Any]:
        """Stack a microbatch and cut what is padding in all of its samples."""
        batch = super().collate_fn(items)
        length = int((batch["tokens"] != 0).nonzero()[:, 1].max()) + 1
        kept = {name: batch[name][:, :length] for name in ("tokens", "labels", "loss_mask", "position_ids")}
        return {**batch, **kept}


@dataclass
class PackedPhotographProvider(PhotographProvider):
    """Bridge dataset provider over `PackedPhotographs`."""

    kind: ClassVar[type[PhotographDataset]] = PackedPhotographs


def train_words(words: Sequence[str]) -> None:
    """Train the example's small Qwen3-VL on microbatches of several samples, which Bridge's step joins."""
    args = worker_parser("waiting_training").parse_args(words)
    bridge_cg_plugin.activate()
    config = photographs.training_config(Run(steps=args.steps, small=True, global_batch=MICROBATCHES * SAMPLES))
    config.train.micro_batch_size = SAMPLES
    config.dataset = PackedPhotographProvider(
        dataloader_type="single",
        num_workers=config.dataset.num_workers,
        seq_length=config.dataset.seq_length,
        most_images=1,
        sizes=SIZES,
        enable_in_batch_packing=True,
    )
    apply_options(graph_options(config.model, OPTIONS), config.model)
    waits, kept = Waits(), Statistics()
    with helper_as_shipped():
        pretrain(config, qwen3_vl_step.forward_step, callbacks=[waits, kept])
    found = {"in_schedule": waits.in_schedule, "others": waits.others, "graphs": kept.value}
    args.out.write_text(json.dumps({**found, "checked": config.rerun_state_machine.check_for_nan_in_loss}))


class Statistics(Callback):
    """Keeps the graphs' statistics as of the last step."""

    value: dict[str, Any] | None = None

    def on_train_step_end(self, context: CallbackContext) -> None:
        """Read them."""
        self.value = graph_statistics()
