"""Ranks that train together under megatron-core's data parallelism, and checkpoints read at another layout."""

from contextlib import contextmanager, nullcontext
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer import TransformerConfig
from torch import distributed, nn

from bridge_cg_plugin.options import VisionGraphOptions
from bridge_cg_plugin.upstream.hooks.helpers.constructors import encoder_helper
from bridge_cg_plugin.upstream.parallel.data_parallel import ReductionOrder
from tests.ranks import run_ranks

from .mixes import IMAGES, MIXED, VIDEO
from .towers import DEFAULTS, assert_close, draw, new_tower

MIXES = (IMAGES, MIXED, VIDEO)
TOO_LARGE = [(1, 20, 20)]
WIDTH = 24  # of the towers' outputs


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.vision_model = new_tower()

    def forward(self, rows, seed):
        hidden, deepstack = self.vision_model(*draw(rows, seed))
        return sum((o * torch.linspace(0.5, 1.5, o.numel()).view(o.shape)).sum() for o in (hidden, *deepstack))


def no_gpu():
    stands_in = {"current_device": lambda: "cpu", "current_stream": mock.MagicMock(), "synchronize": lambda: None}
    return mock.patch.multiple(torch.cuda, **stands_in)


def data_parallel_model(module, **settings):
    """Return a module in megatron-core's data parallelism, in several buckets."""
    config = TransformerConfig(num_layers=1, hidden_size=WIDTH, num_attention_heads=1)
    ddp = DistributedDataParallelConfig(bucket_size=4096, **settings)
    with no_gpu():
        return DistributedDataParallel(config, ddp, module)


@contextmanager
def reductions_of(model):
    """List the model's bucket groups, by number, in the order in which they are reduced inside."""
    groups = enumerate(dict.fromkeys(model.param_to_bucket_group.values()))
    numbers = {bucket.grad_data.data_ptr(): number for number, group in groups for bucket in group.buckets}
    reduced, original = [], distributed.all_reduce

    def all_reduce(tensor, *args, **kwargs):
        reduced.append(numbers[tensor.data_ptr()])
        return original(tensor, *args, **kwargs)

    with mock.patch.object(distributed, "all_reduce", all_reduce):
        yield reduced


def data_parallel(overlap, last=None, beside=()):
    """Train two steps of three microbatches on images of this rank's own, eager and with graphs.

    Args:
        overlap: Whether reductions start inside the backward.
        last: Images of rank 1's last microbatches, where they are others.
        beside: Images that the last microbatches encode as well, each in a call of its own: the places of further
            calls, before the usual one (-1) or behind it (1).
    """
    rank = distributed.get_rank()
    found = []
    for graphs in (False, True):
        model = data_parallel_model(Model(), overlap_grad_reduce=overlap)
        encoder = model.module.vision_model
        options = VisionGraphOptions(**DEFAULTS)
        helper = encoder_helper([model], encoder.config, num_microbatches=3, options=options)
        if graphs:
            helper.create_cudagraphs()
        steps = []
        for step in range(2):
            model.zero_grad_buffer()
            with model.no_sync():
                for index in range(2):
                    model(MIXES[(index + rank) % 3], 10 * step + index).backward()
            usual = last if last is not None and rank == 1 else MIXES[(2 + rank) % 3]
            calls = sorted([(0, usual), *((place, TOO_LARGE) for place in beside)], key=lambda call: call[0])
            loss = sum(model(rows, 10 * step + 2) for _, rows in calls)
            with no_gpu(), reductions_of(model) as reduced:  # hooks start the reduction
                loss.backward()
                before_the_end = list(reduced)
            with no_gpu():
                model.finish_grad_sync()
            steps.append(([p.main_grad.clone() for p in model.parameters()], before_the_end))
        found.append((steps, helper.graphs.statistics().replays))
        helper.delete_cuda_graphs()
    return found


LAST = {
    "all replay": (False, None, (), [6, 6]),
    "all replay, reduced inside": (True, None, (), [6, 6]),
    "the last one of a rank runs eager": (True, TOO_LARGE, (), [6, 4]),
    # Its hooks are all that data parallelism sees; a reduction must not start before the replay has added its part.
    "eager passes beside the last replay": (True, None, (-1, 1), [6, 6]),
}


@pytest.mark.parametrize("overlap, last, beside, replays", LAST.values(), ids=LAST)
def test_reduced_gradients_of_two_ranks_with_different_images_equal_eager(tmp_path, overlap, last, beside, replays):
    """Reductions of several buckets go over one communicator: in another order they would be of other buckets."""
    ranks = run_ranks(2, data_parallel, tmp_path, overlap, last, beside)
    assert [(none, found) for (_, none), (_, found) in ranks] == [(0, found) for found in replays]
    for (plain, _), (graphed, _) in ranks:
        for (expected, _), (gradients, _) in zip(plain, graphed, strict=True):
            assert_close(gradients, expected, 1e-4)
        if overlap:  # upstream learns in its first step how many gradients a bucket waits for
            assert [order for _, order in graphed] == [[], list(range(len(plain[1][1])))] and len(plain[1][1]) > 2
    for (one, _), (other, _) in zip(*(graphed for _, (graphed, _) in ranks), strict=True):
        assert_close(one, other, 0.0)


class WithText(Model):
    """A model whose microbatches may have no image; its embedding is called behind the encoder, as in Bridge's."""

    def __init__(self):
        super().__init__()
        self.language_model = nn.Module()
        self.language_model.embedding = nn.Linear(4, WIDTH)

    def forward(self, rows, seed):
        loss = super().forward(rows, seed) if rows else 0.0
        return loss + self.language_model.embedding(torch.ones(2, 4) * (seed + 1)).sum()


# Of both ranks in each step: the last microbatch of one has no image, and no microbatch of the other.
TEXT = (
    ((IMAGES, MIXED, ()), (VIDEO, IMAGES, MIXED)),
    (((), (), ()), (MIXED, (), VIDEO)),
    ((IMAGES, (), VIDEO), ((), MIXED, ())),
)


def with_text(overlap, graphs):
    """Train steps in which a rank has no image in its last microbatch, or in none; return their gradients."""
    rank = distributed.get_rank()
    model = data_parallel_model(WithText(), overlap_grad_reduce=overlap)
    encoder = model.module.vision_model
    options = VisionGraphOptions(**DEFAULTS)
    helper = None
    if graphs != "none":
        helper = encoder_helper([model], encoder.config, num_microbatches=3, options=options)
    steps = []
    for step, mixes in enumerate(TEXT * 2):
        if step == 2 and graphs == "captured":
            helper.create_cudagraphs()
        model.zero_grad_buffer()
        with no_gpu():
            with model.no_sync():
                for index in range(2):
                    model(mixes[rank][index], 10 * step + index).backward()
            model(mixes[rank][2], 10 * step + 2).backward()
            model.finish_grad_sync()
        steps.append([p.main_grad.clone() for p in model.parameters()])
    if helper is not None:
        helper.delete_cuda_graphs()
    hooks = sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())
    return steps, hooks


def text_only_ranks(graphs):
    plain, hooks = with_text(False, "none")
    found, left = with_text(True, graphs)
    assert left == hooks
    return plain, found


def test_a_rank_whose_last_microbatch_has_no_image_reduces_what_others_reduce(tmp_path):
    for plain, found in run_ranks(2, text_only_ranks, tmp_path, "captured"):
        for expected, gradients in zip(plain, found, strict=True):
            assert_close(gradients, expected, 1e-4)


def test_upstream_ends_where_a_ranks_last_microbatch_has_no_image(tmp_path):
    """What the plugin mends; once upstream does, its part can go."""
    with pytest.raises(
        AssertionError, match="assert len\\(self.per_param_grad_ready_counts\\) == len\\(self.params\\)"
    ):
        run_ranks(2, text_only_ranks, tmp_path, "none")


def gathers(has_images):
    """Return the order in which a microbatch gathers its buckets of parameters, without and with an image."""
    settings = dict.fromkeys(("overlap_grad_reduce", "overlap_param_gather", "use_distributed_optimizer"), True)
    model = data_parallel_model(WithText(), **settings)
    encoder = model.module.vision_model
    helper = encoder_helper([model], encoder.config, options=VisionGraphOptions(**DEFAULTS))
    order = []
    for number, group in enumerate(dict.fromkeys(model.param_to_bucket_group.values())):
        group.finish_param_sync = lambda number=number, **unused: order.append(number)
    model(IMAGES if has_images else (), 1)
    helper.delete_cuda_graphs()
    return list(dict.fromkeys(order))


def both_gathers():
    return gathers(True), gathers(False)


def test_a_microbatch_without_an_image_gathers_in_the_same_order(tmp_path):
    for with_images, without in run_ranks(2, both_gathers, tmp_path):
        assert with_images == without and len(without) > 3


class Group:
    """A bucket group as megatron-core's: finishing one that never started is an error, but in its first batch."""

    def __init__(self, number, log, first_batch=False):
        self.number, self.log, self.is_first_batch, self.running = number, log, first_batch, False
        self.per_param_grad_ready_counts = {}

    def start_grad_sync(self, force_all_reduce=False):
        self.log.append((self.number, force_all_reduce))
        self.running = True

    def finish_grad_sync(self, force_all_reduce=False):
        if self.is_first_batch:
            self.start_grad_sync(force_all_reduce=force_all_reduce)
        assert self.running, "Communication call has not been issued for this bucket"
        self.running = False


def in_order(count, first_batch=False, later=frozenset()):
    log = []
    groups = [Group(i, log, first_batch) for i in range(count)]
    order = ReductionOrder(groups, [{number} for number in range(count)])
    order.keep(lambda parameters: not parameters.isdisjoint(later))
    return groups, order, log


@given(ready=st.permutations(range(6)) | st.lists(st.integers(0, 5), unique=True), steps=st.integers(1, 3))
def test_groups_start_in_one_order_whichever_is_ready_first(ready, steps):
    """As many as are ready without a gap start at once, those behind one without gradients before they are finished."""
    groups, _, log = in_order(6)
    for _ in range(steps if len(ready) == 6 else 1):
        for known, number in enumerate(ready, 1):
            groups[number].start_grad_sync(force_all_reduce=True)
            assert [n for n, _ in log] == list(range(next(i for i in range(7) if i not in ready[:known])))
        for group in groups:
            with nullcontext() if group.number in ready else pytest.raises(AssertionError, match="has not been issued"):
                group.finish_grad_sync()
        assert log == [(number, True) for number in sorted(ready)]
        log.clear()


@pytest.mark.parametrize("counted, issued", [([], True), (["of another module"], True), (["ours"], False)])
def test_groups_of_a_module_that_did_not_run_start_in_order_when_the_first_is_finished(counted, issued):
    log = []
    groups = [Group(i, log) for i in range(3)]
    order = ReductionOrder(groups, [set(), set(), set()], {"ours", "ours too"})
    order.keep(lambda parameters: False)
    for _ in range(2):
        groups[0].per_param_grad_ready_counts = dict.fromkeys(counted, 1)
        if issued:
            for group in groups:
                group.finish_grad_sync(force_all_reduce=True)
            assert log == [(0, True), (1, True), (2, True)]
            log.clear()
    if not issued:
        with pytest.raises(AssertionError, match="has not been issued"):
            groups[0].finish_grad_sync()  # it ran, and left parameters out: upstream's error
    order.remove()
    with pytest.raises(AssertionError, match="has not been issued"):
        groups[0].finish_grad_sync()


def test_what_somebody_put_around_it_stays_without_effect():
    groups, order, log = in_order(2)
    ours = groups[1].start_grad_sync
    groups[1].start_grad_sync = lambda **kwargs: ours(**kwargs)
    order.remove()
    groups[1].start_grad_sync()
    assert log == [(1, False)]


def test_a_replay_that_never_comes_holds_no_reduction_beyond_the_step():
    groups, _, log = in_order(2, later={0, 1})
    for group in groups:
        group.start_grad_sync()
    assert log == []
    for group in groups:
        group.finish_grad_sync()
    assert [n for n, _ in log] == [0, 1]
