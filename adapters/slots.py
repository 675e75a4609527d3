"""`SlotTable`: the adapters on the device, their places, and which may be evicted; pure, counts and never waits.

A device has LoRA slots, which rows name, and memory in granules, of which an adapter takes as many as it needs, side by
side. Whoever calls `take_moves` carries out what the table decided and reports back with `arrived` or `failed`. Next to
read: engine/scheduling/order/overtaking.py.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum, IntEnum, auto
from typing import NamedTuple

__all__ = ["AdapterVersion", "Move", "Replacing", "Residency", "SlotTable"]


class Residency(Enum):
    """The state of an adapter's weights on the device."""

    ABSENT = auto()
    LOADING = auto()
    """The adapter has a slot and granules, which are being filled."""
    RESIDENT = auto()


class Replacing(IntEnum):
    """The adapters that may be evicted for one that is to be fetched; each value includes those above it."""

    NOTHING = auto()
    UNWANTED = auto()
    """Adapters that no request waits for."""
    IDLE = auto()
    """Adapters that no row uses."""
    PINNED = auto()
    """Adapters that no row uses, even those that somebody asked to keep."""


@dataclass(slots=True, eq=False, kw_only=True, weakref_slot=True)
class AdapterVersion:
    """One content that was loaded under some name; a name that is loaded again gets another version."""

    digest: bytes
    granules: int
    """Granules of the device's memory that the adapter takes."""
    virtual_tokens: int = 0
    residency: Residency = Residency.ABSENT
    slot: int = -1
    start: int = -1
    """The first of the adapter's granules; -1 while it has none."""
    users: int = 0
    """Requests with this adapter that have not ended."""
    holders: int = 0
    """Requests with this adapter that hold a row."""
    pins: int = 0
    """Requests to keep the adapter on the device that were not withdrawn."""
    retired: bool = False
    """Whether no name stands for the version any more, so that it leaves with its last user."""


class Move(NamedTuple):
    """Fill a slot with a version, or empty it."""

    slot: int
    start: int
    version: AdapterVersion | None


class SlotTable:
    """The slots of one device. Adapters that rows use stay; the others are evicted least recently used first."""

    def __init__(
        self,
        slots: int = 0,
        granules: int = 0,
        *,
        most_active: int | None = None,
        most_active_granules: int | None = None,
    ) -> None:
        """Start empty.

        Args:
            slots: Number of adapters that may be on the device.
            granules: Memory of the device for adapters, in granules.
            most_active: Different adapters that rows may use at a time; None: as many as there are slots.
            most_active_granules: Memory of the adapters that rows use, which every step reads, in granules; one adapter
                alone may be larger. None: any.
        """
        self.slots = slots
        self.granules = granules
        self.most_active = slots if most_active is None else min(most_active, slots)
        self.most_active_granules = granules if most_active_granules is None else most_active_granules
        self._free = list(range(slots - 1, -1, -1))
        self._placed: OrderedDict[AdapterVersion, None] = OrderedDict()
        """Versions that have a slot, least recently used first."""
        self._moves: list[Move] = []

    @property
    def active(self) -> list[AdapterVersion]:
        """Adapters that rows use, least recently used first."""
        return [version for version in self._placed if version.holders]

    def take_moves(self) -> list[Move]:
        """Return the moves to carry out now, in this order; each is returned once."""
        moves, self._moves = self._moves, []
        return moves

    # -- requests -------------------------------------------------------------------------------------------------

    def enter(self, version: AdapterVersion) -> None:
        """Note that a request of `version` has arrived; fetch the version beforehand if that disturbs nobody."""
        version.users += 1
        self.fetch(version, Replacing.UNWANTED)

    def leave(self, version: AdapterVersion) -> None:
        """Note that a request of `version` has ended and holds no row."""
        version.users -= 1
        if version.retired and not version.users:
            self.retire(version)

    def ready(self, version: AdapterVersion) -> bool:
        """Return whether a row may use `version` now."""
        if version.residency is not Residency.RESIDENT:
            return False
        if version.holders:
            return True
        active = self.active
        granules = version.granules + sum(each.granules for each in active)
        return len(active) < self.most_active and (not active or granules <= self.most_active_granules)

    def hold(self, version: AdapterVersion) -> int:
        """Note that a row begins to use a ready `version`; return its slot."""
        assert version.residency is Residency.RESIDENT, "a row cannot use what is not there"
        version.holders += 1
        self._placed.move_to_end(version)
        return version.slot

    def drop(self, version: AdapterVersion) -> None:
        """Note that a row no longer uses `version`, and that no launched step needs it for that row."""
        version.holders -= 1
        self._placed.move_to_end(version)

    def fetch(self, version: AdapterVersion, replacing: Replacing = Replacing.IDLE) -> bool:
        """Have `version` brought to the device; return False if there is no room for it now."""
        if version.residency is not Residency.ABSENT:
            return True
        start = self._make_room(version.granules, replacing)
        if start is None:
            return False
        version.slot, version.start = self._free.pop(), start
        version.residency = Residency.LOADING
        self._placed[version] = None
        self._moves.append(Move(version.slot, start, version))
        return True

    # -- the device -----------------------------------------------------------------------------------------------

    def arrived(self, version: AdapterVersion) -> None:
        """Note that the device has `version`."""
        version.residency = Residency.RESIDENT
        if version.retired and not version.users:
            self._remove(version)

    def failed(self, version: AdapterVersion) -> None:
        """Note that the device could not be given `version`."""
        self._remove(version)

    def retire(self, version: AdapterVersion) -> None:
        """Remove `version`, for which no name stands any more, now or with its last user."""
        version.retired = True
        version.pins = 0
        if not version.users and version.residency is Residency.RESIDENT:
            self._remove(version)

    # -- room -----------------------------------------------------------------------------------------------------

    def _make_room(self, granules: int, replacing: Replacing) -> int | None:
        """Evict as few adapters as possible for a slot and `granules` adjacent granules; return the first granule."""
        start = self._gap(granules, ())
        if start is not None and self._free:
            return start
        idle = self._replaceable(replacing)
        for count in range(1, len(idle) + 1):
            start = self._gap(granules, idle[:count])
            if start is not None:
                for version in idle[:count]:
                    self._remove(version)
                return start
        return None

    def _replaceable(self, replacing: Replacing) -> list[AdapterVersion]:
        """Return the versions that may be evicted, first those that no request waits for, then by their latest use."""
        idle = [each for each in self._placed if each.residency is Residency.RESIDENT and not each.holders]
        if replacing < Replacing.PINNED:
            idle = [version for version in idle if not version.pins]
        wanted = [version for version in idle if version.users] if replacing >= Replacing.IDLE else []
        unwanted = [version for version in idle if not version.users] if replacing >= Replacing.UNWANTED else []
        return unwanted + wanted

    def _gap(self, granules: int, without: list[AdapterVersion] | tuple[()]) -> int | None:
        """Return the first of `granules` adjacent granules, free once `without` are gone; None if there are none."""
        end = 0
        for version in sorted(self._placed.keys() - set(without), key=lambda version: version.start):
            if version.start - end >= granules:
                return end
            end = version.start + version.granules
        return end if self.granules - end >= granules else None

    def _remove(self, version: AdapterVersion) -> None:
        del self._placed[version]
        self._free.append(version.slot)
        self._moves.append(Move(version.slot, version.start, None))
        version.residency = Residency.ABSENT
        version.slot = version.start = -1

    def check(self) -> None:
        """Assert that slots and granules are where they belong.

        Raises:
            AssertionError: A defect of headrace.
        """
        used = [version.slot for version in self._placed]
        assert sorted(used + self._free) == list(range(self.slots)), "a slot is lost or used twice"
        end = 0
        for version in sorted(self._placed, key=lambda version: version.start):
            assert version.start >= end, "two adapters share a granule"
            end = version.start + version.granules
            assert version.residency is not Residency.ABSENT, "an absent adapter has a slot"
            assert 0 <= version.holders <= version.users, "more rows than requests use an adapter"
        assert end <= self.granules, "an adapter lies past the end of the memory"
        assert len(self.active) <= self.most_active, "too many adapters are active"
