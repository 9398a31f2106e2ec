"""Storages that are freed and filled again, at addresses of their own from the second time on."""

import gc

import pytest
import torch

from bridge_cg_plugin.graphs.memory import returning_storages
from bridge_cg_plugin.graphs.memory.returning_storages import ReturningPlace, ReturningStorages
from bridge_cg_plugin.graphs.memory.virtual_memory import DeviceMemoryError, NoDeviceMemory

DEVICE = torch.device("cuda", 0)
BYTES = 64


def plain(storage, nbytes):
    return torch._C.StorageBase.resize_(storage, nbytes)


class FakePlace:
    """Notes what is asked of it; fails to fill as often as it is told to."""

    def __init__(self, device):
        self.device, self.asked, self.fails = device, [], 0

    def freed(self):
        self.asked.append("freed")

    def fill(self, storage, nbytes, resize):
        if self.fails:
            self.fails -= 1
            raise torch.OutOfMemoryError("made to fail")
        self.asked.append(nbytes)
        resize(storage, nbytes)


@pytest.fixture(autouse=True)
def any_size(monkeypatch):
    monkeypatch.setattr(returning_storages, "LEAST_BYTES", 16)


@pytest.fixture
def places():
    return []


@pytest.fixture
def storages(places):
    def new_place(device):
        places.append(FakePlace(device))
        return places[-1]

    return ReturningStorages(new_place)


@pytest.fixture
def storage(storages):
    made = torch.arange(BYTES // 4, dtype=torch.int32).untyped_storage()
    storages.follow([made])
    return made


def test_what_was_freed_returns_to_a_place_of_its_own(storages, storage, places):
    for _ in range(3):
        assert storages.resize(storage, 0, plain) is storage and storage.nbytes() == 0
        assert storages.resize(storage, BYTES, plain) is storage and storage.nbytes() == BYTES
    (place,) = places
    assert place.device == storage.device and place.asked == [BYTES, "freed", BYTES, "freed", BYTES]


def test_two_views_of_a_storage_are_one(storages, storage, places):
    view = torch.tensor([], dtype=torch.uint8).set_(storage).untyped_storage()
    storages.follow([view])
    storages.resize(view, 0, plain)
    storages.resize(storage, BYTES, plain)
    assert len(places) == 1 and view.nbytes() == BYTES


def test_other_storages_and_other_changes_of_size_are_pytorchs(storages, storage, places):
    other = torch.zeros(4).untyped_storage()
    for nbytes in (0, 16):
        storages.resize(other, nbytes, plain)
    for nbytes in (2 * BYTES, BYTES, 0, 0):
        storages.resize(storage, nbytes, plain)
    small = torch.zeros(15, dtype=torch.uint8).untyped_storage()
    storages.follow([small])
    for nbytes in (0, 15):
        storages.resize(small, nbytes, plain)
    assert not places and other.nbytes() == 16 and storage.nbytes() == 0


def test_a_storage_that_is_there_is_not_filled_twice(storages, storage, places):
    """verl loads gradients that nobody has freed; PyTorch moves what it gives the size that it has."""
    for nbytes in (0, BYTES):
        storages.resize(storage, nbytes, plain)
    torch.tensor([], dtype=torch.uint8).set_(storage).fill_(3)
    address, resized = storage.data_ptr(), []
    storages.resize(storage, BYTES, lambda moved, nbytes: resized.append(nbytes) or plain(moved, nbytes))
    assert storage.data_ptr() == address and not resized and places[0].asked == [BYTES]


@pytest.mark.parametrize("freed_before", [False, True])
def test_a_small_storage_is_followed_where_several_tensors_have_it(storages, places, freed_before):
    """Those of adapters: the buffer is small, and no tensor in it can be given other memory alone."""
    buffer = torch.zeros(12, dtype=torch.uint8)
    adapters = buffer[:4], buffer[4:]
    if freed_before:
        buffer.untyped_storage().resize_(0)
    storages.follow(each.untyped_storage() for each in adapters)
    for nbytes in (0, 12, 0, 12):
        storages.resize(buffer.untyped_storage(), nbytes, plain)
    (place,) = places
    assert place.asked == [12, "freed", 12]


def test_another_size_gets_another_place(storages, storage, places):
    for nbytes in (0, BYTES, 0, 2 * BYTES, 0, 2 * BYTES):
        storages.resize(storage, nbytes, plain)
    assert [place.asked for place in places] == [[BYTES, "freed"], [2 * BYTES, "freed", 2 * BYTES]]


def test_a_return_that_fails_can_be_tried_again(storages, storage, places):
    for nbytes in (0, BYTES, 0):
        storages.resize(storage, nbytes, plain)
    places[0].fails = 1
    with pytest.raises(torch.OutOfMemoryError):
        storages.resize(storage, BYTES, plain)
    assert storage.nbytes() == 0
    storages.resize(storage, BYTES, plain)
    assert len(places) == 1 and storage.nbytes() == BYTES


def test_a_dead_storages_place_goes_and_a_new_one_is_not_taken_for_it(storages, places):
    for _ in range(50):
        storage = torch.zeros(BYTES, dtype=torch.uint8).untyped_storage()
        storages.follow([storage])
        storages.resize(storage, 0, plain)
        storages.resize(storage, BYTES, plain)
        del storage
    gc.collect()
    storages.forget_dead()
    assert len(places) == 50 and not storages._places and not storages._followed


def test_once_stopped_storages_have_pytorchs_memory_and_their_content(storages, storage, places):
    kept = torch.arange(BYTES, dtype=torch.uint8)
    away, content = torch.zeros(BYTES, dtype=torch.uint8), torch.tensor([], dtype=torch.uint8).set_(storage)
    storages.follow([away.untyped_storage()])
    for moved in (storage, away.untyped_storage()):
        storages.resize(moved, 0, plain)
        storages.resize(moved, BYTES, plain)
    content.copy_(kept)
    storages.resize(away.untyped_storage(), 0, plain)
    sizes = []
    storages.stop(lambda moved, nbytes: sizes.append(nbytes) or plain(moved, nbytes))
    assert torch.equal(content, kept) and sizes == [0, BYTES] and not storages._places
    for nbytes in (0, BYTES):
        storages.resize(storage, nbytes, plain)
    assert len(places) == 2, "followed still"


class FakeRange:
    """Addresses whose memory may be missing, and whose driver may fail."""

    def __init__(self, room=True, fails=False):
        self.room, self.fails, self.asked = room, fails, []

    def new_pool(self):
        return "pool"

    def release(self):
        self.asked.append("release")
        if self.fails:
            raise DeviceMemoryError("made to fail")

    def restore(self):
        self.asked.append("restore")
        if not self.room:
            raise NoDeviceMemory("made to fail")


def place_over(addresses, monkeypatch):
    monkeypatch.setattr(returning_storages, "driver_of", lambda device: "driver")
    monkeypatch.setattr(returning_storages, "AddressRange", lambda driver, nbytes: addresses)
    return ReturningPlace(DEVICE)


@pytest.fixture
def emptied():
    """What was called to give PyTorch's cached memory back."""
    return []


@pytest.fixture
def inside(monkeypatch, emptied):
    """Stand-ins for what needs a GPU; notes where memory would be taken."""
    entered = []

    class Around:
        def __init__(self, *given):
            self.given = given

        def __enter__(self):
            entered.append(self.given)

        def __exit__(self, *unused):
            entered.pop()

    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *unused, name=name: emptied.append(name))
    monkeypatch.setattr(returning_storages, "taking_from", Around)
    return entered


@pytest.mark.parametrize("room", [True, False])
def test_memory_is_taken_from_the_places_pool_where_there_is_room(inside, monkeypatch, room):
    addresses, storage, taken = FakeRange(room), torch.zeros(0).untyped_storage(), []
    place = place_over(addresses, monkeypatch)
    place.fill(storage, BYTES, lambda storage, nbytes: taken.append((nbytes, list(inside))))
    place.freed()
    assert taken == [(BYTES, [(addresses, "pool")] if room else [])]
    assert addresses.asked == ["restore", "release"] and not inside


def test_pytorchs_cache_is_emptied_for_the_first_memory_alone(inside, emptied, monkeypatch):
    """PyTorch does not do it for a pool, and what the storage had before is in its cache."""
    place = place_over(FakeRange(), monkeypatch)
    for _ in range(3):
        place.fill(torch.zeros(0).untyped_storage(), BYTES, lambda storage, nbytes: None)
        place.freed()
    assert emptied.count("empty_cache") == 1


def test_a_driver_that_fails_is_named_once_and_pytorchs_memory_is_used(inside, caplog, monkeypatch):
    addresses, taken = FakeRange(fails=True), []
    place = place_over(addresses, monkeypatch)
    for _ in range(2):
        place.fill(torch.zeros(0).untyped_storage(), BYTES, lambda storage, nbytes: taken.append(len(inside)))
        place.freed()
    assert taken == [1, 0] and addresses.asked == ["restore", "release"]
    assert [record.getMessage() for record in caplog.records].count(caplog.records[0].getMessage()) == 1
    assert "made to fail" in caplog.text
