"""What else of a configuration decides whether graph options can work."""

from dataclasses import dataclass
from typing import Any

from .errors import OptionError
from .experts import not_recorded
from .offload import CORE_FIELDS
from .sources import Written
from .values import is_unset, parse_flag, words

# What a loop other than Bridge's adds to the settings of a model.
LOOP_PARTS = "loop_parts"
# Newer and older releases' names.
PACKING_FIELDS = ("enable_in_batch_packing", "pack_sequences_in_batch")
OFFLINE_PACKING = "enable_offline_packing"
FP8_ATTENTION = ("fp8_dot_product_attention", "fp8_multi_head_attention")
LEVELS = "hierarchical_context_parallel_sizes"
# The release that waits for copies inside graphs brought this field.
CAME_WITH_OFFLOAD_IN_GRAPHS = CORE_FIELDS["delay_until_cuda_graph"]
# Bridge's providers of models that take images and whose encoder's layers are set like the language model's.
BRIDGES_MODELS, PROVIDER = "megatron.bridge.models.", "ModelProvider"
QWEN3_VL = (
    *("Qwen3VLModelProvider", "Qwen3VLMoEModelProvider"),
    *("Qwen35VLModelProvider", "Qwen35VLMoEModelProvider"),
)
# Fields of providers whose model has a vision encoder.
IMAGE_FIELDS = ("vision_config", "thinker_config", "vision_model_type", "freeze_vision_model")
# Nemotron Omni's provider is one of these.
NEMOTRON_VL = "NemotronVLModelProvider"
# Layers of Qwen3-VL's encoder and its mergers. Bridge puts adapters into all that have a target's name; a target with
# wildcards may mean those of the language model alone.
ENCODER_LAYERS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Settings besides the graph options; None is unknown, and what is unknown refuses nothing.

    Attributes:
        te_rng_tracker: Whether random states are Transformer Engine's.
        megatron_fsdp: Whether Megatron-FSDP holds the parameters.
        torch_fsdp: Whether PyTorch's FSDP2 holds them.
        variable_seq_lengths: Whether sequences of different microbatches differ in length.
        nan_check: Whether the loss is checked for NaN inside a step.
        recompute_granularity: None, "selective" or "full".
        recompute_modules: Parts that selective recompute covers.
        attention_dropout: Whether attention uses random numbers.
        hidden_dropout: Whether MLP and MoE use random numbers.
        moe: Whether the model has mixture-of-experts layers.
        expert_ranks: Ranks of expert parallelism.
        expert_tensor_ranks: Ranks of expert tensor parallelism.
        expert_adapters: Names by which adapters are put on linear layers that experts have, too.
        router_jitter: Whether a router's input is changed at random.
        eager_experts: A setting that keeps experts out of graphs, its value and what it must be; empty is none.
        mamba: Whether the model has Mamba layers.
        packed_data: Whether the dataset packs documents.
        mla: Whether attention is multi-latent.
        mla_fused_norm: Whether its norm is part of its first projection.
        attention_variant: Another attention that layers have.
        fused_experts: Whether Transformer Engine runs an expert's MLP as one operation.
        stashed_experts: Whether megatron-core keeps experts' activations in pages of its own.
        warmup_steps: Eager steps before capture.
        images: Whether the model takes images through Bridge's Qwen3-VL step.
        other_tower: Whether the vision encoder is another than that of Qwen3-VL and Qwen3.5-VL.
        copied_settings: Whether the vision encoder's layers are set up by a copy of the language model's settings.
        pipeline_stages: Stages of pipeline parallelism.
        tensor_ranks: Ranks of tensor parallelism.
        context_ranks: Ranks of context parallelism.
        context_exchange: Ways in which they exchange keys and values, by layer; empty is upstream's default, a ring.
        context_levels: Ranks of each level of a hierarchical exchange; those of the first divide heads.
        key_heads: Heads of keys and values, of all tensor-parallel ranks together.
        in_batch_packing: The release's field that is set to pack a microbatch's sequences into one.
        multi_token_layers: Layers of multi-token prediction.
        low_precision: The fp8 or fp4 format that layers compute in.
        fp8: The fp8 format alone.
        fp8_recipe: How scales are found.
        fp8_attention: A field by which attention itself computes in fp8; empty where none is set.
        own_precision: Whether single modules have a precision of their own.
        cpu_offloading: Whether megatron-core offloads whole layers.
        offload_in_graphs: Whether megatron-core can offload inside the graphs that it captures.
        sequence_parallel: Whether tensor-parallel ranks are set to divide sequences; with experts they do anyway.
        deepstack: Whether layers of the language model take features of the vision encoder.
        encoder_trained: Whether anything of the vision encoder and its mergers is trained.
        loop_parts: Parts that a loop other than Bridge's can have on graphs of this model; None in Bridge's own loop.
        explicit: Fields that a person wrote.
    """

    te_rng_tracker: bool | None = None
    megatron_fsdp: bool | None = None
    torch_fsdp: bool | None = None
    variable_seq_lengths: bool | None = None
    nan_check: bool | None = None
    recompute_granularity: str | None = None
    recompute_modules: tuple[str, ...] = ()
    attention_dropout: bool | None = None
    hidden_dropout: bool | None = None
    moe: bool | None = None
    expert_ranks: int | None = None
    expert_tensor_ranks: int | None = None
    expert_adapters: tuple[str, ...] = ()
    router_jitter: bool | None = None
    eager_experts: tuple[Any, ...] = ()
    mamba: bool | None = None
    packed_data: bool | None = None
    mla: bool | None = None
    mla_fused_norm: bool | None = None
    attention_variant: str | None = None
    fused_experts: bool | None = None
    stashed_experts: bool | None = None
    warmup_steps: int | None = None
    images: bool | None = None
    other_tower: bool | None = None
    copied_settings: bool | None = None
    pipeline_stages: int | None = None
    tensor_ranks: int | None = None
    context_ranks: int | None = None
    context_exchange: tuple[str, ...] = ()
    context_levels: tuple[int, ...] = ()
    key_heads: int | None = None
    in_batch_packing: str | None = None
    multi_token_layers: int | None = None
    low_precision: str | None = None
    fp8: str | None = None
    fp8_recipe: str | None = None
    fp8_attention: str = ""
    own_precision: bool = False
    cpu_offloading: bool | None = None
    offload_in_graphs: bool | None = None
    sequence_parallel: bool | None = None
    deepstack: bool | None = None
    encoder_trained: bool | None = None
    loop_parts: tuple[str, ...] | None = None
    explicit: frozenset[str] = frozenset()


def facts_of(written: Written) -> Facts:
    """Return what the collected settings say.

    Raises:
        OptionError: A setting has no value of its kind.
    """
    settings = written.settings
    modules = settings.get("recompute_modules")
    granularity = settings.get("recompute_granularity")
    experts = settings.get("num_moe_experts")
    tower = None if written.model is None else _has_tower(written.model)
    return Facts(
        te_rng_tracker=_te_rng_tracker(settings),
        megatron_fsdp=_flag(settings, "use_megatron_fsdp"),
        torch_fsdp=_flag(settings, "use_torch_fsdp2"),
        variable_seq_lengths=_flag(settings, "variable_seq_lengths"),
        nan_check=_flag(settings, "check_for_nan_in_loss"),
        recompute_granularity=None if is_unset(granularity) else str(granularity),
        recompute_modules=("core_attn",) if is_unset(modules) else words(modules),  # megatron-core's default
        attention_dropout=_above_zero(settings, "attention_dropout"),
        hidden_dropout=_above_zero(settings, "hidden_dropout"),
        moe=None
        if "num_moe_experts" not in settings
        else not is_unset(experts) and _number("num_moe_experts", experts) > 1,
        expert_ranks=_count(settings, "expert_model_parallel_size"),
        expert_tensor_ranks=_count(settings, "expert_tensor_parallel_size"),
        expert_adapters=tuple(filter(_names_experts, _adapted(settings))),
        router_jitter=_above_zero(settings, "moe_input_jitter_eps"),
        eager_experts=not_recorded(settings),
        mamba=_mamba(written),
        packed_data=any(_flag(settings, name) for name in (*PACKING_FIELDS, OFFLINE_PACKING)),
        mla=_flag(settings, "multi_latent_attention"),
        mla_fused_norm=_flag(settings, "mla_down_proj_fusion"),
        attention_variant=_word(settings, "experimental_attention_variant"),
        fused_experts=_flag(settings, "use_transformer_engine_op_fuser"),
        stashed_experts=_flag(settings, "moe_paged_stash"),
        warmup_steps=_count(settings, "cuda_graph_warmup_steps"),
        images=None if tower is None else hasattr(written.model, "vision_cuda_graph_impl") and not tower,
        other_tower=tower,
        copied_settings=None if written.model is None else NEMOTRON_VL in _bases(written.model),
        pipeline_stages=_count(settings, "pipeline_model_parallel_size"),
        tensor_ranks=_count(settings, "tensor_model_parallel_size"),
        context_ranks=_count(settings, "context_parallel_size"),
        context_exchange=() if is_unset(settings.get("cp_comm_type")) else words(settings["cp_comm_type"]),
        context_levels=_counts(settings, LEVELS),
        key_heads=_count(settings, "num_query_groups") or _count(settings, "num_attention_heads"),
        in_batch_packing=next((name for name in PACKING_FIELDS if _flag(settings, name)), None),
        multi_token_layers=_count(settings, "mtp_num_layers"),
        low_precision=_word(settings, "fp8") or _word(settings, "fp4"),
        fp8=_word(settings, "fp8"),
        fp8_recipe=_word(settings, "fp8_recipe"),
        fp8_attention=next((name for name in FP8_ATTENTION if _flag(settings, name)), ""),
        own_precision=not is_unset(settings.get("quant_recipe")),
        cpu_offloading=_flag(settings, "cpu_offloading"),
        offload_in_graphs=None if written.model is None else hasattr(written.model, CAME_WITH_OFFLOAD_IN_GRAPHS),
        sequence_parallel=_flag(settings, "sequence_parallel"),
        deepstack=_deepstack(written.model),
        encoder_trained=_encoder_trained(settings),
        loop_parts=settings.get(LOOP_PARTS),
        explicit=written.explicit,
    )


def _bases(model: Any) -> set[str]:
    return {base.__name__ for base in type(model).__mro__}


def _has_tower(model: Any) -> bool:
    mro = type(model).__mro__
    bridges = any(b.__module__.startswith(BRIDGES_MODELS) and b.__name__.endswith(PROVIDER) for b in mro)
    takes_images = any(hasattr(model, name) for name in ("vision_cuda_graph_impl", *IMAGE_FIELDS))
    return bridges and takes_images and _bases(model).isdisjoint(QWEN3_VL)


def _flag(settings: dict[str, Any], name: str) -> bool | None:
    value = settings.get(name)
    return None if is_unset(value) else parse_flag(name, value)


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise OptionError(name, value, "a number", "Change it in the model's configuration.") from None


def _count(settings: dict[str, Any], name: str) -> int | None:
    value = settings.get(name)
    return None if is_unset(value) else int(_number(name, value))


def _counts(settings: dict[str, Any], name: str) -> tuple[int, ...]:
    value = settings.get(name)
    if is_unset(value):
        return ()
    items: Any = value.strip("[]() ").split(",") if isinstance(value, str) else value
    return tuple(int(_number(name, item)) for item in items)


def _word(settings: dict[str, Any], name: str) -> str | None:
    value = settings.get(name)
    return None if is_unset(value) else str(getattr(value, "value", value))


def _above_zero(settings: dict[str, Any], name: str) -> bool | None:
    value = settings.get(name)
    return None if is_unset(value) else _number(name, value) > 0


def _te_rng_tracker(settings: dict[str, Any]) -> bool | None:
    given = [_flag(settings, name) for name in ("te_rng_tracker", "use_te_rng_tracker")]
    if any(given):
        return True
    # Either of the two places is enough, so the model's alone does not say that it is off.
    return given[0]


def _deepstack(model: Any) -> bool | None:
    layers = getattr(getattr(model, "vision_config", None), "deepstack_visual_indexes", None)
    return None if layers is None else bool(layers)


def _adapted(settings: dict[str, Any]) -> list[str]:
    """Return the names by which adapters are put on linear layers."""
    targets = settings.get("target_modules")
    names = targets.strip("[]() ").split(",") if isinstance(targets, str) else targets or ()
    return [str(name).strip(" '\"") for name in names]


def _names_experts(target: str) -> bool:
    elsewhere = any(part in target for part in ("vision", "shared_experts", "self_attention"))
    return target.rpartition(".")[2].startswith("linear_fc") and not elsewhere


def _encoder_trained(settings: dict[str, Any]) -> bool | None:
    if "target_modules" in settings:
        return True if any(name in ENCODER_LAYERS for name in _adapted(settings)) else None
    frozen = [_flag(settings, name) for name in ("freeze_vision_model", "freeze_vision_projection")]
    if False in frozen:
        return True
    return None if None in frozen else False


def _mamba(written: Written) -> bool | None:
    if _flag(written.settings, "is_hybrid_model"):
        return True
    patterns = [written.settings.get(name) for name in ("hybrid_layer_pattern", "hybrid_override_pattern")]
    if any(not is_unset(pattern) for pattern in patterns):
        return any("M" in str(pattern) for pattern in patterns if not is_unset(pattern))
    if written.model is None:
        return None
    names = " ".join(base.__name__ for base in type(written.model).__mro__).lower()
    return False if "gptmodelprovider" in names else None
