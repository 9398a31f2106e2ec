"""What a decoder is to its packed-sequence graphs: its calls, its pieces, its upstream side."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from ...graphs.fallback import Fallback
from ...graphs.piece import CallSite
from ...graphs.replays.replay import BackwardObserver
from ..experts.exchange import ExpertExchange
from .program import Changed, Run


@dataclass(frozen=True, slots=True)
class DecoderCall:
    """The arguments of one call of a decoder.

    Attributes:
        hidden: `[tokens / (shards * ranks), 1, width]`.
        angles: Rotary angles; None where nothing is rotated.
        offsets: `cu_seqlens` by name; None where the batch has none.
        max_seqlens: Tokens of the longest document by name.
        visual: What is added behind the first layers: `[1, tokens]` mask, and `[marked tokens, width]` for each layer.
    """

    hidden: Tensor
    angles: Tensor | None
    offsets: Mapping[str, Tensor | None]
    max_seqlens: Mapping[str, int]
    visual: tuple[Tensor, Sequence[Tensor]] | None = None


@dataclass(frozen=True, slots=True)
class DecoderPart:
    """A piece of a decoder that becomes a region of its own.

    Attributes:
        name: Of the region.
        owner: The layer; the decoder itself for all layers.
        uses: Names of the owner's submodules whose parameters the piece uses; none are all of them.
        run: The piece.
        site: Where the layer calls it; None where the decoder's forward is the call.
        outputs: How many tensors the piece gives.
        counted: Whether the piece must know how many tokens are no padding.
        changed: Whether its weights must be quantized again; None where it quantizes none.
    """

    name: str
    owner: nn.Module
    uses: Sequence[str]
    run: Run
    site: CallSite | None = None
    outputs: int = 1
    counted: bool = False
    changed: Changed | None = None

    def roots(self) -> list[nn.Module]:
        """Return the modules whose parameters the piece uses now: a layer's submodules may be replaced."""
        return [self.owner.get_submodule(name) for name in self.uses or ("",)]


class Scales(BackwardObserver, Protocol):
    """Scales that follow what microbatches hold."""

    def after_forward(self) -> None:
        """Called after the forward of a microbatch was replayed."""


class DecoderFamily(Protocol):
    """What the plugin must know of a decoder's upstream code.

    Attributes:
        per_position: Whether rotary angles come with a row per position.
        absolute: Whether a table with a row per token is taken by the place in the pack.
        shards: Tensor-parallel ranks that hold a part of the tokens each.
        ranks: Context-parallel ranks that hold two chunks of every document each.
        rank: Which of them this is.
        rows: What a rank's tokens in a bucket are a multiple of.
        exchange: Ranks of expert parallelism whose exchanges are in what is recorded; None without any.
    """

    per_position: bool
    absolute: bool
    shards: int
    ranks: int
    rank: int
    rows: int
    exchange: ExpertExchange | None

    def kernels(self, modules: Sequence[nn.Module], /) -> AbstractContextManager[Any]:
        """Be around recorded work; swaps in kernels that compute the same."""

    def fused_accumulation(self, modules: Sequence[nn.Module], /) -> AbstractContextManager[Any]:
        """Be around recorded work whose weight gradients are added to `main_grad` inside the GEMM."""

    def known_activations(self, modules: Sequence[nn.Module], /) -> AbstractContextManager[Any]:
        """Be around recorded work where activations leave the device: notes what they are."""

    def read(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> DecoderCall | Fallback:
        """Return a call's arguments, or why a graph cannot serve it."""

    def parts(self, modules: Sequence[str]) -> list[DecoderPart]:
        """Return the pieces to record; no modules are all layers as one piece."""

    def weights_per_token(self) -> float:
        """Return how many weights of this rank a token is multiplied with; of experts, those that it is sent to."""

    def scales(self) -> Scales | None:
        """Return what is told of replays; None where no scales outlive a microbatch."""

    def statistics_kept(self) -> AbstractContextManager[None]:
        """Be around captures, whose passes leave no trace in what layers count and log."""
