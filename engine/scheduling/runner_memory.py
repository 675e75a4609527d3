"""Optional protocols of runners: those that keep pages in host memory, change how many they have, or sleep.

A runner without them serves as well, with the memory that it opened with. Next to read: memory/resizing.py.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

__all__ = ["Resizable", "Sleeping", "Swapping"]


@runtime_checkable
class Swapping(Protocol):
    """A runner that can also keep pages in host memory: it carries out the spills and fetches of a plan."""

    def open_host_pool(self, places: int) -> float:
        """Allocate host memory for `places` pages; called once, before the first launch.

        Returns:
            Seconds that moving one page takes, one way.

        Raises:
            Exception: The host does not have that much memory.
        """
        ...


@runtime_checkable
class Resizable(Protocol):
    """A runner whose number of pages may change while it lives."""

    @property
    def most_pages(self) -> int:
        """Largest number of pages that the runner can hold."""
        ...

    def resize(self, num_pages: int) -> None:
        """Have pages 0 to `num_pages` - 1, and free the memory of any others; blocks for some milliseconds.

        No step is in flight, and nobody holds a page from `num_pages` on. Pages that stay keep their content.

        Raises:
            Exception: The device is out of memory; nothing has changed.
        """
        ...


@runtime_checkable
class Sleeping(Protocol):
    """A runner that can free its memory for a while. Its methods are called with no step in flight."""

    def sleep(self, *, keep_weights: bool) -> None:
        """Free the memory of all pages and of the weights; blocks. May be called again, to keep less.

        Args:
            keep_weights: Keep the weights in host memory, copying them there if necessary.

        Raises:
            Exception: The host is out of memory; `wake` still works.
        """
        ...

    def wake(self, num_pages: int) -> None:
        """Load the weights again, from wherever they are, and allocate `num_pages` empty pages; blocks.

        Raises:
            ModelRejected: The model's files can no longer be used; the runner stays asleep.
            Exception: The device is out of memory; the runner stays asleep.
        """
        ...
