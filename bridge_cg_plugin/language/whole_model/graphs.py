"""A language model's graphs over a training run: observe, capture, replay, fall back, report."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ...announce import announce
from ...graphs.changes.model_watch import NOTHING_EXEMPT, Exempt
from ...graphs.errors import CaptureError
from ...graphs.executor import Executor
from ...graphs.fallback import Fallback
from ...graphs.gradients import Reduction
from ...graphs.graphed_module import GraphedModule
from ...graphs.region import Region
from .microbatch import Microbatch, read_call
from .program import LanguageModel, Recording


class LanguageModelGraphs(GraphedModule):
    """Runs one language model on a graph of its forward and one of its backward, replayed for every microbatch.

    Until the warm-up steps are over, and at least for one step, it runs eager and its microbatches are observed.

    Args:
        model: The language model; its `forward` is replaced on the instance until `detach`.
        deepstack: How many of its layers add features of images.
        recording: Entered around recorded work; see `Recording`.
        executor: Makes recordings.
        warmup_steps: Eager training steps before capture.
        before_replay: Called before each replay; waits for parameters that are still being gathered.
        reduction: What waits for gradients; None hands every gradient over to autograd.
        exempt: What may change of the language model without changing what it computes.

    Attributes:
        steps: Training steps since the object was made.
        replayed_steps: Those in which every microbatch was replayed.
    """

    title = "language-model CUDA graphs"
    noun = "language model"
    group = "language_model_cuda_graph"
    out_of_memory_remedy = "Lower the sequence length or the microbatch size."

    def __init__(
        self,
        model: nn.Module,
        deepstack: int,
        recording: Recording,
        executor: Executor,
        warmup_steps: int,
        before_replay: Callable[[], None] | None = None,
        reduction: Reduction | None = None,
        exempt: Exempt = NOTHING_EXEMPT,
    ) -> None:
        super().__init__(model, executor, strict=False, before_replay=before_replay, exempt=exempt)
        self.steps = self.replayed_steps = 0
        self._deepstack, self._recording, self._warmup_steps = deepstack, recording, warmup_steps
        self._reduction = reduction
        self._example: Microbatch | None = None
        self._observed = 0

    @contextmanager
    def training_step(self, microbatches: int) -> Iterator[None]:
        """Run the forward and backward passes of a training step inside; captures before them if it is time."""
        if self._example is not None and self.steps >= self._warmup_steps and not self.captured and not self.failure:
            self.capture()
        before = self._replays()
        with self.step():
            yield
        self.steps += 1
        self.replayed_steps += self._replays() - before == microbatches

    def _replays(self) -> int:
        return sum(region.statistics.replays for region in self._regions)

    def _shapes(self) -> Microbatch:
        """Return the shapes of the last observed microbatch.

        Raises:
            CaptureError: None was observed.
        """
        if self._example is None:
            raise CaptureError("no microbatch was observed before the capture")
        return self._example

    def _record(self) -> None:
        """Capture for the shapes of the last observed microbatch."""
        program = LanguageModel(self.model, self._eager_forward, self._shapes(), self._deepstack, self._recording)
        region = Region(
            program,
            self.executor,
            [program.bucket],
            before_replay=self._before_replay,
            reduction=self._reduction,
            watch=self._followed(),
        )
        self._regions = [region]
        region.capture()

    def _recorded(self) -> None:
        sequence, batch, _ = self._shapes().decoder_input.shape
        announce(f"language-model CUDA graphs: whole, {batch} sequence(s) of {sequence} tokens a microbatch")

    def _warmup_microbatches(self) -> int:
        return self._observed

    def _notes(self) -> dict[str, str]:
        return {"steps": f"{self.replayed_steps} of {self.steps} training steps replayed every microbatch"}

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        """The language model's forward: a replay where possible, eager otherwise."""
        self._before_eager()
        microbatch = read_call(args, kwargs)
        if not self.captured:
            self._look_on(microbatch)
            return self._eager_forward(*args, **kwargs)
        reason = Fallback.CALL_ARGUMENTS if microbatch is None else microbatch.fits(self._shapes())
        if reason is None:
            outputs = self._regions[0].run(microbatch)
            if outputs is not None:
                return outputs[0]
        else:
            self._fell_back(reason, _tokens(microbatch))
            self._note_eager()
        return self._eager_forward(*args, **kwargs)

    def _look_on(self, microbatch: Microbatch | None) -> None:
        """Observe an eager microbatch before capture, or count it as one that a failed capture left eager."""
        if self.failure is not None:
            self._fell_back(Fallback.CAPTURE_FAILED, _tokens(microbatch))
        elif microbatch is not None and self.model.training and torch.is_grad_enabled():
            self._example = microbatch.shapes()
            self._observed += 1


def _tokens(microbatch: Microbatch | None) -> int | None:
    return None if microbatch is None else microbatch.tokens
