"""A language model as the graph manager sees it: microbatches of few shapes, replayed from embeddings to losses."""

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from ...announce import announce
from ...graphs.errors import CaptureError
from ...graphs.fallback import Fallback
from ...graphs.piece import Piece
from ...graphs.planning.buckets import Bucket
from ...graphs.planning.demand import Demand, Menu
from ...graphs.workload import Call, Workload
from .program import LanguageModel, Microbatch, Recording, read_call

# A shape is recorded once training has shown it so often, and so many are at most: where every microbatch has a shape
# of its own, recordings would never end.
OFTEN, MOST_SHAPES = 3, 8


class LanguageModelWorkload(Workload):
    """See `Workload`: a graph of the model's forward and one of its backward, replayed for every microbatch.

    Until the first capture it runs eager and its microbatches are observed.

    Args:
        model: The language model.
        deepstack: How many of its layers add features of images.
        recording: Entered around recorded work; see `Recording`.
        grows: Whether other shapes than the first one are recorded when they are asked for. Ranks that share layers
            would have to agree on them.

    Attributes:
        steps: Training steps since the object was made.
        replayed_steps: Those in which every microbatch was replayed.
    """

    title = "language-model CUDA graphs"
    noun = "language model"
    group = "language_model_cuda_graph"
    out_of_memory_remedy = "Lower the sequence length or the microbatch size."

    def __init__(self, model: nn.Module, deepstack: int, recording: Recording, grows: bool) -> None:
        self.steps = self.replayed_steps = 0
        self._model, self._deepstack, self._recording = model, deepstack, recording
        self._grows = grows
        self._example: Microbatch | None = None
        self._examples: dict[Bucket, Microbatch] = {}
        self._demand: Demand | None = None
        self._asked: Counter[Bucket] = Counter()
        self._observed = 0

    @contextmanager
    def training_step(self, microbatches: int, may_record: bool = True) -> Iterator[None]:
        """Run the forward and backward passes of a training step inside.

        Args:
            microbatches: How many the step has.
            may_record: Whether something may be recorded before it once there are graphs.
        """
        before = self.manager.statistics().replays
        with self.manager.step(may_record):
            yield
        self.steps += 1
        self.replayed_steps += self.manager.statistics().replays - before == microbatches

    def read(self, *args: Any, **kwargs: Any) -> Call:
        """See `Workload`."""
        microbatch = read_call(args, kwargs)
        if microbatch is None:
            return Call(None, Fallback.CALL_ARGUMENTS)
        if not self._examples:
            return Call(microbatch, None, microbatch.tokens)
        refusal = self._refusal(microbatch)
        return Call(microbatch, refusal, microbatch.tokens, note=None if refusal else microbatch.bucket)

    def _refusal(self, microbatch: Microbatch) -> Fallback | None:
        """Return why a microbatch has no graphs and will have none soon."""
        bucket = microbatch.bucket
        if len(microbatch.deepstack) > self._deepstack:
            return Fallback.CALL_ARGUMENTS
        if (example := self._examples.get(bucket)) is not None:
            given_up = self._demand is not None and self._demand.refuses(bucket)
            return Fallback.OTHER_SHAPES if given_up else microbatch.fits(example)
        if microbatch.constants != self._shapes().constants:
            return Fallback.CALL_ARGUMENTS
        self._ask(bucket)
        if self._demand is not None and self._asked[bucket] >= OFTEN and len(self._examples) < MOST_SHAPES:
            self._examples[bucket] = microbatch.shapes()
        return Fallback.OTHER_SHAPES

    def _ask(self, bucket: Bucket) -> None:
        self._asked[bucket] += self._model.training and torch.is_grad_enabled()

    def observe(self, call: Call) -> None:
        """See `Workload`."""
        if call.batch is not None and self._model.training and torch.is_grad_enabled():
            self._example = call.batch.shapes()
            self._observed += 1
            self._ask(call.batch.bucket)

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
        first = self._shapes()
        examples = {first.bucket: first}
        forward = self.manager.eager_forward
        program = LanguageModel(self._model, forward, examples, self._deepstack, self._recording)
        demand = Demand(_menu(examples)) if self._grows else None
        if demand is not None:
            demand.buckets.append(first.bucket)
        piece = Piece(program=program, buckets=[first.bucket], growth=demand, shape=attrgetter("bucket"))
        self.manager.record([piece], demand)
        self._examples, self._demand = examples, demand

    def captured(self) -> None:
        """See `Workload`."""
        sequence, batch, _ = self._shapes().decoder_input.shape
        announce(f"{self.title}: whole, {batch} sequence(s) of {sequence} tokens a microbatch")

    def forget(self) -> None:
        """See `Workload`."""
        self._examples, self._demand = {}, None

    def grown(self) -> None:
        """See `Workload`; the region has all that is known of shapes."""

    def returned(self, outputs: tuple[Tensor, ...]) -> Tensor:
        """See `Workload`: the losses."""
        return outputs[0]

    def warmup_microbatches(self) -> int:
        """See `Workload`."""
        return self._observed

    def notes(self) -> dict[str, str]:
        """See `Workload`."""
        return {"steps": f"{self.replayed_steps} of {self.steps} training steps replayed every microbatch"}


def _menu(examples: dict[Bucket, Microbatch]) -> Menu:
    """Return what may be recorded: the shapes that there are examples of, each for itself."""
    return Menu(
        buckets_of=lambda tokens, _: [bucket for bucket in examples if bucket.tokens == tokens],
        refuse=lambda shape, bucket: None if shape == bucket else Fallback.OTHER_SHAPES,
        cost=_tokens,
        exact_below=math.inf,
    )


def _tokens(bucket: Bucket) -> float:
    return float(bucket.tokens)
