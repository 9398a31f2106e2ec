"""Combinations of Bridge options that vision graphs cannot work with, refused before the model is built."""

from collections.abc import Callable
from typing import Any

from ..options import PROVIDER_FIELDS, OptionError, vision_options
from ..plugin import broken_seams
from .environment import check_process
from .patches import DriftError, Patch, bridge_release
from .registry import seam


def check_seams() -> None:
    """Refuse vision graphs where upstream does not look as the plugin relies on.

    Raises:
        DriftError: Names the seams, the release and what was found.
    """
    broken = broken_seams()
    if broken:
        found = "; ".join(f"{name}: {reason}" for name, reason in broken.items())
        raise DriftError(
            f"vision_cuda_graph_impl=transformer_engine needs parts of upstream that do not fit in megatron-bridge "
            f"{bridge_release()} ({found}). Set vision_cuda_graph_impl=none or use a release of the version table."
        )


def check_training_config(config: Any) -> None:
    """Check a Bridge `ConfigContainer` for everything that vision graphs depend on.

    Raises:
        OptionError: Something cannot work; nothing was built yet.
    """
    model = config.model
    if not hasattr(model, PROVIDER_FIELDS["impl"]):
        return
    options = vision_options(model, getattr(model, "spatial_merge_size", 2) ** 2)
    if not options.enabled:
        return
    check_process()
    check_seams()
    if not (getattr(model, "use_te_rng_tracker", False) or getattr(config.rng, "te_rng_tracker", False)):
        raise OptionError(
            "rng.te_rng_tracker",
            False,
            "true with vision_cuda_graph_impl=transformer_engine",
            "Set rng.te_rng_tracker=true and model.use_te_rng_tracker=true: other random states cannot be captured.",
        )
    if getattr(config.ddp, "use_megatron_fsdp", False):
        raise OptionError(
            "ddp.use_megatron_fsdp",
            True,
            "false with vision_cuda_graph_impl=transformer_engine",
            "Megatron-FSDP moves parameters between steps, a graph reads them where they were at capture.",
        )
    _check_recompute(model)


def _check_recompute(model: Any) -> None:
    granularity = getattr(model, "recompute_granularity", None)
    modules = getattr(model, "recompute_modules", None)
    modules = ["core_attn"] if modules is None else modules  # megatron-core's default
    if granularity is None or (granularity == "selective" and not {"core_attn", "mlp", "layernorm"} & set(modules)):
        return
    raise OptionError(
        "model.recompute_granularity",
        granularity,
        "null with vision_cuda_graph_impl=transformer_engine",
        "Bridge applies it to the vision encoder too, whose activations live in the graph's memory; lower "
        "max_vision_cuda_graph_seq_length if memory is short.",
    )


def _checked(old: Callable[..., None]) -> Callable[..., None]:
    def validate(self, *args: Any, **kwargs: Any) -> None:
        check_training_config(self)
        return old(self, *args, **kwargs)

    return validate


PATCHES = (Patch(seam("config_check"), _checked),)
