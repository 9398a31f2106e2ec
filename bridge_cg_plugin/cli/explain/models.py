"""Models of recipes by their names on Hugging Face's hub, without its configurations: which provider, which sizes."""

import dataclasses
import importlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

from bridge_cg_plugin.options.vision import PROVIDER_FIELDS
from bridge_cg_plugin.upstream.seams.encoders import DECLARED, DECLARED_MODELS, MODELS, HubModels, Model


class Sizes(NamedTuple):
    """Sizes of a language model.

    Attributes:
        layers, hidden, heads: Its layers, their width, heads of queries.
        groups: Heads of keys and values.
        channels: Width of a head.
        mlp: Width of the MLP; of experts' layers, of one that is dense.
        vocabulary: Tokens.
        top, expert, shared: Experts that a token goes through, the width of one, and of the shared one.
        fused: Whether Bridge fuses activations and rotation.
    """

    layers: int
    hidden: int
    heads: int
    groups: int
    channels: int
    mlp: int
    vocabulary: int = 151_936
    top: int = 0
    expert: int = 0
    shared: int = 0
    fused: bool = False

    def fields(self) -> dict[str, int | bool]:
        """Return them as fields of a Bridge provider."""
        named = {
            "num_layers": self.layers,
            "hidden_size": self.hidden,
            "num_attention_heads": self.heads,
            "num_query_groups": self.groups,
            "kv_channels": self.channels,
            "ffn_hidden_size": self.mlp,
            "vocab_size": self.vocabulary,
            "moe_router_topk": self.top,
            "moe_ffn_hidden_size": self.expert,
            "moe_shared_expert_intermediate_size": self.shared,
        }
        fused = dict.fromkeys(("bias_activation_fusion", "apply_rope_fusion"), True) if self.fused else {}
        return {name: size for name, size in named.items() if size} | fused


_LLAMA = 128_256
# The first that matches counts. Qwen3-VL's language models are Qwen3's.
SIZES: Mapping[str, Sizes] = {
    r"Qwen/Qwen3(-VL)?-30B-A3B": Sizes(48, 2048, 32, 4, 128, 6144, top=8, expert=768),
    r"Qwen/Qwen3(-VL)?-235B-A22B": Sizes(94, 4096, 64, 4, 128, 12288, top=8, expert=1536),
    r"Qwen/Qwen3-0\.6B": Sizes(28, 1024, 16, 8, 128, 3072),
    r"Qwen/Qwen3-1\.7B|Qwen/Qwen3-VL-2B": Sizes(28, 2048, 16, 8, 128, 6144),
    r"Qwen/Qwen3(-VL)?-4B": Sizes(36, 2560, 32, 8, 128, 9728),
    r"Qwen/Qwen3(-VL)?-8B": Sizes(36, 4096, 32, 8, 128, 12288),
    r"Qwen/Qwen3-14B": Sizes(40, 5120, 40, 8, 128, 17408),
    r"Qwen/Qwen3(-VL)?-32B": Sizes(64, 5120, 64, 8, 128, 25600),
    r"meta-llama/(Meta-)?Llama-3(\.1)?-8B": Sizes(32, 4096, 32, 8, 128, 14336, _LLAMA, fused=True),
    r"meta-llama/(Meta-)?Llama-3(\.1)?-70B": Sizes(80, 8192, 64, 8, 128, 28672, _LLAMA, fused=True),
    r"meta-llama/Llama-3\.2-1B": Sizes(16, 2048, 32, 8, 64, 8192, _LLAMA, fused=True),
    r"meta-llama/Llama-3\.2-3B": Sizes(28, 3072, 24, 8, 128, 8192, _LLAMA, fused=True),
}

# Tokens of tokenizers, for models whose recipes name nothing else of the hub.
VOCABULARIES = {r"nvidia/(NVIDIA-)?Nemotron-": 131_072, r"google/gemma-3-": 262_144}


def tokens_of(name: str) -> int | None:
    """Return the tokens of a tokenizer on the hub; None where they are not known here."""
    return next((count for names, count in VOCABULARIES.items() if re.match(names, name)), None)


def sizes_of(name: str) -> dict[str, int | bool]:
    """Return the sizes of a model on the hub as fields of a Bridge provider; none where they are not known here."""
    return next((sizes.fields() for sizes in _matching(name)), {})


def _matching(name: str) -> Iterator[Sizes]:
    return (sizes for names, sizes in SIZES.items() if re.match(names, name))


QWEN3_VL, QWEN35_VL, QWEN25_VL = "Qwen3-VL", "Qwen3.5-VL", "Qwen2.5-VL"
_OF_PROVIDERS = {
    "Qwen3VLModelProvider": QWEN3_VL,
    "Qwen3VLMoEModelProvider": QWEN3_VL,
    "Qwen35VLModelProvider": QWEN35_VL,
    "Qwen35VLMoEModelProvider": QWEN35_VL,
    **{encoder.model.provider: encoder.name for encoder in DECLARED if encoder.encodes == "vision"},
}
_DEPTHS = ("depth", "num_hidden_layers")


@dataclass(frozen=True, slots=True)
class Encoder:
    """A vision encoder.

    Attributes:
        family: Its kind; empty for one that no record is of.
        layers, width: Its sizes; None where nobody knows them here.
    """

    family: str
    layers: int | None = None
    width: int | None = None

    def __str__(self) -> str:
        sizes = "of unknown size" if self.layers is None else f"of {self.layers} layers"
        return f"{self.family} encoder {sizes}".lstrip() + (f" of {self.width}" if self.width else "")


def encoder_of(model: Any) -> Encoder | None:
    """Return the vision encoder of a Bridge model provider; None for a model that has none for graphs."""
    if not hasattr(model, PROVIDER_FIELDS["impl"]):
        return None
    names = (base.__name__ for base in type(model).__mro__)
    family = next((_OF_PROVIDERS[name] for name in names if name in _OF_PROVIDERS), "")
    config = getattr(model, "vision_config", None)
    depth = next((value for name in _DEPTHS if (value := _whole(config, name)) is not None), None)
    return Encoder(family, depth, _whole(config, "hidden_size"))


def _whole(config: Any, name: str) -> int | None:
    value = getattr(config, name, None)
    return value if isinstance(value, int) else None


GPT = "gpt_provider.GPTModelProvider"


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Models whose names begin alike.

    Attributes:
        names: Regular expression of their names on the hub.
        provider: Module and class of Bridge's provider, below its models.
        sizes: Fields that follow from the model's configuration and decide whether graph options can work.
        deepstack: Layers of the vision encoder whose features the language model takes.
        encoder: Layers and width of the vision encoder, as its configuration names them; empty where models differ.
    """

    names: str
    provider: str
    sizes: Mapping[str, Any] = field(default_factory=dict)
    deepstack: tuple[int, ...] = ()
    encoder: Mapping[str, int] = field(default_factory=dict)


_QWEN3_VL, _QWEN35_VL = "qwen_vl.qwen3_vl_provider.Qwen3VL", "qwen_vl.qwen35_vl_provider.Qwen35VL"
_COMMON = {"attention_dropout": 0.0, "hidden_dropout": 0.0, "add_bias_linear": False, "vocab_size": 151936}
_DENSE = {**_COMMON, "num_moe_experts": None}
_LARGE = {"depth": 27, "hidden_size": 1152}
_ROUTERS_LOSS = {"moe_aux_loss_coeff": 1e-3}  # set by Bridge's conversion, not by the provider's class


def _experts(count: int) -> dict[str, Any]:
    return {**_COMMON, "num_moe_experts": count}


def _family_of(model: Model, on_hub: HubModels) -> Family:
    return Family(
        names=on_hub.names,
        provider=f"{model.module.removeprefix(f'{MODELS}.')}.{model.provider}",
        sizes=_DENSE if on_hub.experts is None else _experts(on_hub.experts),
        encoder=dict(zip(("depth", "hidden_size"), on_hub.encoder or (), strict=False)),
    )


# The first that matches counts.
FAMILIES = (
    Family(
        names=r"Qwen/Qwen3-VL-\d+B-A\d+B",
        provider=f"{_QWEN3_VL}MoEModelProvider",
        sizes=_experts(128) | _ROUTERS_LOSS,
        deepstack=(8, 16, 24),
        encoder=_LARGE,
    ),
    Family(
        names=r"Qwen/Qwen3-VL-8B",
        provider=f"{_QWEN3_VL}ModelProvider",
        sizes=_DENSE,
        deepstack=(8, 16, 24),
        encoder=_LARGE,
    ),
    Family(names=r"Qwen/Qwen3-VL-\d+B", provider=f"{_QWEN3_VL}ModelProvider", sizes=_DENSE, deepstack=(8, 16, 24)),
    Family(
        names=r"Qwen/Qwen3\.[56]-397B",
        provider=f"{_QWEN35_VL}MoEModelProvider",
        sizes=_experts(512),
        encoder=_LARGE,
    ),
    Family(
        names=r"Qwen/Qwen3\.[56]-\d+B-A\d+B",
        provider=f"{_QWEN35_VL}MoEModelProvider",
        sizes=_experts(256),
        encoder=_LARGE,
    ),
    Family(names=r"Qwen/Qwen3\.[56]-9B", provider=f"{_QWEN35_VL}ModelProvider", sizes=_DENSE, encoder=_LARGE),
    Family(names=r"Qwen/Qwen3\.[56]-[\d.]+B", provider=f"{_QWEN35_VL}ModelProvider", sizes=_DENSE),
    *(_family_of(model, on_hub) for model in DECLARED_MODELS for on_hub in model.hub),
    Family(names=r"Qwen/Qwen3-\d+B-A\d+B", provider=GPT, sizes=_experts(128) | _ROUTERS_LOSS),
    Family(names=r"(Qwen/Qwen(2|2\.5|3)-[\d.]+B|meta-llama/(Meta-)?Llama-[23])", provider=GPT, sizes=_DENSE),
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
    "attention_dropout",
    "hidden_dropout",
    "num_moe_experts",
    "moe_input_jitter_eps",
    "add_bias_linear",
    "moe_latent_size",
    "is_hybrid_model",
    "hybrid_layer_pattern",
    "hybrid_override_pattern",
    "multi_latent_attention",
    "mtp_num_layers",
    "spatial_merge_size",
)


@dataclass(slots=True)
class StandInBridge:
    """Stands in for Bridge's `AutoBridge`, which asks the hub for a model's configuration.

    Attributes:
        name: The model's name on the hub.
    """

    name: str

    def to_megatron_provider(self, *args: Any, **kwargs: Any) -> Any:
        """Return a provider with the sizes that are known."""
        _asked.append(self.name)
        family = _family(self.name)
        if family is None:
            kinds = (kind for names, kind in WITHOUT_ADAPTER.items() if re.match(names, self.name))
            made = unknown_model(next(kinds, GPT))
            made.vocab_size = tokens_of(self.name)
            return made
        return _provider(_kind(family.provider), replace(family, sizes={**family.sizes, **sizes_of(self.name)}))


# Sizes that a provider's class has only until a configuration on the hub gives others: no check may go by them.
_PLACEHOLDERS: Mapping[str, Any] = dict.fromkeys(("num_attention_heads", "num_layers", "hidden_size"))
_asked: list[str] = []


def _family(name: str) -> Family | None:
    return next((family for family in FAMILIES if re.match(family.names, name)), None)


def unknown(names: Iterable[str]) -> list[str]:
    """Return those models of which no sizes are known."""
    return [name for name in dict.fromkeys(names) if _family(name) is None]


def _bridge(name: Any, *args: Any, **kwargs: Any) -> StandInBridge:
    return StandInBridge(str(name))


def replace_auto_bridge() -> list[str]:
    """Have recipes take providers from here; returns the list to which the names of their models are added."""
    _asked.clear()
    stand_in = SimpleNamespace(from_hf_pretrained=_bridge, from_hf_config=_bridge)
    vars(importlib.import_module("megatron.bridge"))["AutoBridge"] = stand_in
    return _asked


def _provider(kind: type, family: Family) -> Any:
    """Return a provider without running its constructor, which looks at sizes that nobody knows here."""
    made: Any = object.__new__(kind)
    for one in dataclasses.fields(kind):
        if one.default_factory is not dataclasses.MISSING:
            setattr(made, one.name, one.default_factory())
        elif one.default is not dataclasses.MISSING:
            setattr(made, one.name, one.default)
    for name, value in {**_PLACEHOLDERS, **family.sizes}.items():
        setattr(made, name, value)
    if hasattr(made, "vision_config"):
        known = {"deepstack_visual_indexes": list(family.deepstack)} if family.deepstack else {}
        made.vision_config = SimpleNamespace(**known, **family.encoder)
    return made


class UnknownModel(SimpleNamespace):
    """The configuration of a model whose provider is not known here."""

    def to_text_provider(self) -> "UnknownModel":
        """Return the configuration of its language model, as Bridge's provider of a model with images does."""
        return self


def unknown_model(provider: str = GPT) -> Any:
    """Return a model's configuration of which only what every model has is known.

    Args:
        provider: Module and class of its provider, whose name the configuration's class has.
    """
    kind = _kind(provider) or _kind(GPT)
    known = vars(_provider(kind, Family(names="", provider=provider)))
    found = {name: value for name, value in known.items() if name not in _FROM_THE_HUB}
    if provider == GPT:
        return UnknownModel(**found)
    module, _, name = provider.rpartition(".")
    return type(name, (UnknownModel,), {"__module__": f"{MODELS}.{module}"})(**found)


def _kind(provider: str) -> Any:
    """Return a provider's class; None where this release of megatron-bridge lacks it."""
    module, _, name = provider.rpartition(".")
    try:
        return getattr(importlib.import_module(f"{MODELS}.{module}"), name)
    except ModuleNotFoundError:
        return None
