"""`PageMoves`: pages on their way between a GPU and host memory, on a stream of their own beside the steps.

A step waits only for the pages that are fetched for it, and, before it writes to a page, until a copy of that page to
the host is done. Never decides what moves. Next to read: host_pool.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain

import torch
from torch import Tensor

from headrace.engine.model.shared.host_pool import HostPool
from headrace.engine.model.shared.memory import borrow_stream, return_stream
from headrace.engine.scheduling.plan import PageEntry, StepPlan
from headrace.ops.cuda.memory import copies

__all__ = ["PageMoves"]


class PageMoves:
    """The page copies of one runner between its GPU and the host."""

    def __init__(self, pools: Sequence[Tensor], stream: torch.cuda.Stream, device: torch.device) -> None:
        """Start without copies.

        Args:
            pools: The pools of the paged cache.
            stream: The stream of the runner's steps.
            device: The GPU.
        """
        self._pools = pools
        self._stream = stream
        self._side = borrow_stream(device)
        self._hosts: tuple[HostPool, ...] = ()
        """Room on the host for pages of each pool."""
        self._leaving: dict[int, torch.cuda.Event] = {}
        """Event after which a page has left, for each page whose copy to the host may still run."""

    def open(self, places: int, pages: int, wait: Callable[[], None]) -> float:
        """Make room for `places` pages in pinned memory; return the seconds that moving one takes, as measured."""
        self._hosts = tuple(HostPool(pool, places, pinned=True) for pool in self._pools)
        return sum(host.measure(pool, pages, wait) for host, pool in self._each())

    def before(self, entries: Sequence[PageEntry]) -> None:
        """Have the next step, which gets these pages, wait until copies of them are done."""
        if self._leaving:
            self._wait_for(entry.page for entry in entries)

    def enqueue(self, plan: StepPlan) -> None:
        """Enqueue all moves and copies of `plan`, whose step is enqueued next."""
        writes = {entry.page for entry in plan.entries}
        writes.update(page for _, page in plan.copies)
        writes.update(page for _, page in plan.fetches)
        self._wait_for(writes)
        at_once = [pair for pair in plan.spills if pair[0] in writes]
        if at_once:
            with self._beside() as each:
                for host, pool in each:
                    host.spill(pool, at_once)
            self._stream.wait_stream(self._side)
        copies.copy_pages(self._pools, plan.copies)
        if plan.fetches:
            with self._beside() as each:
                for host, pool in each:
                    host.fetch(pool, plan.fetches)
            self._stream.wait_stream(self._side)
        if len(at_once) < len(plan.spills):
            later = [pair for pair in plan.spills if pair[0] not in writes]
            with self._beside() as each:
                for pages in chain.from_iterable(host.spills(pool, later) for host, pool in each):
                    left = torch.cuda.Event()
                    left.record(self._side)  # the last one of a page counts, behind its copies of all pools
                    self._leaving.update(dict.fromkeys(pages, left))

    def settle(self) -> None:
        """Wait until all copies are done."""
        self._side.synchronize()
        self._leaving.clear()

    def close(self) -> None:
        """Return the stream and the host's memory; no copy may be running."""
        return_stream(self._side)
        self._hosts = ()

    def _wait_for(self, writes: Iterable[int]) -> None:
        waited = {self._leaving[page] for page in writes if page in self._leaving}
        if waited:
            for left in waited:
                self._stream.wait_event(left)
            self._leaving = {page: left for page, left in self._leaving.items() if left not in waited}

    @contextlib.contextmanager
    def _beside(self) -> Iterator[Iterable[tuple[HostPool, Tensor]]]:
        """Enter the side stream, behind all that the runner's stream has enqueued so far; yield pools and rooms."""
        assert self._hosts
        self._side.wait_stream(self._stream)
        with torch.cuda.stream(self._side):
            yield self._each()

    def _each(self) -> Iterator[tuple[HostPool, Tensor]]:
        return zip(self._hosts, self._pools, strict=True)
