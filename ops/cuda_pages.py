"""`PageMemory`: pages of all layers at addresses that never change, of which as many have memory as are wanted.

Owns a range of the device's addresses and the memory behind it, through CUDA's driver; never reads or writes a key or
value. Graphs keep the addresses that they were captured with, so that pages can come and go without a new capture.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["PageMemory"]

_PIECES = 32  # in which a layer's new memory comes, and can be given back
_OUT_OF_MEMORY = 2
_PINNED = _DEVICE = 1  # kinds of memory and of places
_READ_WRITE = 3


class _Place(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int), ("number", ctypes.c_int))


class _Properties(ctypes.Structure):
    """As `CUmemAllocationProp`."""

    _fields_ = (
        ("kind", ctypes.c_int),
        ("handles", ctypes.c_int),
        ("place", _Place),
        ("windows", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    """As `CUmemAccessDesc`."""

    _fields_ = (("place", _Place), ("flags", ctypes.c_int))


class _Driver:
    """Ranges of addresses on a device and memory behind parts of them, in bytes."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")

    def grain(self, device: torch.device) -> int:
        """What addresses and sizes of memory are multiples of."""
        found = ctypes.c_size_t()
        self._call("cuMemGetAllocationGranularity", ctypes.byref(found), ctypes.byref(_properties(device)), 0)
        return found.value

    def reserve(self, size: int) -> int:
        """A range of addresses without memory."""
        address = ctypes.c_uint64()
        nothing = ctypes.c_uint64(0)
        self._call(
            "cuMemAddressReserve", ctypes.byref(address), ctypes.c_size_t(size), ctypes.c_size_t(0), nothing, nothing
        )
        return address.value

    def back(self, address: int, size: int, device: torch.device) -> None:
        """Put memory behind a part of a range."""
        handle, length, zero = ctypes.c_uint64(), ctypes.c_size_t(size), ctypes.c_uint64(0)
        properties = _properties(device)
        self._call("cuMemCreate", ctypes.byref(handle), length, ctypes.byref(properties), zero)
        try:
            self._call("cuMemMap", ctypes.c_uint64(address), length, ctypes.c_size_t(0), handle, zero)
        finally:
            self._call("cuMemRelease", handle)  # what is mapped stays until it is not
        access = _Access(properties.place, _READ_WRITE)
        try:
            self._call("cuMemSetAccess", ctypes.c_uint64(address), length, ctypes.byref(access), ctypes.c_size_t(1))
        except BaseException:
            self.unback(address, size)
            raise

    def unback(self, address: int, size: int) -> None:
        """Give back memory that one call of `back` put there; nothing on the device may use it any more."""
        self._call("cuMemUnmap", ctypes.c_uint64(address), ctypes.c_size_t(size))

    def free(self, address: int, size: int) -> None:
        """Give back a range that has no memory."""
        self._call("cuMemAddressFree", ctypes.c_uint64(address), ctypes.c_size_t(size))

    def tensor(self, owner: _Range, device: torch.device) -> Tensor:
        """uint8: the whole range; the tensor keeps `owner` alive."""
        return torch.as_tensor(owner, device=device)

    def settle(self, device: torch.device) -> None:
        """Wait until the device does nothing."""
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


class _Range:
    """Addresses, and the parts of them that have memory; given back by `close`, or with the last tensor over them."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._device, self._parts = device, set[tuple[int, int]]()
        self.address = _driver().reserve(size)
        whole = {"shape": (size,), "typestr": "|u1", "data": (self.address, False), "version": 3}
        self.__cuda_array_interface__ = whole
        self.close = weakref.finalize(self, _give_back, self.address, size, self._parts, device)
        self.close.atexit = False

    def back(self, start: int, size: int) -> None:
        """Put memory behind a part; what torch keeps for later is given back if need be.

        Raises:
            torch.OutOfMemoryError: The device has not so much.
        """
        try:
            _driver().back(self.address + start, size, self._device)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            _driver().back(self.address + start, size, self._device)
        self._parts.add((self.address + start, size))

    def unback(self, start: int, size: int) -> None:
        """Undo a `back`."""
        self._parts.remove((self.address + start, size))
        _driver().unback(self.address + start, size)


def _give_back(address: int, size: int, parts: set[tuple[int, int]], device: torch.device) -> None:
    driver = _driver()
    with contextlib.suppress(RuntimeError):  # a device that failed takes nothing back
        driver.settle(device)
        for part in parts:
            driver.unback(*part)
        driver.free(address, size)


class PageMemory:
    """Pages of all layers, and one more page for rows that pad a batch."""

    def __init__(
        self, layers: int, page_shape: Sequence[int], dtype: torch.dtype, num_pages: int, device: torch.device
    ) -> None:
        """Reserve addresses for as many pages as the whole device could hold, and memory for `num_pages`.

        Args:
            layers: Layers of the model.
            page_shape: Of a page in one layer.
            dtype: Of keys and values.
            num_pages: As for `resize`.
            device: The GPU.

        Raises:
            torch.OutOfMemoryError: It has not so much memory.
        """
        self._layers, self._page = layers, math.prod(page_shape) * dtype.itemsize
        self._grain = _driver().grain(device)
        self.most_pages = torch.cuda.mem_get_info(device)[1] // (layers * self._page)
        """That `resize` may ever be asked for."""
        below = self._whole(self.most_pages * self._page)
        self.scratch_page = -(-below // self._page)
        """Number of the page that is always there beside the others."""
        self._span = self._whole((self.scratch_page + 1) * self._page)
        self._ends = [0, self._grain]
        """Where pieces of memory end, in every layer."""
        self._range = _Range(layers * self._span, device)
        self._back(*self._ends)
        self._back(below, self._span)
        self._bytes = _driver().tensor(self._range, device)  # torch asks whose memory its first byte is
        strides = [self._page // dtype.itemsize]
        for size in page_shape:
            strides.append(strides[-1] // size)
        self.kv = self._bytes.view(dtype).as_strided(
            (layers, self.scratch_page + 1, *page_shape), (self._span // dtype.itemsize, *strides)
        )
        """[layers, pages, *page_shape]; only pages below the number wanted last have memory, and the scratch page."""
        self._clear(*self._ends)
        self._clear(below, self._span)
        self.resize(num_pages)

    def resize(self, num_pages: int) -> None:
        """Have memory for pages 0 .. num_pages; new memory is zero, pages that stay are untouched.

        Only whole pieces are given back: up to a 32nd of what an earlier call added may stay.

        Raises:
            torch.OutOfMemoryError: There is not so much; all is as it was.
        """
        if num_pages > self.most_pages:
            raise torch.OutOfMemoryError(f"{num_pages} pages are more than the device's {self.most_pages}")
        before, wanted = self._ends[-1], num_pages * self._page
        piece = self._whole((wanted - before) // _PIECES)
        try:
            while self._ends[-1] < wanted:
                start = self._ends[-1]
                end = start + min(piece, self._whole(wanted - start))
                self._back(start, end)
                self._ends.append(end)
                self._clear(start, end)
        except torch.OutOfMemoryError:
            wanted = before
            raise
        finally:
            while len(self._ends) > 2 and self._ends[-2] >= wanted:
                end = self._ends.pop()
                self._unback(self._ends[-1], end, self._layers)

    def close(self) -> None:
        """Give back everything; nobody may touch a page any more, whoever still has a tensor over them."""
        self._range.close()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _whole(self, size: int) -> int:
        """The least size of memory that is no less."""
        return max(1, -(-size // self._grain)) * self._grain

    def _back(self, start: int, end: int) -> None:
        """Put memory behind the same part of every layer, or of none."""
        for layer in range(self._layers):
            try:
                self._range.back(layer * self._span + start, end - start)
            except BaseException:
                self._unback(start, end, layer)
                raise

    def _unback(self, start: int, end: int, layers: int) -> None:
        for layer in range(layers):
            self._range.unback(layer * self._span + start, end - start)

    def _clear(self, start: int, end: int) -> None:
        for layer in range(self._layers):
            self._bytes[layer * self._span + start : layer * self._span + end].zero_()
