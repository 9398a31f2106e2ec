"""Encoders that graphs take, of this package and of others, and the providers of Bridge's models that have them.

The plugin is loaded in every process that imports PyTorch, so this imports neither torch nor Megatron, nor the packages
that entry points name.
"""

import os
import sys
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal, NamedTuple

MODELS = "megatron.bridge.models"
QWEN_VL, QWEN_OMNI = f"{MODELS}.qwen_vl", f"{MODELS}.qwen_omni"
VLM_STEP = "megatron.bridge.training.vlm_step"
# An entry point's name is the class of the model's provider, its value the `EncoderFamily`.
GROUP = "bridge_cg_plugin.encoders"
NO_ADAPTER = "without an adapter for vision graphs"
HOW_TO_ADD = "docs/adding_an_encoder.md shows how to write one"


class HubModels(NamedTuple):
    """Models on Hugging Face's hub, for `bridge-cg explain`, which does without their configurations.

    Attributes:
        names: Regular expression of their names.
        experts: Of a layer of the language model; None for a dense one.
        encoder: Its layers and width; None where models differ.
    """

    names: str
    experts: int | None = None
    encoder: tuple[int, int] | None = None


class Model(NamedTuple):
    """Models of one of Bridge's providers.

    Attributes:
        module, provider: Of the provider's class.
        hub: Their names on the hub.
        config_field: The provider's field with the encoder's configuration.
        steps: Modules of the forward steps that make their batches.
    """

    module: str
    provider: str
    hub: tuple[HubModels, ...] = ()
    config_field: str = "vision_config"
    steps: tuple[str, ...] = (VLM_STEP,)


class Declaration(NamedTuple):
    """An encoder of this package besides Qwen3-VL's. Its seams are in `registry/encoders.py`.

    Attributes:
        name: Of the models that have it.
        model: Where Bridge builds it.
        region: Module of `upstream/encoders` and name of its `EncoderFamily` there, as "module:name".
        encodes: As `EncoderFamily` has it.
    """

    name: str
    model: Model
    region: str
    encodes: Literal["vision", "audio"] = "vision"

    @property
    def feature(self) -> str:
        """What the seams serve."""
        return f"{self.encodes} graphs of {self.name}"


GEMMA3_VL = Declaration(
    "Gemma 3",
    Model(
        f"{MODELS}.gemma_vl.gemma3_vl_provider",
        "Gemma3VLModelProvider",
        hub=(HubModels(r"google/gemma-3-(4|12|27)b", encoder=(27, 1152)),),
    ),
    "siglip:SIGLIP",
)
GLM45V = Declaration(
    "GLM-4.5V",
    Model(
        f"{MODELS}.glm_vl.glm_45v_provider", "GLM45VModelProvider", hub=(HubModels(r"zai-org/GLM-4\.5V", experts=128),)
    ),
    "glm45v:GLM45V",
)
MINISTRAL3 = Declaration(
    "Ministral 3",
    Model(
        f"{MODELS}.ministral3.ministral3_provider",
        "Ministral3ModelProvider",
        hub=(HubModels(r"mistralai/Ministral-3-\d+B"),),
        config_field="hf_config",
    ),
    "pixtral:PIXTRAL",
)
NEMOTRON_OMNI = Declaration(
    "Nemotron Omni",
    Model(
        f"{MODELS}.nemotron_omni.nemotron_omni_provider",
        "NemotronOmniModelProvider",
        hub=(HubModels(r"nvidia/Nemotron-3-Nano-Omni-\d+B-A\d+B", experts=128, encoder=(32, 1280)),),
        config_field="vision_model_type",
        steps=(),
    ),
    "radio:PACKED_RADIO",
)
NEMOTRON_VL = Declaration(
    "Nemotron VL",
    Model(
        f"{MODELS}.nemotron_vl.nemotron_vl_provider",
        "NemotronVLModelProvider",
        hub=(HubModels(r"nvidia/NVIDIA-Nemotron-Nano-12B-v2-VL", encoder=(32, 1280)),),
        config_field="vision_model_type",
        steps=(),
    ),
    "radio:RADIO",
)
QWEN25_OMNI = Declaration(
    "Qwen2.5-Omni",
    Model(
        f"{QWEN_OMNI}.qwen25_omni_provider",
        "Qwen25OmniModelProvider",
        hub=(HubModels(r"Qwen/Qwen2\.5-Omni-"),),
        config_field="thinker_config",
    ),
    "qwen25_omni:QWEN25_OMNI",
)
QWEN25_VL = Declaration(
    "Qwen2.5-VL",
    Model(
        f"{QWEN_VL}.qwen25_vl_provider",
        "Qwen25VLModelProvider",
        hub=(HubModels(r"Qwen/Qwen2\.5-VL-[37]B", encoder=(32, 1280)), HubModels(r"Qwen/Qwen2\.5-VL-")),
    ),
    "qwen25_vl:QWEN25_VL",
)
QWEN3_OMNI = Declaration(
    "Qwen3-Omni",
    Model(
        f"{QWEN_OMNI}.qwen3_omni_provider",
        "Qwen3OmniModelProvider",
        hub=(HubModels(r"Qwen/Qwen3-Omni-\d+B-A\d+B", experts=128),),
        config_field="thinker_config",
        steps=(VLM_STEP, f"{QWEN_OMNI}.qwen3_omni_step"),
    ),
    "qwen3_omni:QWEN3_OMNI",
)
QWEN3_OMNI_AUDIO = Declaration(QWEN3_OMNI.name, QWEN3_OMNI.model, "qwen3_omni_audio:QWEN3_OMNI_AUDIO", encodes="audio")
# Those of images first.
DECLARED = (
    *(GEMMA3_VL, GLM45V, MINISTRAL3, NEMOTRON_OMNI, NEMOTRON_VL, QWEN25_OMNI, QWEN25_VL, QWEN3_OMNI),
    QWEN3_OMNI_AUDIO,
)
DECLARED_MODELS = tuple(dict.fromkeys(one.model for one in DECLARED))
QWEN3_VL_MODELS = (
    Model(f"{QWEN_VL}.qwen3_vl_provider", "Qwen3VLModelProvider"),
    Model(f"{QWEN_VL}.qwen3_vl_provider", "Qwen3VLMoEModelProvider"),
    Model(f"{QWEN_VL}.qwen35_vl_provider", "Qwen35VLModelProvider"),
    Model(f"{QWEN_VL}.qwen35_vl_provider", "Qwen35VLMoEModelProvider"),
)
QWEN3_VL = tuple(model.provider for model in QWEN3_VL_MODELS)


@cache
def points() -> tuple[EntryPoint, ...]:
    """Return the entry points of other packages that name encoders."""
    return tuple(entry_points(group=GROUP)) if any(map(_may_declare, sys.path)) else ()


def other_providers() -> tuple[tuple[str, str], ...]:
    """Return module and class of the providers that entry points name."""
    paths = (point.name.rpartition(".") for point in points())
    return tuple((module, provider) for module, _, provider in paths if module)


def _may_declare(place: str) -> bool:
    """Whether a distribution at a place of `sys.path` may name the group.

    `entry_points` would take most of the time that the plugin takes to load.
    """
    try:
        with os.scandir(place or os.curdir) as found:
            folders = [entry.path for entry in found if entry.name.endswith((".dist-info", ".egg-info"))]
    except FileNotFoundError:
        return False
    except OSError:  # an archive, say: only importlib looks into it
        return True
    return any(map(_names_the_group, folders))


def _names_the_group(folder: str) -> bool:
    try:
        with open(os.path.join(folder, "entry_points.txt"), encoding="utf-8") as file:
            return GROUP in file.read()
    except OSError:
        return False


def encoder_of(model: Any) -> str:
    """Return the vision encoder of a model's provider in words; empty where it has none, or nothing is known of it."""
    from ...options.facts import IMAGE_FIELDS

    bases = [base.__name__ for base in type(model).__mro__]
    others = {provider for _, provider in other_providers()}
    towers = {one.model.provider: one.name for one in DECLARED if one.encodes == "vision"}
    mine = dict.fromkeys(QWEN3_VL, "Qwen3-VL") | towers
    for name in bases:
        if name in others:
            return f"of {name}, with an adapter of another package for vision graphs"
        if name in mine:
            return f"{mine[name]}'s, with an adapter for vision graphs"
    if not any(hasattr(model, field) for field in IMAGE_FIELDS):
        return ""
    if not bases[0].endswith("Provider"):  # `bridge-cg explain` does without the hub
        listed = "docs/encoders.md lists those that vision graphs take"
        return f"of a kind that only the hub tells; {listed}, {HOW_TO_ADD}"
    return f"of {bases[0]}, {NO_ADAPTER}: it runs eager; {HOW_TO_ADD}"


def has_audio_encoder(model: Any) -> bool:
    """Whether a model's provider brings an audio encoder that graphs have an adapter for."""
    bases = {base.__name__ for base in type(model).__mro__}
    return any(one.encodes == "audio" and one.model.provider in bases for one in DECLARED)


def taken_encoders() -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the encoders that this package has an adapter for, and provider -> adapter of other packages."""
    mine = ("Qwen3-VL", *(one.name if one.encodes == "vision" else f"{one.name} (audio)" for one in DECLARED))
    return mine, {point.name.rpartition(".")[2]: point.value for point in points()}
