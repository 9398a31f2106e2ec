"""Combinations of `full_iteration` on a model that takes images, whose whole language model is one region."""

from collections.abc import Callable

from ..facts import Facts
from ..graph_options import GraphOptions
from ..language_model import IMPL
from .rule import Combination

_ALLOWED = f"with {IMPL}=full_iteration on a model that takes images"


def whole_language_model(options: GraphOptions, facts: Facts) -> bool:
    """Whether the whole language model of a model that takes images is to be on graphs."""
    takes_images = facts.images or (options.vision.enabled and not facts.hugging_face_tower)
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
        "The graph goes from the token embeddings to the loss, which a pipeline splits",
        lambda f: (f.pipeline_stages or 1) > 1,
        "model.pipeline_model_parallel_size",
        lambda f: f.pipeline_stages,
        "1",
    ),
    _refused(
        "context parallelism",
        "Bridge's model splits sequences between ranks with sizes read on the host",
        lambda f: (f.context_ranks or 1) > 1,
        "model.context_parallel_size",
        lambda f: f.context_ranks,
        "1",
    ),
    _refused(
        "in-batch packing",
        "The bounds of packed sequences reach the layers as Python objects, which a graph cannot take",
        lambda f: f.in_batch_packing,
        lambda f: f"dataset.{f.in_batch_packing}",
        lambda f: True,
        "false",
    ),
    _refused(
        "recompute",
        "megatron-core's checkpointing does not run inside a backward that returns gradients of chosen inputs, as the "
        "recorded one does",
        lambda f: f.recompute_granularity is not None,
        "model.recompute_granularity",
        lambda f: f.recompute_granularity,
        "null",
    ),
    _refused(
        "mixture-of-experts layers",
        "How many tokens each expert gets is read on the host",
        lambda f: f.moe,
        "model.num_moe_experts",
        lambda f: "above 1",
        "null",
    ),
    _refused(
        "multi-token prediction",
        "Its further losses are scaled and logged outside the language model's output",
        lambda f: f.multi_token_layers,
        "model.mtp_num_layers",
        lambda f: f.multi_token_layers,
        "null",
    ),
    _refused(
        "fp8 or fp4",
        "Weights quantized in a step's first microbatch are kept for the others, which a graph of every microbatch is "
        "not told",
        lambda f: f.low_precision,
        "model.fp8",
        lambda f: f.low_precision,
        "null",
    ),
)
