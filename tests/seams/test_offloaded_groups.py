"""Groups that megatron-core offloads, over schedules of microbatches, with tensors of the CPU and no streams."""

import contextlib
import inspect
import sys
from types import SimpleNamespace

import pytest
import torch

import bridge_cg_plugin

CORE, PROJECTION, FIRST, SECOND = "core_attn", "attn_proj", "expert_fc1", "moe_act"
MICROBATCHES = 4
# Forwards and backwards of the last pipeline stage, or the only one, and of the stage before the last.
LAST = [(step, number) for number in range(MICROBATCHES) for step in "FB"]
BEFORE = [("F", 0), *((s, n - (s == "B")) for n in range(1, MICROBATCHES) for s in "FB"), ("B", MICROBATCHES - 1)]
ORDERS = {"last": LAST, "before": BEFORE}
NO_FIELD = "this release has no such option"


class Stands:
    """Stands in for a stream or an event."""

    def __init__(self, **kwargs):
        pass

    def record(self, *args):
        pass

    wait_event = wait_stream = record


@pytest.fixture
def offloading(active, monkeypatch):
    """Return megatron-core's module of offloading, which copies tensors of the CPU."""
    from megatron.core.pipeline_parallel import fine_grained_activation_offload as module

    for name in ("Stream", "Event", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, Stands)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *args: None)
    engine = SimpleNamespace(cpu_offload=SimpleNamespace())
    monkeypatch.setitem(sys.modules, "megatron.core.extensions.transformer_engine", engine)
    monkeypatch.setattr(module, "print_offload_summary_table", lambda table: None)
    for name in ("range_push", "range_pop"):
        monkeypatch.setattr(torch.cuda.nvtx, name, lambda *said: None)
        monkeypatch.setattr(module, f"nvtx_{name}", lambda *said: None, raising=False)
    handler = module.ChunkOffloadHandler
    monkeypatch.setattr(handler, "_can_manage_tensor_for_offload", staticmethod(lambda tensor: True), raising=False)
    monkeypatch.setattr(handler, "offload", lambda self, tensor, **kwargs: (tensor.clone(),))
    monkeypatch.setattr(handler, "reload", lambda self, state, **kwargs: state[0])
    yield module
    module.PipelineOffloadManager.OFFLOAD_MGR = None


class Square(torch.autograd.Function):
    """Squares what it saves a copy of."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.clone())
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * ctx.saved_tensors[0] * gradient


class Parts(torch.autograd.Function):
    """Squares an input of which it saves a part for each expert, as fused experts do."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(*x.split([1, 5, 2]))
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * torch.cat(ctx.saved_tensors) * gradient


class Output(torch.autograd.Function):
    """Saves what it returns, as attention does."""

    @staticmethod
    def forward(ctx, x):
        made = x.exp()
        ctx.save_for_backward(made)
        return made

    @staticmethod
    def backward(ctx, gradient):
        return ctx.saved_tensors[0] * gradient


class Input(torch.autograd.Function):
    """Saves what it is given, as the projection of attention does."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * ctx.saved_tensors[0] * gradient


def in_group(module, work, x, name, released=()):
    """Return what work gives as a group that is offloaded."""
    interface = module.FineGrainedActivationOffloadingInterface
    group = interface(True, x, name)
    with group as x:
        made = work(x)
    return offload(group, made, name, [x] if released else [])


def offload(group, made, name, released):
    """End a group; returns what it made."""
    if hasattr(group, "group_offload"):
        return group.group_offload(made, forced_released_tensors=released)
    return group.group_commit(made, name=name, forced_released_tensors=released)


def begin(module, smallest=1, **told):
    """Begin a microbatch; skip releases that lack an option."""
    start = module.FineGrainedActivationOffloadingInterface.init_chunk_handler
    known = inspect.signature(start).parameters
    if not told.keys() <= known.keys():
        pytest.skip(NO_FIELD)
    given = {"pp_rank": 0, "vp_size": None, "vp_stage": None, "min_offloaded_tensor_size": smallest}
    late = {"delta_offload_bytes_across_pp_ranks": 0, "activation_offload_fraction": 1.0}
    start(**{name: value for name, value in {**given, **late, **told}.items() if name in known})


def train(module, order, layers, names, **told):
    """Run three steps of a schedule; returns the groups that left in the last one."""
    module.PipelineOffloadManager.reset_instance()
    for _ in range(3):
        left, running = [], {}
        for step, number in order:
            if step == "F":
                begin(module, **told)
                x = y = torch.full((4,), 1 + number / 100, requires_grad=True)
                for name in names * layers:
                    y = in_group(module, Square.apply, y * 1, name)
                running[number] = x, y
                groups = module.PipelineOffloadManager.OFFLOAD_MGR._cached_chunks_forward[number].offload_groups
                left.append([any(isinstance(t, tuple) for t in group._tensors.values()) for group in groups])
            else:
                x, y = running.pop(number)
                y.sum().backward()
                power = 2 ** (layers * len(names))
                assert torch.allclose(x.grad, power * x.detach() ** (power - 1), rtol=1e-4)
        module.FineGrainedActivationOffloadingInterface.reset()
    return left


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_a_stage_may_keep_the_first_groups_of_a_microbatch(offloading, order):
    more = {"pp_rank": 1, "delta_offload_bytes_across_pp_ranks": 1}
    whole, less = train(offloading, order, 4, [CORE]), train(offloading, order, 4, [CORE], **more)
    assert whole[0][:3] == [True] * 3 and less[0] == [False, True, True, False]
    assert less[1:] == whole[1:]


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_a_fraction_of_zero_keeps_every_group(offloading, order):
    left = train(offloading, order, 2, [CORE], activation_offload_fraction=0.0)
    assert left == [[False, False]] * MICROBATCHES


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("names", [[CORE], [FIRST, SECOND], [CORE, FIRST, SECOND]], ids=",".join)
def test_a_stage_may_have_one_layer(offloading, order, names):
    left = train(offloading, order, 1, names)
    assert left[0] == [False] * len(names)
    assert any(map(all, left)) == (order is BEFORE)


def test_as_released_a_microbatch_is_over_after_a_group_that_stays(offloading):
    if not hasattr(offloading.FineGrainedActivationOffloadingInterface, "group_offload"):
        pytest.skip("earlier releases note groups that stay")
    bridge_cg_plugin.deactivate()
    for told in ({"pp_rank": 1, "delta_offload_bytes_across_pp_ranks": 1}, {"activation_offload_fraction": 0.0}):
        with pytest.raises(AssertionError, match="Chunk mismatch"):
            train(offloading, LAST, 4, [CORE], **told)
    with pytest.raises(AssertionError, match="Chunk mismatch"):
        train(offloading, LAST, 1, [FIRST, SECOND])


def gradient_of_parts(module):
    """Return the gradient of a group that gives back its input and saved parts of it, one above the smallest size."""
    module.PipelineOffloadManager.reset_instance()
    begin(module, smallest=4)
    x = torch.arange(1.0, 9.0, requires_grad=True)
    y = in_group(module, Parts.apply, x * 1, "fused_group_mlp", released=True)
    (group,) = module.PipelineOffloadManager.OFFLOAD_MGR.cur_forward_chunk().offload_groups
    kept = [tensor.untyped_storage().nbytes() for tensor in group._tensors.values() if not isinstance(tensor, tuple)]
    if 0 in kept:
        return None
    assert sorted(kept) == [4, 8]  # bytes of one and of two numbers
    y.sum().backward()
    return x.grad


def test_parts_that_stay_outlive_the_memory_that_is_given_back(offloading):
    assert torch.equal(gradient_of_parts(offloading), 2 * torch.arange(1.0, 9.0))


def test_as_released_the_memory_of_parts_that_stay_is_gone(offloading):
    bridge_cg_plugin.deactivate()
    assert gradient_of_parts(offloading) is None


def attend(module, order):
    """Train layers of attention, of the first of which the projection alone leaves.

    Returns the sizes in bytes of the memory that kept tensors have once forward passes ended; before a backward would
    read memory that is gone.
    """
    module.PipelineOffloadManager.reset_instance()
    kept = set()
    for _ in range(3):
        running = {}
        for step, number in order:
            if step == "F":
                begin(module, pp_rank=1, delta_offload_bytes_across_pp_ranks=1)
                x = y = torch.full((2,), number / 100, requires_grad=True)
                for _ in range(3):
                    y = in_group(module, Output.apply, y / 10, CORE)
                    y = in_group(module, Input.apply, y, PROJECTION, released=True)
                running[number] = x, y
                groups = module.PipelineOffloadManager.OFFLOAD_MGR._cached_chunks_forward[number].offload_groups
                saved = [tensor for group in groups for tensor in group._tensors.values()]
                kept |= {one.untyped_storage().nbytes() for one in saved if not isinstance(one, tuple)}
                if 0 in kept:
                    return kept
            else:
                x, y = running.pop(number)
                y.sum().backward()
                z = same = x.detach().requires_grad_()
                for _ in range(3):
                    z = (z / 10).exp() ** 2
                z.sum().backward()
                assert torch.allclose(x.grad, same.grad)
        module.FineGrainedActivationOffloadingInterface.reset()
    return kept


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_a_group_that_stays_outlives_memory_that_the_next_gives_back(offloading, order):
    assert attend(offloading, order) == {8}


class Quantized(torch.Tensor):
    """Has no storage of its own and shows another empty one each time, as tensors of Transformer Engine do."""

    def untyped_storage(self):
        return torch.UntypedStorage(0)

    def clone(self):
        raise AssertionError("copied")


def test_quantized_tensors_are_not_taken_for_one_another(offloading):
    class Saves(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(torch.ones(1).as_subclass(Quantized))
            return x * x

    offloading.PipelineOffloadManager.reset_instance()
    begin(offloading, smallest=4)
    given = torch.ones(8).as_subclass(Quantized)
    interface = offloading.FineGrainedActivationOffloadingInterface
    group = interface(True, torch.ones(8, requires_grad=True), CORE)
    with group as x:
        made = Saves.apply(x)
    offload(group, made, CORE, [given])
