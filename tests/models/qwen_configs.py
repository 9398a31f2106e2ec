"""Hugging Face configurations of the models behind Bridge's recipes, written to a folder instead of fetched."""

from pathlib import Path
from typing import Any

from transformers import (
    Gemma3Config,
    Qwen2_5_VLConfig,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3Config,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
)

QWEN3_VL = (Qwen3VLConfig, "Qwen3VLForConditionalGeneration")
QWEN3_VL_MOE = (Qwen3VLMoeConfig, "Qwen3VLMoeForConditionalGeneration")
QWEN25_VL = (Qwen2_5_VLConfig, "Qwen2_5_VLForConditionalGeneration")
GEMMA3 = (Gemma3Config, "Gemma3ForConditionalGeneration")
QWEN35 = (Qwen3_5Config, "Qwen3_5ForConditionalGeneration")
QWEN35_MOE = (Qwen3_5MoeConfig, "Qwen3_5MoeForConditionalGeneration")


def sizes(layers: int, hidden: int, heads: int, key_value_heads: int, head_dim: int, **more: int) -> dict[str, Any]:
    """Return the language model's part."""
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": key_value_heads,
        "head_dim": head_dim,
        **more,
    }


def experts(count: int, active: int, width: int, **more: int) -> dict[str, Any]:
    """Return the part about experts."""
    return {"num_experts": count, "num_experts_per_tok": active, "moe_intermediate_size": width, **more}


MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}}
CONFIGS = {
    "Qwen/Qwen3-VL-8B-Instruct": (QWEN3_VL, sizes(36, 4096, 32, 8, 128, intermediate_size=12288)),
    "Qwen/Qwen3-VL-30B-A3B-Instruct": (QWEN3_VL_MOE, sizes(48, 2048, 32, 4, 128, **experts(128, 8, 768))),
    "Qwen/Qwen3-VL-235B-A22B-Instruct": (QWEN3_VL_MOE, sizes(94, 4096, 64, 4, 128, **experts(128, 8, 1536))),
    "Qwen/Qwen3.5-9B": (QWEN35, sizes(32, 4096, 16, 4, 256, intermediate_size=12288)),
    "Qwen/Qwen3.5-35B-A3B": (
        QWEN35_MOE,
        sizes(40, 2048, 16, 2, 256, **experts(256, 8, 512, shared_expert_intermediate_size=512)),
    ),
    "Qwen/Qwen3.5-122B-A10B": (
        QWEN35_MOE,
        sizes(48, 3072, 32, 2, 256, **experts(256, 8, 1024, shared_expert_intermediate_size=1024)),
    ),
    "Qwen/Qwen3.5-397B-A17B": (
        QWEN35_MOE,
        sizes(60, 4096, 32, 2, 256, **experts(512, 10, 1024, shared_expert_intermediate_size=1024)),
    ),
    "Qwen/Qwen2.5-VL-7B-Instruct": (QWEN25_VL, sizes(28, 3584, 28, 4, 128, intermediate_size=18944) | MROPE),
    "google/gemma-3-4b-it": (
        GEMMA3,
        {**sizes(34, 2560, 8, 4, 256, intermediate_size=10240, sliding_window=1024), "query_pre_attn_scalar": 256},
    ),
}
# Vision towers of which more than depth and width is no default.
SIGLIP = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16}
SIGLIP |= {"image_size": 896, "patch_size": 14}
TOWERS = {Gemma3Config: SIGLIP, Qwen2_5_VLConfig: {"depth": 32, "hidden_size": 1280, "out_hidden_size": 3584}}

# Language models without a vision encoder.
TEXT_CONFIGS = {
    "Qwen/Qwen3-8B": (Qwen3Config, "Qwen3ForCausalLM", sizes(36, 4096, 32, 8, 128, intermediate_size=12288))
}


def write_configs(root: Path) -> dict[str, Path]:
    """Write a folder with a config.json for every model; returns Hugging Face name -> folder."""
    folders = {}
    for name, ((config_class, architecture), text) in CONFIGS.items():
        folders[name] = root / name.rpartition("/")[2]
        vision = TOWERS.get(config_class, {"depth": 27, "out_hidden_size": text["hidden_size"]})
        config_class(architectures=[architecture], text_config=text, vision_config=vision).save_pretrained(
            folders[name]
        )
    for name, (text_class, architecture, text) in TEXT_CONFIGS.items():
        folders[name] = root / name.rpartition("/")[2]
        text_class(architectures=[architecture], **text).save_pretrained(folders[name])
    return folders
