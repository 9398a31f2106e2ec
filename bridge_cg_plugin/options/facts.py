"""Settings besides the graph options that decide whether these can work."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from ..switches import EXPERT_BOUNDS, switched_on
from .declaration import OptionError, is_unset, parse_flag, words

# What a loop other than Bridge's adds to the settings of a model: the parts that it can have on graphs.
LOOP_PARTS = "loop_parts"
# Newer and older releases' names.
PACKING_FIELDS = ("enable_in_batch_packing", "pack_sequences_in_batch")
FP8_ATTENTION = ("fp8_dot_product_attention", "fp8_multi_head_attention")
# Bridge's providers of models that take images and whose encoder's layers are set like the language model's.
BRIDGES_MODELS, PROVIDER = "megatron.bridge.models.", "ModelProvider"
BRIDGES_DIFFUSION = "megatron.bridge.diffusion."
QWEN3_VL = (
    *("Qwen3VLModelProvider", "Qwen3VLMoEModelProvider"),
    *("Qwen35VLModelProvider", "Qwen35VLMoEModelProvider"),
)
# Fields of providers whose model has a vision encoder.
IMAGE_FIELDS = ("vision_config", "thinker_config", "vision_model_type", "freeze_vision_model")
# Nemotron Omni's provider is one of these.
NEMOTRON_VL = "NemotronVLModelProvider"
GEMMA3_VL = "Gemma3VLModelProvider"
# Models with other encoders whose step makes padded rows, and whose layers were compared with eager over them.
ROWS = (GEMMA3_VL, NEMOTRON_VL, "GLM45VModelProvider", "Qwen25VLModelProvider", "Qwen3OmniModelProvider")
# Layers of Qwen3-VL's encoder and its mergers. Bridge puts adapters into all that have a target's name; a target with
# wildcards may mean those of the language model alone.
ENCODER_LAYERS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")

# Experts in a region take memory that grows with the ranks that share them.
MOST_EXPERT_RANKS = 2
# Settings of routers and experts, and what each must be where a release has it, so that whole layers are captured.
ROUTERS: dict[str, Any] = {
    "moe_router_force_load_balancing": False,
    "moe_router_force_biased": None,
    "moe_enable_routing_replay": False,
}
EXPERTS: dict[str, Any] = {
    "moe_expert_capacity_factor": None,
    "moe_latent_size": None,
    "moe_apply_probs_on_input": False,
    "moe_shared_expert_overlap": False,
    "log_moe_overload_factor": False,
    "moe_router_padding_for_quantization": False,
    "moe_mlp_glu_interleave_size": None,
    "add_bias_linear": False,
    "use_te_activation_func": False,
    "use_transformer_engine_op_fuser": False,
    "use_fused_weighted_squared_relu": False,
    "delay_wgrad_compute": False,
    "overlap_dispatch_backward_with_experts_wgrad": False,
}
BALANCING_TYPE, FUSION, LOSS = "moe_router_load_balancing_type", "moe_router_fusion", "moe_aux_loss_coeff"
# A loss over all data-parallel ranks would exchange inside the graph with ranks whose packs are others.
BALANCING = ("none", "aux_loss", "seq_aux_loss")

# What `experimental_attention_variant` calls layers of Qwen3.5.
DELTA_NETS = "gated_delta_net"

# Whether megatron-core offloads activations.
OFFLOADS = "fine_grained_activation_offloading"

# Whether samples are padded to one length: a field of data sets, or among those of one of text, which Bridge leaves.
ONE_LENGTH, OF_TEXT = "pad_to_max_length", "dataset_kwargs"


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise OptionError(name, value, "a number", "Change it in the model's configuration.") from None


def _count(name: str, value: Any) -> int:
    return int(_number(name, value))


def _each(value: Any) -> list[Any]:
    """Return what a field holds: one value, several, or several as text."""
    if isinstance(value, str):
        return value.strip("[]() ").split(",")
    return list(value) if isinstance(value, list | tuple) else [value]


def _numbers(name: str, value: Any) -> tuple[float, ...]:
    return tuple(_number(name, item) for item in _each(value))


def _word(name: str, value: Any) -> str:
    return str(getattr(value, "value", value))


def _names(name: str, value: Any) -> tuple[str, ...]:
    return words(value)


def _targets(name: str, value: Any) -> tuple[str, ...]:
    return tuple(str(item).strip(" '\"") for item in _each(value))


def _as_it_is(name: str, value: Any) -> Any:
    return value


_READERS: dict[Callable[[str, Any], Any], tuple[str, ...]] = {
    parse_flag: (
        *("te_rng_tracker", "use_te_rng_tracker", "use_megatron_fsdp", "use_torch_fsdp2", "variable_seq_lengths"),
        ONE_LENGTH,
        *("check_for_nan_in_loss", "is_hybrid_model", "multi_latent_attention", "add_qkv_bias"),
        *(*PACKING_FIELDS, "enable_offline_packing", *FP8_ATTENTION, "cpu_offloading"),
        *("sequence_parallel", "freeze_vision_model", "freeze_vision_projection", FUSION, OFFLOADS),
        *(name for name, needed in (ROUTERS | EXPERTS).items() if needed is False),
    ),
    _count: (
        *("expert_model_parallel_size", "expert_tensor_parallel_size", "pipeline_model_parallel_size"),
        *("tensor_model_parallel_size", "context_parallel_size", "mtp_num_layers"),
        *("cuda_graph_warmup_steps", "recompute_num_layers"),
    ),
    _number: ("attention_dropout", "hidden_dropout", "num_moe_experts", "moe_input_jitter_eps"),
    _numbers: (LOSS,),
    _word: (
        *("recompute_granularity", "recompute_method", "experimental_attention_variant"),
        *("fp8", "fp8_recipe", "fp4", "normalization"),
    ),
    _names: ("recompute_modules", "cp_comm_type", BALANCING_TYPE),
    _targets: ("target_modules",),
    _as_it_is: (
        *("hybrid_layer_pattern", "hybrid_override_pattern", "spatial_merge_size", "quant_recipe", LOOP_PARTS, OF_TEXT),
        *(name for name, needed in (ROUTERS | EXPERTS).items() if needed is None),
    ),
}
# Setting -> what reads its value.
SETTINGS = {name: reader for reader, names in _READERS.items() for name in names}


@dataclass(frozen=True, slots=True)
class Facts:
    """Settings besides the graph options, typed; None is unknown, and what is unknown refuses nothing.

    Attributes:
        settings: Setting -> value.
        model: The config object of the model, if there is one.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    model: Any = None

    @classmethod
    def of(cls, settings: Mapping[str, Any], model: Any) -> Self:
        """Return settings, typed.

        Raises:
            OptionError: A setting has no value of its kind.
        """
        typed = {name: None if is_unset(value) else SETTINGS[name](name, value) for name, value in settings.items()}
        return cls(typed, model)

    def __getitem__(self, setting: str) -> Any:
        return self.settings.get(setting)

    def but(self, **settings: Any) -> Self:
        """Return these with other values of settings."""
        return replace(self, settings={**self.settings, **settings})

    def ranks(self, kind: str) -> int:
        """Return the ranks of a kind of parallelism; 1 where it is unknown."""
        return self[f"{kind}_parallel_size"] or 1

    @property
    def te_rng_tracker(self) -> bool | None:
        """Whether random states are Transformer Engine's. Either of two places is enough."""
        return True if self["use_te_rng_tracker"] else self["te_rng_tracker"]

    @property
    def moe(self) -> bool | None:
        """Whether the model has mixture-of-experts layers."""
        return (self["num_moe_experts"] or 0) > 1 if "num_moe_experts" in self.settings else None

    @property
    def mamba(self) -> bool | None:
        """Whether the model has Mamba layers."""
        if self["is_hybrid_model"]:
            return True
        patterns = [self["hybrid_layer_pattern"], self["hybrid_override_pattern"]]
        if any(pattern is not None for pattern in patterns):
            return any("M" in str(pattern) for pattern in patterns if pattern is not None)
        return False if any("gptmodelprovider" in name.lower() for name in self._bases) else None

    @property
    def packed_data(self) -> bool:
        """Whether the dataset packs documents."""
        return any(self[name] for name in (*PACKING_FIELDS, "enable_offline_packing"))

    @property
    def recomputed(self) -> tuple[str, ...]:
        """The parts that selective recompute covers."""
        if self["recompute_granularity"] != "selective":
            return ()
        return self["recompute_modules"] or ("core_attn",)  # megatron-core's default

    @property
    def _bases(self) -> set[str]:
        return {base.__name__ for base in type(self.model).__mro__}

    @property
    def other_tower(self) -> bool | None:
        """Whether the vision encoder is another than that of Qwen3-VL and Qwen3.5-VL."""
        if self.model is None:
            return None
        mro = type(self.model).__mro__
        bridges = any(b.__module__.startswith(BRIDGES_MODELS) and b.__name__.endswith(PROVIDER) for b in mro)
        takes_images = any(hasattr(self.model, name) for name in ("vision_cuda_graph_impl", *IMAGE_FIELDS))
        return bridges and takes_images and self._bases.isdisjoint(QWEN3_VL)

    @property
    def diffusion(self) -> bool:
        """Whether the model is one of Bridge's diffusion models, which are no language models."""
        return any(base.__module__.startswith(BRIDGES_DIFFUSION) for base in type(self.model).__mro__)

    @property
    def images(self) -> bool | None:
        """Whether the model takes images through Bridge's Qwen3-VL step."""
        return None if self.model is None else hasattr(self.model, "vision_cuda_graph_impl") and not self.other_tower

    @property
    def rows(self) -> bool | None:
        """Whether layers over padded rows of a model that takes images are known as one region."""
        if not self.other_tower:
            return self.images
        return self.biases if GEMMA3_VL in self._bases else not self._bases.isdisjoint(ROWS)

    @property
    def biases(self) -> bool:
        """Whether layers take biases of attention that say which tokens are an image; a mask before Bridge 0.6."""
        declared = getattr(type(self.model), "__dataclass_fields__", {}).get("is_vision_language")
        return GEMMA3_VL in self._bases and declared is not None and not declared.init

    @property
    def copied_settings(self) -> bool:
        """Whether the vision encoder's layers are set up by a copy of the language model's settings."""
        return NEMOTRON_VL in self._bases

    @property
    def runs_layers_again(self) -> bool:
        """Whether every layer runs again in the backward, one by one."""
        found = (self["recompute_granularity"], self["recompute_method"], self["recompute_num_layers"])
        return found == ("full", "uniform", 1)

    @property
    def shares_experts(self) -> bool:
        """Whether so many ranks share experts that a graph has them only where a person asks for it."""
        many = self.ranks("expert_model") > MOST_EXPERT_RANKS or self.expert_shards > 1
        return bool(self.moe) and many and not switched_on(EXPERT_BOUNDS, False)

    @property
    def expert_shards(self) -> int:
        """Ranks that hold a part of every expert each: megatron-core's default are those of a dense layer."""
        return self["expert_tensor_parallel_size"] or self.ranks("tensor_model")

    @property
    def deepstack(self) -> bool:
        """Whether layers of the language model are known to take features of the vision encoder."""
        return bool(getattr(getattr(self.model, "vision_config", None), "deepstack_visual_indexes", None))

    @property
    def encoder_trained(self) -> bool | None:
        """Whether anything of the vision encoder and its mergers is trained."""
        if "target_modules" in self.settings:
            return True if any(name in ENCODER_LAYERS for name in self["target_modules"] or ()) else None
        frozen = [self["freeze_vision_model"], self["freeze_vision_projection"]]
        return True if False in frozen else None if None in frozen else False

    @property
    def expert_adapters(self) -> tuple[str, ...]:
        """Names by which adapters are put on linear layers that experts have, too."""
        return tuple(filter(_names_experts, self["target_modules"] or ()))

    @property
    def loop_parts(self) -> tuple[str, ...] | None:
        """Parts that a loop other than Bridge's can have on graphs of this model; None in Bridge's own loop."""
        parts: tuple[str, ...] | None = self[LOOP_PARTS]
        return parts


def _names_experts(target: str) -> bool:
    elsewhere = any(part in target for part in ("vision", "shared_experts", "self_attention"))
    return target.rpartition(".")[2].startswith("linear_fc") and not elsewhere
