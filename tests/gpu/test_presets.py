"""Presets of the full-size 8B model as a user starts them, with a hub's cache made here.

Weights are random. Adapters are trained on those of a checkpoint, which is made here, too; other presets begin without.
"""

import gc
import math

import pytest
import torch

from tests.local_hub import snapshot_in, write_hub, write_weights

from .recipe_runs import assert_checks_passed, run_recipe

STEPS = 8
LIMIT_S = 300
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
    "model.vision_cuda_graph_check_interval=6",
    "model.gradient_accumulation_fusion=false",
)
# Preset -> the fewest GPUs that it is trained on, and its own tensor parallelism, which is less where they are fewer.
PRESETS = {
    "qwen3_vl_8b_vision_graphs_h200_pretrain_mock_config": (2, 4),
    "qwen3_vl_8b_vision_graphs_h200_sft_mock_config": (2, 2),
    "qwen3_vl_8b_vision_graphs_h200_peft_mock_config": (1, 1),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("hub")


@pytest.fixture(scope="module")
def hub(folder):
    return write_hub(folder)


@pytest.fixture(scope="module")
def checkpoint(folder, hub):
    write_weights(snapshot_in(folder))
    gc.collect()
    torch.cuda.empty_cache()
    return snapshot_in(folder)


def begins_with(name, request):
    """Return the words that say how a preset is trained, and on which weights."""
    if "_peft_" in name:
        return [f"checkpoint.pretrained_checkpoint={request.getfixturevalue('checkpoint')}"]
    return ["--mode", "pretrain"]


@pytest.mark.parametrize("name", PRESETS)
def test_it_trains_with_every_microbatch_on_graphs(name, hub, tmp_path, request):
    fewest, own = PRESETS[name]
    found = torch.cuda.device_count()
    if found < fewest:
        pytest.skip(f"needs {fewest} NVIDIA GPUs")
    gpus = own if found >= own else fewest
    layout = f"model.tensor_model_parallel_size={gpus}"
    words = ["--recipe", name, *begins_with(name, request), *WORDS, layout]
    run, text = run_recipe(words, tmp_path, LIMIT_S, gpus, hub)
    print(f"{name}: losses {[loss for _, loss in run.losses]}, ms {[ms for _, ms in run.times]}, {run.peak_gb} GiB")
    assert [step for step, _ in run.losses] == list(range(1, STEPS + 1))
    assert all(math.isfinite(loss) for _, loss in run.losses)
    graphs = run.graphs["vision"]
    print(graphs)
    assert graphs.replays and not graphs.fallbacks
    assert_checks_passed(text, 1)
