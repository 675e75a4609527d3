"""What a test leaves behind: threads and open files of its own, whatever its neighbours in the process do meanwhile.

Threads of an earlier test may still be ending, so that their number says nothing. A test that looks after its threads
takes a `Threads` first, which knows those that are there already, and counts only those that start from then on. What
has no identity, such as memory, is measured after `settle`, which waits for what earlier tests left.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

__all__ = ["Threads", "open_files", "settle", "wait_until"]

_PATIENCE = 20.0
_STILL = 0.1  # seconds without a change, after which nothing more is expected to end


class Threads:
    """The threads that start after this was made and whose name begins with `named`."""

    def __init__(self, named: str = "headrace") -> None:
        """Know the threads that are there already; they do not count, and may end whenever they do."""
        self._before = set(threading.enumerate())
        self._named = named

    def running(self) -> list[threading.Thread]:
        """Return those that have not ended yet."""
        alive = threading.enumerate()
        return [thread for thread in alive if thread not in self._before and thread.name.startswith(self._named)]

    def check_ended(self) -> None:
        """Wait until all have ended, and fail if one does not."""
        wait_until(lambda: not self.running(), lambda: f"threads were left behind: {self.running()}")


def wait_until(condition: Callable[[], object], complaint: Callable[[], str]) -> None:
    """Block until `condition` holds, and fail with `complaint` if it does not come to that."""
    deadline = time.monotonic() + _PATIENCE
    while not condition():
        assert time.monotonic() < deadline, complaint()
        time.sleep(0.001)


def open_files(below: Path) -> set[str]:
    """Return the paths of the files below a folder that this process has open."""
    found = set()
    for link in Path("/proc/self/fd").iterdir():
        try:
            target = str(link.readlink())
        except FileNotFoundError:  # the listing's own descriptor, or one that another thread has just closed
            continue
        if target.startswith(f"{below.resolve()}/"):
            found.add(target)
    return found


def settle() -> None:
    """Return once what earlier tests left has ended: no thread and no descriptor comes or goes for a tenth of a second.

    It returns after 20 seconds at the latest: what goes on for longer belongs to the process.
    """
    gc.collect()
    deadline = time.monotonic() + _PATIENCE
    seen, since = _state(), time.monotonic()
    while time.monotonic() < min(since + _STILL, deadline):
        time.sleep(0.01)
        if (now := _state()) != seen:
            seen, since = now, time.monotonic()


def _state() -> tuple[set[threading.Thread], int]:
    return set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
