"""One training run of Qwen3-VL through Bridge's `pretrain()` on a GPU; writes its losses and times."""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.bridge.models.qwen_vl.qwen3_vl_provider import Qwen3VLModelProvider
from megatron.bridge.models.qwen_vl.qwen3_vl_step import forward_step
from megatron.bridge.recipes.utils.optimizer_utils import distributed_fused_adam_with_cosine_annealing
from megatron.bridge.training.callbacks import Callback, CallbackContext
from megatron.bridge.training.config import (
    CheckpointConfig,
    ConfigContainer,
    DistributedInitConfig,
    LoggerConfig,
    RerunStateMachineConfig,
    RNGConfig,
    TokenizerConfig,
    TrainingConfig,
    ValidationConfig,
)
from megatron.bridge.training.pretrain import pretrain
from megatron.core.distributed import DistributedDataParallelConfig
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig

import bridge_cg_plugin
from bridge_cg_plugin.graphs.reports import RegionStatistics, merge_statistics
from bridge_cg_plugin.options import graph_options
from bridge_cg_plugin.options.sources import FIELDS
from bridge_cg_plugin.recipes.captioned_images import FEW_SIZES
from bridge_cg_plugin.upstream.hooks.graph_fields import apply_options
from bridge_cg_plugin.upstream.hooks.recipes import helper_as_shipped
from examples.photographs.arguments import layout_of, name_and_value, parse
from examples.photographs.images import MIXED_SIZES, PhotographProvider
from examples.photographs.layout import Layout

VOCABULARY = 151_936
LARGE_SIZES = ((1344, 1344),)
SINGLE_SIZES = ((448, 448),)
# Width -> attention heads and MLP width, as in Qwen3-0.6B, Qwen3-1.7B and Qwen3-4B.
LANGUAGE_MODELS = {1024: (16, 3072), 2048: (16, 6144), 2560: (32, 9728)}
PATCH_PIXELS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one run trains.

    Attributes:
        impl: `vision_cuda_graph_impl`; with "none" the run is eager and graph options in `overrides` are not used.
        steps: Optimizer steps.
        overrides: Fields set on the model provider, by name.
        single: Whether every sample is one 448 x 448 image.
        large: Whether every sample is one 1344 x 1344 image.
        language_model: Its layers and width.
        upstream: Whether the plugin is off and vision graphs are upstream's own, of one length that holds all images.
        validate_every: Steps between evaluations, 0 for none.
        text_only_every: Every how many samples one has no image, 0 for none.
        save, load: Checkpoint folders.
        small: Whether the tower is 6 layers deep, embeddings are shared and images are of few sizes: the same code in
            half the memory and a fraction of the time.
        layout: How it is spread over GPUs.
        loader_workers: Processes that load data, of each GPU.
        distinct: Samples that differ, 0 for all.
    """

    impl: str = "none"
    steps: int = 50
    overrides: dict[str, Any] | None = None
    single: bool = False
    large: bool = False
    language_model: tuple[int, int] = (4, 2048)
    upstream: bool = False
    validate_every: int = 0
    text_only_every: int = 0
    global_batch: int = 4
    overlap: bool = True
    save: str | None = None
    load: str | None = None
    small: bool = False
    layout: Layout = Layout()
    loader_workers: int = 4
    distinct: int = 0

    def sizes(self) -> tuple[tuple[int, int], ...]:
        """Return the images' sizes in pixels."""
        if self.single or self.large:
            return SINGLE_SIZES if self.single else LARGE_SIZES
        return FEW_SIZES if self.small else MIXED_SIZES

    def most_images(self) -> int:
        """Return the most images of a sample."""
        return 1 if self.single or self.large else 2 if self.small else 3

    def longest(self) -> int:
        """Return the most patches of a sample."""
        return self.most_images() * max(height * width for height, width in self.sizes()) // PATCH_PIXELS


def parse_language_model(text: str) -> tuple[int, int]:
    """Return layers and width of `LAYERSxWIDTH`.

    Raises:
        ValueError: It is written otherwise, or the width has no model.
    """
    layers, _, width = text.partition("x")
    if not (layers.isdecimal() and int(layers) and width.isdecimal() and int(width) in LANGUAGE_MODELS):
        widths = ", ".join(map(str, LANGUAGE_MODELS))
        raise ValueError(
            f"Cannot use --language-model {text}: it must be LAYERSxWIDTH with a width of {widths}. Write 4x2048, say."
        )
    return int(layers), int(width)


def vision_config(run: Run) -> Qwen3VLVisionConfig:
    """Return the tower's Hugging Face configuration."""
    width = run.language_model[1]
    if run.small:
        return Qwen3VLVisionConfig(depth=6, deepstack_visual_indexes=[1, 3, 5], out_hidden_size=width)
    return Qwen3VLVisionConfig(depth=27, out_hidden_size=width)


def model_provider(run: Run) -> Qwen3VLModelProvider:
    """Return Qwen3-VL with the full vision tower and the run's language model."""
    layers, width = run.language_model
    heads, mlp = LANGUAGE_MODELS[width]
    run.layout.check_layers(layers)
    provider = Qwen3VLModelProvider(
        num_layers=layers,
        hidden_size=width,
        ffn_hidden_size=mlp,
        num_attention_heads=heads,
        num_query_groups=8,
        kv_channels=128,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        vocab_size=VOCABULARY,
        seq_length=2048,
        language_max_sequence_length=2048,
        vision_config=vision_config(run),
        out_hidden_size=width,
        share_embeddings_and_output_weights=run.small,
        make_vocab_size_divisible_by=128,
        gradient_accumulation_fusion=False,
        use_te_rng_tracker=True,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        **run.layout.model_fields(),
    )
    overrides = {name.removeprefix("model."): value for name, value in (run.overrides or {}).items()}
    graphs = graph_overrides(run)
    for name in overrides.keys() - graphs.keys():
        if not hasattr(provider, name):
            raise ValueError(f"the model provider has no field {name!r}")
        setattr(provider, name, overrides[name])
    if run.upstream:
        provider.vision_cuda_graph_impl = "transformer_engine"
        provider.max_vision_cuda_graph_seq_length = run.longest()
    elif run.impl != "none":
        apply_options(graph_options(provider, {"vision_cuda_graph_impl": run.impl}, graphs), provider)
    return provider


def asks_for_full_iteration(run: Run) -> bool:
    """Whether a run's overrides say full_iteration, in any spelling; those of an eager run are not used."""
    return graph_options(graph_overrides(run)).language_model.impl == "full_iteration"


def graph_overrides(run: Run) -> dict[str, Any]:
    """Return the overrides that are graph options, by field."""
    overrides = {name.removeprefix("model."): value for name, value in (run.overrides or {}).items()}
    return {name: value for name, value in overrides.items() if name in FIELDS}


def training_config(run: Run) -> ConfigContainer:
    """Return the whole configuration."""
    optimizer, scheduler = distributed_fused_adam_with_cosine_annealing(
        lr_warmup_iters=5, lr_decay_iters=max(run.steps, 10), max_lr=1e-4, min_lr=1e-5
    )
    return ConfigContainer(
        model=model_provider(run),
        train=TrainingConfig(
            train_iters=run.steps,
            global_batch_size=run.global_batch,
            micro_batch_size=1,
            manual_gc=True,
            manual_gc_interval=1000,
        ),
        validation=ValidationConfig(
            eval_interval=run.validate_every or None, eval_iters=2 if run.validate_every else 0
        ),
        optimizer=optimizer,
        scheduler=scheduler,
        ddp=DistributedDataParallelConfig(
            check_for_nan_in_grad=True,
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=run.overlap,
            overlap_param_gather=run.overlap,
            average_in_collective=run.layout.context == 1,  # Bridge's condition of context parallelism
            use_distributed_optimizer=True,
        ),
        dataset=PhotographProvider(
            dataloader_type="single",
            num_workers=run.loader_workers,
            seq_length=2048,
            most_images=run.most_images(),
            sizes=list(run.sizes()),
            text_only_every=run.text_only_every,
            distinct=run.distinct,
        ),
        logger=LoggerConfig(log_interval=min(10, run.steps)),
        tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=VOCABULARY - 1),
        checkpoint=CheckpointConfig(
            save=run.save,
            load=run.load,
            save_interval=None,
            ckpt_format="torch_dist",
            dist_ckpt_optim_fully_reshardable=True,  # another layout may read it
        ),
        rng=RNGConfig(seed=1234, te_rng_tracker=True),
        # Bridge allows no check of the loss under full_iteration; eager runs beside it go without it as well.
        rerun_state_machine=RerunStateMachineConfig(check_for_nan_in_loss=not asks_for_full_iteration(run)),
        dist=DistributedInitConfig(),
        mixed_precision="bf16_mixed",
    )


# Group of the figures of graphs of the language model.
LANGUAGE_MODEL = "language_model_cuda_graph"


class Recorder(Callback):
    """Keeps losses, gradient norms, step times and peak memory; only the last pipeline stage has losses."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.grad_norms: list[float] = []
        self.step_ms: list[float] = []
        self.evaluations: list[float] = []
        self.peak_gb = 0.0
        self._began = 0.0

    def on_train_step_start(self, context: CallbackContext) -> None:
        """Start the clock."""
        torch.cuda.synchronize()
        self._began = time.perf_counter()

    def on_train_step_end(self, context: CallbackContext) -> None:
        """Stop the clock and keep the step's figures."""
        torch.cuda.synchronize()
        self.step_ms.append((time.perf_counter() - self._began) * 1e3)
        self.losses.append(float(next(iter((context.loss_dict or {}).values()), torch.nan)))
        self.grad_norms.append(float(context.grad_norm or 0.0))
        self.peak_gb = torch.cuda.max_memory_allocated() / 2**30

    def on_eval_end(self, context: CallbackContext) -> None:
        """Keep the evaluation's loss."""
        losses = context.total_loss_dict or {}
        self.evaluations += [float(v) for v in list(losses.values())[:1]]


def train(run: Run, out: Path | None = None) -> dict[str, Any]:
    """Train and return losses, gradient norms, step times, memory and the graphs' statistics."""
    if run.upstream:
        bridge_cg_plugin.deactivate()
    else:
        bridge_cg_plugin.activate()
    ranks = RankResults()
    with helper_as_shipped():
        pretrain(training_config(run), forward_step, callbacks=[ranks.recorder, ranks.statistics, ranks])
    result = merge_ranks(ranks.gathered or [ranks.own()])
    if out is not None and ranks.rank == 0:
        out.write_text(json.dumps(result))
    return result


def merge_ranks(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the run's result: what only some ranks know from one that does, the peak of all, and each rank's figures.

    Losses are known to the last pipeline stage, whose ranks are the last; the encoder's graphs to the first.
    """
    merged = {**ranks[0], "losses": ranks[-1]["losses"], "evaluations": ranks[-1]["evaluations"]}
    merged["peak_gb"] = max(rank["peak_gb"] for rank in ranks)
    if len(ranks) > 1:
        own = ("rank", "peak_gb", "step_ms", "graphs", "language_model_layers")
        merged["ranks"] = [{name: rank[name] for name in own} for rank in ranks]
    return merged


class StatisticsKeeper(Callback):
    """Keeps the graphs' statistics as of the last step, and what all encoders' graphs did until each step.

    Attributes:
        steps: Replays and eager microbatches until the end of each step.
    """

    def __init__(self) -> None:
        self.value: dict[str, Any] | None = None
        self.checks: list[tuple[float | None, float | None]] = []
        self.language_model_layers = 0
        self.language_model: dict[str, Any] | None = None
        self.steps: list[dict[str, Any]] = []

    def on_train_step_end(self, context: CallbackContext) -> None:
        """Read the statistics of both models' graphs and count the language model's layers that have graphs."""
        from bridge_cg_plugin.upstream.hooks.helpers.graph_helper import active_graphs

        modules = (module for chunk in context.model for module in chunk.modules())
        self.language_model_layers = sum(bool(getattr(module, "cuda_graphs", None)) for module in modules)

        for graphs in active_graphs():
            if graphs.workload.group == LANGUAGE_MODEL:
                self.language_model = graphs.statistics().as_dict()
                continue
            self.value = graphs.statistics().as_dict()
            self.checks = [] if graphs.proofs is None else list(graphs.proofs.results)
        found = all_encoders()
        self.steps.append({"replays": found.replays, "eager": found.fallbacks.total()})


def all_encoders() -> RegionStatistics:
    """Return what the graphs of all encoders did so far."""
    from bridge_cg_plugin.upstream.hooks.helpers.graph_helper import active_graphs

    return merge_statistics([g.statistics() for g in active_graphs() if g.workload.group != LANGUAGE_MODEL])


class RankResults(Callback):
    """Gathers every rank's figures on rank 0 while process groups still exist.

    Attributes:
        rank: This process's rank.
        gathered: Every rank's figures, by rank; None before training ends and on other ranks.
    """

    def __init__(self) -> None:
        self.recorder, self.statistics = Recorder(), StatisticsKeeper()
        self.rank = 0
        self.gathered: list[dict[str, Any]] | None = None

    def own(self) -> dict[str, Any]:
        """Return this rank's figures."""
        recorder, statistics = self.recorder, self.statistics
        return {
            "rank": self.rank,
            "losses": recorder.losses,
            "grad_norms": recorder.grad_norms,
            "step_ms": recorder.step_ms,
            "evaluations": recorder.evaluations,
            "peak_gb": recorder.peak_gb,
            "graphs": statistics.value,
            "checks": statistics.checks,
            "language_model_layers": statistics.language_model_layers,
            "language_model_graphs": statistics.language_model,
            "step_graphs": statistics.steps,
        }

    def on_train_end(self, context: CallbackContext) -> None:
        """Gather on rank 0."""
        self.rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        found: list[Any] | None = [None] * world if self.rank == 0 else None
        torch.distributed.gather_object(self.own(), found)
        self.gathered = found


def train_words(words: Sequence[str]) -> None:
    """Train as the words of one run's command line say."""
    train_once(parse(words))


def train_once(args: argparse.Namespace) -> None:
    """Train as the command line of one run says."""
    train(run_of(args), args.out)


def run_of(args: argparse.Namespace) -> Run:
    """Return what the command line of one run says."""
    return Run(
        impl="transformer_engine" if args.train == "graphs" else "none",
        steps=args.steps or 50,
        overrides=dict(map(name_and_value, args.overrides)),
        single=args.single,
        large=args.large,
        language_model=parse_language_model(args.language_model or "4x2048"),
        upstream=args.train == "upstream",
        validate_every=args.validate_every,
        text_only_every=args.text_only_every,
        overlap=not args.no_overlap,
        save=args.save,
        load=args.load,
        small=args.small,
        layout=layout_of(args),
        global_batch=args.global_batch or 4,
        # Workers import the whole stack, longer than a small run trains.
        loader_workers=(0 if args.small else 4) if args.loader_workers is None else args.loader_workers,
        distinct=args.distinct,
    )
