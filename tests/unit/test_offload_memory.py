"""Host memory of offloaded activations: what the host has, what a process may take, where storages lie."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bridge_cg_plugin.offload import host as host_memory
from bridge_cg_plugin.offload.host import ALIGNMENT, GIB, HostMemoryError, PinnedMemory, available_bytes


@pytest.fixture
def host(tmp_path, monkeypatch):
    """Return a function that gives the host so much memory, and control groups so much of it."""

    def make(available_kb, **groups):
        meminfo = tmp_path / "meminfo"
        meminfo.write_text(f"MemTotal: 99999999 kB\nMemAvailable:   {available_kb} kB\n")
        for name, text in groups.items():
            path = tmp_path / name.replace("__", "/").replace("_", ".", 1)
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        found = available_bytes(meminfo, tmp_path)
        monkeypatch.setattr(host_memory, "available_bytes", lambda: found)
        return found

    for name in ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE"):
        monkeypatch.delenv(name, raising=False)
    return make


def test_a_control_groups_limit_counts_less_what_it_uses(host):
    stat = "anon 5\ninactive_file 1000\n"
    assert host(4096, memory_max="100000", memory_current="40000", memory_stat=stat) == 61000
    assert host(4096, memory_max="max") == 4096 * 1024
    assert host(4096, memory_max="100", memory_current="4000", memory_stat="inactive_file 0\n") == 0


def test_an_older_control_groups_limit_counts_as_well(tmp_path):
    (tmp_path / "meminfo").write_text("MemAvailable: 4096 kB\n")
    folder = tmp_path / "memory"
    folder.mkdir()
    (folder / "memory.limit_in_bytes").write_text("90000\n")
    (folder / "memory.usage_in_bytes").write_text("50000\n")
    (folder / "memory.stat").write_text("total_inactive_file 10000\n")
    assert available_bytes(tmp_path / "meminfo", tmp_path) == 50000


def test_too_little_memory_is_refused_with_what_to_do(host, monkeypatch):
    host(10 * 2**20)
    memory = PinnedMemory(page_locked=False)
    memory.check(7 * GIB)
    with pytest.raises(HostMemoryError, match=r"take 9.0 GiB.*has 8.0 GiB.*recompute"):
        memory.check(9 * GIB)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(HostMemoryError, match="2.0 GiB for this process.*4 processes"):
        memory.check(7 * GIB)


@given(
    st.lists(st.lists(st.integers(1, 5000), max_size=8), min_size=1, max_size=4),
    st.sampled_from([512, 1024, 4096]),
)
def test_storages_never_overlap_and_pieces_are_powers_of_two(requests, piece):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_memory, "PIECE", piece)
        patch.setattr(host_memory, "available_bytes", lambda: 2**40)
        memory = PinnedMemory(page_locked=False)
        for request in requests:
            sizes = dict(enumerate(request))
            found = memory.reserve(0, sizes)
            for key, tensor in found.items():
                assert tensor.nbytes == sizes[key] and tensor.dtype is torch.uint8
                assert tensor.storage_offset() % ALIGNMENT == 0
            for key, tensor in found.items():
                tensor.fill_(key)
            assert all(bool((tensor == key).all()) for key, tensor in found.items())
        for held in memory._pieces[0]:
            assert held.nbytes & (held.nbytes - 1) == 0
