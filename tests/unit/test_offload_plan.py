"""Which activations leave, and the host's memory for them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bridge_cg_plugin.offload import host as host_memory
from bridge_cg_plugin.offload.host import ALIGNMENT, GIB, HostMemoryError, PinnedMemory, available_bytes
from bridge_cg_plugin.offload.plan import (
    Fate,
    Inventory,
    Policy,
    Seen,
    fixed_plans,
    kept_bytes,
    needed_at_once,
    plans_within,
)

SCOPES = ("attention", "mlp", "layernorm")
KINDS = ("layernorm", "gelu", "linear")
ALL = Policy(frozenset(SCOPES), frozenset(KINDS))
HIDDEN = 100


@st.composite
def inventories(draw):
    """Storages that are used in about the reverse of their order, some of which can be made from earlier ones."""
    count = draw(st.integers(1, 12))
    seen = []
    for place in range(count):
        sources = draw(st.lists(st.integers(0, place - 1), max_size=2, unique=True)) if place else []
        kind = draw(st.sampled_from([None, *KINDS])) if sources else None
        scope = draw(st.sampled_from(SCOPES))
        seen.append(Seen(draw(st.integers(1, 100)), scope, kind, tuple(sources) if kind else ()))
    events = []
    for place in reversed(range(count)):
        uses = draw(st.integers(1, 2))
        events += [("use", place)] * uses + [("end", place)]
    # Some storages live on behind others' uses.
    for _ in range(draw(st.integers(0, 3))):
        index = draw(st.integers(0, len(events) - 1))
        if events[index][0] == "end":
            events.append(events.pop(index))
    return Inventory(tuple(seen), tuple(events))


PARTS = st.lists(inventories(), min_size=1, max_size=4)


class Backward:
    """A backward for which each storage comes when it is needed, and goes when nothing holds it."""

    def __init__(self, inventory: Inventory, fates) -> None:
        self._seen, self._fates = inventory.seen, fates
        count = range(len(fates))
        self._holders = {
            p: {q for q in count if fates[q] is Fate.REBUILD and p in self._seen[q].sources} for p in count
        }
        for place in count:
            self._holders[place].add("autograd")
        self._there, self.most = set(), 0
        for what, place in inventory.backward:
            if what == "use":
                self._bring(place)
            else:
                self._let_go(place, "autograd")

    def _bring(self, place) -> None:
        if place in self._there or self._fates[place] is Fate.KEEP:
            return
        sources = self._seen[place].sources if self._fates[place] is Fate.REBUILD else ()
        for source in sources:
            self._bring(source)
        self._there.add(place)
        self.most = max(self.most, sum(self._seen[there].nbytes for there in self._there))
        for source in sources:
            self._let_go(source, place)

    def _let_go(self, place, holder) -> None:
        self._holders[place].discard(holder)
        if not self._holders[place]:
            self._there.discard(place)


@given(st.data())
def test_what_is_needed_at_once_is_there_at_one_moment(data):
    inventory = data.draw(inventories())
    fates = [data.draw(st.sampled_from([*Fate] if seen.kind else [Fate.KEEP, Fate.OFFLOAD])) for seen in inventory.seen]
    needed, most = needed_at_once(inventory, fates), Backward(inventory, fates).most
    leaving = [seen.nbytes for seen, fate in zip(inventory.seen, fates, strict=True) if fate is not Fate.KEEP]
    assert max(most, *leaving, 0) <= needed <= sum(leaving)
    if Fate.REBUILD not in fates:
        assert needed == most


def assert_kept_to(parts, plans, window):
    """Every part has room for what it keeps and needs at once, beside what parts before it keep."""
    for part, plan in zip(parts, plans, strict=True):
        assert plan.window == window
        assert plan.reserve == needed_at_once(part, plan.fates) and plan.room >= kept_bytes(part, plan.fates)
        window -= kept_bytes(part, plan.fates)


@given(PARTS, st.integers(0, 1500))
def test_plans_keep_to_their_window_or_there_are_none(parts, window):
    plans, _ = plans_within(parts, HIDDEN, ALL, window)
    _, fewest = plans_within(parts, HIDDEN, ALL, -1)
    assert (plans is None) == (fewest > window)
    if plans is not None:
        assert_kept_to(parts, plans, window)
    if sum(part.nbytes for part in parts) <= window:
        assert {fate for plan in plans for fate in plan.fates} == {Fate.KEEP}


@given(PARTS, st.sets(st.sampled_from(SCOPES)), st.sets(st.sampled_from(KINDS)), st.integers(0, 1500))
def test_nothing_is_done_that_is_not_allowed(parts, scopes, kinds, window):
    policy = Policy(frozenset(scopes), frozenset(kinds))
    fixed = fixed_plans(parts, policy)
    assert_kept_to(parts, fixed, fixed[0].window)
    for plans in (plans_within(parts, HIDDEN, policy, window)[0] or [], fixed):
        for part, plan in zip(parts, plans, strict=bool(plans)):
            for seen, fate in zip(part.seen, plan.fates, strict=True):
                assert fate is Fate.KEEP or (seen.scope in scopes if fate is Fate.OFFLOAD else seen.kind in kinds)
                if plans is fixed and fate is Fate.KEEP:
                    assert seen.scope not in scopes and seen.kind not in kinds


# A hidden state of the tower at 16384 tokens in bf16, and the output of its first linear layer of an MLP.
UNIT = 16384 * 1152 * 2
WIDE = UNIT * 4304 // 1152


def tower(layers=27):
    """Return the inventory of a tower: of each layer a hidden state, its norm, a product of that, and GELU of that."""
    seen, events = [], []
    for first in range(0, 4 * layers, 4):
        seen += [
            Seen(UNIT, "layernorm"),
            Seen(UNIT, "layernorm", "layernorm", (first,)),
            Seen(WIDE, "mlp", "linear", (first + 1,)),
            Seen(WIDE, "mlp", "gelu", (first + 2,)),
        ]
        places = range(first + 3, first - 1, -1)
        events = [*((what, place) for place in places for what in ("use", "end")), *events]
    return Inventory(tuple(seen), tuple(events))


GB = 10**9


def sizes(inventory, plan):
    """Return the bytes of each kind that are recomputed, and those that are offloaded."""
    found = {kind: 0 for kind in (*KINDS, "offload")}
    for seen, fate in zip(inventory.seen, plan.fates, strict=True):
        if fate is not Fate.KEEP:
            found["offload" if fate is Fate.OFFLOAD else seen.kind] += seen.nbytes
    return found


@pytest.mark.parametrize(
    "hidden, share, copies, products",
    [(5 * GB, 0.7, False, False), (5 * GB, 0.4, True, False), (GB, 0.2, True, True), (0, 0.3, False, True)],
)
def test_the_cheapest_leaves_first(hidden, share, copies, products):
    """Norms and GELU are recomputed, then as much is copied as hides, then products are recomputed."""
    inventory = tower()
    (plan,), _ = plans_within([inventory], hidden, ALL, int(share * inventory.nbytes))
    found = sizes(inventory, plan)
    assert found["gelu"] > 0 and found["layernorm"] > 0
    assert (found["offload"] > 0) == copies and found["offload"] <= hidden
    assert (found["linear"] > 0) == products
    if products:
        assert found["offload"] > hidden - WIDE


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


def test_too_little_memory_is_refused_with_what_to_do(host, monkeypatch):
    host(10 * 2**20)
    memory = PinnedMemory(page_locked=False)
    memory.check(7 * GIB)
    with pytest.raises(HostMemoryError, match=r"take 9.0 GiB.*has 8.0 GiB.*recompute"):
        memory.check(9 * GIB)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(HostMemoryError, match="2.0 GiB for this process.*4 processes"):
        memory.check(7 * GIB)


@given(st.lists(st.lists(st.integers(1, 5000), max_size=8), min_size=1, max_size=4), st.sampled_from([512, 1024, 4096]))
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
