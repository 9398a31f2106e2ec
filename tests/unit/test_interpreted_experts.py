"""Layers of experts with the kernels, whose activations leave or are recomputed, in Triton's interpreter."""

from tests.scripts import interpreted

SCRIPT = """
from tests import interpreted

interpreted.prepare()
import torch

from bridge_cg_plugin.language.experts import device, kernels
from bridge_cg_plugin.language.packed import workload
from bridge_cg_plugin.offload import offloading
from bridge_cg_plugin.offload.plan import Fate
from tests.unit.packs import ON_CPU, graphs_on, losses_and_gradients, new_model, pack
from tests.main_grads import hook_main_grads
from tests.unit.packs import EXPERTS
from tests.unit.towers import assert_close, poison

workload.EXACT_BELOW = 0  # the interpreter takes a while for every row
kernels.tiling_of = kernels.tiling_of_gradients = lambda *unused: kernels.Tiling(16, 32, 32, 4, 2)
model = new_model(layers=1, **EXPERTS, **{"moe_z_loss_coeff": 0.1})
arguments = pack((5, 20, 4))
losses, gradients = losses_and_gradients(model, arguments)
nodes = hook_main_grads(model.parameters())
device.runs_kernels = lambda tensor: True
options = {"cuda_graph_packed_buckets": [32], "cuda_graph_packed_slots": 1}
offloading.LEAST_BYTES = 1024
moved = {"cuda_graph_packed_offload": "all", "cuda_graph_packed_recompute": ["gelu", "linear"]}
with ON_CPU(), graphs_on(model, arguments, cuda_graph_modules=[], **options, **moved) as graphs:
    poison(graphs, float("nan"))
    found = model(**arguments)
    (found * torch.linspace(0.5, 1.5, found.numel()).view(found.shape)).sum().backward()
    assert graphs.statistics().replays == 1, graphs.statistics()
    ((planned,),) = graphs._regions[0].chain.offloading._plans.values()
    rebuilt = sorted(planned.inventory.seen[place].kind for place in planned.places(Fate.REBUILD))
assert rebuilt == ["gelu", "linear"], rebuilt
inside = set(model.decoder.parameters())
right = [g for p, g in zip(model.parameters(), gradients, strict=True) if p in inside]
assert_close([found.detach(), *(p.main_grad for p in model.parameters() if p in inside)], [losses, *right])
print("equal")
"""


def test_layers_of_experts_with_the_kernels():
    written = interpreted(SCRIPT)
    assert written.splitlines()[-1] == "equal"
