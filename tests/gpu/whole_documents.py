"""Trainings of small models on documents that are not packed: upstream's graphs, and generation between steps."""

import argparse
import json
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from megatron.bridge.training.callbacks import Callback, CallbackContext
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.inference.utils import InferenceMode
from megatron.core.transformer.enums import AttnBackend

import bridge_cg_plugin
from bridge_cg_plugin.options import graph_options
from bridge_cg_plugin.upstream.hooks.graph_fields import apply_options, inference_graphs
from bridge_cg_plugin.upstream.hooks.graph_helper import active_helpers
from bridge_cg_plugin.upstream.hooks.recipes import helper_as_shipped
from bridge_cg_plugin.upstream.wrappers import unwrapped
from examples.photographs.training import Recorder
from tests.gpu import packed_training as packed_training
from tests.models import packed_parity as parity
from tests.models.tilings import few_tilings

from .core_offload import WholeDocumentProvider, use_any_cores
from .workers import worker_parser

# What makes each model small.
SMALL: dict[str, dict[str, Any]] = {
    "dense": {"num_layers": 2},
    "experts": {"num_layers": 2},
    # Experts inside a graph of megatron-core's take the same number of tokens each.
    "equal_experts": {
        "num_layers": 2,
        "moe_expert_capacity_factor": 1.0,
        "moe_pad_expert_input_to_capacity": True,
        "moe_permute_fusion": False,
    },
    "mamba": {"hybrid_layer_pattern": "M*-M"},
}
PROMPTS, PROMPT, GENERATED, BETWEEN = 2, 32, 16, 6


def train_words(words: Sequence[str]) -> None:
    """Train as the words of a command line say."""
    parser = worker_parser("whole_documents")
    parser.add_argument("--model", choices=SMALL, default="dense")
    parser.add_argument("--packed", action="store_true", help="train on packed documents")
    parser.add_argument("--flash-decode", action="store_true")
    parser.add_argument("--generate", action="store_true", help="generate before training and between its steps")
    parser.add_argument("--set", nargs="*", default=[], help="graph fields of the model")
    args = parser.parse_args(words)
    bridge_cg_plugin.activate()
    with ExitStack() as stack:
        stack.enter_context(parity.deterministic())
        if args.model == "mamba":
            stack.enter_context(few_tilings())
        args.out.write_text(json.dumps(train(args)))


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Run Bridge's `pretrain()`; returns losses, tokens that were generated and what was on graphs."""
    use_any_cores()
    config = packed_training.training_config(args.steps, args.model.removeprefix("equal_"))
    if not args.packed:
        config.dataset = WholeDocumentProvider()
    config.ddp.overlap_grad_reduce = config.ddp.overlap_param_gather = False  # generation calls the model's chunk
    for name, value in SMALL[args.model].items():
        setattr(config.model, name, value)
    if args.flash_decode:  # of FlashAttention only the kernel that reads a cache need be there
        config.model.flash_decode, config.model.attention_backend = True, AttnBackend.fused
    for name, value in (word.split("=", 1) for word in args.set):
        setattr(config.model, name, value)
    apply_options(graph_options(config.model), config)
    recorder, keeper, generator = Recorder(), Keeper(), Generator()
    with helper_as_shipped():
        pretrain(config, forward_step, callbacks=[recorder, keeper, *([generator] if args.generate else [])])
    return {
        "losses": recorder.losses,
        "layers": keeper.layers,
        "packed": keeper.packed,
        "generations": generator.found,
    }


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
