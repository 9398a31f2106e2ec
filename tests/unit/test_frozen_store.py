import gc
import weakref

import pytest

from bridge_cg_plugin.vision import frozen_outputs
from bridge_cg_plugin.vision.frozen_outputs import shared_store

from .frozen_towers import IMAGES, OTHERS, counts, frozen_tower, on_graphs
from .towers import assert_close, forward

pytestmark = pytest.mark.usefixtures("frozen_store_of_its_own")


def test_the_oldest_outputs_leave_when_memory_is_full():
    model = frozen_tower()
    nbytes = sum(each.nbytes for each in forward(model, IMAGES))
    with on_graphs(model, gib=2.5 * nbytes / 2**30) as graphs:
        for seed in (0, 1, 0, 2, 0, 1):
            forward(model, IMAGES, seed)
        assert counts(graphs) == (2, 4)
        assert shared_store().nbytes == 2 * nbytes


def test_outputs_larger_than_all_memory_are_not_kept():
    model = frozen_tower()
    with on_graphs(model, gib=1e-7) as graphs:
        for _ in range(2):
            forward(model, IMAGES)
        assert counts(graphs) == (0, 2)


def test_outputs_leave_with_the_last_encoder():
    with on_graphs(frozen_tower()):
        forward(frozen_tower(), IMAGES)
        assert shared_store() is shared_store()
        assert shared_store().most_bytes == 2**30
    gc.collect()
    assert shared_store().most_bytes == 0


def test_what_is_kept_holds_no_recordings_and_no_model():
    model = frozen_tower()
    with on_graphs(frozen_tower(1)):
        with on_graphs(model) as graphs:
            forward(model, IMAGES)
            source, weight = (
                weakref.ref(x) for x in (graphs._regions[0].sources.current, model.patch_embed.proj.weight)
            )
            assert shared_store().nbytes > 0
        del graphs, model
        gc.collect()
        assert shared_store().nbytes > 0
        assert source() is None and weight() is None


def test_too_little_host_memory_keeps_nothing_more(monkeypatch):
    def fail(output):
        raise RuntimeError("CUDA error: out of memory")

    model = frozen_tower()
    expected = forward(model, IMAGES)
    with on_graphs(model) as graphs:
        forward(model, OTHERS)
        monkeypatch.setattr(frozen_outputs, "_on_host", fail)
        for _ in range(2):
            assert_close(forward(model, IMAGES), expected)
        forward(model, OTHERS)
        assert counts(graphs) == (1, 3)
