"""Which of upstream's modules are patched by which of this package's, and putting it into effect.

Imports neither torch nor Megatron.
"""

import functools
import importlib
import logging
import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

from ...announce import LOGGER, warn
from .contract import CONTRACT, remember
from .encoders import DECLARED_MODELS, MODELS, QWEN3_VL_MODELS, QWEN_VL, other_providers

_CORE, _TRAINING, _QWEN3_VL = "megatron.core", "megatron.bridge.training", f"{QWEN_VL}.modelling_qwen3_vl"
_QWEN3_VL_STEP = f"{QWEN_VL}.qwen3_vl_step"
# Module of this package -> upstream's modules that it patches when they are imported, in the order in which those of
# one module are applied.
PATCHING: dict[str, tuple[str, ...]] = {
    "hooks.train_loop": (f"{_TRAINING}.train", f"{_CORE}.rerun_state_machine"),
    "hooks.any_loop": (f"{_CORE}.pipeline_parallel.schedules",),
    "hooks.helpers.constructors": (f"{_CORE}.full_cuda_graph",),
    "hooks.training_config": (f"{_TRAINING}.config",),
    "hooks.graph_fields": (
        *(f"{MODELS}.{name}" for name in ("gpt_provider", "hybrid.hybrid_provider", "mamba.mamba_provider")),
        *(model.module for model in (*QWEN3_VL_MODELS, *DECLARED_MODELS)),
    ),
    "hooks.recipes": ("megatron.bridge.recipes", "megatron.bridge.recipes.qwen_vl"),
    "hooks.overrides": (
        f"{_TRAINING}.utils.omegaconf_utils",
        "utils.overrides",  # of upstream's scripts/performance; another module of this name is left alone
    ),
    "hooks.batches": (
        *(f"{_TRAINING}.gpt_step", _QWEN3_VL_STEP),
        *(step for model in DECLARED_MODELS for step in model.steps),
        f"{_TRAINING}.utils.visual_inputs",
    ),
    "hooks.qwen3_vl": (
        *(f"{_QWEN3_VL}.model", f"{_QWEN3_VL}.vision_model"),
        f"{_CORE}.transformer.transformer_layer",
        *(model.module for model in QWEN3_VL_MODELS[:2]),
    ),
    "hooks.between": (f"{_QWEN3_VL}.model", _QWEN3_VL_STEP, f"{_CORE}.packed_seq_params"),
}
# Patched while the plugin is switched off, where a model may ask for graphs all the same.
OBSERVING, OBSERVED = "hooks.switched_off", (f"{_TRAINING}.config", f"{_CORE}.pipeline_parallel.schedules")
_on = False
_hooked = False
_before_deactivation: list[Callable[[], None]] = []


def activate() -> None:
    """Patch upstream modules now if they are imported, else when they are. Calling it again does nothing.

    After another plugin replaced a patched attribute, it patches what is there now.
    """
    global _on, _hooked
    _on = True
    for patch in loaded_patches((OBSERVING,)):
        patch.revert()
    if not _hooked:
        from wrapt import register_post_import_hook

        for name in dict.fromkeys((*CONTRACT, MODELS, *patched_modules())):
            register_post_import_hook(_imported, name)
        _hooked = True
        return
    for name in patched_modules():
        if name in sys.modules:
            patch_module(sys.modules[name])


def observe() -> None:
    """With the plugin switched off, let a line be printed for models that ask for graphs."""
    from wrapt import register_post_import_hook

    for name in OBSERVED:
        register_post_import_hook(_observed, name)


def _observed(module: ModuleType) -> None:
    if not (_on or hasattr(module, "__stand_in__")):
        _patch(module, OBSERVING)


def patched_modules() -> tuple[str, ...]:
    """Return upstream's modules that are patched."""
    return tuple(dict.fromkeys(name for names in PATCHING.values() for name in names))


def before_deactivation(drop: Callable[[], None]) -> None:
    """Have a function called before patches are undone: it drops what runs by them."""
    _before_deactivation.append(drop)


def deactivate() -> None:
    """Undo every patch and drop every graph."""
    global _on
    _on = False
    for drop in _before_deactivation:
        drop()
    for patch in reversed(loaded_patches()):
        patch.revert()


def is_on() -> bool:
    """Whether the plugin is on."""
    return _on


def status() -> dict[str, Any]:
    """Return whether the plugin is on and the state of every patch whose upstream module was imported.

    With the plugin switched off, what tells of it at a model that asks for graphs is among them.
    """
    patches = loaded_patches((*PATCHING, *(() if _on else (OBSERVING,))))
    for patch in patches:
        patch.look()
    return {
        "active": _on,
        "patches": {p.name: {"state": p.state, "reason": p.reason, "purpose": p.seam.purpose} for p in patches},
    }


def _imported(module: ModuleType) -> None:
    """Note what a module of upstream ships before anybody can patch it, then apply the plugin's own patches."""
    remember(module)
    if module.__name__ == MODELS:
        patch_other_providers()
    patch_module(module)


def patch_other_providers() -> None:
    """Patch the providers whose encoder another package brings, too.

    Entry points are read with Bridge's models: it would take most of the time that the plugin takes to load.
    """
    from wrapt import register_post_import_hook

    try:
        modules = tuple(module for module, _ in other_providers())
    except Exception:
        LOGGER.exception("bridge_cg_plugin could not read the entry points of other packages")
        return
    PATCHING["hooks.graph_fields"] += modules
    for name in modules:
        register_post_import_hook(_imported, name)


def patch_module(module: ModuleType) -> None:
    """Apply this package's patches of one of upstream's modules, unless the plugin is off; never raises."""
    # A hook that raises would fail upstream's import.
    if not _on or hasattr(module, "__stand_in__"):  # `bridge-cg explain` does without most of upstream's modules
        return
    for name in (name for name, modules in PATCHING.items() if module.__name__ in modules):
        _patch(module, name)


def _patch(module: ModuleType, name: str) -> None:
    """Apply the patches of one of upstream's modules that one of this package's holds; never raises."""
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
    from .seam import too_old

    why = too_old(bridge_release())
    if why:
        warn(f"{why}. The plugin stays off")
    return bool(why)


def _log(patch: Any) -> None:
    level = logging.ERROR if patch.state == "broken" else logging.DEBUG
    LOGGER.log(level, "seam %s is %s: %s", patch.name, patch.state, patch.reason or patch.seam.purpose)


def loaded_patches(names: Iterable[str] = PATCHING) -> list[Any]:
    """Return the patches, of these modules of the package, whose upstream module was imported."""
    modules = (sys.modules.get(f"bridge_cg_plugin.upstream.{name}") for name in names)
    return [patch for module in modules if module is not None for patch in module.PATCHES]
