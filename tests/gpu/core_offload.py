"""Trainings in which megatron-core offloads what the plugin does not run, for test_core_offload.py."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import yaml
from megatron.bridge.models.qwen_vl.modelling_qwen3_vl.attention import Qwen3VLSelfAttention
from megatron.bridge.models.qwen_vl.modelling_qwen3_vl.text_model import Qwen3VLGPTModel
from megatron.bridge.models.qwen_vl.modelling_qwen3_vl.transformer_config import Qwen3VLTransformerConfig
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.pipeline_parallel import utils
from megatron.core.pipeline_parallel.fine_grained_activation_offload import (
    FineGrainedActivationOffloadingInterface as Interface,
)
from megatron.core.pipeline_parallel.fine_grained_activation_offload import PipelineOffloadManager
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor
from torch.utils.data import Dataset

import bridge_cg_plugin
from bridge_cg_plugin.options import graph_options
from bridge_cg_plugin.upstream.hooks.graph_fields import apply_options
from bridge_cg_plugin.upstream.hooks.recipes import helper_as_shipped
from examples.photographs.training import Recorder
from tests.gpu import packed_training as packed_training
from tests.models import tower

from .workers import worker_parser

QWEN, ITERATIONS, MICROBATCHES, TOKENS = "qwen", 3, 2, 2048


def train_words(words: Sequence[str]) -> None:
    """Train as the words of a command line say."""
    parser = worker_parser("core_offload")
    parser.add_argument("--model", choices=("dense", QWEN), default="dense")
    parser.add_argument("--plugin", choices=("on", "off"), default="on")
    parser.add_argument("--set", nargs="*", default=[], help="fields of the model")
    args = parser.parse_args(words)
    (bridge_cg_plugin.activate if args.plugin == "on" else bridge_cg_plugin.deactivate)()
    found = train_qwen(args.set) if args.model == QWEN else train_dense(args.steps, args.set)
    args.out.write_text(json.dumps({**found, "offloaded": offloaded_bytes()}))


def set_fields(model: Any, words: Sequence[str]) -> None:
    """Set fields of a model's configuration as words say, `name=value`."""
    for name, value in (word.split("=", 1) for word in words):
        setattr(model, name, value.split(",") if name == "offload_modules" else yaml.safe_load(value))


def use_any_cores() -> None:
    """Let several train side by side, on any cores."""
    utils.set_ideal_affinity_for_current_gpu = lambda: None


def offloaded_bytes() -> int:
    """Return the bytes that megatron-core says it offloads in a step."""
    manager = PipelineOffloadManager.OFFLOAD_MGR
    return getattr(manager, "_offload_summary_total_bytes", 0)


def train_dense(steps: int, words: Sequence[str]) -> dict[str, Any]:
    """Run Bridge's `pretrain()` on documents that are not packed; several do so side by side, on any cores."""
    use_any_cores()
    config = packed_training.training_config(steps)
    config.dataset = WholeDocumentProvider()
    set_fields(config.model, words)
    apply_options(graph_options(config.model), config)
    recorder = Recorder()
    with helper_as_shipped():
        pretrain(config, forward_step, callbacks=[recorder])
    return {"losses": recorder.losses, "peak_gb": recorder.peak_gb}


class WholeDocuments(packed_training.Documents):
    """Documents of one length, a row of the batch each."""

    def collate_fn(self, items: list[dict[str, Tensor]]) -> dict[str, Any]:
        """Stack a microbatch."""
        batch = {key: torch.stack([item[key] for item in items]) for key in items[0] if key != "attention_mask"}
        batch["labels"] = batch["labels"].clamp(min=0)
        return {**batch, "attention_mask": None}


@dataclass
class WholeDocumentProvider(packed_training.DocumentProvider):
    """Bridge dataset provider over `WholeDocuments`."""

    enable_in_batch_packing: bool = False

    def build_datasets(self, context: Any) -> tuple[Dataset, Dataset, Dataset]:
        """Build train, validation and test sets of the sizes that training asks for."""
        counts = (context.train_samples, context.valid_samples, context.test_samples)
        return tuple(WholeDocuments(max(count, 1), self.seed + i) for i, count in enumerate(counts))


def train_qwen(words: Sequence[str]) -> dict[str, Any]:
    """Run forwards and backwards of Qwen3-VL's language model with experts, as a schedule without pipeline does."""
    tower.start_process()
    model = qwen(words)
    losses, norms = [], []
    for iteration in range(ITERATIONS):
        model.zero_grad()
        for number in range(MICROBATCHES):
            generator = torch.Generator("cuda").manual_seed(iteration * MICROBATCHES + number)
            tokens = torch.randint(packed_training.VOCABULARY, (1, TOKENS), device="cuda", generator=generator)
            positions = torch.arange(TOKENS, device="cuda").expand(3, 1, -1)
            loss = model(tokens, positions, None, labels=tokens.roll(-1, 1)).float().mean()
            loss.backward()
            losses.append(float(loss.detach()))
        if model.config.fine_grained_activation_offloading:
            Interface.reset()
        norms.append([float(p.grad.float().norm()) for p in model.parameters()])
    return {"losses": losses, "grad_norms": norms}


def qwen(words: Sequence[str]) -> Qwen3VLGPTModel:
    """Build it as Bridge does, of four layers."""
    torch.manual_seed(0)
    config = Qwen3VLTransformerConfig(
        num_layers=4,
        hidden_size=1024,
        num_attention_heads=8,
        num_query_groups=4,
        kv_channels=128,
        ffn_hidden_size=3072,
        num_moe_experts=8,
        moe_router_topk=2,
        moe_ffn_hidden_size=768,
        moe_token_dispatcher_type="alltoall",
        moe_grouped_gemm=True,
        moe_router_load_balancing_type="none",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        qk_layernorm=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        gradient_accumulation_fusion=False,
        mrope_section=[24, 20, 20],
    )
    set_fields(config, words)
    spec = get_gpt_layer_with_transformer_engine_spec(num_experts=8, moe_grouped_gemm=True, qk_layernorm=True)
    spec.submodules.self_attention.module = Qwen3VLSelfAttention
    groups = ProcessGroupCollection.use_mpu_process_groups()
    model = Qwen3VLGPTModel(
        config, spec, packed_training.VOCABULARY, TOKENS, position_embedding_type="mrope", pg_collection=groups
    )
    return model.cuda().bfloat16().train()
