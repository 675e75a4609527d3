"""`Overtaking`: which waiting requests must wait for their adapter, so that none waits for ever; moves nothing itself.

A request whose adapter is on the device may overtake one whose adapter finds no slot: batches reuse what is there. It
may do so only so often: then no further adapter is put on, and those that rows wear are closed to newcomers, one after
another from that of the fewest rows, until whoever waits longest has room. A large one may need several to go.
"""

from __future__ import annotations

from collections.abc import Set

from headrace.adapters.slots import AdapterVersion, Replacing, Residency, SlotTable
from headrace.engine.scheduling.request import Request, State

__all__ = ["Overtaking"]


class Overtaking:
    """Admission's view of the slots."""

    def __init__(self, slots: SlotTable, patience: int) -> None:
        """Let the first request that finds no slot be overtaken `patience` times."""
        self._slots = slots
        self._patience = patience
        self._eldest: Request | None = None
        """The first in order that found no room."""
        self._met = False
        """Whether this look through the queue has come past it."""
        self._overtaken = 0
        self._urgent = False
        """Whether it has waited long enough."""
        self._closed: set[AdapterVersion] = set()

    @property
    def closed(self) -> Set[AdapterVersion]:
        """Adapters that take no newcomers: whoever holds a row of one without using it should give way."""
        return self._closed

    def begin(self, *, idle: bool) -> None:
        """A look through the queue begins; `idle` where nothing runs that could give a slot back."""
        if self._eldest is not None and self._eldest.state is not State.WAITING:
            self._forget()
        self._met = False
        self._urgent = self._eldest is not None and (idle or self._overtaken > self._patience)
        active = self._slots.active
        if self._urgent and active and self._closed.isdisjoint(active):
            self._closed.add(min(active, key=lambda version: version.holders))

    def may_start(self, request: Request) -> bool:
        """Whether the device has what `request` wears; if not, it is fetched as soon as there is room.

        Nothing is fetched past one that found no room: it would take what comes free.
        """
        version = request.wears
        if version is None:
            return True
        if self._slots.ready(version) and not (self._met and self._is_closed(version)):
            return True
        if self._met:
            return False
        if self._finds_room(version):
            if request is self._eldest:
                self._forget()
            return False
        self._eldest = request  # of two that change places in the order, neither begins to count anew
        self._met = True
        return False

    def starts(self, request: Request) -> None:
        """`request` is given a row."""
        if request is self._eldest:
            self._forget()
        elif self._met and request.wears is not None:
            self._overtaken += 1

    def _finds_room(self, version: AdapterVersion) -> bool:
        """Whether it comes to the device without another adapter's rows being done first."""
        if version.residency is Residency.RESIDENT:
            return False
        if self._slots.fetch(version):
            return True
        return self._urgent and not self._slots.active and self._slots.fetch(version, Replacing.PINNED)

    def _is_closed(self, version: AdapterVersion) -> bool:
        """Whether a newcomer would take, or keep, what the one that has waited long enough is to get."""
        return version in self._closed or (self._urgent and not version.holders)

    def _forget(self) -> None:
        self._eldest = None
        self._overtaken = 0
        self._closed.clear()
