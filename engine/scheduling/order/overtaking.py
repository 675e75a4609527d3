"""`Overtaking` decides which requests must wait for a LoRA slot, so that none waits for ever; it moves nothing itself.

A request whose adapter is on the device may overtake one whose adapter finds no slot, so that batches reuse adapters.
After too many overtakings no further adapter is loaded, and adapters in use are closed to new requests, one after
another from the one with the fewest rows, until the longest waiting request has room. A large adapter may need several
slots to be freed.
"""

from __future__ import annotations

from collections.abc import Set

from headrace.adapters.slots import AdapterVersion, Replacing, Residency, SlotTable
from headrace.engine.scheduling.request import Request, State

__all__ = ["Overtaking"]


class Overtaking:
    """Admission's view of the LoRA slots."""

    def __init__(self, slots: SlotTable, patience: int) -> None:
        """Let the first request that finds no slot be overtaken `patience` times."""
        self._slots = slots
        self._patience = patience
        self._first: Request | None = None
        """First request in order whose adapter found no room."""
        self._met = False
        """Whether the current pass through the queue has come past that request."""
        self._overtaken = 0
        self._urgent = False
        """Whether that request has waited long enough to close adapters for it."""
        self._closed: set[AdapterVersion] = set()

    @property
    def closed(self) -> Set[AdapterVersion]:
        """Adapters that take no new requests; a paused request that holds a row of one should be preempted."""
        return self._closed

    def begin(self, *, idle: bool) -> None:
        """Begin a pass through the queue; `idle` if nothing runs that could free a slot."""
        if self._first is not None and self._first.state is not State.WAITING:
            self._forget()
        self._met = False
        self._urgent = self._first is not None and (idle or self._overtaken > self._patience)
        active = self._slots.active
        if self._urgent and active and self._closed.isdisjoint(active):
            self._closed.add(min(active, key=lambda version: version.holders))

    def may_start(self, request: Request) -> bool:
        """Return whether the device has the adapter of `request`; if not, it is fetched as soon as there is room.

        Nothing is fetched after a request that found no room, since it would take the next slot that is freed.
        """
        version = request.asked.version
        if version is None:
            return True
        if self._slots.ready(version) and not (self._met and self._is_closed(version)):
            return True
        if self._met:
            return False
        if self._finds_room(version):
            if request is self._first:
                self._forget()
            return False
        self._first = request  # if two requests change places in the order, the count continues
        self._met = True
        return False

    def starts(self, request: Request) -> None:
        """Take note that `request` is given a row."""
        if request is self._first:
            self._forget()
        elif self._met and request.asked.version is not None:
            self._overtaken += 1

    def _finds_room(self, version: AdapterVersion) -> bool:
        """Start to fetch an adapter if it fits without waiting for the rows of others; return whether it does."""
        if version.residency is Residency.RESIDENT:
            return False
        if self._slots.fetch(version):
            return True
        return self._urgent and not self._slots.active and self._slots.fetch(version, Replacing.PINNED)

    def _is_closed(self, version: AdapterVersion) -> bool:
        """Return whether a new request would take, or keep, the slot that the longest waiting one needs."""
        return version in self._closed or (self._urgent and not version.holders)

    def _forget(self) -> None:
        self._first = None
        self._overtaken = 0
        self._closed.clear()
