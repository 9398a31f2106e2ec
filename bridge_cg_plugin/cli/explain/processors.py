"""How images of a recipe become patches."""

from typing import Any

from bridge_cg_plugin.cli.planner.images import Processor

from .encoders import QWEN3_VL, QWEN25_VL, QWEN35_VL, Encoder

# Pixels between which Bridge's `qwen2_5_collate_fn` has a processor keep images, and sides of patches.
_LIMITS = {"min_pixels": 200_704, "max_pixels": 1_003_520}
PATCHES = {QWEN3_VL: 16, QWEN35_VL: 16, QWEN25_VL: 14}
# Fields of providers that have the sizes of patches.
_FIELDS = {"patch": "patch_size", "merge": "spatial_merge_size", "temporal": "temporal_patch_size"}


def processor_of(config: Any, encoder: Encoder) -> Processor:
    """Return the sizes that the provider and the data have; what they lack is of Bridge's or of the encoder's kind.

    Args:
        config: A Bridge `ConfigContainer`.
        encoder: Its model's, of a kind in `PATCHES`.
    """
    held = {name: getattr(config.model, field, None) for name, field in _FIELDS.items()}
    data = getattr(getattr(config, "dataset", None), "task_encoder", None)
    held |= {name: getattr(data, name, None) for name in _LIMITS}
    sizes = {name: size for name, size in held.items() if isinstance(size, int)}
    return Processor(**{"patch": PATCHES[encoder.family], **_LIMITS, **sizes})
