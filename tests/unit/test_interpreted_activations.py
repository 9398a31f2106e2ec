"""Regions of upstream's layers with the plugin's kernels whose activations leave the device."""

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
from tests.interpreted import prepare

prepare()
qwen3_vl.kernels_available = lambda: True
from tests.unit.towers import graphs_on, new_tower, results

tower, rows = new_tower(layers=2), [[1, 2, 4], [1, 2, 2]]
common = {"buckets": (16,), "exact_below": 0, "kernels": "exact"}
with graphs_on(tower, **common) as graphs:
    expected = [t.clone() for part in results(tower, rows) for t in part]
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


def test_a_tower_whose_activations_leave_gives_the_same_to_the_bit():
    written = interpreted(TOWER)
    assert written.strip().splitlines()[-1] == "2"
