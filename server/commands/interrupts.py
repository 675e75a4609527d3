"""`ending_at_once`: ends the process at SIGINT or SIGTERM while a thread that cannot be cancelled opens a model."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.control import Control
from rich.segment import ControlType

__all__ = ["ending_at_once"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_BY_SIGNAL = 128  # shells add it to a signal's number: 130 is Ctrl-C


@contextmanager
def ending_at_once(doing: str, console: Console) -> Iterator[None]:
    """End the process at SIGINT or SIGTERM with one line on stderr; do nothing where this is not the main thread.

    Nothing is lost that way: nobody is served yet, and a file that is being written gets its name when it is whole.
    What the process has started, such as compilers of kernels, ends with it.

    Args:
        doing: The activity that is interrupted, such as "opening small.gguf".
        console: Console on which a spinner may be drawn; it is removed.
    """

    def end(number: int, frame: FrameType | None) -> None:
        console.control(Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2), ControlType.SHOW_CURSOR))
        sys.stderr.write(f"headrace: interrupted while {doing}\n")
        sys.stderr.flush()
        _kill_descendants()
        os._exit(_BY_SIGNAL + number)

    caught = _SIGNALS if threading.current_thread() is threading.main_thread() else ()
    before = {number: handler for number in caught if (handler := signal.getsignal(number)) is not signal.SIG_IGN}
    for number in before:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _kill_descendants() -> None:
    """Kill all processes that this one has started, and those that they have started."""
    sys.setswitchinterval(60.0)  # no other thread sees that a compiler has ended and starts the next one
    found, new = set[int](), _started_by({os.getpid()})
    while new:
        for process in new:  # a stopped process starts nothing while others are looked for
            _signal(process, signal.SIGSTOP)
        found |= new
        new = _started_by({os.getpid(), *found}) - found
    for process in found:
        _signal(process, signal.SIGKILL)


def _started_by(parents: set[int]) -> set[int]:
    """Return the ids of the processes whose parent is one of `parents`."""
    found = set[int]()
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # the process has ended meanwhile
            parent = status.read_text(errors="replace").rpartition(")")[2].split()[1]
            if int(parent) in parents:
                found.add(int(status.parent.name))
    return found


def _signal(process: int, number: signal.Signals) -> None:
    with suppress(OSError):  # the process has ended, or runs as another user
        os.kill(process, number)
