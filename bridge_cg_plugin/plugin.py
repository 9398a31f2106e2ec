"""Switching the plugin on and off. Imports neither torch nor Megatron."""

import importlib
import logging
import os
import sys
from types import ModuleType
from typing import Any

LOGGER = logging.getLogger("bridge_cg_plugin")
SWITCH = "BRIDGE_CG_PLUGIN"

# Upstream module -> modules of this package that patch it when it is imported.
_PATCHED: dict[str, tuple[str, ...]] = {
    "megatron.bridge.training.train": ("train_loop",),
    "megatron.bridge.training.config": ("training_config",),
    "megatron.bridge.training.vlm_step": ("batches",),
    "megatron.bridge.models.qwen_vl.qwen3_vl_step": ("batches", "language_model"),
    "megatron.core.transformer.transformer_layer": ("language_model",),
    "megatron.bridge.models.qwen_vl.qwen3_vl_provider": ("provider_fields",),
    "megatron.bridge.models.qwen_vl.qwen35_vl_provider": ("provider_fields",),
    "megatron.bridge.models.qwen_vl.modelling_qwen3_vl.vision_model": ("qwen3_vl",),
    "megatron.bridge.recipes": ("recipe_names",),
    "megatron.bridge.recipes.qwen_vl": ("recipe_names",),
}
PATCHED_MODULES = tuple(_PATCHED)
_on = False
_hooked = False


def autoload() -> None:
    """Entry point that PyTorch calls at its import: activate unless the environment says no; never raises."""
    if os.environ.get(SWITCH, "1").strip().lower() in ("0", "false", "off"):
        return
    try:
        activate()
    except Exception:
        LOGGER.exception("bridge_cg_plugin could not be activated; training runs without it")


def activate() -> None:
    """Patch upstream modules now if they are imported, else when they are. Calling it again does nothing."""
    global _on, _hooked
    _on = True
    if not _hooked:
        from wrapt import register_post_import_hook

        for name in _PATCHED:
            register_post_import_hook(_patch_module, name)
        _hooked = True
        return
    for name in _PATCHED:
        if name in sys.modules:
            _patch_module(sys.modules[name])


def deactivate() -> None:
    """Undo every patch and drop every graph."""
    global _on
    _on = False
    helper = sys.modules.get("bridge_cg_plugin.upstream.helper")
    if helper is not None:
        for active in helper.active_helpers():
            active.delete_cuda_graphs()
    for patch in _loaded_patches():
        patch.revert()


def status() -> dict[str, Any]:
    """Return whether the plugin is on and the state of every patch known so far."""
    return {
        "active": _on,
        "patches": {p.name: {"state": p.state, "reason": p.reason, "purpose": p.purpose} for p in _loaded_patches()},
    }


def broken_patches() -> dict[str, str]:
    """Return the patches that do not fit the installed release, with what was found."""
    return {patch.name: patch.reason for patch in _loaded_patches() if patch.state == "broken"}


def _patch_module(module: ModuleType) -> None:
    # A hook that raises would fail upstream's import.
    if not _on:
        return
    for name in _PATCHED[module.__name__]:
        try:
            patches = importlib.import_module(f"bridge_cg_plugin.upstream.{name}").PATCHES
            for patch in patches:
                if patch.module == module.__name__:
                    patch.apply(module)
                    if patch.state == "broken":
                        LOGGER.warning("patch %s is not applied: %s", patch.name, patch.reason)
        except Exception:
            LOGGER.exception("bridge_cg_plugin could not patch %s", module.__name__)


def _loaded_patches() -> list[Any]:
    names = dict.fromkeys(name for group in _PATCHED.values() for name in group)
    modules = (sys.modules.get(f"bridge_cg_plugin.upstream.{name}") for name in names)
    return [patch for module in modules if module is not None for patch in module.PATCHES]
