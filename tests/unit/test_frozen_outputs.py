import pytest
import torch
from torch import nn

from bridge_cg_plugin.vision import frozen_outputs
from bridge_cg_plugin.vision.kernels.fingerprint import fingerprint

from ..python_calls import python_calls
from .frozen_towers import IMAGES, OTHERS, activate, counts, frozen_tower, on_graphs
from .towers import assert_close, draw, forward, new_tower, poison

pytestmark = pytest.mark.usefixtures("frozen_store_of_its_own")


def test_the_same_images_are_encoded_once():
    model = frozen_tower()
    expected = [forward(model, rows) for rows in (IMAGES, OTHERS)]
    with on_graphs(model) as graphs:
        for _ in range(3):
            for rows, outputs in zip((IMAGES, OTHERS), expected, strict=True):
                poison(graphs, float("nan"))
                assert_close(forward(model, rows), outputs)
        assert counts(graphs) == (4, 2)
        assert graphs.statistics().replays == 2
        assert graphs.workload.notes()["frozen outputs"].startswith("4 of 6 microbatches")


def test_other_pixels_of_the_same_sizes_are_other_images():
    model = frozen_tower()
    expected = [forward(model, IMAGES, seed) for seed in range(3)]
    with on_graphs(model) as graphs:
        for seed in (0, 1, 2, 0):
            assert_close(forward(model, IMAGES, seed), expected[seed])
        assert counts(graphs) == (1, 3)


def test_images_of_other_shapes_with_the_same_pixels_are_other_images():
    model = frozen_tower()
    pixels, _ = draw([[1, 4, 8]])
    grids = [torch.tensor(rows) for rows in ([[1, 4, 8]], [[1, 8, 4]], [[2, 4, 4]])]
    expected = [model(pixels, grid)[0] for grid in grids]
    with on_graphs(model) as graphs:
        for grid, outputs in zip(grids, expected, strict=True):
            assert_close([model(pixels, grid)[0]], [outputs])
        assert counts(graphs) == (0, 3)


def test_what_is_returned_is_the_callers_own():
    model = frozen_tower()
    expected = forward(model, IMAGES)
    with on_graphs(model):
        for _ in range(3):
            found = forward(model, IMAGES)
            assert_close(found, expected)
            for each in found:
                each.fill_(7.0)


@pytest.mark.parametrize("write", [lambda p: p.data.mul_(2.0), lambda p: p.untyped_storage().fill_(0)])
def test_weights_that_were_written_behind_pytorchs_back_are_seen(write):
    model = frozen_tower()
    with on_graphs(model) as graphs:
        with graphs.step():
            before = forward(model, IMAGES)
        write(model.merger.linear_fc2.weight)
        with graphs.paused():
            expected = forward(model, IMAGES)
        with graphs.step():
            assert_close(forward(model, IMAGES), expected)
        assert not torch.equal(before[0], expected[0])
        assert counts(graphs) == (0, 2)


def test_weights_that_left_and_came_back_are_known():
    model = frozen_tower()
    with on_graphs(model) as graphs:
        with graphs.step():
            before = forward(model, IMAGES)
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
        with graphs.step():
            assert_close(forward(model, IMAGES), before, 0.0)
        assert counts(graphs) == (1, 1)


def test_an_attribute_that_changes_is_another_encoder():
    model = frozen_tower()
    with on_graphs(model) as graphs:
        forward(model, IMAGES)
        for layer in model.decoder.layers:
            layer.mlp.activation_func = nn.functional.relu
        with graphs.paused():
            expected = forward(model, IMAGES)
        for _ in range(4):
            assert_close(forward(model, IMAGES), expected)


def test_an_encoder_that_is_trained_is_replayed_every_time():
    model = new_tower()
    with on_graphs(model) as graphs:
        for _ in range(2):
            assert forward(model, IMAGES)[0].requires_grad
        assert counts(graphs) == (0, 0)
        assert graphs.statistics().replays == 2
        assert "is trained" in graphs.workload.notes()["frozen outputs"]


def test_a_reference_is_looked_up_though_its_parameters_require_gradients():
    model = new_tower()
    with on_graphs(model) as graphs, torch.no_grad():
        model.eval()
        for _ in range(3):
            forward(model, IMAGES)
        assert counts(graphs) == (2, 1)


def test_weights_that_an_optimizer_changes_are_not_looked_up():
    model = new_tower()
    for parameter in model.parameters():
        parameter.main_grad = torch.zeros_like(parameter)
    with on_graphs(model) as graphs, torch.no_grad():
        forward(model, IMAGES)
        assert counts(graphs) == (0, 0)


def test_what_draws_random_numbers_is_not_kept(monkeypatch):
    model = frozen_tower()
    with on_graphs(model) as graphs:
        replay = graphs.workload.frozen._replay

        def drawing(*arguments):
            torch.rand(1)
            return replay(*arguments)

        monkeypatch.setattr(graphs.workload.frozen, "_replay", drawing)
        for _ in range(3):
            forward(model, IMAGES)
        assert counts(graphs) == (0, 3)
        assert "3 drew random numbers" in graphs.workload.notes()["frozen outputs"]


class Scaled(nn.Module):
    """GELU times what is in an attribute, neither parameter nor buffer."""

    def __init__(self, read, held):
        super().__init__()
        self.read, self.held = read, held

    def forward(self, x):
        return nn.functional.gelu(x) * self.read(self.held)


def assert_a_write_is_seen(graphs, model, tensor):
    """Write to what a model reads; kept outputs are not those of before."""
    before = forward(model, IMAGES)
    tensor.mul_(2.0)
    with graphs.paused():
        expected = forward(model, IMAGES)
    assert not torch.equal(before[0], expected[0])
    assert_close(forward(model, IMAGES), expected)


@pytest.mark.parametrize(
    "hold, read",
    [
        (lambda scale: scale, lambda held: held),
        (lambda scale: [scale], lambda held: held[0]),
        (lambda scale: ({"by name": scale},), lambda held: held[0]["by name"]),
    ],
    ids=["tensor", "list", "nested"],
)
def test_tensors_in_attributes_are_part_of_the_weights(hold, read):
    model, scale = frozen_tower(), torch.ones(1)
    activate(model, Scaled(read, hold(scale)))
    with on_graphs(model) as graphs:
        assert_a_write_is_seen(graphs, model, scale)


def test_an_encoder_captured_again_is_another_encoder():
    model = frozen_tower()
    with on_graphs(model) as graphs:
        before = forward(model, IMAGES)
        activate(model, nn.functional.relu)
        assert graphs.capture()
        with graphs.paused():
            expected = forward(model, IMAGES)
        assert not torch.equal(before[0], expected[0])
        assert_close(forward(model, IMAGES), expected)
        assert graphs.capture()
        for _ in range(2):
            assert_close(forward(model, IMAGES), expected)
        assert counts(graphs) == (1, 3), "captured again as it was, it shares after one comparison"


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("write", [lambda p: p.mul_(2.0), lambda p: setattr(p, "data", p.data * 2.0)])
def test_weights_written_inside_a_step_are_seen(frozen, write):
    model = new_tower().requires_grad_(not frozen)
    with on_graphs(model) as graphs, torch.no_grad():
        model.eval()
        with graphs.step():
            before = forward(model, IMAGES)
            write(model.merger.linear_fc2.weight)
            with graphs.paused():
                expected = forward(model, IMAGES)
            assert not torch.equal(before[0], expected[0])
            assert_close(forward(model, IMAGES), expected)


def test_what_an_optimizer_writes_behind_pytorchs_back_inside_a_step_is_seen():
    model = new_tower()
    with on_graphs(model) as graphs, torch.no_grad():
        model.eval()
        with graphs.step():
            forward(model, IMAGES)
            model.merger.linear_fc2.weight.data.mul_(2.0)
            with graphs.paused():
                expected = forward(model, IMAGES)
            assert_close(forward(model, IMAGES), expected)


def test_weights_that_inference_mode_made_and_writes_inside_a_step_are_seen():
    model = frozen_tower()
    weight = model.merger.linear_fc2.weight
    with on_graphs(model) as graphs, graphs.step(), torch.inference_mode():
        weight.data = weight.data.clone()
        assert_a_write_is_seen(graphs, model, weight)


def test_weights_are_read_once_in_a_step(monkeypatch):
    model, asked = frozen_tower(), []
    with on_graphs(model) as graphs:
        monkeypatch.setattr(
            frozen_outputs, "fingerprint", lambda tensors: asked.append(len(tensors)) or fingerprint(tensors)
        )
        for _ in range(2):
            with graphs.step():
                for seed in range(3):
                    forward(model, IMAGES, seed)
    assert len([count for count in asked if count > 2]) == 2


def test_a_grid_that_is_another_than_the_hosts_is_not_taken_for_it():
    model = frozen_tower()
    pixels, grid = draw([[1, 4, 8]])
    with on_graphs(model) as graphs:
        model(pixels, grid)
        grid.data.copy_(torch.tensor([[1, 8, 4]]))  # behind the back of the host's copy
        outputs = model(pixels, grid)[0]
        with graphs.paused():
            expected = model(pixels, grid)[0]
        assert outputs.isnan().all() or torch.allclose(outputs, expected, atol=1e-5)


def look_up_calls(layers):
    """Return how many functions a look-up of kept outputs calls, without its fingerprint's work."""
    model = new_tower(layers=layers).requires_grad_(False)
    pixels, grid = draw(IMAGES)
    with on_graphs(model) as graphs, torch.no_grad(), graphs.step():
        region, frozen = graphs._regions[0], graphs.workload.frozen
        batch = graphs.workload.read(pixels, grid).batch
        for _ in range(2):
            frozen.replay(region, batch)
        found = python_calls(lambda: frozen.replay(region, batch))
        assert frozen.found == 2
        return found


def test_pythons_work_of_a_look_up_does_not_grow_with_parameters(monkeypatch):
    monkeypatch.setattr(frozen_outputs, "begun", lambda tensors: lambda: (1, 2))
    shallow, deep = map(look_up_calls, (3, 6))
    assert deep == shallow <= 80


def test_the_device_takes_a_fingerprint_while_the_host_looks_at_the_encoder(monkeypatch):
    model, events = frozen_tower(), []
    begun = frozen_outputs.begun

    def begin(tensors):
        events.append("begun")
        result = begun(tensors)
        return lambda: (events.append("awaited"), result())[1]

    with on_graphs(model) as graphs:
        frozen = graphs.workload.frozen
        of_weights = frozen._weights_of
        monkeypatch.setattr(frozen_outputs, "begun", begin)
        monkeypatch.setattr(frozen, "_weights_of", lambda *given: (events.append("weights"), of_weights(*given))[1])
        forward(model, IMAGES)
    assert events == ["begun", "weights", "awaited"]
