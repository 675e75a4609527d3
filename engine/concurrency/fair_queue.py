"""`FairQueue`: gives the waiting work of several tenants turns by tenant; reads no clock and starts no thread.

Start-time fair queuing (Goyal, Vin and Cheng, 1996) over the time that work took: the tenant that was given least is
next, and a new tenant begins where the latest turn began. Within a tenant the cheapest work is next, but a piece of
work can be passed only until turns of its tenant have taken up its own cost: a long wait counts like a low cost.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Generic, NamedTuple, TypeVar

__all__ = ["FairQueue", "FairTurn"]

T = TypeVar("T")


@dataclass(slots=True)
class _Account(Generic[T]):
    """The waiting work of one tenant, and the time that the tenant was given."""

    tenant: str | None
    given: float
    """Seconds of work in all turns that have ended, or of the turn at which the tenant came if that is more."""
    waiting: list[tuple[float, int, float, T]] = field(default_factory=list)
    """Heap of (`taken_up` when the work came plus its cost, arrival, cost, work)."""
    taken_up: float = 0.0
    """Sum of the costs of all work that turns have begun."""
    running: int = 0
    """Number of turns that have begun and not ended."""
    place: int = -1
    """Number of the account's valid entry in the order of tenants; -1 if it has none."""


class FairTurn(NamedTuple, Generic[T]):
    """A turn that has begun."""

    tenant: str | None
    item: T
    """The work of the turn."""


class FairQueue(Generic[T]):
    """Waiting work of many tenants. Not safe to use from several threads at once."""

    def __init__(self, most_of_one: int | None = None) -> None:
        """Start empty.

        Args:
            most_of_one: Turns that one tenant may have at a time; None for any number.
        """
        self._most_of_one = most_of_one
        self._accounts: dict[str | None, _Account[T]] = {}
        self._order: list[tuple[float, int, int, _Account[T]]] = []
        """Heap of (seconds given, running turns, place, account); an entry is valid if its place is the account's."""
        self._numbers = itertools.count()
        self._level = 0.0
        """Most seconds that any tenant had been given when it was next."""
        self._waiting = 0

    def __len__(self) -> int:
        """Return the number of waiting pieces of work."""
        return self._waiting

    def put(self, tenant: str | None, item: T, cost: float = 0.0) -> None:
        """Queue work of a tenant; `cost`, in any unit, orders it among the work of that tenant."""
        account = self._accounts.get(tenant)
        if account is None:
            account = self._accounts[tenant] = _Account(tenant, self._level)
        elif not account.waiting and not account.running:
            account.given = max(account.given, self._level)
        heappush(account.waiting, (account.taken_up + cost, next(self._numbers), cost, item))
        self._waiting += 1
        if account.place < 0 or len(account.waiting) == 1:
            self._enter(account)

    def take(self) -> FairTurn[T] | None:
        """Begin the next turn; return None if no waiting tenant may have one now."""
        while self._order:
            *_, place, account = heappop(self._order)
            if place != account.place:  # the account has another entry by now
                continue
            account.place = -1
            self._level = max(self._level, account.given)
            if account.waiting and account.running != self._most_of_one:
                _, _, cost, item = heappop(account.waiting)
                self._waiting -= 1
                account.taken_up += cost
                account.running += 1
                self._enter(account)
                return FairTurn(account.tenant, item)
            if not account.waiting and not account.running:
                del self._accounts[account.tenant]  # a new account begins no lower
        return None

    def finish(self, turn: FairTurn[T], seconds: float) -> None:
        """End a turn that took `seconds`; must be called once for each turn."""
        account = self._accounts[turn.tenant]
        account.running -= 1
        account.given += seconds
        self._enter(account)

    def clear(self) -> list[T]:
        """Drop all waiting work and return it; turns that have begun go on."""
        dropped = [item for account in self._accounts.values() for *_, item in account.waiting]
        for account in self._accounts.values():
            account.waiting.clear()
        self._waiting = 0
        return dropped

    def _enter(self, account: _Account[T]) -> None:
        account.place = next(self._numbers)
        heappush(self._order, (account.given, account.running, account.place, account))
