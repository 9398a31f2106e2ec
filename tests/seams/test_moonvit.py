"""Bridge's Kimi K2.5 around a stand-in for its remote code: found, trained on graphs, driven by the train loop."""

import importlib.util
from unittest import mock

import pytest
import torch

if importlib.util.find_spec("megatron.bridge.models.kimi_vl") is None:
    pytest.skip("this release has no such model", allow_module_level=True)

from megatron.bridge.models.kimi_vl.kimi_k25_vl_provider import KimiK25VLModelProvider
from megatron.bridge.models.mla_provider import MLAModelProvider
from torch import nn

from bridge_cg_plugin.graphs.recordings.executor import ReferenceExecutor
from bridge_cg_plugin.upstream.encoders import registry
from bridge_cg_plugin.upstream.hooks.helpers import graph_helper
from bridge_cg_plugin.upstream.hooks.helpers import vision_helper as helpers
from examples.photographs.small_tower import start_single_process

from ..unit.moonvit_towers import REMOTE_CODE, SIDE, region
from ..unit.towers import assert_close, bridges_step

WIDTH, IMAGE, PAD = 64, 120, 127
BUCKETS = [64, 128, 192]
FIELDS = {
    "vision_cuda_graph_impl": "transformer_engine",
    "vision_cuda_graph_buckets": BUCKETS,
    "vision_cuda_graph_tuning": {"exact_below": 0, "slots": 3},
    "vision_cuda_graph_strict": True,
    "cuda_graph_warmup_steps": 1,
}


class LanguageModel(nn.Module):
    """Stands in for the language model, whose experts and latent attention need a GPU."""

    def __init__(self):
        super().__init__()
        self.words, self.layer = nn.Embedding(128, WIDTH), nn.Linear(WIDTH, WIDTH)

    def embedding(self, input_ids, position_ids):
        return self.words(input_ids).transpose(0, 1)

    def shared_embedding_or_output_weight(self):
        return self.words.weight

    def forward(self, decoder_input, labels, **others):
        logits = torch.tanh(self.layer(decoder_input.transpose(0, 1))) @ self.words.weight.T
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")


@pytest.fixture(autouse=True)
def process(active, monkeypatch):
    start_single_process()
    monkeypatch.setattr(registry, "encoders", lambda: (region().MOONVIT, *registry.ENCODERS))


def build(**fields):
    """Build the model as a recipe's provider does."""
    sizes = {"num_layers": 1, "hidden_size": WIDTH, "num_attention_heads": 2, "vocab_size": 128}
    provider = KimiK25VLModelProvider(
        **sizes,
        media_placeholder_token_id=IMAGE,
        pad_token_id=PAD,
        hf_model_path=str(REMOTE_CODE),
        use_cpu_initialization=True,
    )
    for name, value in {"trust_remote_code": True, **fields}.items():  # no field of a provider before Bridge 0.6
        setattr(provider, name, value)
    torch.manual_seed(0)
    with mock.patch.object(MLAModelProvider, "provide", lambda *args, **kwargs: LanguageModel()):
        return provider.provide(pre_process=True, post_process=True).train()


def loss_of(model, rows, seed):
    """Run a microbatch of items as Bridge's step does."""
    grid, generator = torch.tensor(rows), torch.Generator().manual_seed(seed)
    pixels = torch.randn(int(grid.prod(1).sum()), 3, SIDE, SIDE, generator=generator)
    embeddings = [h * w // 4 for _, h, w in rows]
    parts = [torch.cat((torch.full((count,), IMAGE), torch.arange(5))) for count in embeddings]
    tokens = torch.cat(parts)[None]
    return model(tokens, labels=tokens.roll(-1, 1), pixel_values=pixels, image_grid_thw=grid).mean()


MIXES = ([(1, 4, 6), (2, 4, 4)], [(1, 8, 8)], [(4, 2, 4), (1, 2, 2), (1, 10, 4)])


def results(model):
    model.zero_grad(set_to_none=True)
    losses = [loss_of(model, rows, seed) for seed, rows in enumerate(MIXES)]
    torch.stack(losses).sum().backward()
    return [loss.detach() for loss in losses], [p.grad for p in model.parameters() if p.grad is not None]


def test_steps_of_the_train_loop_drive_graphs_that_compute_what_eager_computes(monkeypatch):
    monkeypatch.setattr(helpers, "default_executor", lambda **_: ReferenceExecutor())
    model = build(**FIELDS)
    expected = results(model)
    for _ in range(3):
        found = bridges_step([model], model.config, lambda: results(model))
        assert_close(found[0], expected[0], 1e-6)
        assert_close(found[1], expected[1], 1e-5)
    (helper,) = graph_helper.active_helpers()
    statistics = helper.graphs.statistics()
    assert (statistics.warmup_microbatches, statistics.replays, statistics.fallbacks) == (3, 6, {})
    helper.delete_cuda_graphs()
