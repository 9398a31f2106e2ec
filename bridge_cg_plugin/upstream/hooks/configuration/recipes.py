"""Bridge's recipe functions by name, and the plugin's presets among them, where Bridge's launchers look them up."""

import difflib
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ....options import OptionError
from ....recipes import DERIVED_RECIPES, SMALL_RECIPES
from ...seams.patches import Additions
from ...seams.registry import seam

PACKAGES = ("megatron.bridge.recipes", "megatron.bridge.perf_recipes")

# What Bridge and Transformers say where they get no answer from the hub.
_NO_HUB = ("Failed to load configuration from", "couldn't connect to 'https://huggingface.co'")


def build_recipe(name: str) -> Any:
    """Return the configuration that a recipe of this name makes.

    Raises:
        OptionError: There is no such recipe, or it does not build without further arguments.
    """
    known: dict[str, Callable[[], Any]] = {}
    for module in _modules():
        found = getattr(module, name, None)
        if inspect.isfunction(found):
            return _built(name, found)
        known.update({key: value for key, value in vars(module).items() if key.endswith("_config")})
    spelt = {key.lower(): key for key in known}
    near = [spelt[key] for key in difflib.get_close_matches(name.lower(), spelt, n=1, cutoff=0.6)]
    raise OptionError.unknown(name, "recipe", near[0] if near else "")


def recipe_names() -> set[str]:
    """Return the names of all recipes."""
    found = (item for module in _modules() for item in vars(module).items())
    return {name for name, value in found if name.endswith("_config") and name[0] != "_" and inspect.isfunction(value)}


def is_benchmark(name: str) -> bool:
    """Whether a recipe is one of Bridge's benchmarks, and not also one of its library."""
    modules = [module.__name__ for module in _modules() if inspect.isfunction(getattr(module, name, None))]
    return bool(modules) and all(module.startswith(PACKAGES[1]) for module in modules)


def _built(name: str, recipe: Callable[[], Any]) -> Any:
    try:
        return recipe()
    except Exception as error:
        why = f"it stopped with {type(error).__name__}: {str(error).rstrip('.')}."
        if any(words in str(error) for words in _NO_HUB):
            why = no_configuration(name)
        raise OptionError.because("recipe", f"Cannot build recipe {name}: {why}") from error


def no_configuration(name: str) -> str:
    """Return why a recipe does not build where nothing has its model's configuration."""
    return (
        "its Hugging Face configuration is not cached, and the hub cannot be reached. "
        f"`bridge-cg explain {name}` answers without it."
    )


def _modules() -> Iterator[Any]:
    for name in PACKAGES:
        try:
            package = importlib.import_module(name)
        except Exception as error:
            if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
                continue  # an older release has no such package
            why = f"{type(error).__name__}: {str(error).rstrip('.')}"
            raise OptionError.because(
                "recipe", f"Cannot import {name}: {why}. `bridge-cg doctor` names what is broken."
            ) from error
        yield package
        for found in pkgutil.iter_modules(package.__path__, f"{name}."):
            if found.ispkg and not name.endswith(".recipes"):
                yield importlib.import_module(found.name)


# Of the families' packages only Qwen3-VL's is asked for names.
_PRESETS: dict[str, tuple[Mapping[str, Callable[..., Any]], ...]] = {
    "recipe_names": (DERIVED_RECIPES, SMALL_RECIPES),
    "recipe_names.qwen_vl": (DERIVED_RECIPES,),
}
PATCHES = tuple(Additions(seam(name), *presets) for name, presets in _PRESETS.items())
