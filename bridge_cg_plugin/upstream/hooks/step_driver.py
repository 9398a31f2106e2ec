"""Vision graphs that the train loop does not drive itself: made and captured at the start of its steps."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from ...options import PROVIDER_FIELDS
from ..encoders.registry import find_encoder
from .vision_helper import VisionTECudaGraphHelper


class OwnLoop:
    """Drives one helper from `train_step`, as the train loops of later releases do from their own code.

    Those know Qwen3-VL's encoder alone; other encoders are driven here on every release.

    The helper is made before the first step of a model that asks for graphs, and captures before the step that
    follows `cuda_graph_warmup_steps` steps. Every way into training comes through `train_step`, which gets the model
    and the state as arguments; a training callback would have to be handed over by the user's script.
    """

    def __init__(self) -> None:
        self._helper: VisionTECudaGraphHelper | None = None
        self._vision_model: nn.Module | None = None
        self._steps = 0

    def before_step(self, model: Sequence[nn.Module], state: Any, bridge_drives: bool = False) -> None:
        """Make the helper or capture, if it is time.

        Args:
            model: The model's chunks.
            state: Bridge's global state.
            bridge_drives: Whether the release's train loop makes helpers itself, for the encoders that it knows.

        Raises:
            OptionError: An option cannot work.
            CaptureError: Capturing failed and `vision_cuda_graph_strict` is set.
        """
        provider = state.cfg.model
        if getattr(provider, PROVIDER_FIELDS["impl"], "none") in (None, "none"):
            return
        found = find_encoder(model)
        if found is None or (bridge_drives and found.family.driven_by_bridge):
            return
        helper = self._helper
        if found.model is not self._vision_model or helper is None or helper.graphs is None:
            helper = self._start(model, found.model)
        if self._steps == provider.cuda_graph_warmup_steps and not helper.graphs_created():
            helper.create_cudagraphs()
        self._steps += 1

    def end(self) -> None:
        """Forget the helper; whoever ends training has reported and freed its graphs."""
        self._helper = self._vision_model = None

    def _start(self, model: Sequence[nn.Module], vision_model: nn.Module) -> VisionTECudaGraphHelper:
        from megatron.core.num_microbatches_calculator import get_num_microbatches

        if self._helper is not None:  # left behind by a run that ended with an error
            self._helper.delete_cuda_graphs()
        self._steps, self._vision_model = 0, vision_model
        self._helper = VisionTECudaGraphHelper(
            list(model), vision_model.config, num_microbatches=get_num_microbatches()
        )
        return self._helper
