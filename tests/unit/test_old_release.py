"""Beside a release of Megatron-Bridge that is too old, the plugin stays off, says so once and refuses graph options."""

import logging
from types import ModuleType, SimpleNamespace

import pytest

from bridge_cg_plugin.cli.main import main
from bridge_cg_plugin.options import OptionError, graph_options
from bridge_cg_plugin.upstream.hooks import graph_fields
from bridge_cg_plugin.upstream.seams import activation, patches

REFUSAL = "megatron-bridge 0.4.2 is too old for bridge_cg_plugin: use 0.5 or newer"


@pytest.fixture
def old_release(monkeypatch):
    monkeypatch.setattr(patches, "bridge_release", lambda: "0.4.2")
    monkeypatch.setattr(graph_fields, "bridge_release", lambda: "0.4.2")
    monkeypatch.setattr(activation, "_on", True)
    activation._stays_off.cache_clear()
    yield
    activation._stays_off.cache_clear()


def test_nothing_is_patched_and_one_line_says_so(old_release, caplog):
    with caplog.at_level(logging.WARNING, "bridge_cg_plugin"):
        for name in ("megatron.bridge.training.train", "megatron.core.packed_seq_params"):
            module = ModuleType(name)
            before = dict(vars(module))
            activation.patch_module(module)
            assert vars(module) == before
    assert caplog.messages == [f"[rank 0] {REFUSAL}. The plugin stays off"]


def test_a_release_that_cannot_be_read_breaks_no_import(old_release, monkeypatch, caplog):
    monkeypatch.setattr(patches, "bridge_release", lambda: 1 / 0)
    activation.patch_module(ModuleType("megatron.core.packed_seq_params"))
    assert "could not patch megatron.core.packed_seq_params" in caplog.text


def test_graph_options_are_refused(old_release):
    with pytest.raises(OptionError, match=f"Cannot use graph options: {REFUSAL}"):
        graph_fields.apply_options(graph_options("cuda_graph_impl=local"), SimpleNamespace())


def test_the_audit_refuses_it(tmp_path, capsys):
    (tmp_path / "megatron_bridge-0.4.2.dist-info").mkdir()
    assert main(["audit", str(tmp_path)]) == 2
    assert f"Cannot audit {tmp_path}: {REFUSAL}." in capsys.readouterr().err
