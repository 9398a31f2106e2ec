"""A declaration, its seams and its region are all that an encoder of this package adds."""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DECLARATION = """
MEAN = Declaration(
    "the mean",
    Model(
        "tests.unit.mean_provider",
        "MeanProvider",
        hub=(HubModels("example/Mean-", encoder=(2, 8)),),
        steps=("example.mean_step",),
    ),
    "mean:ENCODER",
)
DECLARED = (
    MEAN,
"""
SEAMS = """
SEAMS += seams_of(
    encoders.MEAN.feature, mean_tower=called("tests.unit.mean_encoder:MeanTower", "to see it declared")
)
"""
DECLARED = """
import sys

from bridge_cg_plugin.upstream.seams.activation import PATCHING

assert "tests.unit.mean_provider" in PATCHING["hooks.graph_fields"]
assert "example.mean_step" in PATCHING["hooks.batches"]
assert "bridge_cg_plugin.upstream.seams.seam" not in sys.modules and "torch" not in sys.modules

from bridge_cg_plugin.upstream.seams.states import FEATURES, _ASKS
from bridge_cg_plugin.upstream.seams.encoders import encoder_of
from bridge_cg_plugin.upstream.seams.registry import seam
from bridge_cg_plugin.cli.explain.models import encoder_of as sized
from bridge_cg_plugin.cli.explain.models import _family
from tests.unit.mean_provider import MeanProvider

assert seam("mean_tower").features == ("vision graphs of the mean",)
assert seam("MeanProvider.config").attributes[0] == "vision_config" and seam("MeanProvider.init")
assert seam("host_grids.mean_step").module == "example.mean_step"
assert "vision graphs of the mean" in FEATURES and "vision graphs of the mean" in _ASKS
assert encoder_of(MeanProvider()) == "the mean's, with an adapter for vision graphs"
assert _family("example/Mean-1B").encoder == (2, 8)
provider = MeanProvider()
provider.vision_cuda_graph_impl = "none"
assert str(sized(provider)).startswith("the mean encoder")

from bridge_cg_plugin.upstream.encoders.registry import ENCODERS
from tests.unit.mean_encoder import ENCODER

assert ENCODER in ENCODERS
"""


def test_a_new_encoder_touches_no_other_file(tmp_path):
    package = tmp_path / "bridge_cg_plugin"
    shutil.copytree(ROOT / package.name, package, ignore=shutil.ignore_patterns("__pycache__"))
    for folder in ("scripts", "tests"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    declarations, seams = package / "upstream/seams/encoders.py", package / "upstream/seams/registry/encoders.py"
    declarations.write_text(declarations.read_text().replace("\nDECLARED = (\n", DECLARATION))
    seams.write_text(seams.read_text() + SEAMS)
    (package / "upstream/encoders/mean.py").write_text("from tests.unit.mean_encoder import ENCODER\n")
    words, environment = [sys.executable, "-c", DECLARED], {"PYTHONPATH": str(tmp_path)}
    found = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, env=environment, timeout=300)
    assert found.returncode == 0, found.stderr
