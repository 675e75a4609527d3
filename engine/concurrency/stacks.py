"""Shows what every thread is doing, for the log when something hangs; stops none."""

from __future__ import annotations

import sys
import threading
import traceback

__all__ = ["stacks"]


def stacks() -> str:
    """Return the stack of every other thread of the process as lines of code, without values."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames()
    frames.pop(threading.get_ident(), None)
    parts = [f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frames[ident]))}" for ident in frames]
    return "\n".join(parts)
