"""How many threads torch uses in a thread of this process: asked and set so that no other thread is affected.

torch keeps one number for the process, which a thread takes over at its first look and then keeps. So setting it for
one thread means restoring it for those to come, and in between nobody else may look for the first time.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import torch

__all__ = ["default_threads", "torch_threads", "use_threads"]

_changing = threading.Lock()
"""Held while the process's number is meant for one thread alone."""


def torch_threads() -> int:
    """Return how many threads torch uses in the calling thread."""
    with _changing:
        return torch.get_num_threads()


def use_threads(count: int) -> None:
    """Have torch use `count` threads in the calling thread, and in threads to come as many as before."""
    with _changing, ThreadPoolExecutor(1, "headrace-torch") as fresh:
        later = fresh.submit(torch.get_num_threads).result()  # the process's number, since it looks for the first time
        torch.set_num_threads(count)
        torch.get_num_threads()  # the first look of a thread takes the process's number, which is `count` now
        fresh.submit(torch.set_num_threads, later).result()


def default_threads() -> int:
    """Return all threads that torch would use but one: the event loop and the engine's threads need a core, too."""
    return max(1, torch_threads() - 1)
