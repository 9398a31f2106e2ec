"""A folder with a small Qwen3-VL as its hub has it: configuration, processor, random weights."""

from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3VLConfig

from tests.models.local_hub import write_model, write_weights
from tests.models.qwen_configs import sizes

LAYERS, WIDTH, TOWER_LAYERS = 4, 2048, 27
REPOSITORY = "models--benchmark"


def configuration(layers: int = LAYERS, width: int = WIDTH, tower_layers: int = TOWER_LAYERS) -> Qwen3VLConfig:
    """Return the configuration: the full vision tower, and a language model with embeddings tied as Qwen3-VL-2B's.

    Args:
        layers: Of the language model.
        width: Of the language model.
        tower_layers: Of the vision tower.
    """
    text = sizes(layers, width, 16, 8, 128, intermediate_size=3 * width)
    vision: dict[str, Any] = {"depth": tower_layers, "out_hidden_size": width}
    if tower_layers < TOWER_LAYERS:
        vision["deepstack_visual_indexes"] = [0]
    return Qwen3VLConfig(
        architectures=["Qwen3VLForConditionalGeneration"],
        text_config={**text, "tie_word_embeddings": True},
        vision_config=vision,
        tie_word_embeddings=True,
    )


def write_files(folder: Path, config: Qwen3VLConfig, seed: int) -> Path:
    """Write all files; with a GPU, weights are drawn there.

    Args:
        folder: Where they go.
        config: The model's.
        seed: Of the weights.

    Returns:
        The model's folder.
    """
    config.save_pretrained(folder / "config")
    snapshot = folder / REPOSITORY / "snapshots" / "0"
    write_model(snapshot, folder / "config" / "config.json")
    torch.manual_seed(seed)
    write_weights(snapshot)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return snapshot
