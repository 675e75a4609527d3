"""`Shares`: what each of several parties was given, by weight, and where newcomers begin; never decides who is next.

Start-time fair queuing (Goyal, Vin and Cheng, 1996), except that whoever runs something may save up a little: with
nothing in the queue it begins at most `burst` below the latest that was served from it, and an idle one not below.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.engine.scheduling.request import Request

__all__ = ["Account", "Shares"]


@dataclass(slots=True)
class Account:
    """What one party was given."""

    served: float
    """Weighted tokens."""
    parts: Shares
    """How it passed them on to those within it."""
    live: int = 0
    """Requests that wait or run."""
    queued: dict[int, int] = field(default_factory=dict)
    """Id -> tokens of the prompt, of those that have not started yet, in the order in which they came."""


class Shares:
    """Accounts of the parties that have requests, and of those that newcomers would come before."""

    def __init__(self, burst: float) -> None:
        """Start with nobody served; `burst` is in weighted tokens."""
        self.accounts: dict[str | None, Account] = {}
        self._burst = burst
        self._level = 0.0
        """What the latest to be served from the queue had been given by then."""

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
        """A request of `name` is served from the queue."""
        account = self.accounts[name]
        account.queued.pop(request.id, None)
        self._level = max(self._level, account.served)

    def leave(self, name: str | None, request: Request) -> None:
        """Count a request of `name` no more, and forget idle parties that newcomers would not come before."""
        account = self.accounts[name]
        account.live -= 1
        account.queued.pop(request.id, None)
        if account.live:
            return
        all_idle = not any(other.live for other in self.accounts.values())
        for idle in [key for key, other in self.accounts.items() if not other.live]:
            if all_idle or self.accounts[idle].served <= self._level:
                del self.accounts[idle]
