"""Triton's tilings compiled side by side, by Triton's own compiler for a GPU that is not there."""

import os
import subprocess
import sys

from bridge_cg_plugin.cli.runs.results import ROOT

PROGRAM = """
import torch, triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import MockTensor
from tests.models.tilings import compiled_side_by_side

class Hopper:
    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)
    def get_current_device(self):
        return 0
    def get_current_stream(self, device):
        return 0

driver.set_active(Hopper())

@triton.autotune([triton.Config({"BLOCK": 2**n}) for n in (5, 6, 7)] + [triton.Config({"BLOCK": 3})], key=["count"])
@triton.jit
def double(source, target, count, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + place, 2 * tl.load(source + place, place < count), place < count)

tensor = MockTensor(torch.float32)
double.nargs = {"source": tensor, "target": tensor, "count": 100}
kwargs = {"grid": (1,), "warmup": False}
before = type(double).prune_configs
with compiled_side_by_side():
    assert double.prune_configs(kwargs) == double.configs
assert type(double).prune_configs is before
compiled = double.fn.device_caches[0][0]
blocks = sorted(int(k.asm["ttir"].split("end = ")[1].split(" ")[0]) for k in compiled.values())
print(blocks, kwargs["warmup"])
"""


def test_every_tiling_that_can_be_compiled_is(tmp_path):
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    run = subprocess.run([sys.executable, file], capture_output=True, text=True, env=environment, timeout=120)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1] == "[32, 64, 128] False"
