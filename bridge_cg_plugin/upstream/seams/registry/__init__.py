"""The seam registry: every place where the plugin touches Bridge, megatron-core or Transformer Engine.

Data only, without torch. Someone who ports to a new release starts here: docs/releases.md.
"""

from dataclasses import replace

from ..seam import Seam
from . import bridge, encoders, engine

# What runs inside graphs where a swap does not fit -> the seams of that swap. All others cost their features.
INSTEAD = {
    "upstream's rotation": ("rotary_kernel",),
    "rotation behind the projection": ("vision_attention", "vision_projection"),
    "upstream's sums of bias and residual": ("layer_residuals",),
    "upstream's bias and activation": ("mlp_forward",),
    "Transformer Engine's attention": (
        *("attention_forward", "te_attention", "attention_settings", "attention_scale"),
        *("attention_choice", "attention_backend", "flash_attention_installed"),
    ),
    "weight gradients on the main stream": ("gemm_workspace", "side_products.linear", "side_products.layernorm_linear"),
    "weight gradients added after their product": ("weight_gradients.Linear", "weight_gradients.LayerNormLinear"),
    "placeholders as large as weights": ("placeholder_gradients.linear", "placeholder_gradients.layernorm_linear"),
    "Transformer Engine's LayerNorm in backward": ("layernorm_backward", "layernorm_operation"),
    "Transformer Engine's RMSNorm in backward": ("rmsnorm_operation",),
    "offloading of what could be recomputed": ("layernorm_linear_forward",),
}
_BY_SEAM = {name: words for words, names in INSTEAD.items() for name in names}
SEAMS: tuple[Seam, ...] = tuple(
    replace(seam, instead=_BY_SEAM.get(seam.name, "")) for seam in (*bridge.SEAMS, *encoders.SEAMS, *engine.SEAMS)
)
_BY_NAME = {seam.name: seam for seam in SEAMS}


def seam(name: str) -> Seam:
    """Return a seam by its name.

    Raises:
        KeyError: There is none of this name.
    """
    return _BY_NAME[name]
