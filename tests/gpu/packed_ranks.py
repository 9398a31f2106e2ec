"""One rank of two GPUs that share a model and run packed documents, for test_packed_parallel.py."""

import argparse
import gc
import importlib
import json
import os
import random
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import initialize_rng_tracker, model_parallel_cuda_manual_seed
from torch import distributed

from bridge_cg_plugin.graphs.buckets import EXACT_BELOW
from bridge_cg_plugin.graphs.proofs import schedule
from bridge_cg_plugin.switches import EXPERT_BOUNDS
from tests.models import language_model as lm
from tests.models import packed_parity as parity
from tests.models.reference import without_tf32
from tests.models.tilings import delta_net_kernels, few_tilings
from tests.models.tower import MainGrads, largest_relative, relative

from .packs import double_rows

# Imported before the process is needed.
importlib.import_module("megatron.core.models.gpt.gpt_model")
importlib.import_module("bridge_cg_plugin.upstream.hooks.helpers.constructors")

MAX_SEQS = 24
BUCKETS = (1024, 2048)
SMALL = lm.Shape(layers=4, hidden=1024, heads=8, ffn=3072)
HYBRID = replace(SMALL, pattern="M-M*M-M")
EXPERTS = lm.Shape(layers=2, hidden=1024, heads=8, ffn=768, experts=8)
# Tokens of documents and packs are a multiple of it: two chunks for each of up to four context-parallel ranks.
UNIT = 8
# Packs that fill a bucket, which is what sequence parallelism takes, and packs that do not.
FULL = ((2048,), (512, 512), (8, 896, 24, 96), (64,) * 16, (1000, 1048))
BEYOND = {"too_many_documents": (80,) * 25, "too_many_tokens": (2056,)}
# Packs of ranks that share experts: each rank draws its own, with as many documents.
DRAWN, MOST_DRAWN = 30, 8
# A fault is found in the first, again in the next, and from then on all is eager.
FAULTY_STEPS = 4


@dataclass(frozen=True, slots=True)
class Ranks:
    """How GPUs share a model.

    Attributes:
        tensor: Ranks of tensor parallelism.
        context: Ranks of context parallelism.
        sequence: Whether tensor-parallel ranks hold a part of the tokens each between their layers.
        exchange: How context-parallel ranks exchange keys and values; None is upstream's default.
        experts: Ranks of expert parallelism, which have packs of their own; more than two bound their exchange.
        shape: Of the model.
        fault: Whether replays of the last rank are wrong.
    """

    tensor: int = 1
    context: int = 1
    sequence: bool = False
    exchange: str | None = None
    experts: int = 1
    shape: lm.Shape = SMALL
    fault: bool = False

    @property
    def packs(self) -> dict[str, tuple[int, ...]]:
        """Return the packs to compare by name: 30 of all sizes, and some that fill a bucket."""
        full: dict[str, tuple[int, ...]] = {str(lengths): lengths for lengths in FULL}
        if self.sequence:
            return full
        least = EXACT_BELOW * self.context  # smaller ones must fill a bucket
        drawn = (_drawn(index, least) for index in range(parity.PACKS))
        return {f"{len(lengths)} documents, {sum(lengths)} tokens": lengths for lengths in drawn} | full


LAYOUTS = {
    "TP2": Ranks(tensor=2),
    "TP2_sequence": Ranks(tensor=2, sequence=True),
    "CP2": Ranks(context=2),
    "CP2_a2a": Ranks(context=2, exchange="a2a"),
    "CP2_images": Ranks(context=2, shape=replace(SMALL, images=True)),
    "TP2_mamba": Ranks(tensor=2, shape=HYBRID),
    "TP2_delta_nets": Ranks(tensor=2, shape=replace(SMALL, attending=2)),
    "CP2_mamba": Ranks(context=2, shape=HYBRID),
    "EP2": Ranks(experts=2, shape=EXPERTS),
    "EP4": Ranks(experts=4, shape=EXPERTS),
    "TP2_fault": Ranks(tensor=2, fault=True),
    "EP2_fault": Ranks(experts=2, shape=EXPERTS, fault=True),
}


def _drawn(index: int, least: int) -> tuple[int, ...]:
    """Return lengths of the documents of one of 30 packs: more than `least` tokens, every third fills a bucket."""
    documents = 1 + index * (MAX_SEQS - 1) // (parity.PACKS - 1)
    tokens = least + (BUCKETS[-1] - least) * (index + 1) // parity.PACKS
    units = (tokens if index % 3 else BUCKETS[index % 2]) // UNIT
    return tuple(UNIT * length for length in lm.draw(units, documents, index))


def train_words(words: Sequence[str]) -> None:
    """Compare a layout with eager in this process, as one of its ranks; rank 0 writes what all found."""
    parser = argparse.ArgumentParser(prog="packed_ranks", description=__doc__.splitlines()[0])
    parser.add_argument("--train", choices=("graphs",), required=True)
    parser.add_argument("--layout", choices=LAYOUTS, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(words)
    layout = LAYOUTS[args.layout]
    os.environ[EXPERT_BOUNDS] = str(int(layout.experts > 2))
    with tilings_of(layout.shape):
        rank = Rank(layout)
        compare = rank.parity_of_experts if layout.experts > 1 else rank.parity
        found = rank.proofs_of_a_fault() if layout.fault else compare()
    ranks: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(ranks, found)
    if distributed.get_rank() == 0:
        args.out.write_text(json.dumps({"ranks": ranks}))
    gc.collect()  # graphs hold communicators
    distributed.barrier()
    distributed.destroy_process_group()


def tilings_of(shape: lm.Shape) -> AbstractContextManager[None]:
    """Return a context in which kernels of a model that take minutes to compile have few tilings."""
    if shape.attending > 1:
        return few_tilings(delta_net_kernels)
    return few_tilings() if shape.pattern else nullcontext()


class Rank:
    """One rank of a layout.

    Args:
        layout: How the GPUs share the model.
    """

    def __init__(self, layout: Ranks) -> None:
        self.layout = layout
        number = int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(number)
        distributed.init_process_group("nccl", device_id=torch.device("cuda", number))
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tensor,
            context_parallel_size=layout.context,
            expert_model_parallel_size=layout.experts,
        )
        initialize_rng_tracker(use_te_rng_tracker=True)
        model_parallel_cuda_manual_seed(1234)
        self.context = parallel_state.get_context_parallel_group()

    def parity(self) -> dict[str, Any]:
        """Compare graphs with eager, pack for pack, and run packs that no graph takes."""
        packs = self.layout.packs
        with parity.deterministic():
            model = self._model()
            grads = MainGrads(model)
            results(model, grads, self._pack((512, 512)))  # connections are made by a backward, too, before a capture
            helper = self._helper(model)
            graphs, far = helper.graphs, {}
            for seed, (name, lengths) in enumerate(packs.items()):
                pack = self._pack(lengths, seed)
                with parity.eager_at(graphs, next(tokens for tokens in BUCKETS if tokens >= pack.tokens)):
                    expected = results(model, grads, pack)
                found = results(model, grads, pack)
                far[name] = relative(found[0], expected[0]), largest_relative(found[1], expected[1])
            return {"far": far, **self._beyond(model, grads, helper)}

    def parity_of_experts(self) -> dict[str, Any]:
        """Compare graphs and eager with fp32 and each other, on packs of its own, and run packs that no graph takes.

        Experts in a graph add in another order, so they are not equal to the bit. In fp32 every rank runs its documents
        alone, one for one with the other's.
        """
        with parity.deterministic():
            model = self._model()
            grads = MainGrads(model)
            fp32 = parity.Fp32Reference(lambda: self._model(dtype=torch.float32), model)
            helper = self._helper(model)
            graphs, far, distances = helper.graphs, {}, []
            for index in range(DRAWN):
                pack = self._drawn(index)
                with without_tf32():
                    exact = fp32.results(pack)
                with graphs.paused():
                    expected = results(model, grads, pack)
                found = results(model, grads, pack)
                far[f"{index}: {pack.tokens}"] = (
                    relative(found[0], expected[0]),
                    largest_relative(found[1], expected[1]),
                )
                distances.append([_from(each, exact) for each in (found, expected)])
            means = torch.tensor(distances).mean(0).tolist()
            from_fp32 = dict(zip(("graphs", "eager"), means, strict=True))
            return {"far": far, "from_fp32": from_fp32, **self._beyond(model, grads, helper)}

    def proofs_of_a_fault(self) -> dict[str, Any]:
        """Train while rows of the last rank's replays are wrong; returns what runs eager in the end."""
        model = self._model()
        grads, helper = MainGrads(model), self._helper(model, cuda_graph_packed_strict=False)
        graphs = helper.graphs
        is_last = distributed.get_rank() == distributed.get_world_size() - 1
        for source in graphs._regions[0].sources if is_last else ():
            for made in source.recordings.values():
                double_rows(made.recording)
        with mock.patch.multiple(schedule, FIRST_SHARE=1e9, SHARE=1e9, LEAST_STEPS=1):
            for seed in range(FAULTY_STEPS):
                with graphs.step():
                    results(model, grads, self._pack(FULL[0], seed))
        found = {"disproved": sorted(graphs.proofs.disproved), "fallbacks": dict(graphs.statistics().fallbacks)}
        helper.delete_cuda_graphs()
        return found

    def _beyond(self, model: Any, grads: MainGrads, helper: Any) -> dict[str, Any]:
        """Run packs that no graph takes, with experts of the last rank alone, and one; returns what was counted."""
        last = distributed.get_rank() == distributed.get_world_size() - 1
        for lengths in BEYOND.values():
            results(model, grads, self._pack(lengths if last or self.layout.experts == 1 else (512, 512)))
        results(model, grads, self._pack(FULL[0]))
        statistics = helper.graphs.statistics()
        helper.delete_cuda_graphs()
        return {"replays": statistics.replays, "fallbacks": dict(statistics.fallbacks), "beyond": list(BEYOND)}

    def _drawn(self, index: int) -> lm.Pack:
        rank = distributed.get_rank()
        tokens = random.Random(f"{index} {rank}").randint(300, BUCKETS[-1])
        documents = 1 + index * (MOST_DRAWN - 1) // (DRAWN - 1)
        return self._pack(lm.draw(tokens, documents, 2 * index + rank), 2 * index + rank)

    def _model(self, **changes: Any) -> Any:
        return lm.build_model(
            self.layout.shape,
            tensor_model_parallel_size=self.layout.tensor,
            context_parallel_size=self.layout.context,
            sequence_parallel=self.layout.sequence,
            cp_comm_type=self.layout.exchange,
            expert_model_parallel_size=self.layout.experts,
            **changes,
        )

    def _pack(self, lengths: Sequence[int], seed: int = 1) -> lm.Pack:
        pack = lm.make_pack(lengths, seed)
        if self.layout.shape.images:
            pack = lm.with_images(pack, self.layout.shape.hidden)
        return lm.part_of(pack, self.layout.context, self.context.rank())

    def _helper(self, model: Any, **options: Any) -> Any:
        values = {"cuda_graph_max_packed_seqs": MAX_SEQS, "cuda_graph_packed_buckets": list(BUCKETS), **options}
        return lm.new_helper(model, self._pack((512, 512)), cuda_graph_packed_slots=1, **values)


def _from(found: parity.Result, exact: parity.Result) -> list[float]:
    """Return how far losses and, on average, gradients are from exact ones."""
    far = parity.distances(found, exact)
    return [far["losses"], far["mean of gradients"]]


def results(model: Any, grads: MainGrads, pack: lm.Pack) -> parity.Result:
    """Return per-token losses and all gradients of this rank."""
    grads.zero()
    return lm.step(model, pack), grads.copy()
