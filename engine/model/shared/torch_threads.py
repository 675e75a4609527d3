"""Gets and sets how many threads torch uses in one thread of this process, without effect on other threads.

torch keeps one number for the process, which a thread copies at its first use and then keeps. To set it for one thread
alone, the process's number is restored afterwards, and no other thread may use torch for the first time in between.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import torch

__all__ = ["default_threads", "torch_threads", "use_threads"]

_changing = threading.Lock()
"""Lock held while the process's number is meant for one thread alone."""


def torch_threads() -> int:
    """Return how many threads torch uses in the calling thread."""
    with _changing:
        return torch.get_num_threads()


def use_threads(count: int) -> None:
    """Have torch use `count` threads in the calling thread, and as many as before in threads that start later."""
    with _changing, ThreadPoolExecutor(1, "headrace-torch") as fresh:
        later = fresh.submit(torch.get_num_threads).result()  # the process's number: this thread is new
        torch.set_num_threads(count)
        torch.get_num_threads()  # at its first use, a thread copies the process's number, which is `count` now
        fresh.submit(torch.set_num_threads, later).result()


def default_threads() -> int:
    """Return all threads that torch would use except one: the event loop and the engine's threads need a core, too."""
    return max(1, torch_threads() - 1)
