"""Combinations of packed-sequence graphs with fp8 and fp4."""

from ..facts import Facts
from ..graph_options import GraphOptions
from ..language_model import MODULES
from .packed import asked, one_region, packs, whole_layers, with_experts
from .rule import Combination

TENSORWISE, DELAYED, BLOCKWISE = RECIPES = ("tensorwise", "delayed", "blockwise")
BF16 = "Train in bf16."


def _in_fp8(options: GraphOptions, facts: Facts) -> bool:
    return packs(options) and facts.fp8 is not None


def _with_fp8(options: GraphOptions, facts: Facts) -> str:
    return f"with {asked(options)} and model.fp8={facts.fp8}"


FP8 = (
    Combination(
        "packed-sequence graphs with fp4",
        "fp4 was not looked at",
        lambda o, f: packs(o) and f.fp8 is None and f.low_precision,
        lambda o, f: ("model.fp4", f.low_precision, f"null with {asked(o)}", BF16),
    ),
    Combination(
        "packed-sequence graphs with a precision for each module",
        "Quantized weights are followed where all layers have one recipe",
        lambda o, f: packs(o) and f.own_precision,
        lambda o, f: ("model.quant_recipe", "set", f"null with {asked(o)}", "Remove it."),
    ),
    Combination(
        "packed-sequence graphs in fp8 with another recipe than tensorwise, delayed or blockwise",
        "Other recipes were not compared with eager",
        lambda o, f: _in_fp8(o, f) and f.fp8_recipe not in (None, *RECIPES),
        lambda o, f: (
            "model.fp8_recipe",
            f.fp8_recipe,
            f"{TENSORWISE}, {DELAYED} or {BLOCKWISE} {_with_fp8(o, f)}",
            f"Set it to {TENSORWISE}.",
        ),
    ),
    Combination(
        "packed-sequence graphs in fp8 with attention in fp8",
        "Attention over packed documents in fp8 was not looked at",
        lambda o, f: _in_fp8(o, f) and f.fp8_attention,
        lambda o, f: (f"model.{f.fp8_attention}", True, f"false {_with_fp8(o, f)}", "Set it to false."),
    ),
    Combination(
        "packed-sequence graphs of parts of layers with delayed scaling",
        "Eager updates its scales in the backward of the first layer, which a replayed part leaves out",
        lambda o, f: _in_fp8(o, f) and f.fp8_recipe == DELAYED and not one_region(o, f),
        lambda o, f: (
            "model.fp8_recipe",
            DELAYED,
            f"{TENSORWISE} {_with_fp8(o, f)} and {MODULES} set",
            f"Set it to {TENSORWISE}" + ("." if f.moe else f", or leave {MODULES} empty."),
        ),
    ),
    Combination(
        "packed-sequence graphs of whole layers in fp8 with experts",
        "The plugin's kernels of experts compute in bf16",
        lambda o, f: _in_fp8(o, f) and f.moe and whole_layers(o),
        lambda o, f: (
            "model.fp8",
            f.fp8,
            f"null with {asked(o)}, experts and {MODULES} empty",
            f"Set {MODULES}={with_experts(f)}, where experts stay eager, or train in bf16.",
        ),
    ),
    Combination(
        "packed-sequence graphs in fp8 with Mamba layers",
        "Mamba layers in fp8 were not compared with eager",
        lambda o, f: _in_fp8(o, f) and f.mamba,
        lambda o, f: ("model.fp8", f.fp8, f"null with {asked(o)} and Mamba layers", BF16),
    ),
    Combination(
        "packed-sequence graphs in fp8 with tensor parallelism",
        "Ranks exchange the largest values inside the graph, which was not compared with eager",
        lambda o, f: _in_fp8(o, f) and (f.tensor_ranks or 1) > 1,
        lambda o, f: (
            "model.tensor_model_parallel_size",
            f.tensor_ranks,
            f"1 {_with_fp8(o, f)}",
            "Set it to 1, or train in bf16.",
        ),
    ),
)
