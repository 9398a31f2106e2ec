"""Where parts of a step begin, by hooks on a small model of the same structure, and the step that is profiled."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from bridge_cg_plugin.upstream.encoders.registry import FoundEncoder
from scripts.performance.measuring.step_times import MARKER
from scripts.performance.models.arithmetic import TowerShape, Trained, language_model_flops, step_flops
from scripts.performance.runs import step_parts
from scripts.performance.runs.recipe_cases import PROFILED
from scripts.performance.runs.step_parts import StepParts, trained

WIDTH, GRID, STEPS = 8, (1, 4, 4), 2


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden_states, grid_thw):
        deep = self.first(hidden_states)
        return self.second(deep), [deep * 2]


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.layer, self.vocab_size = nn.Embedding(10, WIDTH), nn.Linear(WIDTH, WIDTH), 10
        self.config = SimpleNamespace(
            **{"num_layers": 1, "hidden_size": WIDTH, "ffn_hidden_size": 16, "num_moe_experts": None},
            **{"num_attention_heads": 2, "num_query_groups": None, "kv_channels": 4},
        )

    def forward(self, input_ids, decoder_input, deepstack, labels, packed_seq_params=None):
        return self.layer(decoder_input + deepstack).sum(-1)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.vision_model, self.language_model = Tower(), LanguageModel()

    def forward(self, pixels, ids, **more):
        features, (deep,) = self.vision_model(hidden_states=pixels, grid_thw=torch.tensor([GRID]))
        embeddings = self.language_model.embedding(ids) + features
        given = {"input_ids": ids[None], "labels": ids[None], **more}
        return self.language_model(decoder_input=embeddings, deepstack=deep, **given)


@pytest.fixture
def marked(monkeypatch):
    """What the device would have run of each profiled step: a marker of 1 us every 1000 us, and nothing else."""
    launched, profiles = [], []

    class Profile:
        prepared = False

        def prepare(self):
            self.prepared = True

        def start(self):
            assert self.prepared
            profiles.append(self)
            launched.clear()

        def stop(self):
            return [(1000.0 * i, 1000.0 * i + 1, MARKER) for i in range(len(launched))]

    monkeypatch.setattr(step_parts, "Profile", Profile)
    monkeypatch.setattr(step_parts, "begin_part", lambda: launched.append(True))
    monkeypatch.setattr(step_parts, "shape_of", lambda model: TowerShape())
    return profiles


def train(parts, model, monkeypatch, steps=STEPS + 2, microbatches=2, stages=1, **more):
    monkeypatch.setattr(step_parts, "find_encoder", lambda _: FoundEncoder(model.vision_model, model, None))
    sizes = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": stages, "context_parallel_size": 1}
    cfg = SimpleNamespace(model=SimpleNamespace(**sizes))
    optimizer = SimpleNamespace(step=lambda: (True, 1.0, None))
    context = SimpleNamespace(state=SimpleNamespace(cfg=cfg), model=[model], optimizer=optimizer)
    parts.on_train_start(context)
    for _ in range(steps):
        parts.on_train_step_start(context)
        for _ in range(microbatches):
            model(torch.ones(5, WIDTH), torch.arange(5), **more).sum().backward()
        assert optimizer.step() == (True, 1.0, None)
        parts.on_train_step_end(context)
    return parts


def without_repeats(marks):
    return [mark for i, mark in enumerate(marks) if i == 0 or mark != marks[i - 1]]


FORWARD = ["vision", "between", "language model", "between"]


def test_every_boundary_of_the_profiled_step_is_marked_in_order(marked, monkeypatch):
    parts = train(StepParts(STEPS), Model(), monkeypatch)
    backward = ["language model", "between", "vision", "between"]
    expected = ["between", *(FORWARD + backward) * 2, "optimizer", "between", "end"]
    assert without_repeats(parts._marks) == expected and len(marked) == 1
    assert sum(parts.record()["parts_ms"].values()) == len(parts._marks) - 1


def test_a_step_with_a_recording_in_it_is_profiled_again(marked, monkeypatch):
    seconds = iter((2.0, 2.5, 2.5, 2.5))  # before and after each profiled step
    monkeypatch.setattr(step_parts, "graph_statistics", lambda: {"vision": {"capture_seconds": next(seconds)}})
    parts = train(StepParts(STEPS), Model(), monkeypatch, steps=STEPS + PROFILED)
    assert len(marked) == 2 and without_repeats(parts._marks)[-1] == "end"
    assert sum(parts.record()["parts_ms"].values()) == len(parts._marks) - 1


def test_a_frozen_encoder_has_no_backward(marked, monkeypatch):
    model = Model()
    model.vision_model.requires_grad_(False)
    model.language_model.embedding.requires_grad_(False)
    parts = train(StepParts(STEPS), model, monkeypatch, microbatches=1)
    expected = ["between", *FORWARD, "language model", "between", "optimizer", "between", "end"]
    assert without_repeats(parts._marks) == expected


def test_nothing_is_marked_before_the_profiled_step(marked, monkeypatch):
    parts = train(StepParts(STEPS), Model(), monkeypatch, steps=STEPS + 1)
    assert not parts._marks and not marked and parts.record() == {}


def test_a_profile_without_markers_leaves_the_run_its_other_figures(marked, monkeypatch, capsys):
    monkeypatch.setattr(step_parts.Profile, "stop", lambda self: [])
    assert train(StepParts(STEPS), Model(), monkeypatch).record() == {}
    assert "the profile has 0 markers of" in capsys.readouterr().out


@pytest.mark.parametrize("packed", [False, True])
def test_arithmetic_is_of_the_steps_own_images_and_documents(marked, monkeypatch, packed):
    more = {"packed_seq_params": SimpleNamespace(cu_seqlens_q=torch.tensor([0, 2, 5, 5]))} if packed else {}
    model = Model()
    found = train(StepParts(STEPS), model, monkeypatch, **more).record()["parts_tflop"]
    shape = step_parts.language_model_shape_of(model.language_model)
    documents = [2, 3] if packed else [5]
    assert found["vision"] == pytest.approx(2 * step_flops([GRID]) / 1e12)
    assert found["language model"] == pytest.approx(2 * language_model_flops(documents, shape) / 1e12)


def test_the_first_stage_has_the_whole_encoder_and_no_labels(marked, monkeypatch):
    model = Model()
    found = train(StepParts(STEPS), model, monkeypatch, stages=2, labels=None).record()["parts_tflop"]
    shape = step_parts.language_model_shape_of(model.language_model)
    assert found["vision"] == pytest.approx(2 * step_flops([GRID]) / 1e12)
    assert found["language model"] == pytest.approx(language_model_flops([5], shape) / 1e12)


def test_what_is_trained_decides_the_products_of_the_backward():
    tower, model = Tower(), LanguageModel()
    assert trained(tower) == Trained()
    tower.requires_grad_(False)
    assert trained(tower) == Trained(weights=False, inputs=False)
    tower.first.bias.requires_grad_(True)
    assert trained(tower) == Trained(weights=False, inputs=True)
    model.requires_grad_(False)
    assert trained(model, tower) == Trained(weights=False, inputs=True)
