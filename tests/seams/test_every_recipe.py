"""Every recipe of the installed Bridge as `bridge-cg explain` reads it, without imports, hub and GPU."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import json
from bridge_cg_plugin.options import OptionError
from bridge_cg_plugin.recipes import RECIPES
from bridge_cg_plugin.cli.explain import command
from bridge_cg_plugin.cli.explain.recipes import recipes_of_bridge
refused, names = {}, recipes_of_bridge() | set(RECIPES)
for name in names:
    try:
        command.look([name])
    except OptionError as error:
        refused[name] = str(error)
print(json.dumps([len(names), refused]))
"""
# What training refuses, too: upstream's own words, a tracker that these recipes set.
RIGHTLY = (
    r"NotImplementedError: PEFT is not currently supported for Qwen3-Next",
    r"rng\.te_rng_tracker=False: it must be true with cuda_graph_impl=transformer_engine",
)


def test_a_recipe_as_bridge_ships_it_is_refused_only_where_training_refuses_it():
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    count, refused = json.loads(done.stdout)
    assert count > 60
    assert {name: why for name, why in refused.items() if not any(re.search(right, why) for right in RIGHTLY)} == {}
