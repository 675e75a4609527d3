"""How much memory is free for keys and values; reads what the system says and allocates nothing."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["free_host_bytes"]


def free_host_bytes() -> int:
    """Bytes of host memory that can be taken without swapping, within this process's control group."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
    limit, used = (_number(f"/sys/fs/cgroup/memory.{name}") for name in ("max", "current"))
    return free if limit is None or used is None else max(0, min(free, limit - used))


def _number(path: str) -> int | None:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):  # no such control group, or "max"
        return None
