import importlib.metadata
import subprocess
import sys
import zipfile
from dataclasses import replace

import pytest

from bridge_cg_plugin.cli import audit as auditing
from bridge_cg_plugin.cli.audit import AuditError, audit
from bridge_cg_plugin.cli.main import main
from bridge_cg_plugin.upstream.seams.registry import SEAMS, seam
from bridge_cg_plugin.upstream.seams.seam import RELEASES

from ..releases import folder_of, sources_of

TRAIN = "megatron/bridge/training/train.py"
every_release = pytest.mark.parametrize("release", RELEASES, ids=lambda r: r.bridge)


@every_release
def test_every_release_of_the_table_fits(release):
    found = audit(sources_of(release))
    assert found.drift == {}
    assert found.versions["bridge"] == release.bridge and found.known
    later = {s.name for s in SEAMS if not s.expected_in(release.bridge)}
    assert later | {"performance_overrides"} <= set(found.not_compared)
    assert len(found.fits) + len(found.not_compared) == len(SEAMS)
    assert len(found.fits) >= 40


def test_features_that_drift_takes_away_are_named(monkeypatch, capsys):
    moved = [replace(s, target="Gone") if s.name == "siglip_forward" else s for s in SEAMS]
    monkeypatch.setattr(auditing, "SEAMS", moved)
    found = audit(["installed"])
    assert list(found.drift) == ["siglip_forward"]
    unavailable = {name: state["seams"] for name, state in found.features.items() if state["state"] != "ready"}
    assert unavailable == {"vision graphs of Gemma 3": ("siglip_forward",)}
    assert main(["audit"]) == 1
    assert "without it: vision graphs of Gemma 3" in capsys.readouterr().out


@pytest.fixture
def wheels(tmp_path):
    """Return a function that packs the oldest release into two wheels, with (file, old, new) replaced."""

    def make(*changes, version="0.5.1"):
        folder = folder_of(RELEASES[-1])
        made = []
        packages = ((f"megatron_bridge-{version}", ("bridge",)), ("megatron_core-0.18.2", ("core", "training")))
        for name, parts in packages:
            path = tmp_path / f"{name}-py3-none-any.whl"
            with zipfile.ZipFile(path, "w") as archive:
                archive.writestr(f"{name}.dist-info/RECORD", "")
                for source in (file for part in parts for file in (folder / "megatron" / part).rglob("*.py")):
                    text = source.read_text(encoding="utf-8")
                    relative = source.relative_to(folder).as_posix()
                    for _, old, new in (change for change in changes if change[0] == relative):
                        assert old in text
                        text = text.replace(old, new)
                    archive.writestr(relative, text)
            made.append(str(path))
        return made

    return make


MOVED = {
    "train_end": (TRAIN, "def _delete_cuda_graphs(", "def _delete_graphs("),
    "train_loop": (TRAIN, "    _delete_cuda_graphs(cuda_graph_helper)", "    pass"),
    "layer_attention": ("megatron/core/transformer/transformer_layer.py", "packed_seq_params", "packed"),
    "packed_segments": ("megatron/core/packed_seq_params.py", "cu_seqlens_q:", "offsets_q:"),
    "gradient_hook": (
        "megatron/core/distributed/distributed_data_parallel.py",
        "grad_added_to_main_grad",
        "added",
    ),
    "vision_parts": (
        "megatron/bridge/models/qwen_vl/modelling_qwen3_vl/vision_model.py",
        "self.patch_embed",
        "self.embed_patches",
    ),
}


def test_what_moved_is_found(wheels):
    found = audit(wheels(*MOVED.values()))
    for name in MOVED:
        assert seam(name).module.rpartition(".")[2] in found.drift[name]["found"], name


def test_arguments_that_are_no_release(tmp_path, capsys):
    (tmp_path / "text.whl").write_text("no archive")
    for argument in (tmp_path / "text.whl", tmp_path / "absent", tmp_path):
        with pytest.raises(AuditError, match=f"^Cannot audit {argument}: "):
            audit([str(argument)])
    assert main(["audit", str(tmp_path)]) == 2
    assert "no module of Bridge" in capsys.readouterr().err


def test_nothing_of_upstream_nor_torch_is_imported():
    script = """
import sys
from bridge_cg_plugin.cli.main import main
assert main(["audit", "installed"]) == 0
bad = [n for n in sys.modules if n.split(".")[0] in ("torch", "megatron", "transformer_engine")]
assert not bad, bad
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"megatron-bridge {importlib.metadata.version('megatron-bridge')}" in done.stdout
