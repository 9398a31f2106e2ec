"""One run of Bridge's `pretrain()` on packed documents; writes its losses and times.

`dense` is a model of 8 layers of 2048; a microbatch is 4 documents of random length, joined by Bridge's in-batch
packing. `experts` has 16 experts of 768 in every layer, 4 of them for a token, and a loss that balances them.
`fp8`, `fp8_delayed` and `fp8_blockwise` are the dense model with Bridge's settings of current, delayed and block
scaling, and bf16 parameters; `fp8_parameters` has current scaling and parameters in fp8.
`qwen3_vl` is Qwen3-VL in small, on photographs with captions; a microbatch is 2 samples, which Bridge's step for that
model pads to one length and joins.
"""

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from megatron.bridge.data.packing.in_batch import pack_right_padded_sequence_batch_to_mcore_thd
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.models.hybrid.hybrid_provider import HybridModelProvider
from megatron.bridge.models.qwen_vl import qwen3_vl_step
from megatron.bridge.recipes.utils.optimizer_utils import distributed_fused_adam_with_cosine_annealing
from megatron.bridge.training.callbacks import Callback, CallbackContext
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
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.mixed_precision import MixedPrecisionConfig, get_mixed_precision_config
from megatron.bridge.training.pretrain import pretrain
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.transformer.enums import AttnBackend
from torch import Tensor
from torch.nn.functional import pad, silu
from torch.utils.data import Dataset

import bridge_cg_plugin
from bridge_cg_plugin.options import graph_options
from bridge_cg_plugin.recipes.captioned_images import CaptionedImages
from bridge_cg_plugin.upstream.hooks.configuration.graph_fields import apply_options
from bridge_cg_plugin.upstream.hooks.data.dataset_helper import helper_as_shipped
from bridge_cg_plugin.upstream.hooks.helpers.graph_helper import active_helpers
from examples.photographs import training as photographs
from examples.photographs.images import PhotographDataset, PhotographProvider
from examples.photographs.training import Recorder, Run
from tests.models.tilings import compiled_side_by_side

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
    "fp8": (GPTModelProvider, DENSE),
    "fp8_delayed": (GPTModelProvider, DENSE),
    "fp8_parameters": (GPTModelProvider, DENSE),
    "fp8_blockwise": (GPTModelProvider, DENSE),
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
# Bridge's names of settings in fp8, by model; eager's products take packs of a multiple of so many tokens.
FP8 = {
    "fp8": "bf16_with_fp8_current_scaling_mixed",
    "fp8_delayed": "bf16_with_fp8_delayed_scaling_mixed",
    "fp8_parameters": "bf16_with_fp8_current_scaling_mixed",
    "fp8_blockwise": "bf16_with_fp8_subchannel_scaling_mixed",
}
PARAMETERS_IN_FP8 = "fp8_parameters"
FP8_ROWS = 16
MODELS = (*LANGUAGE_MODELS, "qwen3_vl")


def train_words(words: Sequence[str]) -> None:
    """Train as the words of a command line say."""
    parser = argparse.ArgumentParser(prog="packed_training", description=__doc__.splitlines()[0])
    parser.add_argument("--train", choices=("eager", "graphs"), required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--model", choices=MODELS, default="dense")
    parser.add_argument("--modules", default="", help="parts of layers to capture; all layers as one region without")
    parser.add_argument("--rows", type=int, default=1, help="packs are padded to a multiple of this many tokens")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(words)
    args.out.write_text(json.dumps(train(args.train, args.steps, args.model, args.modules, args.rows)))


class StatisticsKeeper(Callback):
    """Keeps the graphs' statistics as of the last step."""

    def __init__(self) -> None:
        self.value: dict[str, Any] | None = None

    def on_train_step_end(self, context: CallbackContext) -> None:
        """Read them."""
        for helper in active_helpers():
            if helper.graphs is not None:
                self.value = helper.graphs.statistics().as_dict()


def train(mode: str, steps: int, model: str = "dense", modules: str = "", rows: int = 1) -> dict[str, Any]:
    """Train in this process; returns losses, gradient norms, step times and the graphs' statistics."""
    bridge_cg_plugin.activate()
    recorder, keeper = Recorder(), StatisticsKeeper()
    if model in LANGUAGE_MODELS:
        config, step = training_config(mode, steps, modules, rows, model), forward_step
    else:
        config, step = photograph_config(mode, steps, modules, rows), qwen3_vl_step.forward_step
    with helper_as_shipped(), compiled_side_by_side():
        pretrain(config, step, callbacks=[recorder, keeper])
    return {
        "losses": recorder.losses,
        "grad_norms": recorder.grad_norms,
        "step_ms": recorder.step_ms,
        "peak_gb": recorder.peak_gb,
        "packed_graphs": keeper.value,
    }


def training_config(mode: str, steps: int, modules: str = "", rows: int = 1, model: str = "dense") -> ConfigContainer:
    """Return Bridge's whole configuration of a language model."""
    optimizer, scheduler = distributed_fused_adam_with_cosine_annealing(
        lr_warmup_iters=5, lr_decay_iters=max(steps, 10), max_lr=1e-4, min_lr=1e-5
    )
    return ConfigContainer(
        model=model_provider(mode, modules, model),
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
        dataset=DocumentProvider(rows=max(rows, FP8_ROWS) if model in FP8 else rows),
        logger=LoggerConfig(log_interval=10),
        tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=VOCABULARY - 1),
        checkpoint=CheckpointConfig(save=None, load=None, save_interval=None, ckpt_format="torch_dist"),
        rng=RNGConfig(seed=SEED, te_rng_tracker=True),
        dist=DistributedInitConfig(),
        mixed_precision=precision_of(model),
    )


def precision_of(model: str) -> MixedPrecisionConfig:
    """Return the precision that a model trains in."""
    precision = get_mixed_precision_config(FP8.get(model, "bf16_mixed"))
    precision.fp8_param_gather = model == PARAMETERS_IN_FP8
    return precision


def model_provider(mode: str, modules: str, model: str = "dense") -> Any:
    """Return the provider of a model of 8 layers of 2048, with graphs of up to 8 documents or without."""
    kind, own = LANGUAGE_MODELS[model]
    provider = kind(
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
    put_graphs(provider, mode, modules, DOCUMENTS)
    return provider


def put_graphs(provider: Any, mode: str, modules: str, documents: int) -> None:
    """Ask for graphs of packs with up to twice as many documents as there are, unless the run is eager."""
    if mode != "graphs":
        return
    wanted = {
        "cuda_graph_impl": "transformer_engine",
        "cuda_graph_modules": modules,
        "cuda_graph_max_packed_seqs": 2 * documents,
        "cuda_graph_packed_strict": True,
    }
    apply_options(graph_options(provider, wanted), provider)


def photograph_config(mode: str, steps: int, modules: str = "", rows: int = 1) -> ConfigContainer:
    """Return Bridge's configuration of the example's small Qwen3-VL, with microbatches of several samples packed."""
    config = photographs.training_config(Run(steps=steps, small=True, global_batch=PHOTOGRAPH_MICROBATCHES * SAMPLES))
    config.train.micro_batch_size = SAMPLES
    given = config.dataset
    config.dataset = PackedPhotographProvider(
        dataloader_type="single",
        num_workers=given.num_workers,
        seq_length=given.seq_length,
        most_images=given.most_images,
        sizes=PHOTOGRAPH_SIZES,
        rows=rows,
        enable_in_batch_packing=True,
    )
    put_graphs(config.model, mode, modules, SAMPLES)
    return config


class PackedPhotographs(PhotographDataset):
    """Photographs with captions, whose microbatches are as long as their longest sample.

    Attributes:
        rows: Samples are padded to a multiple of this many tokens.
    """

    rows = 1

    def collate_fn(self, items: list[dict[str, Any]]) -> dict[str, Any]:
        """Stack a microbatch and cut what is padding in all of its samples."""
        batch = super().collate_fn(items)
        longest = int((batch["tokens"] != 0).nonzero()[:, 1].max()) + 1
        length = min(-(-longest // self.rows) * self.rows, batch["tokens"].shape[1])
        kept = {name: batch[name][:, :length] for name in ("tokens", "labels", "loss_mask", "position_ids")}
        return {**batch, **kept}


@dataclass
class PackedPhotographProvider(PhotographProvider):
    """Bridge dataset provider over `PackedPhotographs`."""

    kind: ClassVar[type[PhotographDataset]] = PackedPhotographs

    rows: int = 1

    def build_datasets(self, context: Any) -> tuple[CaptionedImages, CaptionedImages, CaptionedImages]:
        """Build train, validation and test sets of the sizes that training asks for."""
        made = super().build_datasets(context)
        for data in made:
            assert isinstance(data, PackedPhotographs)
            data.rows = self.rows
        return made


class Documents(Dataset[dict[str, Tensor]]):
    """Documents of 16 to `SEQUENCE` tokens, each a repeated phrase, which a model can learn.

    Args:
        count: Documents.
        seed: Of their tokens.
        rows: Packs are padded to a multiple of this many tokens.
    """

    def __init__(self, count: int, seed: int, rows: int) -> None:
        self._count, self._seed, self._rows = count, seed, rows

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
        add_padding(batch, self._rows)
        return batch


def add_padding(batch: dict[str, Any], rows: int) -> None:
    """Pad a pack to a multiple of `rows` tokens by one more document, which no loss counts."""
    missing = -batch["tokens"].shape[1] % rows
    if not missing:
        return
    for name in ("tokens", "labels", "loss_mask"):
        batch[name] = pad(batch[name], (0, missing))
    batch["position_ids"] = torch.cat((batch["position_ids"], torch.arange(missing)[None]), 1)
    for name in ("cu_seqlens_q", "cu_seqlens_kv"):
        batch[name] = torch.cat((batch[name], batch[name][-1:] + missing))
    for name in ("max_seqlen_q", "max_seqlen_kv"):
        batch[name] = batch[name].clamp(min=missing)
    batch["total_tokens"] += missing


@dataclass
class DocumentProvider(DatasetProvider):
    """Bridge dataset provider over `Documents`."""

    seq_length: int = SEQUENCE
    seed: int = 1
    rows: int = 1
    dataloader_type: str = "single"
    num_workers: int = 0
    skip_getting_attention_mask_from_dataset: bool = True
    enable_in_batch_packing: bool = True

    def build_datasets(self, context: Any) -> tuple[Dataset[Any], Dataset[Any], Dataset[Any]]:
        """Build train, validation and test sets of the sizes that training asks for."""
        counts = (context.train_samples, context.valid_samples, context.test_samples)
        train, valid, test = (Documents(max(count, 1), self.seed + i, self.rows) for i, count in enumerate(counts))
        return train, valid, test
