"""Free memory for keys and values, and the return of what a closed engine held; never allocates memory for a model.

Streams are returned, too: cuBLAS keeps a workspace for each stream that it ever ran on, so engines opened one after
another must use the same ones.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import torch

__all__ = [
    "borrow_stream",
    "free_host_bytes",
    "return_device_memory",
    "return_freed_memory",
    "return_stream",
    "returned_if_short",
]

_idle_streams: list[torch.cuda.Stream] = []
_borrowing = threading.Lock()

_CONTROL_GROUP = Path("/sys/fs/cgroup")


def free_host_bytes() -> int:
    """Return the bytes of host memory that can be used without swapping, within this process's control group."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
    limit, used = _number("memory.max"), _number("memory.current")
    if limit is None or used is None:
        return free
    return max(0, min(free, limit - used + _cached_files()))


def return_freed_memory() -> None:
    """Return the free memory that malloc keeps to the system; do nothing if the C library is not glibc.

    This takes some tens of milliseconds after a model was dropped. Memory in use is not affected.
    """
    try:
        trim = ctypes.CDLL(None).malloc_trim  # releases the GIL while it runs
    except (AttributeError, OSError):  # another C library
        return
    trim(ctypes.c_size_t(0))


def return_device_memory() -> None:
    """Return the free device memory that torch keeps to the system; do nothing on a device that failed."""
    gc.collect()  # FlashInfer's wrappers hold themselves in cycles
    with contextlib.suppress(torch.AcceleratorError):
        torch.cuda.empty_cache()
        if torch.accelerator.is_available():
            # torch 2.13 has a public name for this
            getattr(torch.accelerator, "empty_host_cache", getattr(torch._C, "_host_emptyCache", gc.collect))()


def borrow_stream(device: torch.device) -> torch.cuda.Stream:
    """Return a stream on `device` for one user until `return_stream`."""
    with _borrowing:
        for at, stream in enumerate(_idle_streams):
            if stream.device == device:
                return _idle_streams.pop(at)
    return torch.cuda.Stream(device)


def return_stream(stream: torch.cuda.Stream) -> None:
    """Make a stream, on which nothing runs any more, available to other users."""
    _idle_streams.append(stream)


@contextlib.contextmanager
def returned_if_short(stream: torch.cuda.Stream) -> Iterator[None]:
    """Return `stream` if the device runs out of memory in the block."""
    try:
        yield
    except torch.OutOfMemoryError:
        stream.synchronize()
        return_stream(stream)
        raise


def _number(name: str) -> int | None:
    try:
        return int((_CONTROL_GROUP / name).read_text())
    except (OSError, ValueError):  # no such control group, or "max"
        return None


def _cached_files() -> int:
    """Return the bytes of cached files that a control group counts as used; the system reclaims them when it must."""
    try:
        figures = dict(line.split() for line in (_CONTROL_GROUP / "memory.stat").read_text().splitlines())
        return int(figures["inactive_file"]) + int(figures["active_file"])
    except (OSError, ValueError, KeyError):
        return 0
