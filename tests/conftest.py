import gc
import os
import sys
from contextlib import suppress
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, settings

from .ranks import start_server
from .schedule import scope_of, turn_of
from .upstream_sources import changes, fingerprints, installed_folders

# Its audit hooks run for all that the interpreter does: a tenth of the tests' time.
with mock.patch.object(sys, "addaudithook", lambda hook: None):
    import filelock  # noqa: F401
# Pydantic searches all imported modules for each of wandb's classes: 9 s after Bridge, 1 s before it.
with suppress(ImportError):
    import wandb  # noqa: F401

settings.register_profile(
    "suite",
    deadline=None,
    max_examples=50,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.load_profile("suite")
if not torch.cuda.is_available():
    # A C++ compiler takes seconds for each function that megatron-core has compiled.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
# The tensors are tiny: a second thread only adds waiting.
torch.set_num_threads(1)


def pytest_collection():
    """Let imports run without garbage collections until `pytest_collection_finish`."""
    gc.disable()


def pytest_sessionstart(session):
    session.upstream_sources = fingerprints(installed_folders())


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Give a process one module after another, in the order of `turn_of`."""
    from xdist.scheduler import LoadScopeScheduling

    if config.option.dist != "loadscope":
        return None
    config.option.loadscopereorder = False
    scheduling = LoadScopeScheduling(config, log)
    scheduling._split_scope = scope_of
    return scheduling


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: turn_of(item.path))


def pytest_collection_finish(session):
    """Spare garbage collections the modules that are imported by now, and let tests of ranks share these."""
    gc.collect()
    gc.freeze()
    gc.enable()
    if any(hasattr(item.module, "run_ranks") for item in session.items):
        start_server()


def pytest_sessionfinish(session):
    """Fail a run that changed a file of the installed upstream packages."""
    changed = changes(session.upstream_sources, fingerprints(installed_folders()))
    if changed:
        print(f"\nthe run changed {len(changed)} of upstream's files: {', '.join(changed[:5])}")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(scope="module", autouse=True)
def _least_bytes(request):
    """Let activations of small models leave the device in modules that say how small."""
    least = getattr(request.module, "LEAST_BYTES", None)
    if least is None:
        yield
    else:
        with mock.patch("bridge_cg_plugin.offload.offloading.LEAST_BYTES", least):
            yield


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch):
    for name in ("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    torch.manual_seed(0)
