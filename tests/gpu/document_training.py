"""Trainings of small language models on documents: graphs, packs, generation between steps, and offloading.

`dense` is a model of layers of 2048, `experts` has 16 experts of 768 in every layer, 4 of them for a token,
`delta_nets` a gated delta net in one of two layers, `delta_net_experts` both. A microbatch is 4 documents of random
length: rows of the batch, or joined by Bridge's in-batch packing.
"""

import argparse
import dataclasses
import json
import random
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import yaml
from megatron.bridge.data.packing.in_batch import pack_right_padded_sequence_batch_to_mcore_thd
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.models.hybrid.hybrid_provider import HybridModelProvider
from megatron.bridge.training.callbacks import Callback, CallbackContext
from megatron.bridge.training.config import ConfigContainer, DatasetProvider, TokenizerConfig
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.inference.utils import InferenceMode
from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
    get_transformer_block_with_experimental_attention_variant_spec,
)
from megatron.core.pipeline_parallel import utils
from megatron.core.pipeline_parallel.fine_grained_activation_offload import PipelineOffloadManager
from megatron.core.transformer.enums import AttnBackend
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import Dataset

import bridge_cg_plugin
from bridge_cg_plugin.options import graph_options
from bridge_cg_plugin.upstream.hooks.graph_fields import apply_options, inference_graphs
from bridge_cg_plugin.upstream.hooks.helpers.graph_helper import active_helpers
from bridge_cg_plugin.upstream.hooks.recipes import helper_as_shipped
from bridge_cg_plugin.upstream.wrappers import unwrapped
from examples.photographs import training as photographs
from examples.photographs.training import Recorder, Run
from tests.models import packed_parity as parity
from tests.models.language_model import DENSE
from tests.models.tilings import delta_net_kernels, few_tilings

VOCABULARY, SEQUENCE, DOCUMENTS, MICROBATCHES = 32_768, 1024, 4, 4
EXPERTS: dict[str, Any] = {
    "num_moe_experts": 16,
    "moe_router_topk": 4,
    "moe_ffn_hidden_size": 768,
    "moe_grouped_gemm": True,
    "moe_permute_fusion": True,
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 1e-3,
}
# Experts inside a graph of megatron-core's take the same number of tokens each.
EQUAL = {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True, "moe_permute_fusion": False}
MAMBA = {
    "hybrid_layer_pattern": "M*-M",
    "is_hybrid_model": True,
    "mamba_num_heads": 64,
    "mamba_head_dim": 64,
    "mamba_state_dim": 128,
    "attention_backend": AttnBackend.auto,
}
# Qwen3.5's layers: a gated delta net, then attention.
DELTA_NETS = {
    "transformer_layer_spec": get_transformer_block_with_experimental_attention_variant_spec,
    "experimental_attention_variant": "gated_delta_net",
    "linear_attention_freq": 2,
    "layernorm_zero_centered_gamma": True,
    "attention_output_gate": True,
}
GPT: dict[str, Any] = {"num_layers": 2, "qk_layernorm": True, "position_embedding_type": "rope"}
# Providers of language models by name, and what is theirs alone.
LANGUAGE_MODELS: dict[str, tuple[type, dict[str, Any]]] = {
    "dense": (GPTModelProvider, GPT),
    "experts": (GPTModelProvider, {**GPT, **EXPERTS}),
    "equal_experts": (GPTModelProvider, {**GPT, **EXPERTS, **EQUAL}),
    "mamba": (HybridModelProvider, MAMBA),
    "delta_nets": (GPTModelProvider, {**GPT, **DELTA_NETS}),
    "delta_net_experts": (GPTModelProvider, {**GPT, **DELTA_NETS, **EXPERTS}),
}
PROMPTS, PROMPT, GENERATED, BETWEEN = 2, 32, 16, 6


def train_words(words: Sequence[str]) -> None:
    """Train as the words of a command line say."""
    parser = argparse.ArgumentParser(prog="document_training")
    parser.add_argument("--train", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", choices=LANGUAGE_MODELS, default="dense")
    parser.add_argument("--packed", action="store_true", help="train on packed documents")
    parser.add_argument("--flash-decode", action="store_true")
    parser.add_argument("--generate", action="store_true", help="generate before training and between its steps")
    parser.add_argument("--set", nargs="*", default=[], help="fields of the model")
    args = parser.parse_args(words)
    bridge_cg_plugin.activate()
    with ExitStack() as stack:
        stack.enter_context(parity.deterministic())
        if args.model == "mamba":
            stack.enter_context(few_tilings())
        if args.model.startswith("delta_net"):
            stack.enter_context(few_tilings(delta_net_kernels))
        found = train(args)
    manager = PipelineOffloadManager.OFFLOAD_MGR
    offloaded = getattr(manager, "_offload_summary_total_bytes", 0)  # by megatron-core, in a step
    args.out.write_text(json.dumps({**found, "offloaded": offloaded}))


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Run Bridge's `pretrain()`; returns losses, tokens that were generated and what was on graphs."""
    utils.set_ideal_affinity_for_current_gpu = lambda: None  # several train side by side, on any cores
    config = training_config(args.steps, args.model, args.packed)
    if args.flash_decode:  # of FlashAttention only the kernel that reads a cache need be there
        config.model.flash_decode, config.model.attention_backend = True, AttnBackend.fused
    for name, value in (word.split("=", 1) for word in args.set):
        setattr(config.model, name, value.split(",") if name == "offload_modules" else yaml.safe_load(value))
    apply_options(graph_options(config.model), config)
    recorder, keeper, generator = Recorder(), Keeper(), Generator()
    with helper_as_shipped():
        pretrain(config, forward_step, callbacks=[recorder, keeper, *([generator] if args.generate else [])])
    return {"losses": recorder.losses, "layers": keeper.layers, "packed": keeper.packed, "generations": generator.found}


def training_config(steps: int, model: str, packed: bool) -> ConfigContainer:
    """Return Bridge's whole configuration of a language model: the example's, on documents."""
    config = photographs.training_config(
        Run(steps=steps, small=True, global_batch=MICROBATCHES * DOCUMENTS, overlap=False)  # generation calls the chunk
    )
    config.train.micro_batch_size = DOCUMENTS
    return dataclasses.replace(
        config,
        model=model_provider(model),
        dataset=DocumentProvider(enable_in_batch_packing=packed),
        tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=VOCABULARY - 1),
    )


def model_provider(model: str) -> Any:
    """Return the provider of a model of a few layers of 2048."""
    kind, own = LANGUAGE_MODELS[model]
    return kind(
        **own,
        hidden_size=2048,
        ffn_hidden_size=6144,
        num_attention_heads=16,
        num_query_groups=8,
        kv_channels=128,
        **DENSE,
        vocab_size=VOCABULARY,
        make_vocab_size_divisible_by=128,
        seq_length=SEQUENCE,
        share_embeddings_and_output_weights=False,
        gradient_accumulation_fusion=False,
        use_te_rng_tracker=True,
        bf16=True,
        params_dtype=torch.bfloat16,
    )


class Documents(Dataset[dict[str, Tensor]]):
    """Documents of 16 to `SEQUENCE` tokens, each a repeated phrase, which a model can learn.

    Args:
        count: Documents.
        seed: Of their tokens.
        packed: Whether Bridge joins those of a microbatch, or each is a row of the batch.
    """

    def __init__(self, count: int, seed: int, packed: bool) -> None:
        self._count, self._seed, self._packed = count, seed, packed

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
        """Stack a microbatch; Bridge joins packed documents."""
        batch: dict[str, Any] = {key: torch.stack([item[key] for item in items]) for key in items[0]}
        if self._packed:
            pack_right_padded_sequence_batch_to_mcore_thd(batch)
        else:
            batch["attention_mask"] = None
        batch["labels"] = batch["labels"].clamp(min=0)
        return batch


@dataclasses.dataclass
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
        packed = self.enable_in_batch_packing
        train, valid, test = (Documents(max(count, 1), self.seed + i, packed) for i, count in enumerate(counts))
        return train, valid, test


class Keeper(Callback):
    """Keeps what was on graphs as of the last step: layers by upstream, packs by the plugin."""

    def __init__(self) -> None:
        self.layers = 0
        self.packed: dict[str, Any] | None = None

    def on_train_step_end(self, context: CallbackContext) -> None:
        """Count layers and read the statistics."""
        modules = (module for chunk in context.model for module in chunk.modules())
        self.layers = sum(bool(getattr(module, "cuda_graphs", None)) for module in modules)
        for helper in active_helpers():
            self.packed = helper.graphs.statistics().as_dict()


class Generator(Callback):
    """Generates before training and after a step, as roll-outs in a training loop do.

    Attributes:
        found: Tokens of each generation, whether they were the same with graphs away, and whether options came back.
    """

    def __init__(self) -> None:
        self.found: list[dict[str, Any]] = []
        self._steps = 0
        # megatron-core's graphs know the context that they were recorded with, as its engine keeps one.
        self._context = StaticInferenceContext(PROMPTS, PROMPT + GENERATED)

    def on_train_start(self, context: CallbackContext) -> None:
        """Generate with the weights that training begins with."""
        self._generate(context)

    def on_train_step_end(self, context: CallbackContext) -> None:
        """Generate once, with graphs captured."""
        self._steps += 1
        if self._steps == BETWEEN:
            self._generate(context)

    def _generate(self, context: CallbackContext) -> None:
        (chunk,) = context.model
        model = list(unwrapped(chunk))[-1]
        before = dict(vars(model.config))
        with inference_graphs(model.config):
            tokens = generate(model, self._context)
        with ExitStack() as stack:
            for helper in active_helpers():
                stack.enter_context(helper.graphs.paused())
            stack.enter_context(inference_graphs(model.config))
            again = generate(model, self._context)
        same_options = dict(vars(model.config)) == before
        self.found.append({"tokens": tokens, "same": again == tokens, "options": same_options})


@torch.no_grad()
def generate(model: Any, context: StaticInferenceContext) -> list[list[int]]:
    """Return tokens that a model is surest of, one after the other, for two prompts."""
    context.reset()
    device = next(model.parameters()).device
    rows = torch.arange(PROMPT, device=device) % 8 + 10
    tokens = torch.stack((rows, rows + 20))
    model.eval()
    try:
        with InferenceMode.active():
            given, made = tokens, []
            for _ in range(GENERATED):
                start = context.sequence_len_offset
                places = torch.arange(start, start + given.shape[1], device=device).expand(len(given), -1)
                logits = model(given, places, None, inference_context=context, runtime_gather_output=True)
                context.sequence_len_offset += given.shape[1]
                context.enable_decode_mode()
                given = logits[:, -1:].argmax(-1)
                made.append(given)
    finally:
        model.train()
    return torch.cat(made, 1).tolist()
