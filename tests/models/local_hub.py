"""A cache of Hugging Face's hub with models' configurations and processors like their own; nothing is fetched.

Sizes and special tokens are the published ones, the tokenizer spells every word in bytes, and weights, where they are
wanted, are random. With it Bridge's recipes and mock data work on a machine without a network.
"""

from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    Gemma3ImageProcessor,
    Gemma3Processor,
    ProcessorMixin,
    Qwen2_5_VLProcessor,
    Qwen2Tokenizer,
    Qwen2VLImageProcessor,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)
from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

from tests.models.hub_folders import MODELS, REVISION, snapshot_in, variables_of
from tests.models.qwen_configs import write_configs

# Gemma 3's processor takes this one for a regular expression.
IMAGE_BEGINS = "<start_of_image>"
SPECIAL = [
    f"<|{name}|>"
    for name in (
        *("endoftext", "im_start", "im_end", "object_ref_start", "object_ref_end", "box_start", "box_end"),
        *("quad_start", "quad_end", "vision_start", "vision_end", "vision_pad", "image_pad", "video_pad"),
    )
] + [IMAGE_BEGINS]
# What processors call some of them.
ROLES = {"image_token": "<|image_pad|>", "boi_token": IMAGE_BEGINS, "eoi_token": "<|vision_end|>"}
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PIXELS = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "patch_size": 16, "temporal_patch_size": 2, "merge_size": 2}


def tokenizer(image_token_id: int) -> Qwen2Tokenizer:
    """Return a tokenizer of bytes whose special tokens have the ids of the model with this id for images."""
    first_special = image_token_id - SPECIAL.index("<|image_pad|>")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, *(f"unused{i}" for i in range(first_special - len(alphabet)))]
    found = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    found.pre_tokenizer, found.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    found.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    return Qwen2Tokenizer(
        tokenizer_object=found, eos_token="<|im_end|>", pad_token="<|endoftext|>", extra_special_tokens=ROLES
    )


def write_weights(snapshot: Path) -> None:
    """Write random bf16 weights of the configuration in a folder; with a GPU they are drawn there."""
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        config = AutoConfig.from_pretrained(snapshot)
        AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16).save_pretrained(snapshot)


def write_hub(folder: Path, names: Iterable[str] = MODELS.values()) -> dict[str, str]:
    """Write the cache of models, by their names on the hub.

    Returns:
        The environment variables that make Hugging Face's libraries use it; see `variables_of`.
    """
    configs = write_configs(folder / "configs")
    for name in names:
        write_model(snapshot_in(folder, name), configs[name] / "config.json")
    return variables_of(folder)


def write_model(snapshot: Path, config: Path) -> None:
    """Write one model's files into its folder; its configuration is moved there."""
    snapshot.mkdir(parents=True)
    references = snapshot.parents[1] / "refs"
    references.mkdir()
    (references / "main").write_text(REVISION)
    config.rename(snapshot / "config.json")
    written = AutoConfig.from_pretrained(snapshot)
    made = {"gemma3": gemma3_processor, "qwen2_5_vl": qwen25_processor}
    made.get(written.model_type, qwen_processor)(tokenizer(written.image_token_id)).save_pretrained(snapshot)


def qwen_processor(words: Qwen2Tokenizer) -> ProcessorMixin:
    """Return Qwen3-VL's processor."""
    return Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(size={"shortest_edge": 65536, "longest_edge": 16777216}, **PIXELS),
        tokenizer=words,
        video_processor=Qwen3VLVideoProcessor(**PIXELS),
        chat_template=TEMPLATE,
    )


def qwen25_processor(words: Qwen2Tokenizer) -> ProcessorMixin:
    """Return Qwen2.5-VL's processor, whose defaults are the published ones."""
    return Qwen2_5_VLProcessor(Qwen2VLImageProcessor(), words, Qwen2VLVideoProcessor(), chat_template=TEMPLATE)


def gemma3_processor(words: Qwen2Tokenizer) -> ProcessorMixin:
    """Return Gemma 3's processor, which writes an image's tokens where a text has the word before it."""
    return Gemma3Processor(
        image_processor=Gemma3ImageProcessor(size={"height": 896, "width": 896}),
        tokenizer=words,
        chat_template=TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", IMAGE_BEGINS),
    )


def write_checkpoint(folder: Path) -> Path:
    """Write what Bridge takes for a checkpoint of a model, without weights; returns its folder.

    Args:
        folder: Where it goes.
    """
    checkpoint = folder / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text("{}")
    (checkpoint / "model.safetensors").touch()
    return checkpoint
