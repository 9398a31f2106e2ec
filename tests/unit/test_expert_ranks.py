"""Experts of several ranks inside packed graphs: equal to eager's dispatcher, on graphs together or not at all."""

import random
from contextlib import ExitStack, contextmanager
from unittest import mock

import pytest
import torch
from megatron.core.transformer.moe import token_dispatcher
from torch import distributed

from bridge_cg_plugin.graphs.executor import ReferenceExecutor
from bridge_cg_plugin.upstream.parallel.process_groups import expert_group, sharing_groups, without_collectives
from tests.ranks import run_ranks

from .packs import ON_CPU, graphs_on, losses_and_gradients, new_model, pack
from .test_packed import EXPERTS
from .towers import assert_close

EP2 = {"expert_model_parallel_size": 2}
WARMUP = (100, 150, 50)


class Stream:
    """Stands in for a CUDA stream, and for its events: on a CPU all has ended."""

    def wait_stream(self, other):
        pass

    def record_event(self):
        return self

    def synchronize(self):
        pass


def on_the_host(tensor, as_numpy=False, record_stream=False):
    """Return counts as the dispatcher wants them, from a tensor that is on the CPU already."""
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


@contextmanager
def dispatching_on_cpu():
    """Let megatron-core's all-to-all dispatcher run without CUDA's streams."""
    stream = Stream()
    with ExitStack() as stack:
        stack.enter_context(ON_CPU())
        stack.enter_context(mock.patch.object(torch.cuda, "Stream", lambda *args, **kwargs: stream))
        stack.enter_context(mock.patch.object(torch.cuda, "current_stream", lambda *args: stream))
        stack.enter_context(mock.patch.object(torch.cuda, "stream", lambda *args: ExitStack()))
        stack.enter_context(mock.patch.object(token_dispatcher, "maybe_move_tensor_to_cpu", on_the_host))
        yield


def rank_model(**changes):
    return new_model(**{**EXPERTS, "moe_token_dispatcher_type": "alltoall", **EP2, **changes})


def executor_of(model):
    groups = (*sharing_groups(model.decoder), expert_group(model.decoder))
    return ReferenceExecutor(isolated=without_collectives(*groups))


def on_graphs(model, *warmup, **options):
    return graphs_on(model, *warmup, executor=executor_of(model), cuda_graph_modules=[], **options)


def draw(generator, most=500):
    """Return the lengths of a pack."""
    lengths = [generator.randint(1, 200) for _ in range(generator.randint(1, 6))]
    while sum(lengths) > most:
        lengths.pop()
    return tuple(lengths) if sum(lengths) > 256 else (*lengths[:5], 257)


def replay(changes, packs=4):
    with dispatching_on_cpu():
        rank = distributed.get_rank()
        generator = random.Random(rank)
        model = rank_model(**changes)
        made = [pack(draw(generator), seed=2 * number + rank) for number in range(packs)]
        expected = [losses_and_gradients(model, arguments) for arguments in made]
        with on_graphs(model, pack(WARMUP)) as graphs:
            found = [losses_and_gradients(model, arguments) for arguments in made]
            statistics = graphs.statistics()
        assert statistics.replays == packs and not statistics.fallbacks, statistics.fallbacks
        for (losses, gradients), (eager, eagers) in zip(found, expected, strict=True):
            assert_close([losses, *gradients], [eager, *eagers])


def test_replays_equal_eager(tmp_path):
    run_ranks(2, replay, tmp_path, {}, **EP2)
