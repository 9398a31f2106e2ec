"""Regions with the plugin's kernels whose activations leave or are recomputed, in Triton's interpreter."""

import json

from tests.scripts import interpreted
from tests.seams.test_layer_kernels import STREAM_SCRIPT

REGION = """
from contextlib import contextmanager

from bridge_cg_plugin.graphs.recordings.executor import ReferenceExecutor
from bridge_cg_plugin.graphs.buckets import Bucket
from bridge_cg_plugin.offload.offloading import RegionOffloading
from bridge_cg_plugin.offload.plan import Policy
from tests.regions import new_region
from tests.rows_program import RowsProgram
from tests.unit.test_offload_store import LateTransfers, stores


class Program(RowsProgram):
    @contextmanager
    def recording(self):
        with layer_kernels.fused_layer_kernels([self.model]), layer_kernels.fused_layernorm_backward([self.model]):
            yield


torch.manual_seed(0)
counts = {}
for case in ("plain", "shared norm"):
    tower, x = Tower(case), torch.randn(18, 1, WIDTH, requires_grad=True)
    found = []
    for offloaded in (False, True):
        policy = Policy(frozenset({"other"}), frozenset(), least_bytes=1)
        offloading = RegionOffloading(policy, 1, torch.device("cpu")) if offloaded else None
        if offloaded:
            offloading._transfers = LateTransfers()
        program = Program(tower, (1, WIDTH), outputs=2)
        region = new_region(program, ReferenceExecutor(), [Bucket(18)], offloading=offloading)
        region.capture()
        for repeat in range(1 + offloaded):
            outputs = region.run(x)
            wanted = [p for p in [x, *tower.parameters()] if p.requires_grad]
            loss = sum((o * torch.linspace(0.5, 1.5, o.numel()).view(o.shape)).sum() for o in outputs)
            found.append([*(o.detach() for o in outputs), *torch.autograd.grad(loss, wanted)])
        counts[case] = 0 if not offloaded else offloading._transfers.loads
        assert not region.statistics.fallbacks
    assert all(map(torch.equal, found[0], found[1]))
    for other in found[2:]:
        assert all(map(torch.equal, found[0], other))
print(json.dumps(counts))
"""


def test_the_residual_streams_gradient_finds_a_norms_input_that_came_back_elsewhere():
    script = STREAM_SCRIPT[: STREAM_SCRIPT.index("summed = []")] + REGION
    written = interpreted(script)
    counts = json.loads(written.splitlines()[-1])
    assert all(counts.values())


TOWER = """
import torch

from bridge_cg_plugin.offload import offloading
from bridge_cg_plugin.upstream.encoders import qwen3_vl
from bridge_cg_plugin.upstream.kernels import layers
from tests.interpreted import prepare

prepare()
layers.kernels_available = qwen3_vl.kernels_available = lambda: True
from tests.unit.towers import graphs_on, new_tower, results

tower, rows = new_tower(layers=2), [[1, 2, 4], [1, 2, 2]]
common = {"buckets": (16,), "exact_below": 0, "kernels": "exact"}
eager = [t for part in results(tower, rows) for t in part]
with graphs_on(tower, **common) as graphs:
    expected = [t.clone() for part in results(tower, rows) for t in part]
for a, b in zip(expected, eager, strict=True):
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * float(b.abs().max()))
moved = {"offload": ("attention", "mlp", "layernorm", "merger", "other")}
offloading.LEAST_BYTES = 1
for options in (moved, {**moved, "recompute": ("layernorm", "gelu", "linear")}):
    with graphs_on(tower, **common, **options) as graphs:
        found = [t.clone() for part in results(tower, rows) for t in part]
        again = [t.clone() for part in results(tower, rows) for t in part]
        (planned,) = next(iter(graphs._regions[0].chain.offloading._plans.values()))
        kinds = [s.kind for s, f in zip(planned.inventory.seen, planned.fates) if f.value == "rebuild"]
        assert graphs.statistics().pinned_bytes > 0 and not graphs.statistics().fallbacks
    assert all(map(torch.equal, found, expected)) and all(map(torch.equal, again, expected))
print(kinds.count("gelu"))
"""


def test_a_tower_computes_what_eager_does_and_the_same_to_the_bit_where_activations_leave():
    written = interpreted(TOWER)
    assert written.strip().splitlines()[-1] == "2"


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
kernels.tiling_of = kernels.tiling_of_gradients = lambda *unused: kernels.tiling(16, 32, 32, 4, 2)
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
