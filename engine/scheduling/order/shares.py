"""`Shares` counts the weighted tokens that each of several parties was given; it never decides who is next.

Start-time fair queuing (Goyal, Vin and Cheng, 1996), except that a party that runs something may save up a little: with
nothing queued it starts at most `burst` below the party served last from the queue, and an idle party not below it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.engine.scheduling.request import Request

__all__ = ["Account", "Shares"]


@dataclass(slots=True)
class Account:
    """Service that one party was given, and its requests."""

    served: float
    """Weighted tokens that the party was given."""
    parts: Shares
    """Accounts of the parties within this one."""
    live: int = 0
    """Number of requests that wait or run."""
    queued: dict[int, int] = field(default_factory=dict)
    """Request id -> tokens of its prompt, for requests that have not started yet, in order of arrival."""


class Shares:
    """Accounts of the parties that have requests, and of idle ones that are ahead of new parties."""

    def __init__(self, burst: float) -> None:
        """Start without accounts; `burst` is in weighted tokens."""
        self.accounts: dict[str | None, Account] = {}
        self._burst = burst
        self._level = 0.0
        """Virtual time: most weighted tokens of a party when it was served from the queue."""

    def join(self, name: str | None, request: Request) -> Account:
        """Queue a request of `name`."""
        account = self.accounts.get(name)
        if account is None:
            account = self.accounts[name] = Account(self._level, Shares(self._burst))
        if not account.queued:
            account.served = max(account.served, self._level - (self._burst if account.live else 0.0))
        account.live += 1
        account.queued[request.id] = request.known
        return account

    def start(self, name: str | None, request: Request) -> None:
        """Take note that a request of `name` is served from the queue."""
        account = self.accounts[name]
        account.queued.pop(request.id, None)
        self._level = max(self._level, account.served)

    def leave(self, name: str | None, request: Request) -> None:
        """Remove a request of `name`, and forget idle parties that are not ahead of new ones."""
        account = self.accounts[name]
        account.live -= 1
        account.queued.pop(request.id, None)
        if account.live:
            return
        all_idle = not any(other.live for other in self.accounts.values())
        for idle in [key for key, other in self.accounts.items() if not other.live]:
            if all_idle or self.accounts[idle].served <= self._level:
                del self.accounts[idle]
