"""Encoders of other packages, by their entry points, and what one of this package is made of."""

import dataclasses
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge_cg_plugin.graphs.errors import CaptureError
from bridge_cg_plugin.upstream.encoders import registry
from bridge_cg_plugin.upstream.seams import encoders

from .hugging_face_towers import assert_equal_results, change_behind_the_hosts_back, results
from .mean_encoder import ENCODER, PATCHES, WIDTH, MeanEncoder, MeanTower
from .moonvit_towers import PACKAGE, entry_points, new_moonvit, region, run_moonvit
from .towers import graphs_on, new_tower, poison

ROOT = Path(__file__).resolve().parents[2]
PROVIDER = "tests.unit.mean_provider.MeanProvider"
BUCKETS = (PATCHES, 4 * PATCHES)


class MeanModel(torch.nn.Module):
    """Holds the tower as a model of Bridge's would."""

    def __init__(self):
        super().__init__()
        self.eyes = MeanTower()
        self.config = self.eyes.config


def forget():
    """Have entry points looked up again."""
    registry.encoders.cache_clear()
    encoders.points.cache_clear()


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Return a function that installs a package that declares an encoder: its metadata on the path."""
    forget()

    def install(value="tests.unit.mean_encoder:ENCODER", provider=PROVIDER):
        folder = tmp_path / "an_encoder-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: an-encoder\nVersion: 1.0\n")
        (folder / "entry_points.txt").write_text(f"[bridge_cg_plugin.encoders]\n{provider} = {value}\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        return tmp_path

    yield install
    forget()


def run(model, images):
    embeddings = model(images)
    wanted = list(model.parameters())
    return embeddings.detach(), torch.autograd.grad((embeddings * torch.arange(3.0)).sum(), wanted)


def images(count):
    return torch.randn(count, PATCHES, WIDTH, generator=torch.Generator().manual_seed(count))


def test_it_is_found_in_a_model_once_its_package_is_installed(installed):
    model = MeanModel()
    assert registry.find_encoders(model) == []
    forget()
    installed()
    (found,) = registry.find_encoders([torch.nn.Identity(), model])
    assert (found.model, found.holder, found.family.name) == (model.eyes, model, "MeanTower")
    assert registry.find_encoders(new_tower())[0].family.name == "Qwen3-VL"


def test_a_program_that_returns_no_tuple_is_named(installed, monkeypatch):
    installed()
    monkeypatch.setattr(MeanEncoder, "forward", lambda self, buffers, bucket: self.model.first(buffers["images"]))
    said = "vision_encoder: its forward returned a Tensor, not a tuple of tensors"
    with pytest.raises(CaptureError, match=said), graphs_on(MeanModel(), buckets=BUCKETS):
        pass


def test_its_replays_equal_eager_to_the_bit(installed):
    installed()
    model = MeanModel()
    counts = (1, 4, 3, 2)
    expected = [run(model.eyes, images(count)) for count in counts]
    with graphs_on(model, buckets=BUCKETS) as graphs:
        poison(graphs, float("nan"))
        for count, (embeddings, gradients) in zip(counts, expected, strict=True):
            found = run(model.eyes, images(count))
            assert torch.equal(found[0], embeddings)
            assert all(map(torch.equal, found[1], gradients))
        assert graphs.statistics().replays == len(counts) and graphs.statistics().fallbacks == {}
        model.eyes(images(5))
        assert graphs.statistics().fallbacks == {"too_many_tokens": 1}


@pytest.mark.parametrize("value", ["tests.unit.no_such_module:ENCODER", "tests.unit.mean_encoder:MeanTower"])
def test_a_package_that_cannot_be_used_is_told_and_left_out(installed, value, caplog):
    installed(value)
    with caplog.at_level(logging.WARNING, "bridge_cg_plugin"):
        assert registry.find_encoders(MeanModel()) == []
    assert registry.find_encoders(new_tower())
    (said,) = [record.getMessage() for record in caplog.records]
    assert value in said and "bridge_cg_plugin.encoders" in said


def test_one_that_fails_in_a_model_is_told_once_and_found_nowhere(monkeypatch, caplog):
    def fails(holder):
        raise AttributeError("no such part")

    broken = dataclasses.replace(ENCODER, name="broken", find=fails)
    monkeypatch.setattr(registry, "encoders", lambda: (broken, *registry.ENCODERS))
    monkeypatch.setattr(registry, "_failed", set())
    assert registry.find_encoders([MeanModel(), MeanModel()]) == []
    assert registry.find_encoders(new_tower())
    (said,) = [record.getMessage() for record in caplog.records if "broken" in record.getMessage()]
    assert "no such part" in said


PROVIDER_SCRIPT = """
import dataclasses
import sys

import bridge_cg_plugin

bridge_cg_plugin.activate()
import megatron.bridge.models
from tests.unit.mean_provider import MeanProvider

assert MeanProvider(vision_cuda_graph_impl="transformer_engine").vision_cuda_graph_impl == "transformer_engine"
assert "vision_cuda_graph_buckets" in {field.name for field in dataclasses.fields(MeanProvider)}
assert bridge_cg_plugin.plugin.status()["patches"]["MeanProvider.init"]["state"] == "active"
assert not {"torch", "tests.unit.mean_encoder"} & set(sys.modules)
"""


def test_its_provider_takes_the_options_before_anything_of_its_encoder_is_imported(installed):
    folder = installed()
    models = folder / "megatron/bridge/models"
    models.mkdir(parents=True)
    for stand_in in (models.parent, models):
        (stand_in / "__init__.py").touch()
    environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    done = subprocess.run([sys.executable, "-c", PROVIDER_SCRIPT], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_documentation_shows_the_file_as_it_is():
    page = (ROOT / "docs/adding_an_encoder.md").read_text()
    shown = page.partition("```python\n")[2].partition("```")[0]
    assert (ROOT / "tests/unit/mean_encoder.py").read_text().partition('"""\n\n')[2] == shown


# Kimi's MoonViT, built from remote code, by the package of `tests/packages`.
MOON_BUCKETS = {"buckets": (32, 64, 128, 256), "max_frames": 8}
sides = st.integers(1, 4).map(lambda n: 2 * n)
items = st.lists(st.tuples(st.integers(1, 4), sides, sides), min_size=1, max_size=5)
with_moonvit = pytest.mark.usefixtures("moonvit")


@pytest.fixture
def moonvit(installed, monkeypatch):
    """Install the package: its folder and the metadata that its pyproject.toml makes on the path."""
    ((provider, value),) = entry_points().items()
    installed(value, provider)
    monkeypatch.syspath_prepend(str(PACKAGE))


@with_moonvit
def test_the_layers_are_found_where_bridge_holds_the_tower():
    tower = new_moonvit()
    model = torch.nn.Module()
    model.vision_tower, model.config = tower, SimpleNamespace()
    for holder in (model, tower, tower.encoder):
        (found,) = registry.find_encoders([torch.nn.Identity(), holder])
        assert found.family is region().MOONVIT and found.model is tower.encoder
    assert registry.find_encoders(torch.nn.Linear(2, 2)) == []


@with_moonvit
def test_any_images_and_videos_equal_eager():
    model, eager = new_moonvit(), new_moonvit()

    @settings(max_examples=20)
    @given(rows=items, seed=st.integers(0, 9))
    def check(rows, seed):
        before = graphs.statistics()
        poison(graphs, float("nan"))
        assert_equal_results(results(run_moonvit, model, rows, seed), results(run_moonvit, eager, rows, seed))
        after = graphs.statistics()
        assert after.replays + after.fallbacks["too_many_tokens"] == before.replays + before.fallbacks.total() + 1

    with graphs_on(model, **MOON_BUCKETS) as graphs:
        check()
        assert graphs.statistics().replays


@with_moonvit
def test_a_grid_that_changed_behind_the_hosts_back_gives_nan():
    model = new_moonvit()
    hidden, grid = torch.randn(8, 32), torch.tensor([(1, 2, 4)])
    with graphs_on(model, **MOON_BUCKETS) as graphs:
        change_behind_the_hosts_back(graphs, lambda: grid.copy_(torch.tensor([[1, 4, 2]])))
        assert model.encoder(hidden, grid).isnan().all()
