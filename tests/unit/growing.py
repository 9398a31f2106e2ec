"""Towers whose buckets are recorded on demand."""

from contextlib import ExitStack

from .towers import assert_close, draw, graphs_on, results

SMALL, LARGE, OTHER = [[1, 8, 8]], [[1, 16, 16], [1, 8, 8]], [[2, 8, 8], [1, 6, 4]]
ON_DEMAND = {"grows": True, "buckets": "auto"}


def grown(model, *warmup, **options):
    """Put graphs on a tower that saw these microbatches in warm-up steps."""
    stack = ExitStack()
    graphs = stack.enter_context(graphs_on(model, capture=False, **{**ON_DEMAND, **options}))
    with stack:
        for rows in warmup:
            model(*draw(rows))
        assert graphs.capture()
        return graphs, stack.pop_all()


def assert_equals_eager(model, graphs, rows, seed=0):
    actual = results(model, rows, seed)
    with graphs.paused():
        expected = results(model, rows, seed)
    for found, right in zip(actual, expected, strict=True):
        assert_close(found, right)


def capacities(graphs):
    return sorted({bucket.tokens for region in graphs._regions for bucket in region.buckets})
