"""One setting for all graphs, on the providers of the installed release and through Bridge's validation."""

import pytest
import torch

from bridge_cg_plugin.options import normalize
from bridge_cg_plugin.upstream.hooks.training_config import check_training_config

from .test_features import QWEN3_VL, config_of


@pytest.mark.parametrize("how", ["exact", "fastest"])
def test_validation_sets_what_the_setting_comes_to(active, capsys, how):
    config = config_of(QWEN3_VL, cuda_graphs=how)
    config.rng.te_rng_tracker = config.model.use_te_rng_tracker = False
    config.rerun_state_machine.check_for_nan_in_loss = True
    check_training_config(config)
    options = normalize(config)[0]
    assert options.vision.enabled and options.vision.kernels == ("exact" if how == "exact" else "auto")
    assert options.language_model.impl == "full_iteration"
    assert config.rng.te_rng_tracker and not config.rerun_state_machine.check_for_nan_in_loss
    (line,) = capsys.readouterr().out.splitlines()
    parts = "vision encoder: the whole encoder; language model: all layers as one region"
    assert line == f"[bridge-cg] cuda_graphs={how}: {parts}"
    check_training_config(config)
    assert normalize(config)[0] == options and not capsys.readouterr().out


@pytest.mark.parametrize("variable", ["RANK", "SLURM_PROCID"])
def test_only_rank_0_prints_before_the_ranks_are_connected(active, capsys, monkeypatch, variable):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    monkeypatch.setenv(variable, "1")
    check_training_config(config_of(QWEN3_VL, cuda_graphs="exact"))
    assert not capsys.readouterr().out
    monkeypatch.setenv(variable, "0")
    check_training_config(config_of(QWEN3_VL, cuda_graphs="exact"))
    assert "vision encoder" in capsys.readouterr().out
