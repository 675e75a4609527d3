"""`AddressRange`: a range of addresses on a device that never change, of which parts have memory as needed.

Calls CUDA's driver and nothing else; never reads or writes the memory. Next to read: pages.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import weakref
from typing import Any

import torch
from torch import Tensor

__all__ = ["AddressRange", "memory_grain"]

_OUT_OF_MEMORY = 2
_PINNED = _DEVICE = 1  # CUDA's numbers for the kind of memory and of place
_READ_WRITE = 3


class _Place(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int), ("number", ctypes.c_int))


class _Properties(ctypes.Structure):
    """Python form of `CUmemAllocationProp`."""

    _fields_ = (
        ("kind", ctypes.c_int),
        ("handles", ctypes.c_int),
        ("place", _Place),
        ("windows", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    """Python form of `CUmemAccessDesc`."""

    _fields_ = (("place", _Place), ("flags", ctypes.c_int))


class _Driver:
    """CUDA driver calls for ranges of addresses on a device and memory behind parts of them, in bytes."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")

    def grain(self, device: torch.device) -> int:
        """Return the unit of addresses and sizes of memory."""
        found = ctypes.c_size_t()
        self._call("cuMemGetAllocationGranularity", ctypes.byref(found), ctypes.byref(_properties(device)), 0)
        return found.value

    def reserve(self, size: int) -> int:
        """Reserve a range of addresses without memory; return the first."""
        address = ctypes.c_uint64()
        nothing = ctypes.c_uint64(0)
        self._call(
            "cuMemAddressReserve", ctypes.byref(address), ctypes.c_size_t(size), ctypes.c_size_t(0), nothing, nothing
        )
        return address.value

    def back(self, address: int, size: int, device: torch.device) -> None:
        """Map new memory to a part of a range."""
        handle, length, zero = ctypes.c_uint64(), ctypes.c_size_t(size), ctypes.c_uint64(0)
        properties = _properties(device)
        self._call("cuMemCreate", ctypes.byref(handle), length, ctypes.byref(properties), zero)
        try:
            self._call("cuMemMap", ctypes.c_uint64(address), length, ctypes.c_size_t(0), handle, zero)
        finally:
            self._call("cuMemRelease", handle)  # the memory stays until it is unmapped
        access = _Access(properties.place, _READ_WRITE)
        try:
            self._call("cuMemSetAccess", ctypes.c_uint64(address), length, ctypes.byref(access), ctypes.c_size_t(1))
        except BaseException:
            self.unback(address, size)
            raise

    def unback(self, address: int, size: int) -> None:
        """Release the memory that one call of `back` mapped; nothing on the device may use it any more."""
        self._call("cuMemUnmap", ctypes.c_uint64(address), ctypes.c_size_t(size))

    def free(self, address: int, size: int) -> None:
        """Release a range that has no memory."""
        self._call("cuMemAddressFree", ctypes.c_uint64(address), ctypes.c_size_t(size))

    def tensor(self, owner: AddressRange, device: torch.device) -> Tensor:
        """Return the whole range as uint8; the tensor keeps `owner` alive."""
        return torch.as_tensor(owner, device=device)

    def settle(self, device: torch.device) -> None:
        """Wait until the device is idle."""
        torch.cuda.synchronize(device)

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status == _OUT_OF_MEMORY:
            raise torch.OutOfMemoryError(f"{name}: the device has not so much memory left")
        if status:
            raise RuntimeError(f"{name} failed with CUDA error {status}")


@functools.cache
def _driver() -> _Driver:
    return _Driver()


def _properties(device: torch.device) -> _Properties:
    return _Properties(kind=_PINNED, place=_Place(_DEVICE, device.index or 0))


class AddressRange:
    """Range of addresses, parts of which have memory; released by `close`, or with the last tensor over it."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._device, self._parts = device, set[tuple[int, int]]()
        self.address = _driver().reserve(size)
        whole = {"shape": (size,), "typestr": "|u1", "data": (self.address, False), "version": 3}
        self.__cuda_array_interface__ = whole
        self.close = weakref.finalize(self, _give_back, self.address, size, self._parts, device)
        self.close.atexit = False

    def tensor(self) -> Tensor:
        """Return the whole range as uint8, which keeps this object alive. The first byte must have memory by then."""
        return _driver().tensor(self, self._device)  # torch looks up the device of the first byte

    def settle(self) -> None:
        """Wait until the device is idle."""
        _driver().settle(self._device)

    def back(self, start: int, size: int) -> None:
        """Map new memory to a part; if there is too little, release what torch keeps for later and try again.

        Raises:
            torch.OutOfMemoryError: The device has too little memory.
        """
        try:
            _driver().back(self.address + start, size, self._device)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            _driver().back(self.address + start, size, self._device)
        self._parts.add((self.address + start, size))

    def unback(self, start: int, size: int) -> None:
        """Release the memory that one call of `back` mapped."""
        self._parts.remove((self.address + start, size))
        _driver().unback(self.address + start, size)


def memory_grain(device: torch.device) -> int:
    """Return the unit of starts and sizes of parts of a range, in bytes."""
    return _driver().grain(device)


def _give_back(address: int, size: int, parts: set[tuple[int, int]], device: torch.device) -> None:
    driver = _driver()
    with contextlib.suppress(RuntimeError):  # a device that failed releases nothing
        driver.settle(device)
        for part in parts:
            driver.unback(*part)
        driver.free(address, size)
