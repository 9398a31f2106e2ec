"""examples/upstream_vision_graphs.py without a GPU: what it compares upstream's graphs with."""

from examples.upstream_vision_graphs import distance, without_positions_and_boundaries

from .towers import draw, new_tower

TWO, ONE = [(1, 4, 4), (1, 4, 4)], [(1, 4, 4)]


def test_positions_and_boundaries_are_left_out_once():
    model = new_tower()
    pixels, grid = draw(TWO)
    eager = model(pixels, grid)[0].detach()
    changed = without_positions_and_boundaries(model, pixels, grid)
    assert distance(changed, eager) > 1e-3
    assert distance(model(pixels, grid)[0].detach(), eager) == 0
    # Every patch attends to both images: another second image changes the first one's embeddings.
    other = pixels.clone()
    other[len(pixels) // 2 :] += 1
    half = len(eager) // 2
    assert distance(model(other, grid)[0].detach()[:half], eager[:half]) == 0
    assert distance(without_positions_and_boundaries(model, other, grid)[:half], changed[:half]) > 1e-3
