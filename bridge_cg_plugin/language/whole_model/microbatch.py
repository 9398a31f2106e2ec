"""One microbatch's call of the language model, taken apart into what a graph reads and what must not change."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ...graphs.fallback import Fallback
from ...graphs.planning.buckets import Bucket
from ...graphs.replays.inputs import want_gradients

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
