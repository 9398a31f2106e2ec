"""Rounds of a policy with adapters as verl runs them: the model leaves and returns around every single pass."""

from contextlib import nullcontext

import pytest
import torch
from megatron.bridge.peft.lora import LoRA

from bridge_cg_plugin.graphs.memory.returning_storages import ReturningStorages
from bridge_cg_plugin.upstream.hooks.helpers import vision_helper
from bridge_cg_plugin.upstream.hooks.helpers.graph_helper import active_graphs
from bridge_cg_plugin.upstream.hooks.loops import emptied_cache, resized_storages
from tests.held_addresses import HeldAddresses
from tests.main_grads import give_main_grads
from tests.returning import Returning

from .loops import Policy, assert_equal, call, in_one_process

# The system gets memory of this many elements back at once, and gives the next such from the same addresses: of less,
# the allocator keeps up to 64 MiB.
LARGE = 20 * 2**20
MOST_TRIES = 64
PASSES = ("log-probabilities", "reference", "update")


@pytest.fixture(autouse=True)
def loop(active, monkeypatch):
    yield from in_one_process(monkeypatch)


class Place:
    """Addresses of a large storage, held for it while it has no memory."""

    address = nbytes = 0
    held = None

    def __init__(self, device):
        self.device = device

    def freed(self):
        self.held = HeldAddresses(self.address, self.nbytes)

    def fill(self, storage, nbytes, resize):
        if self.held is not None:
            self.held.let_go()
        resize(storage, nbytes)
        self.address, self.nbytes, others = self.address or storage.data_ptr(), nbytes, []
        while storage.data_ptr() != self.address:
            resize(storage, 0)
            others.append(torch.empty(nbytes, dtype=torch.uint8))  # which has what the system gives first
            if others[-1].data_ptr() == self.address:
                del others[-1]
            resize(storage, nbytes)
            if len(others) > MOST_TRIES:
                pytest.skip("the system gave a large storage other memory than before")


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


class Adapted:
    """A policy with adapters in buffers of data parallelism, which leave and return beside frozen weights."""

    def __init__(self, **fields):
        self.policy, self.lora = Policy(**fields), LoRA(target_modules=["linear_proj", "linear_fc2"], dim=4, alpha=8)
        self.policy.vision_model = self.lora(self.policy.vision_model, training=True)
        self.frozen = [p for p in self.policy.parameters() if not p.requires_grad]
        self.trained = [p for p in self.policy.parameters() if p.requires_grad]
        generator = torch.Generator().manual_seed(0)
        for parameter in self.trained:
            parameter.data.normal_(std=0.3, generator=generator)
        self.buffers, self._places = FlatBuffers(self.trained), OtherPlaces()

    def leave(self):
        self.buffers.leave()
        torch.cuda.empty_cache()

    def back(self, gradients):
        self.buffers.back(gradients)
        for parameter in self.frozen:
            parameter.data = self._places.copy(parameter.data)

    def run(self, kind, seed):
        """Return losses, and of an update the gradients."""
        trains = kind == "update"
        self.policy.train(trains)
        off = self.lora.disable_adapter(self.policy.vision_model) if kind == "reference" else nullcontext()
        with nullcontext() if trains else torch.no_grad(), off:
            losses, _ = call(self.policy, 2, forward_only=not trains, seed=seed)
        # Autograd adds to `grad` what a hook of data parallelism would add to `main_grad`; replays leave zeros there.
        return losses, [p.main_grad + p.grad for p in self.trained] if trains else []


def test_a_policy_with_adapters_settles_in_its_second_round(monkeypatch):
    monkeypatch.setenv("BRIDGE_CG_RELEASE_MEMORY", "1")
    monkeypatch.setattr(emptied_cache, "is_on_device", lambda tensor: True)
    monkeypatch.setattr(resized_storages, "STORAGES", ReturningStorages(Place))
    executor, counts = Returning(), []
    monkeypatch.setattr(vision_helper, "default_executor", lambda *args, **kwargs: executor)
    graphed, eager = Adapted(), Adapted(vision_cuda_graph_impl="none")
    graphed.leave()
    for number in range(8):
        for kind in PASSES:
            graphed.back(gradients=kind == "update")
            eager.buffers.gradients.zero_()
            assert_equal(graphed.run(kind, number), eager.run(kind, number))
            graphed.leave()
        counts.append(executor.recorded)
    statistics = active_graphs()[0].statistics()
    # Of each pass once where weights were first found, and once at addresses of their own.
    assert counts[1] == counts[-1] <= 2 * len(PASSES) - 1
    assert statistics.fallbacks == {"model_changed": 1} and statistics.replays >= 7 * 2 * len(PASSES)
