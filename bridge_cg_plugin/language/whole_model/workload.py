"""A language model as the graph manager sees it: microbatches of one shape, replayed from embeddings to losses."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ...announce import announce
from ...graphs.errors import CaptureError
from ...graphs.fallback import Fallback
from ...graphs.piece import Piece
from ...graphs.workload import Call, Workload
from .microbatch import Microbatch, read_call
from .program import LanguageModel, Recording


class LanguageModelWorkload(Workload):
    """See `Workload`: a graph of the model's forward and one of its backward, replayed for every microbatch.

    Until the warm-up steps are over, and at least for one step, it runs eager and its microbatches are observed.

    Args:
        model: The language model.
        deepstack: How many of its layers add features of images.
        recording: Entered around recorded work; see `Recording`.
        warmup_steps: Eager training steps before capture.

    Attributes:
        steps: Training steps since the object was made.
        replayed_steps: Those in which every microbatch was replayed.
    """

    title = "language-model CUDA graphs"
    noun = "language model"
    group = "language_model_cuda_graph"
    out_of_memory_remedy = "Lower the sequence length or the microbatch size."

    def __init__(self, model: nn.Module, deepstack: int, recording: Recording, warmup_steps: int) -> None:
        self.steps = self.replayed_steps = 0
        self._model, self._deepstack = model, deepstack
        self._recording, self._warmup_steps = recording, warmup_steps
        self._example: Microbatch | None = None
        self._recorded = False
        self._observed = 0

    @contextmanager
    def training_step(self, microbatches: int, may_record: bool = True) -> Iterator[None]:
        """Run the forward and backward passes of a training step inside; captures before them if it is time.

        Args:
            microbatches: How many the step has.
            may_record: Whether something may be recorded before it once there are graphs.
        """
        manager, due = self.manager, self._example is not None and self.steps >= self._warmup_steps
        if due and not manager.captured and not manager.failure:
            manager.capture()
        before = manager.statistics().replays
        with manager.step(may_record):
            yield
        self.steps += 1
        self.replayed_steps += manager.statistics().replays - before == microbatches

    def read(self, *args: Any, **kwargs: Any) -> Call:
        """See `Workload`."""
        microbatch = read_call(args, kwargs)
        if microbatch is None:
            return Call(None, Fallback.CALL_ARGUMENTS)
        refusal = microbatch.fits(self._shapes()) if self._recorded else None
        return Call(microbatch, refusal, microbatch.tokens)

    def observe(self, call: Call) -> None:
        """See `Workload`."""
        if call.batch is not None and self._model.training and torch.is_grad_enabled():
            self._example = call.batch.shapes()
            self._observed += 1

    def _shapes(self) -> Microbatch:
        """Return the shapes of the last observed microbatch.

        Raises:
            CaptureError: None was observed.
        """
        if self._example is None:
            raise CaptureError("no microbatch was observed before the capture")
        return self._example

    def capture(self) -> None:
        """Capture for the shapes of the last observed microbatch. See `Workload`."""
        program = LanguageModel(
            self._model, self.manager.eager_forward, self._shapes(), self._deepstack, self._recording
        )
        self.manager.record([Piece(program=program, buckets=[program.bucket])])
        self._recorded = True

    def captured(self) -> None:
        """See `Workload`."""
        sequence, batch, _ = self._shapes().decoder_input.shape
        announce(f"{self.title}: whole, {batch} sequence(s) of {sequence} tokens a microbatch")

    def forget(self) -> None:
        """See `Workload`."""
        self._recorded = False

    def grown(self) -> None:
        """See `Workload`; microbatches have one shape."""

    def returned(self, outputs: tuple[Tensor, ...]) -> Tensor:
        """See `Workload`: the losses."""
        return outputs[0]

    def warmup_microbatches(self) -> int:
        """See `Workload`."""
        return self._observed

    def notes(self) -> dict[str, str]:
        """See `Workload`."""
        return {"steps": f"{self.replayed_steps} of {self.steps} training steps replayed every microbatch"}
