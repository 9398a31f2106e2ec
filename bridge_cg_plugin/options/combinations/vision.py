"""Combinations of vision graphs."""

from ..facts import Facts
from ..graph_options import GraphOptions
from ..language_model import IMPL
from ..vision import PROVIDER_FIELDS
from .language_model import whole_language_model
from .rule import Combination

VISION_IMPL = PROVIDER_FIELDS["impl"]


def _recompute_of_vision(options: GraphOptions, facts: Facts) -> bool:
    if not options.vision.enabled or facts.recompute_granularity is None or facts.other_tower:
        return False
    reaches = {"core_attn", "mlp", "layernorm"} & set(facts.recompute_modules)
    return facts.recompute_granularity != "selective" or bool(reaches)


_ON_THIS_MODEL = f"{VISION_IMPL}=transformer_engine on this model"
_INSTEAD_OF_SHARDING = "Use DDP with the distributed optimizer."


def _no_sharding(options: GraphOptions) -> str:
    graphs = f"{VISION_IMPL}=transformer_engine" if options.vision.enabled else f"{IMPL}=full_iteration"
    return f"false with {graphs}"


VISION = (
    Combination(
        "Megatron-FSDP with vision graphs, or with `full_iteration` on a model that takes images",
        "Megatron-FSDP moves parameters between steps, but a graph reads fixed addresses",
        lambda o, f: f.megatron_fsdp and (o.vision.enabled or whole_language_model(o, f)),
        lambda o, f: ("ddp.use_megatron_fsdp", True, _no_sharding(o), _INSTEAD_OF_SHARDING),
    ),
    Combination(
        "PyTorch's FSDP2 with vision graphs, or with `full_iteration` on a model that takes images",
        "FSDP2 frees gathered parameters after each module, but a graph reads fixed addresses",
        lambda o, f: f.torch_fsdp and (o.vision.enabled or whole_language_model(o, f)),
        lambda o, f: ("dist.use_torch_fsdp2", True, _no_sharding(o), _INSTEAD_OF_SHARDING),
    ),
    Combination(
        "vision graphs with recompute that reaches the vision encoder",
        "Bridge applies recompute to the vision encoder too, and its activations are in graph memory",
        _recompute_of_vision,
        lambda o, f: (
            "model.recompute_granularity",
            f.recompute_granularity,
            f"null with {VISION_IMPL}=transformer_engine",
            f"Lower {PROVIDER_FIELDS['max_seq_length']} if memory is short.",
        ),
    ),
    Combination(
        "vision graphs of Nemotron's encoder with fp8 or fp4",
        "The encoder's layers compute in it, too, and quantize weights only in the first microbatch of a step",
        lambda o, f: o.vision.enabled and f.copied_settings and f.low_precision,
        lambda o, f: ("model.fp8", f.low_precision, f"null with {_ON_THIS_MODEL}", "Train in bf16."),
    ),
    Combination(
        "vision graphs of Nemotron's encoder with `cpu_offloading`",
        "It offloads the encoder's layers, too, and their activations are in graph memory",
        lambda o, f: o.vision.enabled and f.copied_settings and f.cpu_offloading,
        lambda o, f: ("model.cpu_offloading", True, f"false with {_ON_THIS_MODEL}", "Switch one of both off."),
    ),
    Combination(
        "graphs of parts of layers of a vision encoder other than Qwen3-VL's and Qwen3.5-VL's",
        "Parts of layers can be captured in the layers of these two only",
        lambda o, f: o.vision.enabled and f.other_tower and not o.vision.whole_encoder,
        lambda o, f: (
            PROVIDER_FIELDS["modules"],
            list(o.vision.modules),
            "empty on this model",
            "Leave it out: the whole encoder is one region.",
        ),
    ),
    Combination(
        "vision graphs of an encoder other than these with `full_iteration`",
        "megatron-core captures the whole step of such a model, and a graph cannot replay inside a capture",
        lambda o, f: o.vision.enabled and f.other_tower and o.language_model.impl == "full_iteration",
        lambda o, f: (
            IMPL,
            o.language_model.impl,
            f"none or transformer_engine with {_ON_THIS_MODEL}",
            "Change either.",
        ),
    ),
    Combination(
        "the run-time check with graphs of parts of layers",
        "The check compares the whole encoder",
        lambda o, f: o.vision.enabled and o.vision.check_interval and not o.vision.whole_encoder,
        lambda o, f: (
            PROVIDER_FIELDS["check_interval"],
            o.vision.check_interval,
            f"0 with {PROVIDER_FIELDS['modules']}={list(o.vision.modules)}",
            "Use it with the whole encoder as one region.",
        ),
    ),
)
