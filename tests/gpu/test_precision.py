"""Default kernels: outputs equal eager's to the bit, gradients are as near to fp32 as eager's."""

import statistics

from tests.models.reference import ALLOWANCE, Fp32Tower, errors_of

MIXES = {
    "one image": [(1, 28, 28)],
    "four images": [(1, 20, 20)] * 4,
    "video and images": [(4, 10, 14), (1, 28, 20), (1, 6, 4)],
    "many tiny": [(1, 4, 6)] * 40,
    "exactly a bucket": [(1, 32, 32)],
}
BUCKETS = (1024, 1664)
REPEATS = 3


def mean_errors(model, grads, batches, expected):
    """Return the outputs of every batch, and each gradient's error, averaged over the batches."""
    found = [errors_of(model, grads, *pair) for pair in zip(batches, expected, strict=True)]
    errors = [statistics.fmean(values) for values in zip(*(errors for _, _, errors in found), strict=True)]
    return [o for outputs, _, _ in found for o in outputs], errors


def test_gradients_are_as_near_to_fp32_as_eagers(tower_module, model, grads, graphs_of):
    helper = graphs_of(buckets=BUCKETS, max_frames=48)
    for name, grid in MIXES.items():
        batches = [tower_module.make_batch(grid, model, seed=seed) for seed in range(REPEATS)]
        with helper.graphs.paused():
            tower_module.forward(model, batches[0])  # upstream makes the rotary frequencies in its first call
            reference = Fp32Tower(model)
            expected = [reference.step(batch) for batch in batches]
            eager_outputs, eager = mean_errors(model, grads, batches, expected)
        outputs, errors = mean_errors(model, grads, batches, expected)
        assert tower_module.largest_relative(outputs, eager_outputs) == 0.0, name
        for figure in (statistics.median, statistics.fmean):
            assert figure(errors) <= ALLOWANCE * figure(eager), (name, figure.__name__)
    assert not helper.graphs.statistics().fallbacks
