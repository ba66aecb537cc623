"""Memory that grows and is given back, at one address where the driver can do that.

Captured CUDA graphs read and write at fixed addresses. CUDA's virtual memory separates an address from the memory
behind it: a range of addresses is reserved once, and memory is mapped into it and taken out again. So the KV of an
engine grows, is freed for an update and comes back while all graphs stay valid. The driver is called by ctypes.
Left out on purpose: memory of several devices, and of other processes.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from typing import Any

import torch

from whet.errors import format_exception

__all__ = ["GrowingMemory", "MappedMemory", "make_memory"]

log = logging.getLogger("whet")

CHUNK = 8 * 2**20
"""The least bytes that are mapped at once: rows grow a little at a time, and each call of the driver has its cost."""
OUT_OF_MEMORY = 2
"""CUDA_ERROR_OUT_OF_MEMORY."""


class GrowingMemory:
    """Ordinary memory, which moves when it grows, by a quarter at least: its content is copied.

    Args: limit: the most bytes. device: of the memory.

    >>> memory = GrowingMemory(64, torch.device("cpu"))
    >>> memory.resize(16)
    >>> memory.bytes[3] = 7
    >>> memory.resize(32)
    >>> memory.held, memory.bytes[3].item(), memory.moves
    (32, 7, 2)
    """

    def __init__(self, limit: int, device: torch.device) -> None:
        self.limit, self.device = limit, device
        self.bytes = torch.empty(0, dtype=torch.uint8, device=device)
        """uint8, at least `held` long."""
        self.moves = 0
        """Counts the changes of its address."""

    @property
    def held(self) -> int:
        """Bytes of memory."""
        return len(self.bytes)

    def resize(self, size: int) -> None:
        """Holds this many bytes; the first ones keep their content, and new ones hold anything."""
        if size != self.held:
            if size > self.held:
                size = max(size, self.held + self.held // 4)
            new = torch.empty(min(size, self.limit), dtype=torch.uint8, device=self.device)
            kept = min(len(new), self.held)
            new[:kept] = self.bytes[:kept]
            self.bytes, self.moves = new, self.moves + 1

    def close(self) -> None:
        """Frees everything; nothing may read it any more."""
        self.resize(0)


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _Flags(ctypes.Structure):
    _fields_ = [
        ("compression", ctypes.c_ubyte),
        ("rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    ]


class _Properties(ctypes.Structure):
    """Mirrors CUDA's struct CUmemAllocationProp."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32", ctypes.c_void_p),
        ("flags", _Flags),
    ]


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]


class _Bytes:
    """Device memory as torch.as_tensor reads it."""

    def __init__(self, address: int, size: int) -> None:
        interface = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}
        self.__cuda_array_interface__ = interface


class MappedMemory(GrowingMemory):
    """Memory mapped into a reserved range of addresses: it never moves.

    Only the first `held` of its bytes may be touched. Args: driver: libcuda; see GrowingMemory for the others.
    Raises: RuntimeError: the driver refuses.
    """

    def __init__(self, limit: int, device: torch.device, driver: Any) -> None:
        super().__init__(limit, device)
        self._driver = driver
        location = _Location(1, device.index or 0)  # CU_MEM_LOCATION_TYPE_DEVICE
        self._properties = _Properties(1, 0, location, None, _Flags())  # CU_MEM_ALLOCATION_TYPE_PINNED
        self._access = _Access(location, 3)  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        step = ctypes.c_size_t()
        self._call("cuMemGetAllocationGranularity", ctypes.byref(step), ctypes.byref(self._properties), 0)
        self._step = step.value
        self.limit = -(-limit // self._step) * self._step
        address, zero = ctypes.c_uint64(), ctypes.c_uint64(0)
        self._call(
            "cuMemAddressReserve", ctypes.byref(address), ctypes.c_size_t(self.limit), ctypes.c_size_t(0), zero, zero
        )
        self._address = address.value
        self._parts: list[tuple[int, int]] = []
        """Size and handle of each part, in order."""
        try:
            self.resize(self._step)  # an address without memory is no device memory to torch
            self.bytes = torch.as_tensor(_Bytes(self._address, self.limit), device=device)
        except Exception:
            self.close()
            raise

    @property
    def held(self) -> int:
        """Bytes of memory."""
        return sum(size for size, _ in self._parts)

    def resize(self, size: int) -> None:
        """Holds at least this many bytes; what lies above may be given back to the driver."""
        held, size = self.held, min(size, self.limit)
        if size > held:
            more = max(size - held, min(CHUNK, self.limit - held))
            self._map(held, -(-more // self._step) * self._step)
        elif self._parts and held - self._parts[-1][0] >= size:
            if torch.cuda.is_available():
                torch.cuda.synchronize(self.device)  # kernels may still read it
            while self._parts and self.held - self._parts[-1][0] >= size:
                self._unmap()

    def _map(self, offset: int, size: int) -> None:
        """Puts new memory behind the addresses from offset on."""
        handle, address = ctypes.c_uint64(), ctypes.c_uint64(self._address + offset)
        create = ("cuMemCreate", ctypes.byref(handle), ctypes.c_size_t(size), ctypes.byref(self._properties))
        code = self._driver.cuMemCreate(*create[1:], ctypes.c_uint64(0))
        if code == OUT_OF_MEMORY:
            torch.cuda.empty_cache()
            code = self._driver.cuMemCreate(*create[1:], ctypes.c_uint64(0))
        if code == OUT_OF_MEMORY:
            raise torch.OutOfMemoryError(f"CUDA out of memory: {size / 2**20:.0f} MiB more for the KV cache")
        _check(create[0], code)
        size_t, zero = ctypes.c_size_t(size), ctypes.c_uint64(0)
        self._call("cuMemMap", address, size_t, ctypes.c_size_t(0), handle, zero)
        self._parts.append((size, handle.value))
        self._call("cuMemSetAccess", address, size_t, ctypes.byref(self._access), ctypes.c_size_t(1))

    def _unmap(self) -> None:
        """Gives the last part back."""
        size, handle = self._parts.pop()
        self._call("cuMemUnmap", ctypes.c_uint64(self._address + self.held), ctypes.c_size_t(size))
        self._call("cuMemRelease", ctypes.c_uint64(handle))

    def close(self) -> None:
        """Gives memory and addresses back; nothing may read it any more."""
        if self._address:
            while self._parts:
                self._unmap()
            self._call("cuMemAddressFree", ctypes.c_uint64(self._address), ctypes.c_size_t(self.limit))
            self._address = 0

    def _call(self, name: str, *arguments: Any) -> None:
        _check(name, getattr(self._driver, name)(*arguments))


def _check(name: str, code: int) -> None:
    """Raises RuntimeError for another code than success."""
    if code:
        raise RuntimeError(f"{name} returned CUDA error {code}")


@functools.cache
def _driver() -> Any:
    """Returns CUDA's driver library. Raises OSError: there is none."""
    return ctypes.CDLL("libcuda.so.1")


@functools.cache
def _warn(reason: str) -> None:
    """Says once why addresses do not stay."""
    log.warning("the KV cache has no mapped memory, so CUDA graphs are captured anew after each update: %s", reason)


def make_memory(limit: int, device: torch.device) -> GrowingMemory:
    """Returns memory that stays at its address where the driver can map it, else ordinary memory."""
    if device.type == "cuda":
        try:
            driver, total = _driver(), torch.cuda.get_device_properties(device).total_memory
            return MappedMemory(min(limit, total), device, driver)
        except (OSError, AttributeError, RuntimeError) as error:
            _warn(format_exception(error))
    return GrowingMemory(limit, device)
