"""Data workers that Bridge forks once its tokenizer was used: run_recipe.py keeps them from waiting for ever."""

import pytest

from bridge_cg_plugin.upstream.seams.patches import bridge_release
from bridge_cg_plugin.upstream.seams.seam import NEWEST
from tests.scripts import forked

pytestmark = pytest.mark.skipif(
    bridge_release() != NEWEST.bridge, reason="workers and tokenizers are the same beside every release"
)
# A process that used a tokenizer, and another forked from it that does so again.
FORK = """
import multiprocessing
import bridge_cg_plugin
bridge_cg_plugin.activate()
from megatron.bridge.training import pretrain
from tokenizers import Tokenizer, models

WORDS = ["word"] * 8
tokenizer = Tokenizer(models.WordLevel({"word": 0}, unk_token="word"))

def train(seconds=60, **given):
    tokenizer.encode_batch(WORDS)
    worker = multiprocessing.get_context("fork").Process(target=tokenizer.encode_batch, args=(WORDS,))
    worker.start()
    worker.join(seconds)
    worker.kill()
    print("ended" if worker.exitcode == 0 else "waits", flush=True)
"""
# By itself, then by the script.
TWICE = """
train(seconds=3)

from bridge_cg_plugin.upstream.hooks import recipes as steps
from bridge_cg_plugin.cli.runs import recipe

steps.train_function = lambda mode: train
recipe.train(recipe.Prepared(None, "pretrain", "qwen3_vl_step", None, ""))
"""


def test_the_scripts_worker_ends_where_upstreams_own_waits(monkeypatch):
    """What the script's setting is for: when upstream's no longer waits, the setting can go."""
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    assert forked(FORK + TWICE).splitlines()[-2:] == ["waits", "ended"]
