"""The names by which GPU tests know upstream's waits for the device, against the installed sources."""

import ast
import importlib.util
from pathlib import Path

import pytest

pytest.importorskip("megatron.bridge.data.packing", reason="the GPU test trains on packs of the newest release")

from tests.gpu.test_host_waits import BEHIND

WAITING = {"item", "tolist", "barrier"}


def functions(module):
    """Return the functions of an installed module's source, methods too, by name, without importing it."""
    source = Path(importlib.util.find_spec(module).origin).read_text()
    nodes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef))
    return {node.name: node for node in nodes}


def called(function):
    """Return the names of what a function calls."""
    calls = (node.func for node in ast.walk(function) if isinstance(node, ast.Call))
    return {getattr(call, "attr", None) or getattr(call, "id", None) for call in calls}


def waiting(module, names):
    """Return which of these functions of a module read the device or wait for other ranks."""
    stem = module.rsplit(".")[-1]
    return {f"{stem}.{name}" for name, node in functions(module).items() if name in names and called(node) & WAITING}


def test_what_a_training_step_waits_in_is_known():
    step = called(functions("megatron.bridge.training.train")["train_step"])
    found = waiting("megatron.bridge.training.utils.train_utils", step)
    assert "train_utils.reduce_max_stat_across_model_parallel_group" in found
    assert found <= BEHIND, found - BEHIND


def test_what_the_log_waits_in_is_known():
    found = waiting("megatron.core.timers", {"start", "stop", "_get_global_min_max_time"})
    assert found and found <= BEHIND, found - BEHIND
