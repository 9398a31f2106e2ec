"""Recipes of the full-size 8B and 9B models with all graphs, as a user starts them, with a hub's cache made here.

Weights are random. Adapters are trained on those of a checkpoint, which is made here, too; other recipes begin without.
"""

import gc
import math
from typing import NamedTuple

import pytest
import torch

from tests.models.local_hub import MODELS, snapshot_in, write_hub, write_weights

from .recipe_runs import checks_passed, run_recipe

STEPS = 8
# A minute or two, and as much again where gated delta nets, Qwen3.5-VL's, have Triton time its kernels.
LIMIT_S = 600
# Nothing is saved, loaded or evaluated; few of Bridge's mock images are drawn. Fused accumulation is Apex's, which
# NVIDIA's containers have and the registry has not.
WORDS = (
    f"train.train_iters={STEPS}",
    "train.global_batch_size=4",
    "train.eval_iters=0",
    "validation.eval_iters=0",
    "logger.log_interval=1",
    "logger.tensorboard_dir=null",
    "checkpoint.save=null",
    "checkpoint.load=null",
    "dataset.num_base_examples=16",
    "model.gradient_accumulation_fusion=false",
)


class Case(NamedTuple):
    """How a recipe is trained here.

    Attributes:
        fewest: GPUs that it is trained on at least.
        own: The GPUs of its own layout, tensor parallelism of as many; where there are fewer it is `fewest`.
        language_model: The kind of graphs of the language model.
        words: Further overrides.
    """

    fewest: int
    own: int
    language_model: str
    words: tuple[str, ...] = ()


WHOLE, PACKS = "language model", "packed sequences"
RECIPES = {
    "qwen3_vl_8b_pretrain_mock_config": Case(2, 4, WHOLE),
    "qwen3_vl_8b_sft_config": Case(2, 2, PACKS),
    "qwen3_vl_8b_peft_config": Case(1, 1, PACKS),
    "qwen35_vl_9b_pretrain_mock_config": Case(2, 4, WHOLE),
    "qwen35_vl_9b_sft_config": Case(4, 4, WHOLE),
    # What writes the checkpoint has no layers for multi-token prediction.
    "qwen35_vl_9b_peft_config": Case(1, 1, WHOLE, ("model.mtp_num_layers=null",)),
}
# A pack's length depends on its answers.
UNSEEN = {PACKS: {"not_captured_yet", "too_many_tokens", "too_few_tokens"}}
# Pretraining recipes have Bridge's mock images already.
GRAPHS = ("--graphs", "h200", "--mock_data")


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """Return the folder of the hub's cache, and the variables that make libraries use it."""
    folder = tmp_path_factory.mktemp("hub")
    return folder, write_hub(folder)


@pytest.fixture
def beginning(hub):
    """Return a function that gives the words for what a recipe's training begins with; weights are removed after it."""
    folder, _ = hub

    def begin(name):
        if "_peft_" not in name:
            return ["--mode", "pretrain"]
        snapshot = snapshot_in(folder, MODELS[name.removesuffix("_peft_config")])
        write_weights(snapshot)
        gc.collect()
        torch.cuda.empty_cache()
        return [f"checkpoint.pretrained_checkpoint={snapshot}"]

    yield begin
    for weights in folder.rglob("*.safetensors"):
        weights.unlink()


@pytest.mark.parametrize("name", RECIPES)
def test_it_trains_with_encoder_and_language_model_on_graphs(name, hub, beginning, tmp_path):
    fewest, own, language_model, words = RECIPES[name]
    found = torch.cuda.device_count()
    if found < fewest:
        pytest.skip(f"needs {fewest} NVIDIA GPUs")
    gpus = own if found >= own else fewest
    words = ["--recipe", name, *GRAPHS, *beginning(name), *WORDS, f"model.tensor_model_parallel_size={gpus}", *words]
    run, text = run_recipe(words, tmp_path, LIMIT_S, gpus, hub[1])
    print(f"{name}: losses {[loss for _, loss in run.losses]}, ms {[ms for _, ms in run.times]}, {run.peak_gb} GiB")
    assert [step for step, _ in run.losses] == list(range(1, STEPS + 1))
    assert all(math.isfinite(loss) for _, loss in run.losses)
    print(run.graphs)
    assert set(run.graphs) == {"vision", language_model}
    for kind, graphs in run.graphs.items():
        assert graphs.replays and graphs.fallbacks.keys() <= UNSEEN.get(kind, set()), kind
    assert checks_passed(text) >= 1
