"""Memory mapped into reserved addresses, with a stand-in of CUDA's driver that keeps its rules."""

import ctypes

import pytest
import torch

from whet.rollout.engine import growing_memory
from whet.rollout.engine.growing_memory import GrowingMemory, MappedMemory, make_memory

STEP = 64


class Driver:
    """The functions of libcuda that map memory; each breaks off where the driver would, or would do harm later."""

    def __init__(self, room=10 * STEP):
        self.room, self.handles, self.mapped, self.open, self.reserved = room, {}, {}, set(), {}

    def cuMemGetAllocationGranularity(self, out, properties, option):
        out._obj.value = STEP
        return 0

    def cuMemAddressReserve(self, out, size, alignment, address, flags):
        assert size.value % STEP == 0
        out._obj.value = (len(self.reserved) + 1) << 32
        self.reserved[out._obj.value] = size.value
        return 0

    def cuMemCreate(self, out, size, properties, flags):
        p = properties._obj
        assert size.value % STEP == 0 and size.value > 0 and (p.type, p.location.type, p.location.id) == (1, 1, 3)
        if sum(self.handles.values()) + size.value > self.room:
            return 2
        out._obj.value = len(self.handles) + 7
        self.handles[out._obj.value] = size.value
        return 0

    def cuMemMap(self, address, size, offset, handle, flags):
        assert self.handles[handle.value] == size.value and offset.value == 0
        start = max(a for a in self.reserved if a <= address.value)
        assert address.value + size.value <= start + self.reserved[start]
        for a, (n, _) in self.mapped.items():
            assert a + n <= address.value or address.value + size.value <= a
        self.mapped[address.value] = size.value, handle.value
        return 0

    def cuMemSetAccess(self, address, size, access, count):
        assert self.mapped[address.value][0] == size.value and access._obj.flags == 3 and count.value == 1
        self.open.add(address.value)
        return 0

    def cuMemUnmap(self, address, size):
        assert self.mapped.pop(address.value)[0] == size.value  # never a part of what was mapped
        self.open.discard(address.value)
        return 0

    def cuMemRelease(self, handle):
        assert all(h != handle.value for _, h in self.mapped.values())
        del self.handles[handle.value]
        return 0

    def cuMemAddressFree(self, address, size):
        assert self.reserved.pop(address.value) == size.value and not self.mapped
        return 0


@pytest.fixture
def driver(monkeypatch):
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, device, **options: empty(*size, **options))
    monkeypatch.setattr(growing_memory, "CHUNK", STEP)
    monkeypatch.setattr(torch, "as_tensor", lambda x, device: ("tensor of", *x.__cuda_array_interface__["data"]))
    return Driver()


DEVICE = torch.device("cuda", 3)


def test_memory_grows_and_goes_behind_one_address(driver):
    memory = MappedMemory(9 * STEP - 5, DEVICE, driver)
    assert memory.limit == 9 * STEP and memory.bytes[1] == 1 << 32
    for size in (10, 2 * STEP, 5 * STEP - 1, 5 * STEP, 9 * STEP, 100 * STEP):
        memory.resize(size)
        ends = sum(n for n, _ in driver.mapped.values())
        assert memory.held == ends == sum(driver.handles.values()) and memory.held >= min(size, 9 * STEP)
        assert memory.held - min(size, 9 * STEP) < STEP and driver.open == set(driver.mapped)
    memory.resize(3 * STEP)
    assert 3 * STEP <= memory.held < 9 * STEP
    memory.resize(0)
    assert memory.held == 0 and not driver.mapped and not driver.handles
    memory.resize(4 * STEP)
    assert memory.held == 4 * STEP and memory.moves == 0
    memory.close()
    assert not driver.reserved and not driver.handles


def test_small_growth_is_mapped_in_few_calls(driver, monkeypatch):
    monkeypatch.setattr(growing_memory, "CHUNK", 4 * STEP)
    memory = MappedMemory(10 * STEP, DEVICE, driver)
    held = [memory.resize(size) or memory.held // STEP for size in range(STEP, 10 * STEP + 1, STEP // 4)]
    assert sorted({*held}) == [4, 8, 10] and len(driver.mapped) == 3


def test_a_full_device_empties_torchs_cache_and_then_says_so(driver, monkeypatch):
    memory, emptied = MappedMemory(20 * STEP, DEVICE, driver), []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(1))
    with pytest.raises(torch.OutOfMemoryError, match="for the KV cache"):
        memory.resize(11 * STEP)
    assert emptied == [1] and memory.held == STEP
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: setattr(driver, "room", 99 * STEP))
    memory.resize(11 * STEP)
    assert memory.held == 11 * STEP


def test_without_a_driver_memory_is_ordinary_and_the_log_says_what_that_costs(monkeypatch, caplog):
    growing_memory._warn.cache_clear()
    for error in (OSError("no libcuda"), AttributeError("no cuMemMap")):
        monkeypatch.setattr(growing_memory, "_driver", lambda error=error: (_ for _ in ()).throw(error))
        monkeypatch.setattr(growing_memory, "GrowingMemory", lambda limit, device: GrowingMemory(limit, "cpu"))
        assert make_memory(64, DEVICE).limit == 64
    assert "captured anew after each update: OSError: no libcuda" in caplog.text


def test_the_structures_have_the_sizes_of_cudas():
    sizes = [ctypes.sizeof(x) for x in (growing_memory._Location, growing_memory._Properties, growing_memory._Access)]
    assert sizes == [8, 32, 12]
