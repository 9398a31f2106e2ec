"""Cases of bench_recipe.py: a recipe, its GPUs and what is overridden of it. Imports nothing heavy."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RecipeCase:
    """One case of docs/benchmarks/whole_step.jsonl.

    Attributes:
        recipe: A recipe's or preset's name.
        gpus: Ranks, with a GPU each.
        words: Flags and overrides of `bridge-cg train`.
        batch: Samples of a step over all ranks.
    """

    recipe: str
    gpus: int = 1
    words: tuple[str, ...] = ()
    batch: int = 8


LORA = "8b_lora"
_EXPERTS = "qwen3_vl_30b_a3b_vision_graphs_h200_sft_config"
_PEFT = "qwen3_vl_8b_vision_graphs_h200_peft_config"
_SFT, _TP2 = "qwen3_vl_8b_vision_graphs_h200_sft_config", "model.tensor_model_parallel_size=2"
_OVERLAP = ("ddp.overlap_grad_reduce=true", "ddp.overlap_param_gather=true")
# Random weights send three times the mean of tokens to one of eight GPUs, and samples are padded to the whole length:
# with 4096 tokens, 48 layers do not fit 140 GB.
_FITTING = (
    "model.moe_router_force_load_balancing=true",
    "model.seq_length=2048",
    "dataset.seq_length=2048",
)
CASES = {
    "8b_sft_tp2": RecipeCase(_SFT, 2, (_TP2,)),
    "8b_sft_tp2_dp2": RecipeCase(_SFT, 4, (_TP2,), 16),
    "8b_sft_tp2_pp2": RecipeCase(_SFT, 4, (_TP2, "model.pipeline_model_parallel_size=2"), 16),
    "8b_sft_dp4": RecipeCase(_SFT, 4, ("model.tensor_model_parallel_size=1",), 16),
    "8b_sft_dp4_overlap": RecipeCase(_SFT, 4, ("model.tensor_model_parallel_size=1", *_OVERLAP), 16),
    LORA: RecipeCase(_PEFT),
    "8b_lora_dp2": RecipeCase(_PEFT, 2, (), 16),
    "8b_lora_dp4": RecipeCase(_PEFT, 4, (), 32),
    "30b_a3b_8_layers_ep2": RecipeCase(_EXPERTS, 2, ("model.num_layers=8", "model.expert_model_parallel_size=2")),
    # A GPU holds as many parameters of experts as one of eight does of all 48 layers.
    "30b_a3b_24_layers_ep4": RecipeCase(
        _EXPERTS, 4, ("model.num_layers=24", "model.expert_model_parallel_size=4", *_FITTING), 16
    ),
    "30b_a3b_ep8": RecipeCase(_EXPERTS, 8, ("model.expert_model_parallel_size=8", *_FITTING), 32),
}
