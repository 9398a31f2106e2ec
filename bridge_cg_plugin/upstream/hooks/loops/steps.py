"""Which function runs a step of a recipe's model and which one trains it, by the recipe's name, as upstream does it."""

import difflib
import importlib
import inspect
from collections.abc import Callable
from typing import Any, Literal

from ....options import OptionError

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
TRAIN: dict[Mode, tuple[str, str]] = {
    "pretrain": ("megatron.bridge.training.pretrain", "pretrain"),
    "finetune": ("megatron.bridge.training.finetune", "finetune"),
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
    """Return a forward step of the installed release.

    Raises:
        OptionError: There is none of this name, or the installed release lacks it.
    """
    check_step(name)
    module, attribute = STEPS[name]
    try:
        found: Any = getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        raise OptionError.because("step_func", f"Cannot use the forward step {name}: {error}.") from error
    step: Callable[..., Any] = _made(found, mode) if inspect.isclass(found) else found
    return step


def _made(kind: Callable[..., Any], mode: Mode) -> Any:
    return kind(mode=mode) if "mode" in inspect.signature(kind).parameters else kind()


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
    module, attribute = TRAIN[mode]
    function: Callable[..., None] = getattr(importlib.import_module(module), attribute)
    return function
