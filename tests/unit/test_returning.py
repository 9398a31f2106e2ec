"""What a loop frees and fills again, or gives other memory: it returns to addresses of its own."""

import gc
import weakref
from contextlib import contextmanager

import numpy
import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from bridge_cg_plugin.graphs.buckets import Bucket
from bridge_cg_plugin.graphs.memory import returning as memory
from bridge_cg_plugin.graphs.memory.ranges import AddressRange, DeviceMemoryError, NoDeviceMemory, close_left
from bridge_cg_plugin.graphs.memory.returning import Home, ReturningStorages, release_homes
from bridge_cg_plugin.upstream.hooks.leaving_models import ReturningBuffers

from ..fake_device import FakeVirtualMemory
from ..regions import new_region
from ..returning import CPU, Filled, Homes, Returning
from ..rows_program import RowsProgram
from .test_ranges import allocate, give_back
from .towers import assert_close, forward, graphs_on, new_tower


@pytest.fixture(autouse=True)
def no_other_homes(monkeypatch):
    monkeypatch.setattr(memory, "_homes", weakref.WeakSet())


@pytest.fixture
def device():
    return FakeVirtualMemory(1 << 10)


@pytest.fixture
def gpu(monkeypatch, device):
    """Let homes be on a device of the host; returns what of PyTorch's was called."""
    called = []
    monkeypatch.setattr(memory, "driver_of", lambda found: device)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda found: type("GPU", (), {"total_memory": 512}))
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *unused, name=name: called.append(name))
    return called


def fill(home, *sizes):
    home.begin()
    return [allocate(home._addresses, size) for size in sizes]


def test_what_returns_lies_where_it_lay_and_its_memory_leaves_once_nothing_is_there(gpu, device):
    home, found = Home(CPU), []
    assert release_homes() == 0
    for _ in range(3):
        found.append(fill(home, 40, 8))
        assert release_homes() == 0 and device.mapped_bytes == 48
        for address in found[-1]:
            give_back(address)
        assert release_homes() == 48 and release_homes() == 0 and not device.mapped
    assert found[0] == found[1] == found[2]
    assert gpu.count("empty_cache") == 3, "PyTorch empties no cache for a pool"


def test_what_somebody_still_has_is_not_overwritten(gpu, device):
    home = Home(CPU)
    (kept,) = fill(home, 40)
    (other,) = fill(home, 40)
    assert kept != other and device.mapped_bytes == 80
    for address in (kept, other):
        give_back(address)
    del home
    gc.collect()
    close_left()
    assert not device.mapped and not device.reserved


def test_without_a_driver_or_room_nothing_returns(gpu, device, monkeypatch):
    home = Home(CPU)
    give_back(*fill(home, 40))
    release_homes()
    device.free_bytes = 0
    with pytest.raises(NoDeviceMemory):
        home.begin()
    monkeypatch.setattr(memory, "driver_of", lambda found: None)
    with pytest.raises(DeviceMemoryError, match="cannot leave"):
        Home(CPU).begin()


def test_a_driver_that_fails_is_named_once(gpu, device, caplog):
    home = Home(CPU)
    give_back(*fill(home, 40))
    device.fails = "unmap"
    assert release_homes() == release_homes() == 0
    assert caplog.text.count("memory for weights did not leave") == 1
    device.fails = None


def test_tensors_are_made_in_a_pool_of_the_addresses(gpu, monkeypatch):
    inside = []

    @contextmanager
    def around(*given):
        inside.append(given)
        yield
        inside.pop()

    monkeypatch.setattr(AddressRange, "giving", around)
    monkeypatch.setattr(AddressRange, "new_pool", lambda addresses: "pool")
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: "stream")
    for name in ("stream", "use_mem_pool"):
        monkeypatch.setattr(torch.cuda, name, around)
    monkeypatch.setattr(torch, "empty_like", lambda like: (like, list(inside)))
    home = Home(CPU)
    home.begin()
    assert home.make(["tensor"]) == [("tensor", [(home._addresses,), ("stream",), ("pool",)])] and not inside


# Storages that are freed and filled again.


def plain(storage, nbytes):
    return torch._C.StorageBase.resize_(storage, nbytes)


@pytest.fixture
def storages(monkeypatch):
    monkeypatch.setattr(memory, "LEAST_BYTES", 16)
    return ReturningStorages(Filled)


STORAGES = {
    "what was freed returns": (64, 1, [0, 64, 0, 64], 2),
    "to another size": (64, 1, [0, 128], 1),
    "other changes": (64, 1, [128, 64, 0, 0], 0),
    "a small one, of a tensor that can be given other memory": (15, 1, [0, 15], 0),
    "a small one of several tensors, as of adapters": (12, 2, [0, 12, 0, 12], 2),
    "one that is freed when it is first followed": (0, 2, [0, 12], 1),
}


@pytest.mark.parametrize(("size", "tensors", "sizes", "filled"), STORAGES.values(), ids=STORAGES)
def test_a_storage_that_was_freed_and_filled_returns_home(storages, size, tensors, sizes, filled):
    views = [torch.zeros(size, dtype=torch.uint8)]
    views += [views[0][:4] for _ in range(tensors - 1)]
    storages.follow(view.untyped_storage() for view in views)
    for nbytes in sizes:
        storage = views[-1].untyped_storage()
        assert storages.resize(storage, nbytes, plain) is storage and storage.nbytes() == nbytes
    assert sum(home.filled for home in storages._homes.values()) == filled


def test_a_storage_that_is_there_is_not_filled_twice(storages):
    """verl loads gradients that nobody has freed; PyTorch moves what it gives the size that it has."""
    storage = torch.zeros(64, dtype=torch.uint8).untyped_storage()
    storages.follow([storage])
    storages.resize(storage, 64, lambda *unused: pytest.fail("filled"))


@pytest.mark.parametrize("fails", [torch.OutOfMemoryError, DeviceMemoryError])
def test_without_room_at_home_a_storage_gets_memory_of_pytorchs(storages, fails, monkeypatch):
    storage = torch.zeros(64, dtype=torch.uint8).untyped_storage()
    storages.follow([storage])
    with monkeypatch.context() as patched:
        patched.setattr(Filled, "fails", fails)
        storages.resize(storage, 0, plain)
        assert storages.resize(storage, 64, plain).nbytes() == 64
    storages.resize(storage, 0, plain)
    storages.resize(storage, 64, plain)
    assert storages._homes[storage].filled == 1


# Tensors that are given other memory.


@pytest.fixture
def homes():
    return Homes()


@pytest.fixture
def returning(homes):
    return homes.new(CPU)


@pytest.fixture
def parameters():
    return [nn.Parameter(torch.rand(size)) for size in (3, 5)]


def load(tensors, scale=1.0):
    """Give tensors other memory, as a loop does; returns their values."""
    for number, tensor in enumerate(tensors):
        tensor.data = torch.arange(float(tensor.numel())) + scale * number
    return [tensor.detach().clone() for tensor in tensors]


def places(tensors):
    return [tensor.data_ptr() for tensor in tensors]


def settled(returning, tensors, scale=1.0):
    """Load tensors and settle them; returns where they are."""
    values = load(tensors, scale)
    returning.settle(tensors)
    assert all(map(torch.equal, tensors, values)) and all(each.requires_grad for each in tensors)
    return places(tensors)


def test_what_a_loop_keeps_stays(returning, homes, parameters):
    home = settled(returning, parameters)
    kept = [parameter.detach() for parameter in parameters]  # of one model, while the loop has another one there
    values = [each.clone() for each in kept]
    other = settled(returning, parameters, 7.0)
    assert release_homes() == 0 and not homes.away and all(map(torch.equal, kept, values))
    assert not set(home) & set(other) and homes.ranges == 2


def shares_its_memory():
    parameter = nn.Parameter(torch.rand(3))
    return parameter, parameter.detach()


def shares_its_storage():
    parameter = nn.Parameter(torch.rand(3))
    return parameter, parameter.untyped_storage()


def is_of_numpy():
    array = numpy.arange(3.0, dtype=numpy.float32)
    return nn.Parameter(torch.from_numpy(array)), array


class Quantized(nn.Parameter):
    """Stands for parameters of a class of their own, which have further tensors."""


@pytest.mark.parametrize(
    "new",
    [
        shares_its_memory,
        shares_its_storage,
        is_of_numpy,
        lambda: (Quantized(torch.ones(3)), None),
        lambda: (nn.Parameter(torch.ones(3, 2).t()), None),
        lambda: (nn.Parameter(torch.ones(3, device="meta")), None),
    ],
    ids=["memory", "storage", "numpy", "of a class of its own", "not contiguous", "off the device"],
)
def test_other_tensors_and_those_of_others_stay_with_their_neighbors(returning, parameters, new):
    tensor, _held = new()
    before = tensor.untyped_storage()._cdata, *places(parameters)
    returning.settle([tensor, *parameters])
    returning.settle([])
    assert (tensor.untyped_storage()._cdata, *places(parameters)) == before


@pytest.fixture
def many(monkeypatch):
    """Return parameters in four groups."""
    monkeypatch.setattr(memory, "GROUP_BYTES", 16)
    return [nn.Parameter(torch.rand(size)) for size in (3, 5, 2, 2, 4)]


def test_one_group_after_the_other_has_two_copies(returning, homes, many):
    values = load(many)
    storages, freed = [StorageWeakRef(each.untyped_storage()) for each in many], []
    (home,) = homes.made
    make = home.make
    home.make = lambda like: (freed.append(sum(each.expired() for each in storages)), make(like))[1]
    returning.settle(many)
    assert freed == [0, 1, 2, 4] and all(map(torch.equal, many, values))


def test_groups_without_room_stay_where_they_are(returning, homes, many, caplog):
    """Each state of a model asks; recordings of the last one would otherwise be of addresses that are gone."""
    caplog.set_level("INFO")  # what is logged keeps no memory
    homes.room = 0
    values, before = load(many), places(many)
    returning.settle(many)
    assert places(many) == before
    homes.room = 2
    returning.settle(many)
    first = places(many)
    assert all(map(torch.equal, many, values)) and first[2:] == before[2:] and not set(first[:2]) & set(before)
    homes.room = 9
    returning.settle(many)
    returning.settle(many[2:3] + many[:1])
    assert places(many) == first
    assert settled(returning, many, 5.0)[:2] == first[:2]


# Regions, whose recordings read these addresses.


def test_graphs_of_weights_that_leave_and_come_back_are_recorded_once_more():
    tower, reference = new_tower().requires_grad_(False), new_tower().requires_grad_(False)
    executor, counts = Returning(), []
    with graphs_on(tower, buckets=(16,), executor=executor) as graphs:
        for number in range(4):
            weights = [(0.5 + number) * parameter.detach().cpu() for parameter in reference.parameters()]
            for parameter, mirrored, weight in zip(tower.parameters(), reference.parameters(), weights, strict=True):
                parameter.data, mirrored.data = weight.clone(), weight
            assert (graphs.release_memory() > 0) == (number > 0)
            for seed in range(2):
                with graphs.step(), torch.no_grad():
                    found, expected = (forward(model, [[1, 4, 4]], seed) for model in (tower, reference))
                assert_close(found, expected)
            counts.append(executor.recorded)
        assert graphs.statistics().replays == 8 and not graphs.statistics().fallbacks
    assert counts[0] == counts[-1]


def new_linear_region(linear, executor):
    region = new_region(RowsProgram(linear, (4,)), executor, [Bucket(8)])
    region.capture()
    return region


def move(module):
    """Give a module's weights other memory, which nobody else has; returns where it is."""
    for parameter in module.parameters():
        parameter.data = parameter.detach().clone()
    return places(module.parameters())


def equals_eager(region, linear):
    x = torch.rand(8, 4)
    with torch.no_grad():
        (found,) = region.run(x)
        return torch.equal(found, linear(x))


def test_weights_that_two_regions_read_stay_where_they_are():
    linear = nn.Linear(4, 4)
    one, other = new_linear_region(linear, Returning()), new_linear_region(linear, Returning())
    for _ in range(3):
        before = move(linear)
        assert equals_eager(one, linear) and equals_eager(other, linear)
        assert places(linear.parameters()) == before
    other.reset()
    before = move(linear)
    assert equals_eager(one, linear) and places(linear.parameters()) != before


def seem_to_have_other_memory(region, tensor):
    """Let a tensor's storage be another one than a region recorded, at the same address."""
    source = region.sources.current
    (number,) = (number for number, each in enumerate(source.reads) if each is tensor)
    source._storages[number] = StorageWeakRef(torch.empty(1).untyped_storage())


def test_weights_that_returned_to_their_address_by_chance_get_addresses_of_their_own_with_the_others():
    """Otherwise each round in which further ones have other addresses would record again."""
    linear, executor, counts = nn.Linear(4, 4), Returning(), []
    region = new_linear_region(linear, executor)
    seem_to_have_other_memory(region, linear.weight)
    linear.bias.data = linear.bias.detach().clone()
    for _ in range(3):
        assert equals_eager(region, linear)
        counts.append(executor.recorded)
        move(linear)
    assert len(set(counts)) == 1, counts


# Buffers that other tensors replace.


class Scaled(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.register_buffer("scale", scale)


@pytest.mark.parametrize("inference", [False, True])
def test_a_buffer_returns_where_its_values_did(inference):
    scale = torch.ones(3)
    own = Scaled(scale)
    returning = ReturningBuffers([nn.ModuleList([own])])
    with torch.inference_mode(inference):
        own.scale = torch.ones(3)
    returning.put_back()
    assert own.scale is scale
    for other in (torch.zeros(3), torch.ones(3, dtype=torch.int32), torch.ones(3, device="meta"), None):
        own.scale = other
        returning.put_back()
        assert own.scale is other and scale.tolist() == [1.0] * 3
