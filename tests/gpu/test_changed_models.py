"""A tower that changes under its graphs, on a GPU; `tests/unit/test_changed_models.py` has the rest on a CPU."""

import gc

import pytest
import torch

from tests.main_grads import give_main_grads
from tests.other_memory import are_intact, fill_elsewhere

from .common import add_lora, equal, vision_graphs

ONE, MIXED = [(1, 28, 28)], [[(1, 28, 28)], [(2, 12, 16), (1, 20, 20)], [(1, 40, 44)], [(1, 30, 24), (1, 4, 6)]]
BUCKETS = (768, 1024, 1792, 2048)
STEPS, ROUNDS = 8, 4
LORA = ("linear_qkv", "linear_proj", "linear_fc2")


@pytest.fixture
def deterministic(monkeypatch):
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")


def adapters(model):
    """Give a tower adapters; returns what switches them off."""
    from megatron.bridge.peft.lora import LoRA

    add_lora(model, LORA)
    return LoRA().disable_adapter


def preference_loop(tower_module, model, off, steps: int) -> list[float]:
    """Train adapters as DPO does: a policy pass, a reference pass with adapters off, then the backward."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=1e-3)
    losses = []
    for step in range(steps):
        batch = tower_module.make_batch(MIXED[step % len(MIXED)], model, seed=step)
        policy = tower_module.forward(model, batch)
        with torch.no_grad(), off(model):
            reference = tower_module.forward(model, batch)
        scores = [
            ((p.float() - r.float()) * g.float()).mean()
            for p, r, g in zip(policy, reference, batch.gradients, strict=True)
        ]
        loss = -torch.nn.functional.logsigmoid(10.0 * sum(scores))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.first
def test_a_preference_loop_equals_eager(deterministic, tower_module, graphs_of, model):
    eager, off = tower_module.build_tower(layers=4), adapters(model)
    adapters(eager)
    with torch.no_grad():
        for ours, theirs in zip(eager.parameters(), model.parameters(), strict=True):
            ours.copy_(theirs)
    expected = preference_loop(tower_module, eager, off, STEPS)
    del eager
    helper = graphs_of(buckets=BUCKETS, slots=1)
    losses = preference_loop(tower_module, model, off, STEPS)
    worst = max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))
    statistics = helper.graphs.statistics()
    print(f"preference loop: losses {losses[0]:.6f} to {losses[-1]:.6f}, bit-equal: {losses == expected}, {worst:.1e}")
    print("preference loop:", statistics.replays, dict(statistics.fallbacks))
    assert losses[0] != losses[-1] and losses == expected
    assert statistics.fallbacks == {"model_changed": 1} and statistics.replays == 2 * STEPS - 1


class Buffers:
    """Trained parameters and their gradients in two flat buffers, as megatron-core's data parallelism keeps them."""

    def __init__(self, tower_module, model) -> None:
        self.hooks = tower_module.MainGrads(model)  # they end with it
        parameters = self.hooks.parameters
        sizes = [p.numel() for p in parameters]
        self.weights = torch.empty(sum(sizes), dtype=torch.bfloat16, device="cuda")
        self.gradients = torch.zeros(sum(sizes), device="cuda")
        for parameter, weight in zip(parameters, self.weights.split(sizes), strict=True):
            weight.view_as(parameter).copy_(parameter.detach())
            parameter.data = weight.view_as(parameter)
        give_main_grads(parameters, self.gradients)

    def move(self) -> list[torch.Tensor]:
        """Free both and take memory again, as `offload_grad_buffers` and `restore_grad_buffers` do.

        Returns:
            Tensors of somebody else that took the freed memory in between.
        """
        others = []
        for flat in (self.weights, self.gradients):
            storage, host = flat.untyped_storage(), flat.cpu()
            size = storage.nbytes()
            storage.resize_(0)
            others += fill_elsewhere(storage, size, ())
            flat.copy_(host)
        return others


def on_the_device_elsewhere(tensor: torch.Tensor, address: int) -> torch.Tensor:
    """Return a copy of a tensor on the GPU that is not at an address."""
    made = [tensor.cuda()]
    while made[-1].data_ptr() == address:
        made.append(tensor.cuda())
    return made[-1]


def test_adapters_that_return_beside_frozen_weights_need_no_further_capture(deterministic, tower_module):
    """As verl moves a policy: buffers of what is trained are freed and filled, frozen weights get other memory."""
    from bridge_cg_plugin.upstream.hooks.leaving_models import follow, stop

    model = tower_module.build_tower(layers=4)
    off, batch = adapters(model), tower_module.make_batch(ONE, model)
    frozen = [p for p in model.parameters() if not p.requires_grad]
    buffers, seconds = Buffers(tower_module, model), []
    assert buffers.weights.nbytes < 20 * 2**20
    storage, nbytes = buffers.gradients.untyped_storage(), buffers.gradients.nbytes
    try:
        follow([model], lambda: None)
        helper = vision_graphs(model, around={"releasable": True}, buckets=(1024,))

        def passes():
            storage.resize_(0)  # log-probabilities are computed without gradients on the device
            with torch.no_grad(), helper.graphs.step():
                found = [tower_module.forward(model, batch)]
                with off(model):
                    found.append(tower_module.forward(model, batch))
            storage.resize_(nbytes)
            buffers.gradients.zero_()
            with helper.graphs.step():
                found.append(tower_module.step(model, batch))
            return [output.detach().clone() for outputs in found for output in outputs]

        for _ in range(ROUNDS):
            found, gradients = passes(), buffers.gradients.clone()
            seconds.append(helper.graphs.statistics().capture_seconds)
            with helper.graphs.paused():
                assert equal(found, passes()) and gradients.any()
            assert tower_module.largest_relative([gradients], [buffers.gradients]) <= 3e-2
            places = [weight.data_ptr() for weight in frozen]
            for weight in frozen:
                weight.data = weight.data.cpu()
            assert helper.graphs.release_memory()
            torch.cuda.empty_cache()
            others = buffers.move()
            for weight, place in zip(frozen, places, strict=True):
                weight.data = on_the_device_elsewhere(weight.data, place)
            assert are_intact(others)
            del others
        statistics = helper.graphs.statistics()
        print(f"adapters returned: captured until {seconds} s; {statistics.replays} replays, {statistics.fallbacks}")
        # In the first round the two passes without a backward run eager: nothing is recorded for them yet.
        assert statistics.replays == 3 * ROUNDS - 2
        # The buffers' first return is to other addresses, and the frozen weights' first one after it.
        assert len(set(seconds[2:])) == 1
        helper.delete_cuda_graphs()
    finally:
        stop()


def test_recordings_share_the_memory_of_gradients_without_main_grad(tower_module, graphs_of, model):
    weights = sum(p.nbytes for p in model.parameters())
    helper = graphs_of(buckets=(256, 320, 384, 448, 512), slots=2, exact_below=0, streams=1)
    statistics = helper.graphs.statistics()
    recordings = len(helper.graphs._regions[0].sources.current.recordings)
    print(f"{recordings} recordings: {statistics.memory_bytes / weights:.2f} times the weights")
    assert recordings >= 10 and statistics.gradient_bytes == weights
    assert statistics.memory_bytes < 4 * weights  # with memory of their own it were 10 times the weights and more
    batch = tower_module.make_batch([(1, 16, 18)], model)
    outputs = tower_module.step(model, batch)
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with helper.graphs.paused():
        assert equal([o.detach() for o in outputs], [o.detach() for o in tower_module.step(model, batch)])
    assert tower_module.largest_relative(found, [p.grad for p in model.parameters()]) <= 3e-2
    gc.collect()
