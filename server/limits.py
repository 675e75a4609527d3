"""`Limits`: bounds of the queue and of the use by each key; counts, refuses, and never touches a request itself."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from headrace.server.auth import Caller
from headrace.server.errors import ApiError
from headrace.server.room import Room
from headrace.server.settings import KeyLimits, ServerSettings

__all__ = ["Limits", "Permit"]

_WINDOW = 10.0
_SMALLEST_UPLOAD = 65_536  # bytes that even a small body counts for: its connection costs something, too
_LONGEST_RETRY = 30.0  # official clients give up where they are told to wait much longer


@dataclass(slots=True)
class _Account:
    """The limits of one key and its present use."""

    limits: KeyLimits
    live: int = 0
    tokens: float = 0.0
    """Tokens that may still be used; negative where they were overdrawn."""
    refilled: float = 0.0


@dataclass(slots=True)
class Permit:
    """One admitted request; call `started` at its first token, and `end` in any case."""

    account: _Account
    weight: int
    limits: Limits
    tokens: int = 0
    """Tokens of the prompt, once they are known."""
    charged: int = 0
    """Tokens of the prompt that the key has been charged with."""
    tokenized: int = 0
    """Tokens that the tokenizer made, which is work done even if no step computes them."""
    waiting: bool = True
    ended: bool = False

    def add_prompt(self, tokens: int) -> None:
        """Count the prompt, once its length is known.

        Raises:
            ApiError: 503 where too many prompt tokens wait, 429 where the key has used up its tokens meanwhile.
        """
        self.limits.add_prompt(self, tokens)

    def started(self) -> None:
        """Take the request out of the queue, since it has its first token; later calls do nothing."""
        if self.waiting:
            self.waiting = False
            self.limits.left_queue(self)

    def spend(self, tokens: int) -> None:
        """Charge generated tokens to the key."""
        self.account.tokens -= tokens

    def made_tokens(self, tokens: int) -> None:
        """Count tokens that the tokenizer made, before the end of the request or after it."""
        self.tokenized += tokens
        if self.ended:
            self.charge_prompt(max(self.charged, self.tokenized))

    def charge_prompt(self, tokens: int) -> None:
        """Charge the key with `tokens` of the prompt in all, instead of those charged before."""
        self.account.tokens -= tokens - self.charged
        self.charged = tokens

    def end(self, *, refund: bool = False) -> None:
        """Give the request's places back; later calls do nothing.

        Args:
            refund: Whether no step has computed anything, so that the key pays for the tokens made of text alone.
        """
        if not self.ended:
            self.ended = True
            self.charge_prompt(self.tokenized if refund else max(self.charged, self.tokenized))
            if self.waiting:
                self.waiting = False
                self.limits.left_queue(self, departed=False)
            self.limits.release(self)


@dataclass(slots=True)
class _Queue:
    """Counts of the choices that wait for their first token, and of those that left lately."""

    choices: int = 0
    tokens: int = 0
    departures: deque[tuple[float, int]] = field(default_factory=deque)
    departed: int = 0
    """Choices in `departures`."""


class Limits:
    """Bounds of a whole server and of its keys. All methods run on the event loop."""

    def __init__(self, settings: ServerSettings, clock: Callable[[], float] = time.monotonic) -> None:
        """Start with nothing waiting."""
        self._settings = settings
        self._clock = clock
        self._queue = _Queue()
        self._accounts: dict[str, _Account] = {}
        self._own = dict(settings.key_limits)
        self._uploads = self._room(settings.max_upload_bytes, settings.max_body_bytes, "sends")
        self._answers = self._room(settings.max_answer_bytes, 0, "asks for")
        self.live = 0
        """Admitted requests that have not ended."""

    def _room(self, most: int, one: int, what: str) -> Room:
        def key_full() -> ApiError:
            return self._too_many(f"this key {what} too much at once", self.retry_after())

        return Room(most, one, self.overloaded, key_full)

    def set_limits(self, name: str, limits: KeyLimits) -> None:
        """Change the limits of a key from now on; requests that run are left alone."""
        self._own[name] = limits
        account = self._accounts.get(name)
        if account is not None:
            self._refill(account)
            allowance = float(limits.tokens_per_minute or 0)
            unlimited = account.limits.tokens_per_minute is None
            account.tokens = allowance if unlimited else min(account.tokens, allowance)
            account.limits = limits

    def limits_of(self, name: str) -> KeyLimits:
        """Return the limits of the key `name`."""
        return self._own.get(name, self._settings.default_limits)

    def admit(self, caller: Caller, weight: int, priority: int = 0) -> Permit:
        """Admit a request, or refuse it.

        Args:
            caller: Holder of the key.
            weight: Number of prompts times choices of each.
            priority: Priority of the request; lower is served first.

        Raises:
            ApiError: 429 where the key has reached its limits, 503 where too much waits, 400 where one request asks
                for more than there may ever be, or to be served before others.
        """
        account = self._account(caller.name)
        limits = account.limits
        if priority < limits.min_priority:
            message = f"priority: at least {limits.min_priority} for this key, got {priority}"
            raise ApiError(400, "invalid_value", message, param="priority")
        most = min(self._settings.max_queue, weight if limits.concurrency is None else limits.concurrency)
        if weight > most > 0:
            raise ApiError(400, "invalid_value", f"n: {weight} choices in one request, at most {most} here", param="n")
        if limits.concurrency is not None and account.live + weight > limits.concurrency:
            raise self._too_many(f"this key may have {limits.concurrency} requests at once", self.retry_after())
        self._check_tokens(account)
        self.check_queue(weight)
        self._queue.choices += weight
        account.live += weight
        self.live += 1
        return Permit(account, weight, self)

    def _check_tokens(self, account: _Account) -> None:
        """Refuse with 429 where the key has used up the tokens of its last minutes."""
        rate = account.limits.tokens_per_minute
        if rate is not None:
            self._refill(account)
            if account.tokens <= 0:
                pause = (1.0 - account.tokens) * 60.0 / max(rate, 1)
                raise self._too_many(f"this key may use {rate} tokens a minute", pause)

    def check_queue(self, weight: int = 1) -> None:
        """Refuse `weight` more choices if the queue has no room for them.

        Raises:
            ApiError: 503 where too many choices would wait.
        """
        if self._queue.choices + weight > self._settings.max_queue:
            raise self.overloaded()

    def upload(self, caller: Caller, size: int) -> AbstractContextManager[None]:
        """Hold room for a body of `size` bytes while it is read; one key may hold half of all room.

        Raises:
            ApiError: 429 where the key has too little left, 503 where the server has.
        """
        return self._uploads.hold(caller.name, max(size, _SMALLEST_UPLOAD))

    def answer(self, caller: Caller, size: int) -> AbstractContextManager[None]:
        """Hold room for an answer of `size` bytes until it is sent; raise what `upload` raises."""
        return self._answers.hold(caller.name, size)

    def add_prompt(self, permit: Permit, tokens: int) -> None:
        """Count a permit's prompt tokens; raise what `Permit.add_prompt` raises.

        Many requests may have been admitted before the first of their prompts was counted: one prompt alone may
        overdraw the account.
        """
        self._check_tokens(permit.account)
        if self._queue.tokens and self._queue.tokens + tokens > self._settings.max_queue_tokens:
            raise self.overloaded()
        permit.tokens += tokens
        permit.charge_prompt(permit.charged + tokens)
        self._queue.tokens += tokens

    def left_queue(self, permit: Permit, departed: bool = True) -> None:
        """Take a permit out of the queue; `departed` says that it was served."""
        self._queue.choices -= permit.weight
        self._queue.tokens -= permit.tokens
        if departed:
            self._queue.departures.append((self._clock(), permit.weight))
            self._queue.departed += permit.weight
            self._forget_old()

    def release(self, permit: Permit) -> None:
        """Give back the places of a permit that has ended."""
        permit.account.live -= permit.weight
        self.live -= 1

    def overloaded(self) -> ApiError:
        """Return the refusal for a full queue, which says when to come again."""
        pause = f"{self.retry_after():.0f}"
        return ApiError(503, "server_overloaded", "too many requests wait", headers={"retry-after": pause})

    def waited_too_long(self) -> ApiError:
        """Return the error of a request that no step took up in time."""
        pause = {"retry-after": f"{self.retry_after():.0f}"}
        return ApiError(503, "queue_timeout", "the request waited too long", headers=pause)

    def retry_after(self) -> float:
        """Return the seconds in which the queue should empty at the rate of the last ten seconds."""
        self._forget_old()
        queue = self._queue
        if not queue.departed:
            return _clamped(1.0)
        span = max(self._clock() - queue.departures[0][0], 0.1)
        return _clamped(queue.choices * span / queue.departed)

    def _account(self, name: str) -> _Account:
        account = self._accounts.get(name)
        if account is None:
            limits = self.limits_of(name)
            account = _Account(limits, tokens=float(limits.tokens_per_minute or 0), refilled=self._clock())
            self._accounts[name] = account
        return account

    def _refill(self, account: _Account) -> None:
        now = self._clock()
        rate = account.limits.tokens_per_minute
        if rate is not None:
            account.tokens = min(float(rate), account.tokens + (now - account.refilled) * rate / 60.0)
        account.refilled = now

    def _too_many(self, message: str, pause: float) -> ApiError:
        headers = {"retry-after": f"{_clamped(pause):.0f}"}
        return ApiError(429, "rate_limit_exceeded", message, headers=headers)

    def _forget_old(self) -> None:
        queue, oldest = self._queue, self._clock() - _WINDOW
        while queue.departures and queue.departures[0][0] < oldest:
            queue.departed -= queue.departures.popleft()[1]


def _clamped(seconds: float) -> float:
    """Return `seconds` within 1 and 30, spread a little so that refused clients do not return all at once."""
    return min(max(seconds * random.uniform(0.9, 1.3), 1.0), _LONGEST_RETRY)
