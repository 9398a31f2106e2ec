"""Deepstack's gradients under tensor parallelism with sequence parallelism: as released, and summed over the ranks.

Bridge's whole Qwen3-VL over two processes against one, every gradient. Once a test of what is released fails, upstream
has mended it: then upstream/hooks/qwen3_vl.py, its option and its warning can go.
"""

import zlib
from contextlib import contextmanager, nullcontext
from unittest import mock

import pytest
import torch
from megatron.bridge.peft.lora import LoRA
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from torch import distributed

import bridge_cg_plugin
from bridge_cg_plugin.options.facts import ENCODER_LAYERS
from bridge_cg_plugin.options.normalization import ALLREDUCE
from bridge_cg_plugin.upstream.hooks.any_loop import LOOPS
from bridge_cg_plugin.upstream.hooks.helpers.graph_helper import active_graphs
from tests.ranks import run_ranks

from ..unit import vlm
from ..unit.towers import graphs_on, split_dim

# Images and the tokens behind them: lengths are even, and images lie across the middle or on one side of it.
BATCHES = (([(4, 4)], 12), ([(4, 8), (4, 4)], 11), ([(8, 8)], 12))
EQUAL, APART = 1e-5, 0.25


def part(name, whole, dim, rank, ranks):
    """Return a rank's part of a parameter; `dim` is None where every rank has all of it."""
    if dim is None:
        return whole
    gated = "language_model" in name and "linear_fc1" in name
    blocks = whole.chunk(2, dim) if gated else [whole]
    return torch.cat([block.chunk(ranks, dim)[rank] for block in blocks], dim)


@contextmanager
def on_cpu():
    """Let the whole model run on a CPU, megatron-core's random states included."""
    with vlm.on_cpu(), mock.patch.object(CudaRNGStatesTracker, "fork", lambda *_, **__: nullcontext()):
        yield


def new_model(sequence_parallel, *, adapters=False, allreduce=False, graphs=False):
    """Build the model with weights that depend on their names alone, adapters' in the encoder too."""
    rank, ranks = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()
    model = vlm.build(
        graphs=graphs,
        tensor_model_parallel_size=ranks,
        sequence_parallel=sequence_parallel,
        gradient_accumulation_fusion=False,
    )
    setattr(model.config, ALLREDUCE, allreduce)
    if adapters:
        model = LoRA(dim=4, alpha=4, target_modules=[f"vision_model.*{layer}" for layer in ENCODER_LAYERS])(model)
    for name, parameter in model.named_parameters():
        dim, shape = split_dim(parameter), list(parameter.shape)
        if dim is not None:
            shape[dim] *= ranks
        drawn = torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
        whole = 0.1 * drawn + ("norm" in name and name.endswith("weight"))
        parameter.data.copy_(part(name, whole, dim, rank, ranks))
    return model


def microbatches():
    """Return microbatches of one sequence each."""
    return [vlm.sample(images, seed, text) for seed, (images, text) in enumerate(BATCHES)]


def gradients(model):
    """Return the loss of all batches, and each gradient with the dimension in which ranks split it."""
    model.zero_grad()
    total = 0.0
    for batch in microbatches():
        inputs = batch["visual_inputs"].normalized_for_model()
        losses = model(batch["tokens"], position_ids=None, attention_mask=None, labels=batch["labels"], **inputs)
        loss = (losses * torch.linspace(0.5, 1.5, losses.numel()).view(losses.shape)).sum()
        loss.backward()
        total += loss.item()
    return total, finalized(model, "grad")


def finalized(model, attribute):
    """Return each gradient with the dimension in which ranks split it, as megatron-core finalizes them."""
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    for parameter in trained.values():
        if getattr(parameter, "sequence_parallel", False):
            group = parallel_state.get_tensor_model_parallel_group()
            distributed.all_reduce(getattr(parameter, attribute), group=group)
    return {name: (getattr(p, attribute).clone(), split_dim(p)) for name, p in trained.items()}


def scheduled_gradients(model, graphs):
    """Return the same of a step of Bridge's, with the language model on graphs that a step before captured or not."""
    trainer = vlm.Trainer(model, graphs)
    for _ in range(1 + graphs):
        reports, _ = trainer.step(microbatches())
    if graphs:
        (found,) = [layers.statistics() for layers in active_graphs()]
        assert (found.replays, dict(found.fallbacks)) == (len(BATCHES), {})
        LOOPS.end_bridges()
    return sum(report[0].item() for report in reports), finalized(model, "main_grad")


def on_one_rank():
    """Return losses and gradients of one rank, by what is trained."""
    bridge_cg_plugin.deactivate()
    with on_cpu():
        return {
            "dense": gradients(new_model(False)),
            "adapters": gradients(new_model(False, adapters=True)),
            "a step of Bridge's": scheduled_gradients(new_model(False), graphs=False),
        }


def on_two_ranks():
    """Return losses and gradients of one of two ranks, by how the model is trained."""
    bridge_cg_plugin.deactivate()
    with on_cpu():
        found = {"as released": gradients(new_model(True))}
        bridge_cg_plugin.activate()
        found["option off"] = gradients(new_model(True))
        found["option without effect"] = gradients(new_model(False, allreduce=True))  # no sequence parallelism
        return found | with_the_option()


def with_the_option():
    """Return the same with the option, and at last of such a model after the plugin was switched off."""
    found = {
        "option on": gradients(new_model(True, allreduce=True)),
        "option on, adapters": gradients(new_model(True, allreduce=True, adapters=True)),
        "option on, graphs": replayed(new_model(True, allreduce=True)),
        "option on, language model on graphs": scheduled_gradients(
            new_model(True, allreduce=True, graphs=True), graphs=True
        ),
    }
    model = new_model(True, allreduce=True)
    bridge_cg_plugin.deactivate()
    return found | {"option on, plugin off": gradients(model)}


def replayed(model):
    """Return losses and gradients of a model whose encoder is on graphs."""
    with graphs_on(model.vision_model) as graphs:
        found = gradients(model)
        counted = graphs.statistics()
    assert (counted.replays, dict(counted.fallbacks)) == (len(BATCHES), {})
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    (found,) = run_ranks(1, on_one_rank, tmp_path_factory.mktemp("one"))
    return found


@pytest.fixture(scope="module")
def halves(tmp_path_factory):
    return run_ranks(2, on_two_ranks, tmp_path_factory.mktemp("two"), tensor_model_parallel_size=2)


def distances(halves, way, expected):
    """Return the larger relative distance of the two ranks' gradients from one rank's, by name."""
    loss, gradients_of_one = expected
    found = dict.fromkeys(gradients_of_one, 0.0)
    for rank, half in enumerate(halves):
        assert half[way][0] == pytest.approx(loss, rel=EQUAL)
        assert half[way][1].keys() == gradients_of_one.keys()
        for name, (gradient, dim) in half[way][1].items():
            own = part(name, gradients_of_one[name][0], dim, rank, len(halves))
            found[name] = max(found[name], ((gradient - own).norm() / own.norm()).item())
    return found


def above(found, limit):
    return {name: distance for name, distance in found.items() if not distance <= limit}


def feeds_deepstack(name):
    return name.startswith("vision_model.") and not name.startswith("vision_model.merger.")


def test_as_released_the_tower_and_deepstacks_mergers_have_other_gradients_than_on_one_rank(whole, halves):
    found = distances(halves, "as released", whole["dense"])
    assert above(found, EQUAL).keys() == above(found, APART).keys() == {name for name in found if feeds_deepstack(name)}


@pytest.mark.parametrize(
    "way, expected",
    [
        ("option on", "dense"),
        ("option on, adapters", "adapters"),
        ("option on, graphs", "dense"),
        ("option on, language model on graphs", "a step of Bridge's"),
        ("option without effect", "dense"),
    ],
)
def test_with_the_option_all_gradients_are_those_of_one_rank(whole, halves, way, expected):
    assert above(distances(halves, way, whole[expected]), EQUAL) == {}


@pytest.mark.parametrize("way", ["option on", "option on, language model on graphs"])
def test_with_the_option_ranks_agree_on_what_all_of_them_have(halves, way):
    first, second = (half[way][1] for half in halves)
    shared = {name for name, (_, dim) in first.items() if dim is None}
    mergers = {f"vision_model.decoder.deepstack_merger_list.{i}.linear_fc2.bias" for i in range(2)}
    assert mergers < shared
    assert {name for name in shared if not first[name][0].equal(second[name][0])} == set()


@pytest.mark.parametrize("way", ["option off", "option on, plugin off"])
def test_without_option_or_plugin_gradients_are_upstreams_to_the_bit(halves, way):
    for half in halves:
        (loss, released), (found_loss, found) = half["as released"], half[way]
        assert found_loss == loss
        assert {name for name in released if not found[name][0].equal(released[name][0])} == set()
