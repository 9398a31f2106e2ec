"""Trainings with single options of megatron-core's offloading, and what these did, for test_core_offload.py."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any
from unittest import mock

from megatron.bridge.models.mla_provider import MLAModelProvider
from megatron.bridge.training.callbacks import Callback, CallbackContext
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain
from megatron.core.activations import squared_relu
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.pipeline_parallel.fine_grained_activation_offload import ChunkOffloadHandler, PipelineOffloadManager

import bridge_cg_plugin
from bridge_cg_plugin.options import graph_options
from bridge_cg_plugin.upstream.hooks.configuration.graph_fields import apply_options
from bridge_cg_plugin.upstream.hooks.data.dataset_helper import helper_as_shipped
from examples.photographs.training import Recorder
from tests.gpu import packed_training as packed_training
from tests.models import packed_parity as parity

from .core_offload import WholeDocumentProvider, set_fields, use_any_cores
from .whole_documents import Keeper
from .workers import worker_parser

LAYERS = 4
# What makes each model of its base.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("dense", {}),
    "experts": ("experts", {}),
    # Norms are modules of their own before multi-latent attention and before experts.
    "norms": ("experts", {"moe_layer_freq": [0, 1, 1, 1], "num_query_groups": 16}),
    "fused": (
        "experts",
        {
            "use_transformer_engine_op_fuser": True,
            "gated_linear_unit": False,
            "activation_func": squared_relu,
            "use_fused_weighted_squared_relu": True,
        },
    ),
}
LATENT = {
    **{"q_lora_rank": 512, "kv_lora_rank": 256, "rope_type": "rope", "multi_latent_attention": True},
    **{"qk_head_dim": 64, "qk_pos_emb_head_dim": 64, "v_head_dim": 128},
}


def train_words(words: Sequence[str]) -> None:
    """Train as the words of a command line say."""
    parser = worker_parser("offload_fields")
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--set", nargs="*", default=[], help="graph fields of the model")
    args = parser.parse_args(words)
    bridge_cg_plugin.activate()
    use_any_cores()
    config = configuration(args.model, args.steps, args.set)
    recorder, keeper, watch = Recorder(), Keeper(), Watch()
    with parity.deterministic(), watch.watching(), helper_as_shipped():
        pretrain(config, forward_step, callbacks=[recorder, keeper, watch])
    found = {"losses": recorder.losses, "grad_norms": recorder.grad_norms, "layers": keeper.layers}
    args.out.write_text(json.dumps({**found, **watch.found()}))


def configuration(model: str, steps: int, words: Sequence[str]) -> ConfigContainer:
    """Return Bridge's configuration of a small model whose fields are set as words say, `name=value`."""
    base, own = MODELS[model]
    config = packed_training.training_config(steps, base)
    config.dataset = WholeDocumentProvider()
    if model == "norms":
        told = {one.name: getattr(config.model, one.name) for one in fields(config.model) if one.init}
        kept = {name: value for name, value in told.items() if value is not None}
        # As for DeepSeek: Bridge's default layers have no latent attention, and experts in every layer.
        layers = partial(get_gpt_decoder_block_spec, use_transformer_engine=True)
        config.model = MLAModelProvider(**{**kept, **LATENT, "transformer_layer_spec": layers})
    for name, value in {"num_layers": LAYERS, **own}.items():
        setattr(config.model, name, value)
    set_fields(config.model, words)
    apply_options(graph_options(config.model), config)
    if config.model.cuda_graph_impl == "full_iteration":  # which reads nothing on the host
        config.rerun_state_machine.check_for_nan_in_loss = config.ddp.check_for_nan_in_grad = False
    return config


@dataclass(eq=False)
class Watch(Callback):
    """What offloading does.

    Attributes:
        copied: Bytes that Python code copied to the host in each step: those of replays are not among them.
        delayed: Groups whose copies waited for a replay.
        waited: Copies that compute waited for because of the limit in flight.
    """

    copied: list[int] = field(default_factory=lambda: [0])
    delayed: int = 0
    waited: int = 0

    def on_train_step_end(self, context: CallbackContext) -> None:
        """Begin the next step's count."""
        self.copied.append(0)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count inside."""
        with ExitStack() as stack:
            for owner, name, counting in (
                (ChunkOffloadHandler, "offload", self._copying),
                (PipelineOffloadManager, "push_offload_groups", self._delaying),
                (ChunkOffloadHandler, "_drain_offload_pending", self._waiting),
            ):
                stack.enter_context(mock.patch.object(owner, name, counting(getattr(owner, name))))
            yield

    def found(self) -> dict[str, Any]:
        """Return the counts, `copied` of the last step, and the bytes that megatron-core plans to copy, by module."""
        planned = getattr(PipelineOffloadManager.OFFLOAD_MGR, "_offload_summary_bytes", {})
        return {"copied": self.copied[-2], "delayed": self.delayed, "waited": self.waited, "planned": planned}

    def _copying(self, old: Callable[..., Any]) -> Callable[..., Any]:
        def offload(handler: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
            self.copied[-1] += tensor.nbytes
            return old(handler, tensor, *args, **kwargs)

        return offload

    def _delaying(self, old: Callable[..., Any]) -> Callable[..., Any]:
        def push(*args: Any) -> Any:
            self.delayed += 1
            return old(*args)

        return push

    def _waiting(self, old: Callable[..., Any]) -> Callable[..., Any]:
        def drain(handler: Any, group: str) -> Any:
            pending = handler._offload_pending_by_name[group]
            before = len(pending)
            result = old(handler, group)
            self.waited += before - len(pending)
            return result

        return drain
