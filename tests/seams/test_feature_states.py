"""What `bridge-cg doctor` and warnings say of features whose seams are broken."""

import pytest

import bridge_cg_plugin
from bridge_cg_plugin.cli import doctor
from bridge_cg_plugin.cli.main import main
from bridge_cg_plugin.upstream.hooks import training_config
from bridge_cg_plugin.upstream.hooks.training_config import check_training_config
from bridge_cg_plugin.upstream.seams.features import FEATURES, feature_states
from bridge_cg_plugin.upstream.seams.registry import seam
from bridge_cg_plugin.upstream.seams.seam import Feature as F

from .test_features import config_of

pytestmark = pytest.mark.usefixtures("libraries_that_import")


def test_doctor_shows_each_feature(active, break_seam, capsys):
    found = doctor.diagnose(wants_gpu=False)
    assert {name: f["state"] for name, f in found.features.items()} == dict.fromkeys(map(str, FEATURES), "ready")
    break_seam(seam("siglip_forward"))
    assert main(["doctor", "--no-gpu", "--details"]) == 1
    out = capsys.readouterr().out
    assert "not available vision graphs of Gemma 3: seam siglip_forward" in out
    assert "ready         vision graphs of Qwen2.5-VL" in out
    assert out.index("features\n") < out.index("seams\n")
    assert (
        "not available: vision graphs of Gemma 3. Runs that ask for one of these are refused, others train"
        in " ".join(out.split())
    )


@pytest.mark.parametrize(
    "broken, name, state",
    [
        (("Qwen3VLModelProvider.provide",), F.PIPELINES, "partly"),
        (("Qwen3VLModelProvider.provide", "Qwen3VLMoEModelProvider.provide"), F.PIPELINES, "not available"),
        (("language_model_length",), F.LANGUAGE_MODEL, "partly"),  # models that no seam names have these graphs too
        (("Gemma3VLModelProvider.config",), F.VISION, "partly"),
    ],
)
def test_a_feature_is_partly_there_while_a_model_has_it(broken, name, state):
    assert feature_states(broken)[name].state == state


def test_messages_name_the_models_that_a_seam_concerns(active, break_seam, caplog):
    """A run of another model does ask for the feature."""
    training_config._told.discard("Gemma3VLModelProvider.init")
    break_seam(seam("Gemma3VLModelProvider.init"))
    check_training_config(config_of("Qwen3VLModelProvider", vision_cuda_graph_impl="transformer_engine"))
    concerned = "options of a model's provider (for Gemma3VLModelProvider)"
    assert f"This run asks for none of: {concerned}" in caplog.text
    (problem,) = doctor.diagnose(wants_gpu=False).problems
    assert problem.remedy.startswith(f"not available: {concerned}. Runs that ask for one of these are refused")


def test_doctor_shows_features_of_a_plugin_that_is_off(active, break_seam):
    bridge_cg_plugin.deactivate()
    found = doctor.diagnose(wants_gpu=False)
    states = {name: feature["state"] for name, feature in found.features.items()}
    assert states == {str(f): "ready" if f in (F.PLANNER, F.SCRIPTS) else "off" for f in FEATURES}
    assert "  off           vision graphs\n" in doctor.render(found, details=True)
    break_seam(seam("siglip_forward"))
    assert doctor.diagnose(wants_gpu=False).features["vision graphs of Gemma 3"]["state"] == "not available"
