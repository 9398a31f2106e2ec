"""Graphs of encoders that Bridge's train loop does not drive: captured at the start of its steps."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from ....options import PROVIDER_FIELDS
from ...encoders.registry import FoundEncoder, find_encoders
from ..helpers.vision_helper import VisionTECudaGraphHelper, encoder_config


class StepDriver:
    """Drives helpers from `train_step`, as the train loop itself does for Qwen3-VL's encoder only.

    Helpers are created before the first step of a model that enables graphs. They capture after
    `cuda_graph_warmup_steps` steps. All training goes through `train_step`, which receives the model and the state; a
    training callback would have to be passed by the user's script.
    """

    def __init__(self) -> None:
        self._helpers: list[VisionTECudaGraphHelper] = []
        self._found: list[nn.Module] = []
        self._steps = 0

    def before_step(self, model: Sequence[nn.Module], state: Any) -> None:
        """Make the helpers or capture, if it is time.

        Args:
            model: The model's chunks.
            state: Bridge's global state.

        Raises:
            OptionError: An option cannot work.
            CaptureError: Capturing failed and `vision_cuda_graph_strict` is set.
        """
        provider = state.cfg.model
        if getattr(provider, PROVIDER_FIELDS["impl"], "none") in (None, "none"):
            return
        encoders = [each for each in find_encoders(model) if not each.family.driven_by_bridge]
        if not encoders:
            return
        if [each.model for each in encoders] != self._found or any(helper.graphs is None for helper in self._helpers):
            self._start(model, encoders)
        for helper in self._helpers:
            if self._steps == provider.cuda_graph_warmup_steps and not helper.graphs_created():
                helper.create_cudagraphs()
        self._steps += 1

    def end(self) -> None:
        """Forget the helpers; whoever ends training has reported and freed their graphs."""
        self._helpers, self._found = [], []

    def _start(self, model: Sequence[nn.Module], encoders: Sequence[FoundEncoder]) -> None:
        from megatron.core.num_microbatches_calculator import get_num_microbatches

        for helper in self._helpers:  # left behind by a run that ended with an error
            helper.delete_cuda_graphs()
        self._steps, self._found = 0, [each.model for each in encoders]
        self._helpers = [
            VisionTECudaGraphHelper(
                list(model), encoder_config(each), num_microbatches=get_num_microbatches(), found=each
            )
            for each in encoders
        ]
