"""Configurations of Bridge's `pretrain()` on documents and on packed photographs.

`dense` is a model of 8 layers of 2048; a microbatch is 4 documents of random length, joined by Bridge's in-batch
packing. `experts` has 16 experts of 768 in every layer, 4 of them for a token, and a loss that balances them. The
photographs are for Qwen3-VL in small; a microbatch is 2 samples, which Bridge's step for that model pads to one length
and joins.
"""

import random
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from megatron.bridge.data.packing.in_batch import pack_right_padded_sequence_batch_to_mcore_thd
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.models.hybrid.hybrid_provider import HybridModelProvider
from megatron.bridge.recipes.utils.optimizer_utils import distributed_fused_adam_with_cosine_annealing
from megatron.bridge.training.config import (
    CheckpointConfig,
    ConfigContainer,
    DatasetProvider,
    DistributedInitConfig,
    LoggerConfig,
    RNGConfig,
    TokenizerConfig,
    TrainingConfig,
    ValidationConfig,
)
from megatron.bridge.training.mixed_precision import get_mixed_precision_config
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.transformer.enums import AttnBackend
from torch import Tensor
from torch.nn.functional import pad, silu
from torch.utils.data import Dataset

from bridge_cg_plugin.options import graph_options
from bridge_cg_plugin.upstream.hooks.graph_fields import apply_options
from examples.photographs import training as photographs
from examples.photographs.images import PhotographDataset, PhotographProvider
from examples.photographs.training import Run

VOCABULARY = 32_768
SEQUENCE = 1024
DOCUMENTS = 4
MICROBATCHES = 4
# Of the photographs: cuDNN plans attention anew for every shape that it has not met, so there are few sizes.
SAMPLES, PHOTOGRAPH_MICROBATCHES = 2, 2
PHOTOGRAPH_SIZES = [(448, 448), (256, 384)]
SEED = 1234
# Providers of language models by name, and what is theirs alone.
DENSE: dict[str, Any] = {"num_layers": 8, "qk_layernorm": True, "position_embedding_type": "rope"}
LANGUAGE_MODELS: dict[str, tuple[type, dict[str, Any]]] = {
    "dense": (GPTModelProvider, DENSE),
    "experts": (
        GPTModelProvider,
        {
            **DENSE,
            "num_moe_experts": 16,
            "moe_router_topk": 4,
            "moe_ffn_hidden_size": 768,
            "moe_grouped_gemm": True,
            "moe_permute_fusion": True,
            "moe_token_dispatcher_type": "alltoall",
            "moe_router_load_balancing_type": "aux_loss",
            "moe_aux_loss_coeff": 1e-3,
        },
    ),
    "mamba": (
        HybridModelProvider,
        {
            "hybrid_layer_pattern": "M-M*-M-M",
            "is_hybrid_model": True,
            "mamba_num_heads": 64,
            "mamba_head_dim": 64,
            "mamba_state_dim": 128,
            "attention_backend": AttnBackend.auto,
        },
    ),
}


def training_config(steps: int, model: str = "dense") -> ConfigContainer:
    """Return Bridge's whole configuration of a language model."""
    optimizer, scheduler = distributed_fused_adam_with_cosine_annealing(
        lr_warmup_iters=5, lr_decay_iters=max(steps, 10), max_lr=1e-4, min_lr=1e-5
    )
    return ConfigContainer(
        model=model_provider(model),
        train=TrainingConfig(
            train_iters=steps,
            global_batch_size=MICROBATCHES * DOCUMENTS,
            micro_batch_size=DOCUMENTS,
            manual_gc=True,
            manual_gc_interval=1000,
        ),
        validation=ValidationConfig(eval_interval=None, eval_iters=0),
        optimizer=optimizer,
        scheduler=scheduler,
        ddp=DistributedDataParallelConfig(
            check_for_nan_in_grad=True,
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=True,
            overlap_param_gather=True,
            average_in_collective=True,
            use_distributed_optimizer=True,
        ),
        dataset=DocumentProvider(),
        logger=LoggerConfig(log_interval=10),
        tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=VOCABULARY - 1),
        checkpoint=CheckpointConfig(save=None, load=None, save_interval=None, ckpt_format="torch_dist"),
        rng=RNGConfig(seed=SEED, te_rng_tracker=True),
        dist=DistributedInitConfig(),
        mixed_precision=get_mixed_precision_config("bf16_mixed"),
    )


def model_provider(model: str) -> Any:
    """Return the provider of a model of 8 layers of 2048."""
    kind, own = LANGUAGE_MODELS[model]
    return kind(
        **own,
        hidden_size=2048,
        ffn_hidden_size=6144,
        num_attention_heads=16,
        num_query_groups=8,
        kv_channels=128,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        vocab_size=VOCABULARY,
        make_vocab_size_divisible_by=128,
        seq_length=SEQUENCE,
        share_embeddings_and_output_weights=False,
        gradient_accumulation_fusion=False,
        use_te_rng_tracker=True,
        bf16=True,
        params_dtype=torch.bfloat16,
    )


def photograph_config(steps: int) -> ConfigContainer:
    """Return Bridge's configuration of the example's small Qwen3-VL, microbatches of several samples packed, on graphs.

    Graphs are of packs with up to twice as many documents as there are.
    """
    config = photographs.training_config(Run(steps=steps, small=True, global_batch=PHOTOGRAPH_MICROBATCHES * SAMPLES))
    config.train.micro_batch_size = SAMPLES
    given = config.dataset
    config.dataset = PackedPhotographProvider(
        dataloader_type="single",
        num_workers=given.num_workers,
        seq_length=given.seq_length,
        most_images=given.most_images,
        sizes=PHOTOGRAPH_SIZES,
        enable_in_batch_packing=True,
    )
    wanted = {
        "cuda_graph_impl": "transformer_engine",
        "cuda_graph_modules": "",
        "cuda_graph_max_packed_seqs": 2 * SAMPLES,
        "cuda_graph_packed_strict": True,
    }
    apply_options(graph_options(config.model, wanted), config.model)
    return config


class PackedPhotographs(PhotographDataset):
    """Photographs with captions, whose microbatches are as long as their longest sample."""

    def collate_fn(self, items: list[dict[str, Any]]) -> dict[str, Any]:
        """Stack a microbatch and cut what is padding in all of its samples."""
        batch = super().collate_fn(items)
        length = int((batch["tokens"] != 0).nonzero()[:, 1].max()) + 1
        kept = {name: batch[name][:, :length] for name in ("tokens", "labels", "loss_mask", "position_ids")}
        return {**batch, **kept}


@dataclass
class PackedPhotographProvider(PhotographProvider):
    """Bridge dataset provider over `PackedPhotographs`."""

    kind: ClassVar[type[PhotographDataset]] = PackedPhotographs


class Documents(Dataset[dict[str, Tensor]]):
    """Documents of 16 to `SEQUENCE` tokens, each a repeated phrase, which a model can learn.

    Args:
        count: Documents.
        seed: Of their tokens.
    """

    def __init__(self, count: int, seed: int) -> None:
        self._count, self._seed = count, seed

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        rng = random.Random(self._seed * 1_000_003 + index)
        length = min(max(int(64 * rng.paretovariate(0.7)), 16), SEQUENCE)
        phrase = [rng.randrange(100, 1000) for _ in range(8)]
        tokens = torch.tensor([phrase[i % 8] for i in range(length + 1)])
        kept = torch.arange(SEQUENCE) < length
        padding = (0, SEQUENCE - length)
        return {
            "tokens": pad(tokens[:-1], padding),
            "labels": pad(tokens[1:], padding, value=-100),
            "loss_mask": kept.float(),
            "position_ids": torch.arange(SEQUENCE),
            "attention_mask": kept,
        }

    def collate_fn(self, items: list[dict[str, Tensor]]) -> dict[str, Any]:
        """Stack a microbatch and let Bridge join its documents."""
        batch = {key: torch.stack([item[key] for item in items]) for key in items[0]}
        pack_right_padded_sequence_batch_to_mcore_thd(batch)
        batch["labels"] = batch["labels"].clamp(min=0)
        return batch


@dataclass
class DocumentProvider(DatasetProvider):
    """Bridge dataset provider over `Documents`."""

    seq_length: int = SEQUENCE
    seed: int = 1
    dataloader_type: str = "single"
    num_workers: int = 0
    skip_getting_attention_mask_from_dataset: bool = True
    enable_in_batch_packing: bool = True

    def build_datasets(self, context: Any) -> tuple[Dataset[Any], Dataset[Any], Dataset[Any]]:
        """Build train, validation and test sets of the sizes that training asks for."""
        counts = (context.train_samples, context.valid_samples, context.test_samples)
        train, valid, test = (Documents(max(count, 1), self.seed + i) for i, count in enumerate(counts))
        return train, valid, test
