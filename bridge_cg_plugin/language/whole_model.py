"""Qwen3-VL's language model (dense) as one region: the layers, the output layer and the loss of every token."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from ..announce import announce
from ..graphs.buckets import Bucket, Demand
from ..graphs.errors import CaptureError
from ..graphs.fallback import Fallback
from ..graphs.manager import GraphManager
from ..graphs.program import Buffers, Call, Piece, RegionProgram, TensorSpec, Workload
from ..graphs.replays.replay import want_gradients
from ..graphs.rows import write_rows

DIFFERENTIABLE = "decoder_input"
POSITIONS = "visual_pos_masks"
DEEPSTACK = "deepstack_visual_embeds"


@dataclass(frozen=True, slots=True)
class Microbatch:
    """The arguments of one call.

    Attributes:
        decoder_input: `[sequence, batch, hidden]` embeddings of tokens and images.
        visual: `[batch, sequence]` bool, where an image's embedding stands; None without images.
        deepstack: `[images' tokens, hidden]` each: features that the first layers add there; empty without images.
        tensors: Further tensors, by argument: positions, labels, masks.
        constants: Every other argument; a graph is right for these values only.
    """

    decoder_input: Tensor
    visual: Tensor | None
    deepstack: tuple[Tensor, ...]
    tensors: Mapping[str, Tensor]
    constants: Mapping[str, Any]

    @property
    def tokens(self) -> int:
        """Tokens, padding of sequences included."""
        return self.decoder_input.shape[0] * self.decoder_input.shape[1]

    @property
    def bucket(self) -> Bucket:
        """What it is recorded for: its tokens, in this many sequences of this length."""
        sequence, batch, _ = self.decoder_input.shape
        return Bucket(sequence * batch, (batch, sequence))

    def shapes(self) -> "Microbatch":
        """Return a microbatch of the same shapes, types and constants that keeps no memory of a device."""
        tensors = {name: tensor.detach().to("meta") for name, tensor in self.tensors.items()}
        return Microbatch(self.decoder_input.detach().to("meta"), None, (), tensors, self.constants)

    def fits(self, other: "Microbatch") -> Fallback | None:
        """Return why this microbatch cannot use what was captured for another, or None if it can."""
        if self.constants != other.constants:
            return Fallback.CALL_ARGUMENTS
        ours, theirs = ({**m.tensors, DIFFERENTIABLE: m.decoder_input} for m in (self, other))
        same = ours.keys() == theirs.keys() and all(
            (t.shape, t.dtype) == (theirs[name].shape, theirs[name].dtype) for name, t in ours.items()
        )
        if not same:
            return Fallback.OTHER_SHAPES
        return Fallback.INPUT_GRADIENTS if want_gradients(self.tensors.values()) else None


def read_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Microbatch | None:
    """Return the microbatch of a call, or None if it is not one that a graph could take."""
    decoder_input = kwargs.get(DIFFERENTIABLE)
    rest = {name: value for name, value in kwargs.items() if name not in (DIFFERENTIABLE, POSITIONS, DEEPSTACK)}
    tensors = {name: value for name, value in rest.items() if isinstance(value, Tensor)}
    constants = {name: value for name, value in rest.items() if name not in tensors}
    plain = all(value is None or isinstance(value, bool | int | float | str) for value in constants.values())
    if args or not isinstance(decoder_input, Tensor) or not plain:
        return None
    return Microbatch(decoder_input, kwargs.get(POSITIONS), tuple(kwargs.get(DEEPSTACK) or ()), tensors, constants)


# Called with the language model and the modules of the region; entered around recorded work.
Recording = Callable[[nn.Module, Sequence[nn.Module]], AbstractContextManager[None]]


class LanguageModel(RegionProgram):
    """The language model's forward over static inputs; its output is the loss of every token, `[batch, sequence]`.

    Images reach it as embeddings in `decoder_input`, and as deepstack features that the first layers add to the tokens
    of images. How many tokens those are changes from batch to batch: the features fill the first rows of a buffer with
    a row for every token, and a permutation computed inside the graph brings them to their places, zeros elsewhere.

    Args:
        model: Bridge's `Qwen3VLGPTModel`, or one with the same parts.
        forward: The model's eager forward.
        examples: A microbatch of each bucket, whose shapes and types are recorded; all have the same constants. Others
            may come later.
        deepstack: How many layers add features.
        recording: Makes upstream's block add dense features, and what else recording needs.
    """

    name = "language_model"

    def __init__(
        self,
        model: nn.Module,
        forward: Callable[..., Tensor],
        examples: Mapping[Bucket, Microbatch],
        deepstack: int,
        recording: Recording,
    ) -> None:
        self.model = model
        self._forward = forward
        self._recording = recording
        self._deepstack = tuple(f"{DEEPSTACK}.{index}" for index in range(deepstack))
        self._examples = examples

    def modules(self) -> Sequence[nn.Module]:
        """See `RegionProgram`. The embedding runs eager, so its weight is not the region's, unless it is tied."""
        tied = self.model.share_embeddings_and_output_weights
        return [module for name, module in self.model.named_children() if tied or name != "embedding"]

    def input_specs(self, bucket: Bucket) -> dict[str, TensorSpec]:
        """See `RegionProgram`."""
        example = self._examples[bucket]
        hidden = example.decoder_input
        sequence, batch, width = hidden.shape
        rows = TensorSpec((sequence * batch, width), hidden.dtype, differentiable=True)
        return {
            DIFFERENTIABLE: TensorSpec(tuple(hidden.shape), hidden.dtype, differentiable=True),
            **dict.fromkeys(self._deepstack, rows),
            POSITIONS: TensorSpec((batch, sequence), torch.bool),
            **{name: TensorSpec(tuple(t.shape), t.dtype) for name, t in example.tensors.items()},
        }

    def refuse(self, batch: Microbatch, bucket: Bucket) -> Fallback | None:
        """See `RegionProgram`: nothing is padded."""
        return None if batch.bucket == bucket else Fallback.OTHER_SHAPES

    def load(self, buffers: Buffers, batch: Microbatch) -> None:
        """See `RegionProgram`."""
        buffers[DIFFERENTIABLE].copy_(batch.decoder_input.detach())
        if batch.visual is None:
            buffers[POSITIONS].zero_()
        else:
            buffers[POSITIONS].copy_(batch.visual)
        for name, features in zip(self._deepstack, self._features(batch), strict=True):
            write_rows(buffers[name], features.detach())
        for name, tensor in batch.tensors.items():
            buffers[name].copy_(tensor, non_blocking=True)

    def _features(self, batch: Microbatch) -> tuple[Tensor, ...]:
        """The deepstack features; those that the batch lacks, all of them without images, have no rows."""
        missing = len(self._deepstack) - len(batch.deepstack)
        empty = batch.decoder_input.new_empty((0, batch.decoder_input.shape[-1]))
        return (*batch.deepstack, *(empty,) * missing)

    def forward(self, buffers: Buffers, bucket: Bucket) -> tuple[Tensor, ...]:
        """See `RegionProgram`."""
        sequence, batch, width = buffers[DIFFERENTIABLE].shape
        example = self._examples[bucket]
        order = dense_order(buffers[POSITIONS])
        features = [
            buffers[name].index_select(0, order).view(batch, sequence, width).transpose(0, 1)
            for name in self._deepstack
        ]
        loss = self._forward(
            decoder_input=buffers[DIFFERENTIABLE],
            visual_pos_masks=buffers[POSITIONS],
            deepstack_visual_embeds=features or None,
            **{name: buffers[name] for name in example.tensors},
            **example.constants,
        )
        return (loss,)

    def recording(self) -> AbstractContextManager[None]:
        """See `RegionProgram`."""
        return self._recording(self.model, self.modules())

    def differentiable_inputs(self, batch: Microbatch) -> tuple[Tensor, ...]:
        """See `RegionProgram`."""
        return batch.decoder_input, *self._features(batch)


def dense_order(visual: Tensor) -> Tensor:
    """Return for every token, batch by batch, the row of a buffer whose first rows belong to the visual tokens.

    It is a permutation: other tokens take the remaining rows in order, so that no row's gradient is a sum.

    Args:
        visual: `[batch, sequence]` bool.

    Returns:
        `[batch * sequence]` int64.
    """
    flat = visual.flatten()
    first = flat.cumsum(0)
    others = (~flat).cumsum(0) + first[-1]
    return torch.where(flat, first, others) - 1


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

    manager: GraphManager
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
        self._asked: Counter[Bucket] = Counter()

    @contextmanager
    def training_step(self, microbatches: int) -> Iterator[None]:
        """Run the forward and backward passes of a training step inside.

        Args:
            microbatches: How many the step has.
        """
        before = self.manager.statistics().replays
        with self.manager.step():
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
            given_up = self.demand is not None and self.demand.refuses(bucket)
            return Fallback.OTHER_SHAPES if given_up else microbatch.fits(example)
        if microbatch.constants != self._shapes().constants:
            return Fallback.CALL_ARGUMENTS
        self._ask(bucket)
        if self.demand is not None and self._asked[bucket] >= OFTEN and len(self._examples) < MOST_SHAPES:
            self._examples[bucket] = microbatch.shapes()
        return Fallback.OTHER_SHAPES

    def _ask(self, bucket: Bucket) -> None:
        self._asked[bucket] += self._model.training and torch.is_grad_enabled()

    def observe(self, call: Call) -> None:
        """See `Workload`."""
        if call.batch is not None and self._model.training and torch.is_grad_enabled():
            self._example = call.batch.shapes()
            self.observed += 1
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
        # What may be recorded: the shapes that there are examples of, each for itself.
        shapes = Demand(
            buckets_of=lambda tokens, _: [bucket for bucket in examples if bucket.tokens == tokens],
            refusal=lambda shape, bucket: None if shape == bucket else Fallback.OTHER_SHAPES,
            cost=lambda bucket: float(bucket.tokens),
            exact_below=math.inf,
        )
        shapes.buckets.append(first.bucket)
        demand = shapes if self._grows else None
        unproven = "" if self._grows else "ranks that share it do not agree on proofs"
        shape = attrgetter("bucket")
        piece = Piece(program=program, buckets=[first.bucket], growth=demand, shape=shape, unproven=unproven)
        self.manager.record([piece], demand)
        self._examples, self.demand = examples, demand

    def captured(self) -> None:
        """See `Workload`."""
        sequence, batch, _ = self._shapes().decoder_input.shape
        announce(f"{self.title}: whole, {batch} sequence(s) of {sequence} tokens a microbatch")

    def forget(self) -> None:
        """See `Workload`."""
        self._examples, self.demand = {}, None

    def notes(self) -> dict[str, str]:
        """See `Workload`."""
        return {"steps": f"{self.replayed_steps} of {self.steps} training steps replayed every microbatch"}
