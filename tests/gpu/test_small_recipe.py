"""The small preset through run_recipe.py on a GPU, in a process of its own that may ask no hub for anything."""

import time

import pytest

from bridge_cg_plugin.recipes import SMALL_RECIPES

from .recipe_runs import checks_passed, run_recipe

pytestmark = pytest.mark.alone
(NAME,) = SMALL_RECIPES
STEPS = 20
LIMIT_S = 240  # a minute where nothing else runs


def test_it_trains_in_a_minute_offline(tmp_path):
    words = ["--recipe", NAME, f"train.train_iters={STEPS}"]
    began = time.monotonic()
    run, text = run_recipe(words, tmp_path, LIMIT_S)
    print(f"{time.monotonic() - began:.1f} s with the imports")
    losses = [loss for _, loss in run.losses]
    assert [step for step, _ in run.losses] == [5, 10, 15, 20] and losses[-1] < 0.95 * losses[0]
    graphs, language_model = run.graphs["vision"], run.graphs["language model"]
    assert graphs.replays >= 0.5 * 4 * (STEPS - 4), graphs
    assert language_model.replays >= 4 * (STEPS - 4) and not language_model.fallbacks, language_model
    assert checks_passed(text) >= 2
    assert not (tmp_path / "nemo_experiments").exists()
