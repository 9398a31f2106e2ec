"""A language model's graphs over a training run: observe, capture, replay, fall back, report."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..announce import announce, warn
from ..graphs.errors import CaptureError
from ..graphs.executor import Executor
from ..graphs.gradients import Reduction
from ..graphs.instance import InstanceForward
from ..graphs.region import Region
from ..graphs.report import merge_statistics, metrics, render
from ..graphs.statistics import RegionStatistics
from .microbatch import Microbatch, read_call
from .program import LanguageModel, Recording


class LanguageModelGraphs:
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

    Attributes:
        steps: Training steps since the object was made.
        replayed_steps: Those in which every microbatch was replayed.
        failure: Why capture failed, if it did.
    """

    def __init__(
        self,
        model: nn.Module,
        deepstack: int,
        recording: Recording,
        executor: Executor,
        warmup_steps: int,
        before_replay: Callable[[], None] | None = None,
        reduction: Reduction | None = None,
    ) -> None:
        self.model, self.executor = model, executor
        self.steps = self.replayed_steps = 0
        self.failure: str | None = None
        self._deepstack, self._recording, self._warmup_steps = deepstack, recording, warmup_steps
        self._before_replay, self._reduction = before_replay, reduction
        self._example: Microbatch | None = None
        self._observed = 0
        self._region: Region | None = None
        self._fallbacks: Counter[str] = Counter()
        self._instance = InstanceForward(model, self._forward)
        self._eager_forward = self._instance.original

    @property
    def captured(self) -> bool:
        """Whether graphs exist."""
        return self._region is not None

    @contextmanager
    def step(self, microbatches: int) -> Iterator[None]:
        """Run the forward and backward passes of a training step inside; captures before them if it is time."""
        if self._example is not None and self.steps >= self._warmup_steps and not self.captured and not self.failure:
            self.capture()
        before = self._replays()
        yield
        self.steps += 1
        self.replayed_steps += self._replays() - before == microbatches

    def _replays(self) -> int:
        return 0 if self._region is None else self._region.statistics.replays

    def capture(self) -> bool:
        """Capture for the shapes of the last observed microbatch; returns whether graphs exist now."""
        self.reset()
        example = self._example
        program = LanguageModel(self.model, self._eager_forward, example, self._deepstack, self._recording)
        region = Region(
            program,
            self.executor,
            [program.bucket],
            before_replay=self._before_replay,
            reduction=self._reduction,
        )
        try:
            region.capture()
        except (CaptureError, torch.OutOfMemoryError) as error:
            region.reset()
            self.failure = f"{type(error).__name__}: {error}"
            warn(f"language-model CUDA graphs could not be captured, the language model runs eager: {self.failure}")
            return False
        self._region = region
        sequence, batch, _ = example.decoder_input.shape
        announce(f"language-model CUDA graphs: whole, {batch} sequence(s) of {sequence} tokens a microbatch")
        return True

    def reset(self) -> None:
        """Drop the graphs and their memory; the language model runs eager again."""
        if self._region is not None:
            self._region.reset()
        self._region = None
        if self.executor.device.type == "cuda":
            torch.cuda.synchronize(self.executor.device)
            torch.cuda.empty_cache()

    def detach(self) -> None:
        """Give the language model its former forward back and drop the graphs."""
        self.reset()
        self._instance.restore()

    def _forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The language model's forward: a replay where possible, eager otherwise."""
        microbatch = read_call(args, kwargs)
        if self._region is None:
            self._look_on(microbatch)
            return self._eager_forward(*args, **kwargs)
        reason = "call_arguments" if microbatch is None else microbatch.fits(self._example)
        if reason is None:
            outputs = self._region.run(microbatch)
            if outputs is not None:
                return outputs[0]
        else:
            self._fallbacks[reason] += 1
            self._region.sinks.clear()
        return self._eager_forward(*args, **kwargs)

    def _look_on(self, microbatch: Microbatch | None) -> None:
        """Observe an eager microbatch before capture, or count it as one that a failed capture left eager."""
        if self.failure is not None:
            self._fallbacks["capture_failed"] += 1
        elif microbatch is not None and self.model.training and torch.is_grad_enabled():
            self._example = microbatch.shapes()
            self._observed += 1

    def statistics(self) -> RegionStatistics:
        """Return what happened so far."""
        own = RegionStatistics(fallbacks=self._fallbacks)
        total = merge_statistics([own, *([] if self._region is None else [self._region.statistics])])
        total.warmup_microbatches = self._observed
        return total

    def metrics(self) -> dict[str, float]:
        """Return scalars for TensorBoard and W&B, by tag."""
        return metrics(self.statistics(), "language_model_cuda_graph")

    def report(self) -> str:
        """Return the run's report as text."""
        notes = {"steps": f"{self.replayed_steps} of {self.steps} training steps replayed every microbatch"}
        if self.failure is not None:
            notes["not captured"] = self.failure
        return render(self.statistics(), "language-model CUDA graphs", notes)
