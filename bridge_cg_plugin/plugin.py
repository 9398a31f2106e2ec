"""Switching the plugin on and off. Imports neither torch nor Megatron."""

import importlib
import logging
import os
import sys
from types import ModuleType
from typing import Any

LOGGER = logging.getLogger("bridge_cg_plugin")
SWITCH = "BRIDGE_CG_PLUGIN"

# Upstream module -> modules of this package that patch it when it is imported. The registry says the same, which a test
# checks; it is not imported here because that would take half of what loading the plugin takes.
PATCHED: dict[str, tuple[str, ...]] = {
    "megatron.bridge.training.train": ("train_loop", "packed_helper"),
    "megatron.bridge.training.config": ("training_config",),
    "megatron.bridge.training.gpt_step": ("batches",),
    "megatron.bridge.training.vlm_step": ("batches",),
    "megatron.bridge.models.qwen_vl.qwen3_vl_step": ("batches", "language_model"),
    "megatron.core.transformer.transformer_layer": ("language_model",),
    "megatron.core.packed_seq_params": ("pack_indices",),
    "megatron.bridge.models.gpt_provider": ("provider_fields",),
    "megatron.bridge.models.hybrid.hybrid_provider": ("provider_fields",),
    "megatron.bridge.models.mamba.mamba_provider": ("provider_fields",),
    "megatron.core.full_cuda_graph": ("full_iteration",),
    "megatron.bridge.models.qwen_vl.qwen3_vl_provider": ("provider_fields", "virtual_stages"),
    "megatron.bridge.models.qwen_vl.qwen35_vl_provider": ("provider_fields",),
    "megatron.bridge.models.qwen_vl.qwen25_vl_provider": ("provider_fields",),
    "megatron.bridge.models.gemma_vl.gemma3_vl_provider": ("provider_fields",),
    "megatron.bridge.models.qwen_vl.modelling_qwen3_vl.model": ("qwen3_vl", "deepstack"),
    "megatron.bridge.models.qwen_vl.modelling_qwen3_vl.vision_model": ("qwen3_vl",),
    "megatron.bridge.models.qwen_vl.modelling_qwen3_vl.text_model": ("language_offload",),
    "megatron.bridge.recipes": ("recipe_names",),
    "megatron.bridge.recipes.qwen_vl": ("recipe_names",),
    "megatron.bridge.training.utils.omegaconf_utils": ("performance",),
    # Modules of upstream's scripts/performance; others of these names are left alone.
    "argument_parser": ("performance",),
    "utils.overrides": ("performance",),
    "utils.utils": ("performance",),
}
# A reload of this module changes nothing.
_on: bool = globals().get("_on", False)
_hooked: bool = globals().get("_hooked", False)


def autoload() -> None:
    """Entry point that PyTorch calls at its import: activate unless the environment says no; never raises."""
    if os.environ.get(SWITCH, "1").strip().lower() in ("0", "false", "off"):
        return
    try:
        activate()
    except Exception:
        LOGGER.exception("bridge_cg_plugin could not be activated; training runs without it")


def activate() -> None:
    """Patch upstream modules now if they are imported, else when they are. Calling it again does nothing.

    After another plugin replaced a patched attribute, or upstream's module was reloaded, it patches what is there now.
    """
    global _on, _hooked
    _on = True
    if not _hooked:
        from wrapt import register_post_import_hook

        for name in PATCHED:
            register_post_import_hook(_patch_module, name)
        _hooked = True
        return
    for name in PATCHED:
        if name in sys.modules:
            _patch_module(sys.modules[name])


def deactivate() -> None:
    """Undo every patch and drop every graph."""
    global _on
    _on = False
    helper = sys.modules.get("bridge_cg_plugin.upstream.graph_helper")
    if helper is not None:
        for active in helper.active_helpers():
            active.delete_cuda_graphs()
    full_iteration = sys.modules.get("bridge_cg_plugin.upstream.full_iteration")
    if full_iteration is not None:
        full_iteration.CURRENT.end()
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
    from .upstream.states import seam_states as states_with

    return states_with(_loaded_patches(), _on)


def broken_seams() -> dict[str, str]:
    """Return the seams that do not fit, with what was found.

    First it patches functions again that somebody replaced after the plugin did, like any function of upstream.
    """
    if _on:
        activate()
    return {name: found.reason for name, found in seam_states().items() if found.state == "broken"}


def _patch_module(module: ModuleType) -> None:
    # A hook that raises would fail upstream's import.
    if not _on:
        return
    for name in PATCHED[module.__name__]:
        try:
            patches = importlib.import_module(f"bridge_cg_plugin.upstream.{name}").PATCHES
            for patch in patches:
                if patch.module == module.__name__:
                    before = patch.state, patch.reason
                    patch.apply(module)
                    if (patch.state, patch.reason) != before:
                        _log(patch)
        except Exception:
            LOGGER.exception("bridge_cg_plugin could not patch %s", module.__name__)


def _log(patch: Any) -> None:
    level = logging.ERROR if patch.state == "broken" else logging.DEBUG
    LOGGER.log(level, "seam %s is %s: %s", patch.name, patch.state, patch.reason or patch.seam.purpose)


def _loaded_patches() -> list[Any]:
    names = dict.fromkeys(name for group in PATCHED.values() for name in group)
    modules = (sys.modules.get(f"bridge_cg_plugin.upstream.{name}") for name in names)
    return [patch for module in modules if module is not None for patch in module.PATCHES]
