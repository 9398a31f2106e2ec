"""Encoders that graphs take, of this package and of others, and the providers of Bridge's models that have them.

The plugin is loaded in every process that imports PyTorch, so this imports neither torch nor Megatron, nor the packages
that entry points name.
"""

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


def _encoder(name: str, provider: str, region: str, *hub: HubModels, **more: Any) -> Declaration:
    module, _, provider = f"{MODELS}.{provider}".rpartition(".")
    return Declaration(name, Model(module, provider, hub, **more), region)


GEMMA3_VL = _encoder(
    "Gemma 3",
    "gemma_vl.gemma3_vl_provider.Gemma3VLModelProvider",
    "siglip:SIGLIP",
    HubModels(r"google/gemma-3-(4|12|27)b", encoder=(27, 1152)),
)
GLM45V = _encoder(
    "GLM-4.5V",
    "glm_vl.glm_45v_provider.GLM45VModelProvider",
    "glm45v:GLM45V",
    HubModels(r"zai-org/GLM-4\.5V", experts=128),
)
MINISTRAL3 = _encoder(
    "Ministral 3",
    "ministral3.ministral3_provider.Ministral3ModelProvider",
    "pixtral:PIXTRAL",
    HubModels(r"mistralai/Ministral-3-\d+B"),
    config_field="hf_config",
)
NEMOTRON_OMNI = _encoder(
    "Nemotron Omni",
    "nemotron_omni.nemotron_omni_provider.NemotronOmniModelProvider",
    "radio:PACKED_RADIO",
    HubModels(r"nvidia/Nemotron-3-Nano-Omni-\d+B-A\d+B", experts=128, encoder=(32, 1280)),
    config_field="vision_model_type",
    steps=(),
)
NEMOTRON_VL = _encoder(
    "Nemotron VL",
    "nemotron_vl.nemotron_vl_provider.NemotronVLModelProvider",
    "radio:RADIO",
    HubModels(r"nvidia/NVIDIA-Nemotron-Nano-12B-v2-VL", encoder=(32, 1280)),
    config_field="vision_model_type",
    steps=(),
)
QWEN25_OMNI = _encoder(
    "Qwen2.5-Omni",
    "qwen_omni.qwen25_omni_provider.Qwen25OmniModelProvider",
    "qwen25_vl:QWEN25_OMNI",
    HubModels(r"Qwen/Qwen2\.5-Omni-"),
    config_field="thinker_config",
)
QWEN25_VL = _encoder(
    "Qwen2.5-VL",
    "qwen_vl.qwen25_vl_provider.Qwen25VLModelProvider",
    "qwen25_vl:QWEN25_VL",
    *(HubModels(r"Qwen/Qwen2\.5-VL-[37]B", encoder=(32, 1280)), HubModels(r"Qwen/Qwen2\.5-VL-")),
)
QWEN3_OMNI = _encoder(
    "Qwen3-Omni",
    "qwen_omni.qwen3_omni_provider.Qwen3OmniModelProvider",
    "qwen3_omni:QWEN3_OMNI",
    HubModels(r"Qwen/Qwen3-Omni-\d+B-A\d+B", experts=128),
    config_field="thinker_config",
    steps=(VLM_STEP, f"{QWEN_OMNI}.qwen3_omni_step"),
)
QWEN3_OMNI_AUDIO = QWEN3_OMNI._replace(region="qwen3_omni:QWEN3_OMNI_AUDIO", encodes="audio")
# Those of images first.
DECLARED = (
    *(GEMMA3_VL, GLM45V, MINISTRAL3, NEMOTRON_OMNI, NEMOTRON_VL, QWEN25_OMNI, QWEN25_VL, QWEN3_OMNI),
    QWEN3_OMNI_AUDIO,
)
DECLARED_MODELS = tuple(dict.fromkeys(one.model for one in DECLARED))
QWEN3_VL_MODELS = tuple(
    Model(f"{QWEN_VL}.{series.lower()}_vl_provider", f"{series}VL{kind}ModelProvider")
    for series in ("Qwen3", "Qwen35")
    for kind in ("", "MoE")
)
QWEN3_VL = tuple(model.provider for model in QWEN3_VL_MODELS)


@cache
def points() -> tuple[EntryPoint, ...]:
    """Return the entry points of other packages that name encoders."""
    return tuple(entry_points(group=GROUP))


def other_providers() -> tuple[tuple[str, str], ...]:
    """Return module and class of the providers that entry points name."""
    paths = (point.name.rpartition(".") for point in points())
    return tuple((module, provider) for module, _, provider in paths if module)


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
