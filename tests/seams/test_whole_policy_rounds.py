"""Rounds of a policy whose encoder and language model are both on graphs, as verl runs them."""

import copy
import ctypes
import mmap
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import product

import pytest
import torch
from megatron.bridge.peft.lora import LoRA
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from torch import nn

from bridge_cg_plugin.graphs.memory.returning import Home, ReturningStorages
from bridge_cg_plugin.upstream.hooks import leaving_models
from bridge_cg_plugin.upstream.hooks.helpers import constructors as helpers
from bridge_cg_plugin.upstream.hooks.helpers.graph_helper import active_graphs
from tests.main_grads import give_main_grads
from tests.returning import LeavingReturning
from tests.unit.packs import DEFAULTS, EXPERTS, new_model, pack
from tests.unit.towers import draw, loss_of, new_tower

from .loops import FIELDS, Policy, assert_equal, run_schedule

pytestmark = pytest.mark.usefixtures("loop")

PACKED = {**DEFAULTS, "cuda_graph_impl": "transformer_engine"}
ROUTERS = {**EXPERTS, "moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
MICROBATCHES = (([[1, 4, 6]], (100, 150, 50)), ([[1, 8, 8], [1, 4, 4]], (120, 150)))
OFFLOADED = {"vision_cuda_graph_offload": "all", "vision_cuda_graph_exact_below": 0, "cuda_graph_packed_offload": "all"}
ROUNDS, PARTS = 5, 3
# The system gets memory of this many elements back at once, and gives the next such from the same addresses: of less,
# the allocator keeps up to 64 MiB.
LARGE = 20 * 2**20
MOST_TRIES = 64
PASSES = ("log-probabilities", "reference", "update")


# Linux: fail where something is mapped there already.
FIXED_NOREPLACE = 0x100000
NO_ACCESS = 0
# What the C library puts beside a large block in its mapping.
BESIDE = 128

_C = ctypes.CDLL(None)
_C.mmap.restype = ctypes.c_void_p
_C.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_C.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class HeldAddresses:
    """Holds the pages of a large block that was freed, unless somebody has some of them.

    Args:
        address: Of the block.
        nbytes: Its size.
    """

    def __init__(self, address: int, nbytes: int) -> None:
        self._start = address - address % mmap.PAGESIZE
        self._nbytes = -(-(nbytes + BESIDE) // mmap.PAGESIZE) * mmap.PAGESIZE
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | FIXED_NOREPLACE
        self.held = _C.mmap(self._start, self._nbytes, NO_ACCESS, flags, -1, 0) == self._start

    def let_go(self) -> None:
        """Let others have them again."""
        if self.held:
            _C.munmap(self._start, self._nbytes)
            self.held = False


class Place(Home):
    """Addresses of a large storage, held for it while it has no memory."""

    address = nbytes = 0
    held = None

    def begin(self):
        if self.held is not None:
            self.held.let_go()

    @contextmanager
    def taking(self):
        yield
        (storage,) = (each for each, home in leaving_models.STORAGES._homes.items() if home is self)
        self.address, self.nbytes, others = self.address or storage.data_ptr(), storage.nbytes(), []
        while storage.data_ptr() != self.address:
            resize(storage, 0)
            others.append(torch.empty(self.nbytes, dtype=torch.uint8))  # which has what the system gives first
            if others[-1].data_ptr() == self.address:
                del others[-1]
            resize(storage, self.nbytes)
            if len(others) > MOST_TRIES:
                pytest.skip("the system gave a large storage other memory than before")

    def release(self):
        """Hold the addresses once the storage was freed."""
        if self.address and (self.held is None or not self.held.held):
            self.held = HeldAddresses(self.address, self.nbytes)
        return 0


def resize(storage, nbytes):
    torch._C.StorageBase.resize_(storage, nbytes)


class FlatBuffers:
    """Weights and gradients of parameters in two large storages, as megatron-core's data parallelism keeps them."""

    def __init__(self, parameters):
        sizes = [p.numel() for p in parameters]
        self._weights, self.gradients = torch.zeros(sum(sizes) + LARGE), torch.zeros(sum(sizes) + LARGE)
        for parameter, weight in zip(parameters, self._weights.split([*sizes, LARGE])[:-1], strict=True):
            weight.copy_(parameter.data.flatten())
            parameter.data = weight.view_as(parameter)
        give_main_grads(parameters, self.gradients)
        self._nbytes = self._weights.nbytes

    def leave(self):
        """Free both storages."""
        self._host = self._weights[:-LARGE].clone()
        for flat in (self._weights, self.gradients):
            flat.untyped_storage().resize_(0)

    def back(self, gradients):
        """Fill the weights again, and the gradients with zeros if they are asked for."""
        self._weights.untyped_storage().resize_(self._nbytes)
        self._weights[:-LARGE].copy_(self._host)
        if gradients:
            self.gradients.untyped_storage().resize_(self._nbytes)
            self.gradients.zero_()


class OtherPlaces:
    """Copies tensors to addresses that none of them had before: by chance, recordings would find theirs again."""

    def __init__(self):
        self._had = set()

    def copy(self, tensor):
        copies = [tensor.clone()]
        while tensor.numel() and copies[-1].data_ptr() in self._had:
            copies.append(tensor.clone())
        self._had.add(copies[-1].data_ptr())
        return copies[-1]


@pytest.fixture(autouse=True)
def scale_of_no_other_test(monkeypatch):
    """megatron-core writes a schedule's scale into the tensor that the process had first, of whichever shape."""
    monkeypatch.setattr(MoEAuxLossAutoScaler, "main_loss_backward_scale", None)


@pytest.fixture(autouse=True)
def executors(monkeypatch):
    """Return the executors of all models, whose memory leaves."""
    made = []

    def new(*args, **kwargs):
        made.append(LeavingReturning())
        return made[-1]

    monkeypatch.setattr(helpers, "default_executor", new)
    monkeypatch.setenv("BRIDGE_CG_RELEASE_MEMORY", "1")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    monkeypatch.setattr(leaving_models, "is_on_device", lambda tensor: True)
    monkeypatch.setattr(leaving_models, "STORAGES", ReturningStorages(Place))
    return made


class WholePolicy(Policy):
    """A vision-language model whose loss is that of its encoder and that of its language model over a pack."""

    def __init__(self, graphs, seed=0, modules=(), **fields):
        nn.Module.__init__(self)
        self.vision_model = new_tower(seed)
        self.language_model = new_model(seed, **(ROUTERS if "moe_router" in modules else {}))
        self.config = copy.copy(self.language_model.config)
        # The oldest release has another word.
        name = "cuda_graph_modules" if hasattr(self.config, "cuda_graph_modules") else "cuda_graph_scope"
        options = {**FIELDS, **PACKED, name: list(modules), **fields} if graphs else {}
        for config in (self.config, self.language_model.config):
            vars(config).update(options)
        vars(self.config).update(timers=None, calculate_per_token_loss=False)

    def forward(self, rows, documents, seed):
        hidden, deepstack = self.vision_model(*draw(rows, seed))
        return loss_of([hidden, *deepstack]) + self.language_model(**pack(documents, seed)).mean()


class Rounds:
    """A model that leaves and returns around every pass.

    Trained weights and gradients are in buffers of data parallelism. Frozen weights and the model's buffers get other
    memory each time.
    """

    def __init__(self, model, adapters=None):
        self.model, self._adapters = model, adapters
        self._frozen = [p for p in model.parameters() if not p.requires_grad]
        self._trained = [p for p in model.parameters() if p.requires_grad]
        self.buffers, self._places = FlatBuffers(self._trained), OtherPlaces()

    def leave(self):
        self.buffers.leave()
        self._host_frozen = [parameter.data.clone() for parameter in self._frozen]
        for parameter in self._frozen:
            parameter.data = torch.empty(0)
        self._replace_buffers()
        torch.cuda.empty_cache()

    def back(self, gradients):
        self.buffers.back(gradients)
        for parameter, host in zip(self._frozen, self._host_frozen, strict=True):
            parameter.data = self._places.copy(host)
        del self._host_frozen
        self._replace_buffers()

    def _replace_buffers(self):
        for module in self.model.modules():
            module._buffers.update({name: self._places.copy(b) for name, b in module._buffers.items() if b is not None})

    def run(self, kind, seed):
        """Return losses, and of an update the gradients."""
        trains = kind == "update"
        self.model.train(trains)
        with nullcontext() if trains else torch.no_grad(), self._without_adapters(kind):
            losses = run_schedule(self.model, [(*each, seed) for each in MICROBATCHES], forward_only=not trains)
        # Autograd adds to `grad` what a hook of data parallelism would add to `main_grad`; replays leave zeros there.
        return losses, [p.main_grad + (0 if p.grad is None else p.grad) for p in self._trained] if trains else []

    def _without_adapters(self, kind):
        stack = ExitStack()
        if kind == "reference" and self._adapters is not None:
            for part in (self.model.vision_model, self.model.language_model):
                stack.enter_context(self._adapters.disable_adapter(part))
        return stack


def with_adapters(model):
    lora = LoRA(target_modules=["linear_qkv", "linear_proj", "linear_fc2"], dim=4, alpha=8)
    for name in ("vision_model", "language_model"):
        setattr(model, name, lora(getattr(model, name), training=True))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in (p for p in model.parameters() if p.requires_grad):
            parameter.normal_(std=0.3, generator=generator)
    return Rounds(model, lora)


def frozen(model):
    return Rounds(model.requires_grad_(False))


def run_rounds(executors, policy, reference):
    """Compare each pass of each round with eager; return how much each executor had recorded after each round.

    Args:
        executors: Of the graphs.
        policy: Two policies, one on graphs and one eager.
        reference: Two reference models, which are the policies where these have adapters.
    """
    counts = []
    for graphed in dict.fromkeys((policy[0], reference[0])):
        graphed.leave()
    for number in range(ROUNDS):
        for kind in PASSES:
            graphed, eager = reference if kind == "reference" else policy
            graphed.back(gradients=kind == "update")
            eager.buffers.gradients.zero_()
            assert_equal(graphed.run(kind, number), eager.run(kind, number))
            graphed.leave()
            assert all(executor.memory_away for executor in executors if executor.recorded)
        counts.append([executor.recorded for executor in executors])
    return counts


def assert_all_left(executors):
    """Weights have addresses of their own, whose memory has left with them."""
    for executor in executors:
        assert executor.homes.away
        assert executor.returned == executor.left - 1


@pytest.mark.parametrize(("modules", "fields"), [((), {}), (("attn",), OFFLOADED)], ids=["layers", "offloaded"])
def test_a_policy_with_adapters_settles_in_its_second_round(executors, modules, fields):
    models = [with_adapters(WholePolicy(graphs, modules=modules, **fields)) for graphs in (True, False)]
    counts = run_rounds(executors, models, models)
    assert counts[1] == counts[-1]
    for graphs in active_graphs():
        fallbacks = graphs.statistics().fallbacks
        # Once in each part of the encoder: without adapters, and before parts that are captured together are.
        assert fallbacks["model_changed"] <= PARTS and fallbacks["not_captured_yet"] <= PARTS
        assert set(fallbacks) <= {"model_changed", "not_captured_yet"}
    assert_all_left(executors)


def test_a_policy_and_its_reference_settle_in_their_third_round(executors):
    new = partial(WholePolicy, modules=("attn", "moe_router"))
    policy = [Rounds(new(graphs)) for graphs in (True, False)]
    reference = [frozen(new(graphs, seed=1)) for graphs in (True, False)]
    counts = run_rounds(executors, policy, reference)
    assert counts[2] == counts[-1]
    for graphs in active_graphs():
        assert not graphs.statistics().fallbacks and graphs.statistics().replays
    assert_all_left(executors)


def trained(model, seed):
    """Return losses and gradients of one schedule call."""
    losses = run_schedule(model, [(*each, seed) for each in MICROBATCHES], forward_only=False)
    return losses, [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_of_models_that_share_an_encoder_one_is_on_graphs(caplog):
    """As a policy and its critic."""
    graphed, eager = ([WholePolicy(graphs, seed) for seed in range(2)] for graphs in (True, False))
    for first, second in (graphed, eager):
        second.vision_model = first.vision_model
    for seed, index in product(range(3), range(2)):
        assert_equal(trained(graphed[index], seed), trained(eager[index], seed))
    assert {graphs.model for graphs in active_graphs()} == {graphed[0].vision_model, graphed[0].language_model.decoder}
    assert all(graphs.statistics().replays for graphs in active_graphs())
    assert caplog.text.count("shares modules with this one") == 1
