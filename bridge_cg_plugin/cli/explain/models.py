"""Models of recipes by their names on Hugging Face's hub, without its configurations: which provider, which sizes."""

import dataclasses
import importlib
import re
from collections.abc import Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

from bridge_cg_plugin.options.vision import PROVIDER_FIELDS
from bridge_cg_plugin.upstream.seams.encoders import DECLARED, DECLARED_MODELS, MODELS


def _first[Value](name: str, table: Mapping[str, Value]) -> Value | None:
    """Return what a table has of the first regular expression that a model's name matches."""
    return next((value for names, value in table.items() if re.match(names, name)), None)


# Layers, width and attention heads. Qwen3-VL's language models are Qwen3's.
SIZES: Mapping[str, tuple[int, int, int]] = {
    r"Qwen/Qwen3(-VL)?-30B-A3B": (48, 2048, 32),
    r"Qwen/Qwen3(-VL)?-235B-A22B": (94, 4096, 64),
    r"Qwen/Qwen3-0\.6B": (28, 1024, 16),
    r"Qwen/Qwen3-1\.7B|Qwen/Qwen3-VL-2B": (28, 2048, 16),
    r"Qwen/Qwen3(-VL)?-4B": (36, 2560, 32),
    r"Qwen/Qwen3(-VL)?-8B": (36, 4096, 32),
    r"Qwen/Qwen3-14B": (40, 5120, 40),
    r"Qwen/Qwen3(-VL)?-32B": (64, 5120, 64),
    r"Qwen/Qwen3\.5-0\.8B": (24, 1024, 8),
    r"Qwen/Qwen3\.5-2B": (24, 2048, 8),
    r"Qwen/Qwen3\.5-4B": (32, 2560, 16),
    r"Qwen/Qwen3\.5-9B": (32, 4096, 16),
    r"Qwen/Qwen3\.[56]-27B": (64, 5120, 24),
    r"Qwen/Qwen3\.[56]-35B-A3B": (40, 2048, 16),
    r"Qwen/Qwen3\.5-122B-A10B": (48, 3072, 32),
    r"Qwen/Qwen3\.5-397B-A17B": (60, 4096, 32),
    r"google/gemma-3-4b": (34, 2560, 8),
    r"google/gemma-3-12b": (48, 3840, 16),
    r"google/gemma-3-27b": (62, 5376, 32),
    r"meta-llama/(Meta-)?Llama-3(\.1)?-8B": (32, 4096, 32),
    r"meta-llama/(Meta-)?Llama-3(\.1)?-70B": (80, 8192, 64),
    r"meta-llama/Llama-3\.2-1B": (16, 2048, 32),
    r"meta-llama/Llama-3\.2-3B": (28, 3072, 24),
}
# Tokens of tokenizers, for models whose recipes name nothing else of the hub.
VOCABULARIES = {r"nvidia/(NVIDIA-)?Nemotron-": 131_072, r"google/gemma-3-": 262_144}


def sizes_of(name: str) -> dict[str, Any]:
    """Return the sizes of a model on the hub as fields of a Bridge provider; none where they are not known here."""
    return dict(zip(("num_layers", "hidden_size", "num_attention_heads"), _first(name, SIZES) or (), strict=False))


_OF_PROVIDERS = {
    **dict.fromkeys(("Qwen3VLModelProvider", "Qwen3VLMoEModelProvider"), "Qwen3-VL"),
    **dict.fromkeys(("Qwen35VLModelProvider", "Qwen35VLMoEModelProvider"), "Qwen3.5-VL"),
    **{encoder.model.provider: encoder.name for encoder in DECLARED if encoder.encodes == "vision"},
}


def encoder_of(model: Any) -> str | None:
    """Return the vision encoder of a Bridge model provider in words; None for a model that has none for graphs."""
    if not hasattr(model, PROVIDER_FIELDS["impl"]):
        return None
    names = (base.__name__ for base in type(model).__mro__)
    family = next((_OF_PROVIDERS[name] for name in names if name in _OF_PROVIDERS), "")
    sizes = [getattr(getattr(model, "vision_config", None), name, None) for name in (*_DEPTHS, "hidden_size")]
    *depths, width = [size if isinstance(size, int) else None for size in sizes]
    layers = next((depth for depth in depths if depth is not None), None)
    known = "of unknown size" if layers is None else f"of {layers} layers"
    return f"{family} encoder {known}".lstrip() + (f" of {width}" if width else "")


_DEPTHS = ("depth", "num_hidden_layers")
GPT = "gpt_provider.GPTModelProvider"


class Family(NamedTuple):
    """Models whose names begin alike.

    Attributes:
        names: Regular expression of their names on the hub.
        provider: Module and class of Bridge's provider, below its models.
        experts: Of a layer of the language model; None for a dense one.
        encoder: Layers and width of the vision encoder; empty where models differ.
        further: What else the model's configuration, or Bridge's conversion of it, decides of the provider.
        deepstack: Layers of the vision encoder whose features the language model takes.
    """

    names: str
    provider: str
    experts: int | None = None
    encoder: tuple[int, int] | tuple[()] = ()
    further: Mapping[str, Any] = {}
    deepstack: tuple[int, ...] = ()


_QWEN3_VL, _QWEN35_VL = "qwen_vl.qwen3_vl_provider.Qwen3VL", "qwen_vl.qwen35_vl_provider.Qwen35VL"
_LARGE, _DEEP = (27, 1152), (8, 16, 24)
_LOSS = {"moe_aux_loss_coeff": 1e-3}  # of the router; set by Bridge's conversion, not by the provider's class
_COMMON = {"attention_dropout": 0.0, "hidden_dropout": 0.0, "add_bias_linear": False, "vocab_size": 151936}
# The first that matches counts.
FAMILIES = (
    Family(r"Qwen/Qwen3-VL-\d+B-A\d+B", f"{_QWEN3_VL}MoEModelProvider", 128, _LARGE, _LOSS, _DEEP),
    Family(r"Qwen/Qwen3-VL-8B", f"{_QWEN3_VL}ModelProvider", encoder=_LARGE, deepstack=_DEEP),
    Family(r"Qwen/Qwen3-VL-\d+B", f"{_QWEN3_VL}ModelProvider", deepstack=_DEEP),
    Family(r"Qwen/Qwen3\.[56]-397B", f"{_QWEN35_VL}MoEModelProvider", 512, _LARGE),
    Family(r"Qwen/Qwen3\.[56]-\d+B-A\d+B", f"{_QWEN35_VL}MoEModelProvider", 256, _LARGE),
    Family(r"Qwen/Qwen3\.[56]-(9|27)B", f"{_QWEN35_VL}ModelProvider", encoder=_LARGE),
    Family(r"Qwen/Qwen3\.[56]-[\d.]+B", f"{_QWEN35_VL}ModelProvider"),
    *(
        Family(hub.names, f"{one.module.removeprefix(f'{MODELS}.')}.{one.provider}", hub.experts, hub.encoder or ())
        for one in DECLARED_MODELS
        for hub in one.hub
    ),
    Family(r"Qwen/Qwen3-\d+B-A\d+B", GPT, 128, further=_LOSS),
    Family(r"(Qwen/Qwen(2|2\.5|3)-[\d.]+B|meta-llama/(Meta-)?Llama-[23])", GPT),
)
# Models with images whose encoders this package has no adapter for; another package may. Nothing else is known of them.
WITHOUT_ADAPTER = {
    r"moonshotai/Kimi-K2\.[5-9]": "kimi_vl.kimi_k25_vl_provider.KimiK25VLModelProvider",
    r"google/gemma-4-\d+B-A\d+B": "gemma_vl.gemma4_vl_provider.Gemma4VLModelProvider",
    r"LGAI-EXAONE/EXAONE-4\.5": "exaone.exaone45.exaone45_provider.Exaone45ModelProvider",
    r"stepfun-ai/Step-3\.7": "stepfun.step37_provider.Step37ModelProvider",
    r"baidu/ERNIE-4\.5-VL": "ernie_vl.ernie45_vl_provider.Ernie45VLModelProvider",
}
# What a configuration on the hub decides. Nothing is known of it for a model of no family.
_FROM_THE_HUB = (
    *("attention_dropout", "hidden_dropout", "num_moe_experts", "moe_input_jitter_eps", "add_bias_linear"),
    *("moe_latent_size", "is_hybrid_model", "hybrid_layer_pattern", "hybrid_override_pattern"),
    *("multi_latent_attention", "mtp_num_layers", "spatial_merge_size"),
)


# Sizes that a provider's class has only until a configuration on the hub gives others: no check may go by them.
_PLACEHOLDERS: Mapping[str, Any] = dict.fromkeys(("num_attention_heads", "num_layers", "hidden_size", "seq_length"))
_asked: list[str] = []


def replace_auto_bridge() -> None:
    """Have recipes take providers from here."""

    def bridge(name: Any, *args: Any, **kwargs: Any) -> SimpleNamespace:
        return SimpleNamespace(to_megatron_provider=partial(_provider_of, str(name)))

    _asked.clear()
    stand_in = SimpleNamespace(from_hf_pretrained=bridge, from_hf_config=bridge)
    vars(importlib.import_module("megatron.bridge"))["AutoBridge"] = stand_in


def asked() -> list[str]:
    """Return the models that recipes took from here, by their names on the hub."""
    return list(dict.fromkeys(_asked))


def unknown() -> list[str]:
    """Return those of them of which no sizes are known."""
    return [name for name in asked() if _family(name) is None]


def _family(name: str) -> Family | None:
    return next((family for family in FAMILIES if re.match(family.names, name)), None)


def _provider_of(name: str, *args: Any, **kwargs: Any) -> Any:
    """Return a provider with the sizes that are known of a model."""
    _asked.append(name)
    family = _family(name)
    if family is None:
        return _unknown_model(_first(name, WITHOUT_ADAPTER) or GPT, _first(name, VOCABULARIES))
    sizes = {**_COMMON, "num_moe_experts": family.experts, **family.further, **sizes_of(name)}
    made = _provider(_kind(family.provider), sizes)
    if hasattr(made, "vision_config"):
        known = {"deepstack_visual_indexes": list(family.deepstack)} if family.deepstack else {}
        encoder = dict(zip(("depth", "hidden_size"), family.encoder, strict=False))
        made.vision_config = SimpleNamespace(**known, **encoder)
    return made


def _provider(kind: type, sizes: Mapping[str, Any]) -> Any:
    """Return a provider without running its constructor, which looks at sizes that nobody knows here."""
    made: Any = object.__new__(kind)
    for one in dataclasses.fields(kind):
        if one.default_factory is not dataclasses.MISSING:
            setattr(made, one.name, one.default_factory())
        elif one.default is not dataclasses.MISSING:
            setattr(made, one.name, one.default)
    for name, value in {**_PLACEHOLDERS, **sizes}.items():
        setattr(made, name, value)
    return made


class UnknownModel(SimpleNamespace):
    """The configuration of a model whose provider is not known here."""

    def to_text_provider(self) -> "UnknownModel":
        """Return the configuration of its language model, as Bridge's provider of a model with images does."""
        return self


def _unknown_model(provider: str, tokens: int | None) -> UnknownModel:
    """Return a model's configuration of which only what every model has is known.

    Args:
        provider: Module and class of its provider, whose name the configuration's class has.
        tokens: Of its vocabulary.
    """
    made = _provider(_kind(provider) or _kind(GPT), {"vocab_size": tokens})
    if hasattr(made, "vision_config"):
        made.vision_config = SimpleNamespace()
    found = {name: value for name, value in vars(made).items() if name not in _FROM_THE_HUB}
    if provider == GPT:
        return UnknownModel(**found)
    module, _, name = provider.rpartition(".")
    kind: type[UnknownModel] = type(name, (UnknownModel,), {"__module__": f"{MODELS}.{module}"})
    return kind(**found)


def _kind(provider: str) -> Any:
    """Return a provider's class; None where this release of megatron-bridge lacks it."""
    module, _, name = provider.rpartition(".")
    try:
        return getattr(importlib.import_module(f"{MODELS}.{module}"), name)
    except ModuleNotFoundError:
        return None
