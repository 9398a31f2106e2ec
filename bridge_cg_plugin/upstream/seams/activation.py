"""Which of upstream's modules are patched by which of this package's, and putting it into effect.

Imports neither torch nor Megatron.
"""

import functools
import importlib
import logging
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ...announce import LOGGER, warn
from .contract import CONTRACT, remember
from .encoders import models
from .known_encoders import other_providers

# Upstream module -> modules of this package that patch it when it is imported. The registry has the same, which a test
# checks; it is not imported here because that would take half of what loading the plugin takes.
PATCHED: dict[str, tuple[str, ...]] = {
    "megatron.bridge.training.train": ("hooks.loops.train_loop", "hooks.helpers.packed_helper"),
    "megatron.bridge.training.config": ("hooks.configuration.training_config",),
    "megatron.bridge.training.gpt_step": ("hooks.data.batches",),
    "megatron.bridge.training.utils.visual_inputs": ("hooks.data.batch_copies",),
    "megatron.bridge.models.qwen_vl.qwen3_vl_step": (
        *("hooks.data.batches", "hooks.data.host_tokens", "decoder.per_layer_graphs"),
    ),
    "megatron.core.transformer.transformer_layer": ("decoder.per_layer_graphs",),
    "megatron.core.pipeline_parallel.fine_grained_activation_offload": ("decoder.offloaded_groups",),
    "megatron.core.packed_seq_params": ("hooks.data.pack_indices",),
    "megatron.bridge.models.gpt_provider": ("hooks.configuration.provider_fields",),
    "megatron.bridge.models.hybrid.hybrid_provider": ("hooks.configuration.provider_fields",),
    "megatron.bridge.models.mamba.mamba_provider": ("hooks.configuration.provider_fields",),
    "megatron.core.rerun_state_machine": ("hooks.loops.loss_checks",),
    "megatron.core.full_cuda_graph": ("hooks.helpers.full_iteration",),
    "megatron.core.pipeline_parallel.schedules": ("hooks.loops.any_loop",),
    "megatron.bridge.models.qwen_vl.qwen3_vl_provider": (
        "hooks.configuration.provider_fields",
        "parallel.virtual_stages",
    ),
    "megatron.bridge.models.qwen_vl.qwen35_vl_provider": ("hooks.configuration.provider_fields",),
    "megatron.bridge.models.qwen_vl.modelling_qwen3_vl.model": (
        *("encoders.deepstack", "hooks.data.between", "decoder.variable_lengths"),
    ),
    "megatron.bridge.models.qwen_vl.modelling_qwen3_vl.vision_model": ("encoders.qwen3_vl_patches",),
    "megatron.bridge.models.qwen_vl.modelling_qwen3_vl.text_model": ("decoder.offload",),
    "megatron.bridge.models.qwen_vl.modelling_qwen3_vl.attention": ("decoder.offload",),
    "megatron.bridge.recipes": ("hooks.configuration.recipe_names",),
    "megatron.bridge.recipes.qwen_vl": ("hooks.configuration.recipe_names",),
    "megatron.bridge.training.utils.omegaconf_utils": ("hooks.configuration.performance_scripts",),
    # Modules of upstream's scripts/performance; others of these names are left alone.
    "argument_parser": ("hooks.configuration.performance_scripts",),
    "utils.overrides": ("hooks.configuration.performance_scripts",),
    "utils.utils": ("hooks.configuration.performance_scripts",),
    **{model.module: ("hooks.configuration.provider_fields",) for model in models()},
    **{step: ("hooks.data.batches",) for model in models() for step in model.steps},
}
_on = False
_hooked = False
_before_deactivation: list[Callable[[], None]] = []


def activate() -> None:
    """Patch upstream modules now if they are imported, else when they are. Calling it again does nothing.

    After another plugin replaced a patched attribute, or upstream's module was reloaded, it patches what is there now.
    """
    global _on, _hooked
    _on = True
    if not _hooked:
        from wrapt import register_post_import_hook

        _patch_other_providers()
        for name in dict.fromkeys((*CONTRACT, *PATCHED)):
            register_post_import_hook(_imported, name)
        _hooked = True
        return
    for name in PATCHED:
        if name in sys.modules:
            patch_module(sys.modules[name])


def _patch_other_providers() -> None:
    """Have the providers patched whose encoder another package brings."""
    try:
        for module, _ in other_providers():
            PATCHED.setdefault(module, ("hooks.configuration.provider_fields",))
    except Exception:
        LOGGER.exception("bridge_cg_plugin could not read the entry points of other packages")


def before_deactivation(drop: Callable[[], None]) -> None:
    """Have a function called before patches are undone: it drops what runs by them."""
    _before_deactivation.append(drop)


def deactivate() -> None:
    """Undo every patch and drop every graph."""
    global _on
    _on = False
    for drop in _before_deactivation:
        drop()
    for patch in reversed(_loaded_patches()):
        patch.revert()


def status() -> dict[str, Any]:
    """Return whether the plugin is on and the state of every patch whose upstream module was imported."""
    patches = _loaded_patches()
    for patch in patches:
        patch.look()
    return {
        "active": _on,
        "patches": {p.name: {"state": p.state, "reason": p.reason, "purpose": p.seam.purpose} for p in patches},
    }


def seam_states() -> dict[str, Any]:
    """Return the `SeamState` of every seam by name. Imports nothing of upstream: its sources are read."""
    from .states import seam_states as states_with

    return states_with(_loaded_patches(), _on)


def broken_seams() -> dict[str, str]:
    """Return the seams that do not fit, with what was found.

    First it patches functions again that somebody replaced after the plugin did, like any function of upstream.
    """
    if _on:
        activate()
    return {name: found.reason for name, found in seam_states().items() if found.state == "broken"}


def _imported(module: ModuleType) -> None:
    """Note what a module of upstream ships before anybody can patch it, then apply the plugin's own patches."""
    remember(module)
    if module.__name__ in PATCHED:
        patch_module(module)


def patch_module(module: ModuleType) -> None:
    """Apply this package's patches of one of upstream's modules, unless the plugin is off; never raises."""
    # A hook that raises would fail upstream's import.
    if not _on or hasattr(module, "__stand_in__"):  # `bridge-cg explain` does without most of upstream's modules
        return
    for name in PATCHED[module.__name__]:
        try:
            if _stays_off():
                return
            patches = importlib.import_module(f"bridge_cg_plugin.upstream.{name}").PATCHES
            for patch in patches:
                if patch.module == module.__name__:
                    before = patch.state, patch.reason
                    patch.apply(module)
                    if (patch.state, patch.reason) != before:
                        _log(patch)
        except Exception:
            LOGGER.exception("bridge_cg_plugin could not patch %s", module.__name__)


@functools.cache
def _stays_off() -> bool:
    """Whether the installed Bridge is too old to be patched; says so once."""
    from .patches import bridge_release
    from .releases import too_old

    why = too_old(bridge_release())
    if why:
        warn(f"{why}. The plugin stays off")
    return bool(why)


def _log(patch: Any) -> None:
    level = logging.ERROR if patch.state == "broken" else logging.DEBUG
    LOGGER.log(level, "seam %s is %s: %s", patch.name, patch.state, patch.reason or patch.seam.purpose)


def _loaded_patches() -> list[Any]:
    names = dict.fromkeys(name for group in PATCHED.values() for name in group)
    modules = (sys.modules.get(f"bridge_cg_plugin.upstream.{name}") for name in names)
    return [patch for module in modules if module is not None for patch in module.PATCHES]
