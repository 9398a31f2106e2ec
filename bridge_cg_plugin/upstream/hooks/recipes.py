"""Bridge's recipes by name, the plugin's presets among them, and what runs their steps and training."""

import difflib
import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from ...options import OptionError
from ...recipes import DERIVED_RECIPES, SMALL_RECIPES
from ..seams.patches import Additions
from ..seams.registry import seam

PACKAGES = ("megatron.bridge.recipes", "megatron.bridge.perf_recipes")

MOST_NAMED = 5

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
    raise OptionError.because("recipe", f"Cannot use {name!r}: there is no such recipe. {_meant(name, known)}")


def letters(name: str) -> str:
    """Return a name's letters and digits, by which names are compared that people write in several ways."""
    return re.sub(r"[\W_]", "", name).lower()


def _meant(name: str, known: Iterable[str]) -> str:
    """Return which recipes a name may mean: one that is nearly it, a family's, or those of a model on the hub."""
    wanted = re.sub(r"\W", "_", name.rpartition("/")[2]).lower()
    spelt = {key.lower(): key for key in known}
    if near := difflib.get_close_matches(wanted, spelt, n=1, cutoff=0.8):
        return f"Did you mean {spelt[near[0]]}?"
    parts = wanted.split("_")
    for begin in ("_".join(parts[:count]) for count in range(len(parts), 0, -1)):
        alike = (key for key in spelt.values() if letters(key).startswith(letters(begin)) or wanted in key)
        if near := sorted(alike, key=lambda key: (len(key), key)):
            listing = f" bridge-cg recipes {begin} lists all." if len(near) > 1 else ""
            return f"Did you mean {', '.join(near[:MOST_NAMED])}?{listing}"
    return "bridge-cg recipes lists all."


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
            why = (
                "its Hugging Face configuration is not cached, and the hub cannot be reached. "
                f"`bridge-cg explain {name}` answers without it."
            )
        raise OptionError.because("recipe", f"Cannot build recipe {name}: {why}") from error


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
PATCHES = (
    Additions(seam("recipe_names"), DERIVED_RECIPES, SMALL_RECIPES),
    Additions(seam("recipe_names.qwen_vl"), DERIVED_RECIPES),
)


Mode = Literal["pretrain", "finetune"]

LANGUAGE_MODEL_STEP = "llm_step"
STEPS: dict[str, tuple[str, str]] = {
    "audio_lm_step": ("megatron.bridge.training.audio_lm_step", "forward_step"),
    "dsv4_step": ("megatron.bridge.models.deepseek.deepseek_v4_step", "forward_step"),
    LANGUAGE_MODEL_STEP: ("megatron.bridge.training.gpt_step", "forward_step"),
    "vlm_step": ("megatron.bridge.training.vlm_step", "forward_step"),
    "qwen3_omni_step": ("megatron.bridge.models.qwen_omni.qwen3_omni_step", "forward_step"),
    "qwen3_vl_step": ("megatron.bridge.models.qwen_vl.qwen3_vl_step", "forward_step"),
    "step37_flickr8k_step": ("megatron.bridge.models.stepfun.step37_flickr8k_step", "forward_step"),
    "llava_step": ("megatron.bridge.training.llava_step", "forward_step"),
    "nemotron_omni_step": ("megatron.bridge.training.nemotron_omni_step", "forward_step"),
    "flux_step": ("megatron.bridge.diffusion.models.flux.flux_step", "FluxForwardStep"),
    "wan_step": ("megatron.bridge.diffusion.models.wan.wan_step", "WanForwardStep"),
}
# Start of a recipe's name -> step; any other recipe is a language model's.
FAMILIES: dict[str, str] = {
    "nemotron_nano_v2_vl_": "llava_step",
    "nemotron_omni_": "nemotron_omni_step",
    "qwen2_audio_": "audio_lm_step",
    "qwen3_omni_": "qwen3_omni_step",
    "qwen3_vl_": "qwen3_vl_step",
    "qwen35_vl_": "qwen3_vl_step",
    "step37_": "step37_flickr8k_step",
    **dict.fromkeys(("gemma3_vl_", "gemma4_vl_", "glm_45v_", "kimi_k25_vl_", "ministral3_", "qwen25_vl_"), "vlm_step"),
    "flux_": "flux_step",
    "wan_": "wan_step",
}
_MODES: dict[str, Mode] = {
    "_pretrain_": "pretrain",
    **dict.fromkeys(("_sft_", "_finetune_", "_peft_", "_lora_", "_dora_"), "finetune"),
}


def step_name(recipe: str) -> str:
    """Return the name of the forward step of a recipe's model."""
    return next((step for start, step in FAMILIES.items() if recipe.startswith(start)), LANGUAGE_MODEL_STEP)


def check_step(name: str) -> None:
    """Refuse a forward step that does not exist.

    Raises:
        OptionError: Names the nearest.
    """
    if name not in STEPS:
        near = difflib.get_close_matches(name, STEPS, n=1)
        raise OptionError.unknown(name, "forward step", " or ".join(near or STEPS))


def forward_step(name: str, mode: Mode) -> Callable[..., Any]:
    """Return a forward step of the installed release; `check_step` knows its name.

    Raises:
        OptionError: The installed release lacks it.
    """
    module, attribute = STEPS[name]
    try:
        found: Any = getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        raise OptionError.because("step_func", f"Cannot use the forward step {name}: {error}.") from error
    made = inspect.isclass(found)
    modes = {"mode": mode} if made and "mode" in inspect.signature(found).parameters else {}
    step: Callable[..., Any] = found(**modes) if made else found
    return step


def mode_of(recipe: str, benchmark: bool) -> Mode:
    """Return how a recipe is trained: benchmarks all by `pretrain()`, without a checkpoint, others as they are named.

    Raises:
        OptionError: The name does not say.
    """
    if benchmark:
        return "pretrain"
    for part, mode in _MODES.items():
        if part in f"_{recipe}_":
            return mode
    raise OptionError.because(
        "mode", f"Cannot tell from the name {recipe!r} how to train. Pass --mode pretrain or --mode finetune."
    )


def train_function(mode: Mode) -> Callable[..., None]:
    """Return Bridge's `pretrain` or `finetune`."""
    function: Callable[..., None] = getattr(importlib.import_module(f"megatron.bridge.training.{mode}"), mode)
    return function


@contextmanager
def helper_as_shipped() -> Iterator[None]:
    """Let Bridge use the helper as it is where it cannot be compiled: wheels ship it compiled and have no Makefile.

    Elsewhere, as in a container with megatron-core's sources, Bridge compiles it as ever.
    """
    from megatron.bridge.training import initialize
    from megatron.core import datasets

    from ..wrappers import overridden  # with PyTorch, which `bridge-cg explain` does without

    compiled = find_spec("megatron.core.datasets.helpers_cpp") is not None
    if any((Path(folder) / "Makefile").exists() for folder in datasets.__path__) or not compiled:
        yield
        return
    with overridden(initialize, "compile_helpers", lambda: None):
        yield


def load_packed_numpy(path: Path) -> Sequence[Any]:
    """Return the rows of a file that Bridge packed, through Bridge's own restricted reader."""
    from megatron.bridge.utils.safe_pickle import safe_load_npy

    rows = safe_load_npy(path.read_bytes())
    return list(rows) if rows.ndim else [rows.item()]
