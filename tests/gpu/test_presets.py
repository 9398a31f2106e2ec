"""Presets of the full-size 8B and 9B models as a user starts them, with a hub's cache made here.

Weights are random. Adapters are trained on those of a checkpoint, which is made here, too; other presets begin without.
"""

import gc
import math
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

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
NEEDS_CHECKPOINT = "_peft_"


class Case(NamedTuple):
    """How a preset is trained here.

    Attributes:
        model: Name of the model on the hub.
        fewest: GPUs that it is trained on at least.
        own: Its own tensor parallelism, which is `fewest` where there are fewer GPUs.
        words: Further overrides.
    """

    model: str
    fewest: int
    own: int
    words: tuple[str, ...] = ()


QWEN3, QWEN35 = "Qwen/Qwen3-VL-8B-Instruct", "Qwen/Qwen3.5-9B"
PRESETS = {
    "qwen3_vl_8b_vision_graphs_h200_pretrain_mock_config": Case(QWEN3, 2, 4),
    "qwen3_vl_8b_vision_graphs_h200_sft_mock_config": Case(QWEN3, 2, 2),
    "qwen3_vl_8b_vision_graphs_h200_peft_mock_config": Case(QWEN3, 1, 1),
    "qwen35_vl_9b_vision_graphs_h200_pretrain_mock_config": Case(QWEN35, 2, 4),
    "qwen35_vl_9b_vision_graphs_h200_sft_mock_config": Case(QWEN35, 4, 4),
    # What writes the checkpoint has no layers for multi-token prediction.
    "qwen35_vl_9b_vision_graphs_h200_peft_mock_config": Case(QWEN35, 1, 1, ("model.mtp_num_layers=null",)),
}


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """Return the folder of the hub's cache, and the variables that make libraries use it."""
    folder = tmp_path_factory.mktemp("hub")
    for model in (QWEN3, QWEN35):
        variables = write_hub(folder, model)
    return folder, variables


@contextmanager
def checkpoint_of(model, folder):
    """Write random weights of a model and yield the folder that they are in; they are removed in the end."""
    snapshot = snapshot_in(folder, model)
    write_weights(snapshot)
    gc.collect()
    torch.cuda.empty_cache()
    try:
        yield snapshot
    finally:
        for file in snapshot.glob("*.safetensors"):
            file.unlink()


@pytest.mark.parametrize("name", PRESETS)
def test_it_trains_with_every_microbatch_on_graphs(name, hub, tmp_path):
    model, fewest, own, words = PRESETS[name]
    folder, variables = hub
    found = torch.cuda.device_count()
    if found < fewest:
        pytest.skip(f"needs {fewest} NVIDIA GPUs")
    gpus = own if found >= own else fewest
    words = ["--recipe", name, *WORDS, f"model.tensor_model_parallel_size={gpus}", *words]
    with ExitStack() as stack:
        if NEEDS_CHECKPOINT in name:
            words += [f"checkpoint.pretrained_checkpoint={stack.enter_context(checkpoint_of(model, folder))}"]
        else:
            words += ["--mode", "pretrain"]
        run, text = run_recipe(words, tmp_path, LIMIT_S, gpus, variables)
    print(f"{name}: losses {[loss for _, loss in run.losses]}, ms {[ms for _, ms in run.times]}, {run.peak_gb} GiB")
    assert [step for step, _ in run.losses] == list(range(1, STEPS + 1))
    assert all(math.isfinite(loss) for _, loss in run.losses)
    graphs = run.graphs["vision"]
    print(graphs)
    assert graphs.replays and not graphs.fallbacks
    assert_checks_passed(text, 1)
