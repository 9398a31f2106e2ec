"""Rotation in Hugging Face's encoders by the plugin's kernel, in Triton's interpreter: replays still equal eager."""

import json

import pytest

from tests.scripts import interpreted

# Qwen2.5-VL and Qwen3-Omni have GLM-4.5V's attention.
ENCODERS = ("glm45v", "ministral3", "qwen25_omni")
LAYERS = 2
SCRIPT = """
import json
from dataclasses import replace

from tests.interpreted import prepare

prepare()
from bridge_cg_plugin.upstream.encoders import packed_towers
from bridge_cg_plugin.vision.kernels import rotary
from tests.models import tower
from tests.models.encoders import ENCODERS
from scripts.performance.parity_encoders import Comparison

packed_towers.has_kernels = lambda tensor: True
rounding = []
launch = rotary._launch
rotary._launch = lambda *args: rounding.append(args[-1]) or launch(*args)
class OneMix:
    def capacities(self, model, most):
        return (most,)

    def draw(self, model, rng, most):
        return [(1, 2, 4), (1, 2, 2)]


tower.start_process()
found = {}
for name in NAMES:
    compared = Comparison(name, replace(ENCODERS[name], mixes=OneMix()), LAYERS, 16)
    rounding.clear()
    _, plugin = compared.records(1)
    found[name] = [plugin["fallback"], plugin["forward_rel"], plugin["grad_rel"], list(rounding)]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found():
    script = SCRIPT.replace("NAMES", repr(ENCODERS)).replace("LAYERS", str(LAYERS))
    return json.loads(interpreted(script).splitlines()[-1])


@pytest.mark.parametrize("name", ENCODERS)
def test_queries_and_keys_of_every_layer_are_rotated_by_the_kernel(found, name):
    fallback, forward, gradient, rounding = found[name]
    assert fallback is None
    assert forward <= 1e-6 and gradient <= 2e-5
    assert rounding == [name == "ministral3"] * (2 * 2 * LAYERS)  # forward and backward
