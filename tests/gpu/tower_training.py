"""Bridge's `pretrain()`, unmodified, on models around encoders: what `TrainingProcess` runs.

Towers are of full width and a few layers, the language model is small, images are random and their captions learnable.
"""

import dataclasses
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.bridge.training.config import DatasetBuildContext, DatasetProvider, TokenizerConfig
from megatron.bridge.training.pretrain import pretrain
from torch.utils.data import Dataset

import bridge_cg_plugin
from bridge_cg_plugin.graphs.buckets import round_up
from bridge_cg_plugin.upstream.hooks.recipes import helper_as_shipped
from examples.photographs.arguments import parse
from examples.photographs.training import RankResults, Run, merge_ranks, training_config

from .towers import TOWERS, VOCABULARY, Tower

CAPTION = 24


class RandomItems(Dataset):
    """Random images, or images and sounds, each with one of a few captions, padded.

    A sample is a batch of one, as collate functions of Bridge's make it.
    """

    def __init__(self, tower: Tower, samples: int, seed: int) -> None:
        self.tower, self.samples, self.seed = tower, samples, seed

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        rng = random.Random(self.seed * 1_000_003 + index)
        tokens, counted, items = [], [], self.tower.draw(rng)
        for item in items:
            stand_ins = self.tower.placeholders(item)
            words = [rng.choice((7, 11)) * (word + 1) for word in range(CAPTION)]
            tokens += [*stand_ins, *words]
            counted += [0] * len(stand_ins) + [1] * CAPTION
        length = round_up(len(tokens), self.tower.unit)
        assert length <= self.tower.length
        padding = length + 1 - len(tokens)
        ids, mask = torch.tensor([tokens + [0] * padding]), torch.tensor([counted + [0] * padding], dtype=torch.float)
        generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
        return {
            "tokens": ids[:, :-1],
            "labels": ids[:, 1:],
            "loss_mask": mask[:, 1:],
            "position_ids": torch.arange(length)[None],
            "attention_mask": None,
            **self.tower.inputs(items, ids[:, :-1], generator),
        }

    @staticmethod
    def collate_fn(samples: list[dict[str, Any]]) -> dict[str, Any]:
        """Make a microbatch of one sample."""
        (sample,) = samples
        return sample


@dataclass
class RandomItemsProvider(DatasetProvider):
    """Bridge dataset provider over `RandomItems`."""

    model: str = "qwen25_vl"
    seq_length: int = 0
    skip_getting_attention_mask_from_dataset: bool = True
    enable_in_batch_packing: bool = False

    def build_datasets(self, context: DatasetBuildContext) -> tuple[Dataset, ...]:
        """Build train, validation and test sets of the sizes that training asks for."""
        counts = (context.train_samples, context.valid_samples, context.test_samples)
        return tuple(RandomItems(TOWERS[self.model], max(count, 1), seed) for seed, count in enumerate(counts))


def graph_fields(tower: Tower) -> dict[str, Any]:
    """Return the fields of a provider by which its encoders and its language model run on graphs."""
    return {
        "cuda_graph_impl": "full_iteration",
        "vision_cuda_graph_impl": "transformer_engine",
        "vision_cuda_graph_buckets": list(tower.buckets),
        "vision_cuda_graph_strict": True,
        "vision_cuda_graph_max_frames": 4,
    }


def train_words(words: Sequence[str]) -> None:
    """Train the model of the word `tower=MODEL` as the others say; writes losses, times and the graphs' statistics."""
    args = parse(words)
    (model,) = (word.removeprefix("tower=") for word in args.overrides)
    bridge_cg_plugin.activate()
    tower, config = TOWERS[model], training_config(Run(steps=args.steps, small=True))
    provider = tower.provider()
    for name, value in (graph_fields(tower) if args.train == "graphs" else {}).items():
        setattr(provider, name, value)
    config.rerun_state_machine.check_for_nan_in_loss = provider.cuda_graph_impl != "full_iteration"
    config = dataclasses.replace(
        config,
        model=provider,
        dataset=RandomItemsProvider(
            dataloader_type="single", num_workers=0, model=model, seq_length=provider.seq_length
        ),
        tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=VOCABULARY - 1),
    )
    ranks = RankResults()
    with helper_as_shipped(), tower.changed():
        pretrain(config, tower.forward_step, callbacks=[ranks.recorder, ranks.statistics, ranks])
    args.out.write_text(json.dumps(merge_ranks(ranks.gathered or [ranks.own()])))
