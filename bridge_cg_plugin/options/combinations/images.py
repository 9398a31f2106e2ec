"""Combinations of `full_iteration` on a model that takes images, whose whole language model is one region."""

from collections.abc import Callable

from ..facts import Facts
from ..graph_options import GraphOptions
from ..language_model import IMPL
from .rule import Combination

_ALLOWED = f"with {IMPL}=full_iteration on a model that takes images"


def whole_language_model(options: GraphOptions, facts: Facts) -> bool:
    """Whether the whole language model of a model that takes images is to be on graphs."""
    takes_images = facts.images or (options.vision.enabled and not facts.other_tower)
    return options.language_model.impl == "full_iteration" and bool(takes_images)


def _refused(
    what: str,
    reason: str,
    finds: Callable[[Facts], object],
    field: str | Callable[[Facts], str],
    value: Callable[[Facts], object],
    allowed: str,
) -> Combination:
    """Return the combination of `full_iteration` and a setting, on a model that takes images."""

    def found(options: GraphOptions, facts: Facts) -> object:
        return whole_language_model(options, facts) and finds(facts)

    def error(options: GraphOptions, facts: Facts) -> tuple[str, object, str, str]:
        name = field if isinstance(field, str) else field(facts)
        return name, value(facts), f"{allowed} {_ALLOWED}", f"Change it, or set {IMPL}=transformer_engine."

    return Combination(f"`full_iteration` on a model that takes images, with {what}", reason, found, error)


IMAGES = (
    _refused(
        "pipeline parallelism",
        "The graph covers everything from the embeddings to the loss, and a pipeline splits this",
        lambda f: (f.pipeline_stages or 1) > 1,
        "model.pipeline_model_parallel_size",
        lambda f: f.pipeline_stages,
        "1",
    ),
    _refused(
        "context parallelism",
        "Bridge's model reads sizes on the host when it splits sequences between ranks",
        lambda f: (f.context_ranks or 1) > 1,
        "model.context_parallel_size",
        lambda f: f.context_ranks,
        "1",
    ),
    _refused(
        "in-batch packing",
        "Document bounds are Python objects, which a graph cannot take as input",
        lambda f: f.in_batch_packing,
        lambda f: f"dataset.{f.in_batch_packing}",
        lambda f: True,
        "false",
    ),
    _refused(
        "recompute",
        "megatron-core's checkpointing does not support the backward that is captured",
        lambda f: f.recompute_granularity is not None,
        "model.recompute_granularity",
        lambda f: f.recompute_granularity,
        "null",
    ),
    _refused(
        "mixture-of-experts layers",
        "The host reads the number of tokens of each expert",
        lambda f: f.moe,
        "model.num_moe_experts",
        lambda f: "above 1",
        "null",
    ),
    _refused(
        "multi-token prediction",
        "Its additional losses are not part of the language model's output",
        lambda f: f.multi_token_layers,
        "model.mtp_num_layers",
        lambda f: f.multi_token_layers,
        "null",
    ),
    _refused(
        "fp8 or fp4",
        "Weights are quantized only in the first microbatch of a step, but the graph is the same for all microbatches",
        lambda f: f.low_precision,
        "model.fp8",
        lambda f: f.low_precision,
        "null",
    ),
)
