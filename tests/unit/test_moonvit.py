"""Kimi's MoonViT, built from remote code, on graphs by another package: outputs and gradients equal eager's."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge_cg_plugin.upstream.encoders import registry
from bridge_cg_plugin.upstream.seams import encoders

from .hugging_face_towers import assert_equal_results, change_behind_the_hosts_back, results
from .moonvit_towers import PACKAGE, entry_points, new_moonvit, region, run_moonvit
from .towers import graphs_on, poison

BUCKETS = {"buckets": (32, 64, 128, 256), "max_frames": 8}
sides = st.integers(1, 4).map(lambda n: 2 * n)
items = st.lists(st.tuples(st.integers(1, 4), sides, sides), min_size=1, max_size=5)


@pytest.fixture(autouse=True)
def installed(tmp_path_factory, monkeypatch):
    """Install the package: its folder and the metadata that its pyproject.toml makes on the path."""
    place = tmp_path_factory.mktemp("site")
    metadata = place / "moonvit_graphs-0.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: moonvit-graphs\nVersion: 0.1\n")
    lines = [f"{name} = {value}" for name, value in entry_points().items()]
    (metadata / "entry_points.txt").write_text("\n".join([f"[{encoders.GROUP}]", *lines]))
    for folder in (place, PACKAGE):
        monkeypatch.syspath_prepend(str(folder))
    registry.encoders.cache_clear()
    encoders.points.cache_clear()
    yield
    registry.encoders.cache_clear()
    encoders.points.cache_clear()


def test_the_layers_are_found_where_bridge_holds_the_tower():
    tower = new_moonvit()
    model = torch.nn.Module()
    model.vision_tower, model.config = tower, SimpleNamespace()
    for holder in (model, tower, tower.encoder):
        found = registry.find_encoder([torch.nn.Identity(), holder])
        assert found.family is region().MOONVIT and found.model is tower.encoder
    assert registry.find_encoder(torch.nn.Linear(2, 2)) is None


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

    with graphs_on(model, **BUCKETS) as graphs:
        check()
        assert graphs.statistics().replays


def test_a_grid_that_changed_behind_the_hosts_back_gives_nan():
    model = new_moonvit()
    hidden, grid = torch.randn(8, 32), torch.tensor([(1, 2, 4)])
    with graphs_on(model, **BUCKETS) as graphs:
        change_behind_the_hosts_back(graphs, lambda: grid.copy_(torch.tensor([[1, 4, 2]])))
        assert model.encoder(hidden, grid).isnan().all()
