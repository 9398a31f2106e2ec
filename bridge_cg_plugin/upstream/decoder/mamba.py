"""megatron-core's Mamba layers over packed documents."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from ...graphs.modules import every_module
from ...graphs.piece import CallSite
from ...language.packed.decoder import DecoderPart
from ...language.packed.program import RecordedPack
from ...options import OptionError
from ...options.packed import MAX_PACKED_SEQS
from ...upstream_types import UpstreamModule
from ..attributes import overridden
from ..seams.registry import seam
from .layers import packed_params

LAYER = seam("mamba_layer")
MIXER = seam("mamba_mixer")
# The mixer's helper keeps its parameters under their own name with this behind it.
HELD = "_cp1"


def is_mamba(layer: nn.Module) -> bool:
    """Whether this is one of megatron-core's Mamba layers."""
    module = sys.modules.get(LAYER.module)
    return module is not None and isinstance(layer, module.MambaLayer)


def check_mamba_layer(layer: UpstreamModule) -> None:
    """Refuse a mixer that was not looked at.

    Raises:
        OptionError: Names the mixer.
    """
    if not _is_mixer(layer.mixer):
        why = f"its Mamba layers must have megatron-core's MambaMixer, and one has {type(layer.mixer).__name__}"
        raise OptionError.because(
            MAX_PACKED_SEQS, f"Cannot use {MAX_PACKED_SEQS} on this model: {why}. Remove the option."
        )


def mamba_part(layer: nn.Module, parts: int) -> DecoderPart:
    """Return a whole Mamba layer as a piece.

    Args:
        layer: The layer.
        parts: Ranks that hold a part of the tokens each; the mixer has all of them, and a part of the heads.
    """
    forward: Callable[..., Any] = layer.forward

    def run(pack: RecordedPack) -> tuple[Tensor]:
        params = packed_params(pack.offsets, pack.longest, pack.hidden.shape[0] * parts)
        return (forward(hidden_states=pack.hidden, packed_seq_params=params),)

    return DecoderPart(f"packed_mamba_{layer.layer_number}", layer, (), run, CallSite(layer, "forward"))


@contextmanager
def current_parameters(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Let the Mamba mixers below `modules` compute with the parameters that they have now.

    A mixer hands its parameters over once, to a helper that is no module: what stands in for a parameter while work is
    recorded would not reach it, and gradients would go past the graph.
    """
    with ExitStack() as stack:
        for mixer in filter(_is_mixer, every_module(modules)):
            for held in [name for name, value in vars(mixer.cp).items() if isinstance(value, nn.Parameter)]:
                stack.enter_context(overridden(mixer.cp, held, getattr(mixer, held.removesuffix(HELD))))
        yield


def _is_mixer(module: nn.Module) -> bool:
    core = sys.modules.get(MIXER.module)
    return core is not None and type(module) is core.MambaMixer
