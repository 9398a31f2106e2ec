"""Bridge's `pretrain()` on packed documents: eager several times and on packed-sequence graphs, losses side by side.

python scripts/performance/train_packed.py --steps 50 --out docs/benchmarks/packed_training.jsonl

A dense model of 8 layers of 2048; a microbatch is 4 documents of random length, joined by Bridge's in-batch packing.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bridge_cg_plugin.report.spread import compare_to_spread  # noqa: E402
from scripts.performance.results import provenance, put_record  # noqa: E402

VOCABULARY = 32_768
SEQUENCE = 1024
DOCUMENTS = 4
# Steps whose times do not count: warm-up, capture, the first replays.
SKIPPED = 6


def main() -> int:
    """Run all and compare, or one run of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--eager-runs", type=int, default=3)
    parser.add_argument("--modules", default="", help="parts of layers to capture; all layers as one region without")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/benchmarks/packed_training.jsonl")
    parser.add_argument(
        "--train", choices=("eager", "graphs"), help="do this run in this process; writes JSON to --out"
    )
    args = parser.parse_args()
    if args.train:
        args.out.write_text(json.dumps(train(args.train, args.steps, args.modules)))
        return 0
    runs = {f"eager{i + 1}": run("eager", args) for i in range(args.eager_runs)}
    runs["plugin"] = run("graphs", args)
    return compare(runs, args)


def run(mode: str, args: argparse.Namespace) -> dict[str, Any]:
    """Do one run in a process of its own and return its figures."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run.json"
        words = ["--train", mode, "--steps", str(args.steps), "--modules", args.modules, "--out", str(out)]
        subprocess.run([sys.executable, __file__, *words], check=True, cwd=ROOT)
        return json.loads(out.read_text())


def compare(runs: dict[str, dict[str, Any]], args: argparse.Namespace) -> int:
    """Print and write the comparison; non-zero if graphs train another model or nothing was replayed."""
    *eager, graphs = runs.values()
    spreads = {name: compare_to_spread([run[name] for run in eager], graphs[name]) for name in ("losses", "grad_norms")}
    times = {name: statistics.median(run["step_ms"][SKIPPED:]) for name, run in runs.items()}
    base = min(times[name] for name in times if name != "plugin")
    same = all(spread.inside for spread in spreads.values()) and graphs["packed_graphs"]["replays"] > 0
    records = [
        {
            "case": "in_batch",
            "mode": name,
            "ms": times[name],
            "ratio": times[name] / base if name == "plugin" else 1.0,
            "inside_spread": same if name == "plugin" else None,
            **{field: value for field, value in figures.items() if field != "step_ms"},
            **provenance(args.steps - SKIPPED, 1234),
        }
        for name, figures in runs.items()
    ]
    for record in records:
        put_record(args.out, record)
    for step, losses in enumerate(zip(*(figures["losses"] for figures in runs.values()), strict=True)):
        print(f"{step:>4} " + " ".join(f"{loss:>11.6f}" for loss in losses))
    print(f"graphs: {json.dumps(graphs['packed_graphs'])}")
    print(
        f"step time: eager {base:.1f} ms, graphs {times['plugin']:.1f} ms, {base / times['plugin']:.2f} times as fast"
    )
    worst = ", ".join(f"{name} {spread.worst:.2f} at step {spread.step}" for name, spread in spreads.items())
    print(f"verdict: {'SAME' if same else 'DIFFERENT'} (largest distance over allowance: {worst})")
    return 0 if same else 1


def train(mode: str, steps: int, modules: str) -> dict[str, Any]:
    """Train in this process; returns losses, gradient norms, step times and the graphs' statistics."""
    from megatron.bridge.training.callbacks import Callback
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain

    import bridge_cg_plugin
    from examples.photographs.training import Recorder, skip_helper_build

    class StatisticsKeeper(Callback):
        """Keeps the graphs' statistics as of the last step."""

        value: dict[str, Any] | None = None

        def on_train_step_end(self, context: Any) -> None:
            """Read them."""
            from bridge_cg_plugin.upstream.graph_helper import active_helpers

            for helper in active_helpers():
                self.value = helper.graphs.statistics().as_dict()

    bridge_cg_plugin.activate()
    skip_helper_build()
    recorder, keeper = Recorder(), StatisticsKeeper()
    pretrain(training_config(mode, steps, modules), forward_step, callbacks=[recorder, keeper])
    return {
        "losses": recorder.losses,
        "grad_norms": recorder.grad_norms,
        "step_ms": recorder.step_ms,
        "peak_gb": recorder.peak_gb,
        "packed_graphs": keeper.value,
    }


def training_config(mode: str, steps: int, modules: str) -> Any:
    """Return Bridge's whole configuration."""
    from megatron.bridge.recipes.utils.optimizer_utils import distributed_fused_adam_with_cosine_annealing
    from megatron.bridge.training.config import (
        CheckpointConfig,
        ConfigContainer,
        DistributedInitConfig,
        LoggerConfig,
        RNGConfig,
        TokenizerConfig,
        TrainingConfig,
        ValidationConfig,
    )
    from megatron.core.distributed import DistributedDataParallelConfig

    optimizer, scheduler = distributed_fused_adam_with_cosine_annealing(
        lr_warmup_iters=5, lr_decay_iters=max(steps, 10), max_lr=1e-4, min_lr=1e-5
    )
    return ConfigContainer(
        model=model_provider(mode, modules),
        train=TrainingConfig(
            train_iters=steps,
            global_batch_size=4 * DOCUMENTS,
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
        dataset=dataset_provider(),
        logger=LoggerConfig(log_interval=10),
        tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=VOCABULARY - 1),
        checkpoint=CheckpointConfig(save=None, load=None, save_interval=None, ckpt_format="torch_dist"),
        rng=RNGConfig(seed=1234, te_rng_tracker=True),
        dist=DistributedInitConfig(),
        mixed_precision="bf16_mixed",
    )


def model_provider(mode: str, modules: str) -> Any:
    """Return a dense model of 8 layers of 2048, with graphs of up to 8 documents or without."""
    import torch
    from megatron.bridge.models.gpt_provider import GPTModelProvider

    from bridge_cg_plugin.options import graph_options
    from bridge_cg_plugin.upstream.graph_fields import apply_options

    provider = GPTModelProvider(
        num_layers=8,
        hidden_size=2048,
        ffn_hidden_size=6144,
        num_attention_heads=16,
        num_query_groups=8,
        kv_channels=128,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        qk_layernorm=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        position_embedding_type="rope",
        vocab_size=VOCABULARY,
        make_vocab_size_divisible_by=128,
        seq_length=SEQUENCE,
        share_embeddings_and_output_weights=False,
        gradient_accumulation_fusion=False,
        use_te_rng_tracker=True,
        bf16=True,
        params_dtype=torch.bfloat16,
    )
    if mode == "graphs":
        wanted = {
            "cuda_graph_impl": "transformer_engine",
            "cuda_graph_modules": modules,
            "cuda_graph_max_packed_seqs": 2 * DOCUMENTS,
            "cuda_graph_packed_strict": True,
        }
        apply_options(graph_options(provider, wanted), provider)
    return provider


def dataset_provider() -> Any:
    """Return a provider of documents of random length, packed by Bridge's in-batch packing."""
    import random

    import torch
    from megatron.bridge.data.packing.in_batch import pack_right_padded_sequence_batch_to_mcore_thd
    from megatron.bridge.training.config import DatasetProvider
    from torch.utils.data import Dataset

    class Documents(Dataset):
        """Documents of 16 to `SEQUENCE` tokens, each a repeated phrase, which a model can learn."""

        def __init__(self, count: int, seed: int) -> None:
            self.count, self.seed = count, seed

        def __len__(self) -> int:
            return self.count

        def __getitem__(self, index: int) -> dict[str, Any]:
            rng = random.Random(self.seed * 1_000_003 + index)
            length = min(int(64 * rng.paretovariate(0.7)), SEQUENCE)
            phrase = [rng.randrange(100, 1000) for _ in range(8)]
            tokens = torch.tensor([phrase[i % 8] for i in range(length + 1)])
            kept = torch.arange(SEQUENCE) < length

            def row(values: torch.Tensor, padding: int) -> torch.Tensor:
                return torch.nn.functional.pad(values, (0, SEQUENCE - length), value=padding)

            return {
                "tokens": row(tokens[:-1], 0),
                "labels": row(tokens[1:], -100),
                "loss_mask": kept.float(),
                "position_ids": torch.arange(SEQUENCE),
                "attention_mask": kept,
            }

        @staticmethod
        def collate_fn(items: list[dict[str, Any]]) -> dict[str, Any]:
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

        def build_datasets(self, context: Any) -> tuple[Dataset, Dataset, Dataset]:
            """Build train, validation and test sets of the sizes that training asks for."""
            counts = (context.train_samples, context.valid_samples, context.test_samples)
            return tuple(Documents(max(count, 1), self.seed + i) for i, count in enumerate(counts))

    return DocumentProvider()


if __name__ == "__main__":
    sys.exit(main())
