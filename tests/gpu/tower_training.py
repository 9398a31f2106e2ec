"""Bridge's `pretrain()`, unmodified, on models around Hugging Face's towers: what `TrainingProcess` runs.

Towers are of full width and a few layers, the language model is small, images are random and their captions learnable.
"""

import dataclasses
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.bridge.models.gemma_vl.gemma3_vl_provider import Gemma3VLModelProvider
from megatron.bridge.models.gemma_vl.modeling_gemma3_vl import Gemma3VLMultimodalProjectorConfig
from megatron.bridge.models.qwen_vl.qwen25_vl_provider import Qwen25VLModelProvider
from megatron.bridge.training.config import DatasetBuildContext, DatasetProvider, TokenizerConfig
from megatron.bridge.training.pretrain import pretrain
from megatron.bridge.training.utils.visual_inputs import GenericVisualInputs
from megatron.bridge.training.vlm_step import forward_step
from torch.utils.data import Dataset
from transformers import SiglipVisionConfig
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig

import bridge_cg_plugin
from bridge_cg_plugin.upstream.hooks.data.dataset_helper import helper_as_shipped
from bridge_cg_tools.benchmarks.photographs.arguments import parse
from bridge_cg_tools.benchmarks.photographs.training import RankResults, Run, merge_ranks, training_config

LAYERS, WIDTH, HEADS = 6, 1024, 8
VOCABULARY, IMAGE, START, CAPTION = 4096, 4000, 4001, 24
SEQUENCE = 1024
# (height, width) in patches.
SIZES = ((28, 28), (20, 34), (32, 32))
PATCH = 3 * 2 * 14 * 14
GEMMA_SIDE, GEMMA_EMBEDDINGS = 896, 256
BUCKETS = {"qwen25_vl": [1024, 1536, 2048], "gemma3_vl": [4096, 8192]}


class RandomImages(Dataset):
    """One or two random images, each with one of a few captions, padded to a fixed length."""

    def __init__(self, model: str, samples: int, seed: int) -> None:
        self.model, self.samples, self.seed = model, samples, seed

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        rng = random.Random(self.seed * 1_000_003 + index)
        tokens, counted, sizes = [], [], [rng.choice(SIZES) for _ in range(rng.randint(1, 2))]
        for height, width in sizes:
            embeddings = height * width // 4 if self.model == "qwen25_vl" else GEMMA_EMBEDDINGS
            words = [rng.choice((7, 11)) * (word + 1) for word in range(CAPTION)]
            tokens += [START, *[IMAGE] * embeddings, *words]
            counted += [0] * (1 + embeddings) + [1] * CAPTION
        padding = SEQUENCE + 1 - len(tokens)
        ids, mask = torch.tensor(tokens + [0] * padding), torch.tensor(counted + [0] * padding, dtype=torch.float)
        generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
        if self.model == "qwen25_vl":
            grid = torch.tensor([(1, *size) for size in sizes])
            pixels = torch.randn(int(grid.prod(1).sum()), PATCH, generator=generator)
            images = GenericVisualInputs(pixel_values=pixels, image_grid_thw=grid)
        else:
            shape = (len(sizes), 3, GEMMA_SIDE, GEMMA_SIDE)
            images = GenericVisualInputs(pixel_values=torch.randn(shape, generator=generator))
        return {
            "tokens": ids[:-1],
            "labels": ids[1:],
            "loss_mask": mask[1:],
            "position_ids": torch.arange(SEQUENCE),
            "images": images,
        }

    @staticmethod
    def collate_fn(items: list[dict[str, Any]]) -> dict[str, Any]:
        """Make a microbatch of one sample."""
        (item,) = items
        batch = {key: value[None] for key, value in item.items() if key != "images"}
        return {**batch, "attention_mask": None, "visual_inputs": item["images"]}


@dataclass
class RandomImagesProvider(DatasetProvider):
    """Bridge dataset provider over `RandomImages`."""

    model: str = "qwen25_vl"
    seq_length: int = SEQUENCE
    skip_getting_attention_mask_from_dataset: bool = True
    enable_in_batch_packing: bool = False

    def build_datasets(self, context: DatasetBuildContext) -> tuple[Dataset, ...]:
        """Build train, validation and test sets of the sizes that training asks for."""
        counts = (context.train_samples, context.valid_samples, context.test_samples)
        return tuple(RandomImages(self.model, max(count, 1), seed) for seed, count in enumerate(counts))


def provider_of(model: str) -> Qwen25VLModelProvider | Gemma3VLModelProvider:
    """Return the model's provider."""
    common = {
        "num_layers": 2,
        "hidden_size": WIDTH,
        "ffn_hidden_size": 3 * WIDTH,
        "num_attention_heads": HEADS,
        "num_query_groups": 4,
        "kv_channels": WIDTH // HEADS,
        "vocab_size": VOCABULARY,
        "seq_length": SEQUENCE,
        "image_token_id": IMAGE,
        "vision_start_token_id": START,
        "make_vocab_size_divisible_by": 128,
        "gradient_accumulation_fusion": False,
        "use_te_rng_tracker": True,
        "bf16": True,
        "params_dtype": torch.bfloat16,
        "pipeline_dtype": torch.bfloat16,
    }
    if model == "qwen25_vl":
        return Qwen25VLModelProvider(
            **common,
            normalization="RMSNorm",
            gated_linear_unit=True,
            activation_func=torch.nn.functional.silu,
            add_bias_linear=False,
            add_qkv_bias=True,
            hidden_dropout=0.0,
            vision_config=Qwen2_5_VLVisionConfig(
                depth=LAYERS,
                hidden_size=1280,
                num_heads=16,
                intermediate_size=3420,
                out_hidden_size=WIDTH,
                fullatt_block_indexes=[2, LAYERS - 1],
            ),
        )
    tower = {"hidden_size": 1152, "num_attention_heads": 16, "intermediate_size": 4304}
    return Gemma3VLModelProvider(
        **common,
        vision_config=SiglipVisionConfig(num_hidden_layers=LAYERS, image_size=GEMMA_SIDE, patch_size=14, **tower),
        vision_projector_config=Gemma3VLMultimodalProjectorConfig(
            input_size=1152,
            hidden_size=WIDTH,
            image_size=GEMMA_SIDE,
            tokens_per_image=GEMMA_EMBEDDINGS,
            gradient_accumulation_fusion=False,
            bf16=True,
            params_dtype=torch.bfloat16,
        ),
    )


def train_words(words: Sequence[str]) -> None:
    """Train the model of the word `tower=MODEL` as the others say; writes losses, times and the graphs' statistics."""
    args = parse(words)
    (model,) = (word.removeprefix("tower=") for word in args.overrides)
    bridge_cg_plugin.activate()
    config = training_config(Run(steps=args.steps, small=True))
    provider = provider_of(model)
    if args.train == "graphs":
        provider.vision_cuda_graph_impl = "transformer_engine"
        provider.vision_cuda_graph_buckets = BUCKETS[model]
        provider.vision_cuda_graph_strict = True
        provider.vision_cuda_graph_tuning = {"cost_fallback": False}
    config = dataclasses.replace(
        config,
        model=provider,
        dataset=RandomImagesProvider(dataloader_type="single", num_workers=0, model=model),
        tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=VOCABULARY - 1),
    )
    ranks = RankResults()
    with helper_as_shipped():
        pretrain(config, forward_step, callbacks=[ranks.recorder, ranks.statistics, ranks])
    args.out.write_text(json.dumps(merge_ranks(ranks.gathered or [ranks.own()])))
