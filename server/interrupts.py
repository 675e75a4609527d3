"""`ending_at_once`: what SIGINT and SIGTERM do while a model is opened, by a thread that cannot be cancelled."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from rich.console import Console
from rich.control import Control
from rich.segment import ControlType

__all__ = ["ending_at_once"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_BY_SIGNAL = 128  # what shells add to a signal's number: 130 is Ctrl-C


@contextmanager
def ending_at_once(doing: str, console: Console) -> Iterator[None]:
    """End the process at SIGINT or SIGTERM with one line on stderr; do nothing where this is not the main thread.

    Nothing is lost that way: nobody is served yet, and a file that is being written gets its name when it is whole.

    Args:
        doing: What is interrupted, such as "opening small.gguf".
        console: Where a spinner may be drawn, which is removed.
    """

    def end(number: int, frame: FrameType | None) -> None:
        console.control(Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2), ControlType.SHOW_CURSOR))
        sys.stderr.write(f"headrace: interrupted while {doing}\n")
        sys.stderr.flush()
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
