import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile(
    "suite",
    deadline=None,
    max_examples=50,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.load_profile("suite")
# The tensors are tiny: a second thread only adds waiting.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch):
    for name in ("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    torch.manual_seed(0)
