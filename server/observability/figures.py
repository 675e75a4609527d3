"""`Figures`: counts and times of one generation request, taken as it runs; never holds prompts or answers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from headrace.engine import TokenStream, Usage
from headrace.server.observability.recorder import Recorder, TenantTokens

__all__ = ["Arrivals", "Figures", "between"]


class Figures:
    """Counts and times of one request; times are in seconds of `time.perf_counter`."""

    __slots__ = (
        "adapter",
        "began",
        "cached_tokens",
        "completion_tokens",
        "counted",
        "ended",
        "finish_reasons",
        "first",
        "prompt_tokens",
        "queued",
        "reason",
        "recorder",
        "refused",
        "request_id",
        "taken_up",
        "tenant",
        "trace_id",
    )

    def __init__(self, recorder: Recorder, request_id: str, tenant: str, adapter: str = "") -> None:
        """Begin now; `adapter` is empty where the request uses none."""
        self.recorder = recorder
        self.request_id = request_id
        self.tenant = tenant
        self.adapter = adapter
        self.trace_id: str | None = None
        self.began = time.perf_counter()
        self.queued: float | None = None
        """Time at which the prompts were token ids."""
        self.taken_up: float | None = None
        """Time at which the request's first step was launched."""
        self.first: float | None = None
        """Time of the first token."""
        self.ended: float | None = None
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.completion_tokens = 0
        self.counted = 0
        """Generated tokens that the tenant has been charged with."""
        self.finish_reasons: list[str] = []
        self.reason: str | None = None
        """`finished`, or the code of the error that ended the request."""
        self.refused = False
        """Whether the request ended by the client's own fault, with a status below 500."""

    def arrivals(self, stream: TokenStream, choices: int) -> Arrivals:
        """Return a counter of the tokens of one of the request's streams."""
        return Arrivals(self, stream, choices)

    @property
    def account(self) -> TenantTokens:
        """The counts of the request's tenant."""
        return self.recorder.tenant(self.tenant, self.adapter)

    def take(self, streams: Sequence[TokenStream]) -> None:
        """Add the counts of the ended streams, and charge the tenant with tokens that nobody read."""
        for stream in streams:
            usage = stream.usage
            self.prompt_tokens += usage.prompt_tokens
            self.cached_tokens += usage.cached_tokens
            self.completion_tokens += usage.completion_tokens
            self.finish_reasons += [reason for reason in stream.finish_reasons if reason is not None]
        started = [stream.taken_up for stream in streams if stream.taken_up is not None]
        self.taken_up = min(started, default=None)
        self.account.generated += max(self.completion_tokens - self.counted, 0)

    def computed(self, usage: Usage) -> None:
        """Take the counts of a request that generates nothing, and charge the tenant."""
        tenant = self.account
        self.prompt_tokens, self.cached_tokens = usage.prompt_tokens, usage.cached_tokens
        tenant.prompt += usage.prompt_tokens
        tenant.cached += usage.cached_tokens

    def shown(self) -> dict[str, Any]:
        """Return the fields of the request's line in the log; times are in seconds."""
        fields: dict[str, Any] = {
            "reason": self.reason,
            "finish_reasons": self.finish_reasons,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "completion_tokens": self.completion_tokens,
            "queue_seconds": between(self.queued, self.taken_up),
            "first_token_seconds": between(self.began, self.first),
            "seconds": between(self.began, self.ended),
            "trace_id": self.trace_id,
        }
        return {name: value for name, value in fields.items() if value is not None}


class Arrivals:
    """A counter of the tokens of one stream and their times, as they come to the reader."""

    __slots__ = ("_choices", "_count", "_figures", "_first", "_last", "_stream", "_tenant")

    def __init__(self, figures: Figures, stream: TokenStream, choices: int) -> None:
        """Follow `stream`, whose choices gain their tokens side by side."""
        self._figures = figures
        self._stream = stream
        self._choices = choices
        self._tenant = figures.account
        self._first = 0.0
        self._last = 0.0
        self._count = 0

    def came(self, tokens: int) -> None:
        """Count `tokens` that came at once; call it once for each wake-up of the reader, not for each token."""
        now = time.perf_counter()
        if self._last:
            gap = (now - self._last) * min(1.0, self._choices / tokens)
            self._figures.recorder.inter_token_latency.add(gap, tokens)
        else:
            self._begin(now)
        self._last = now
        self._count += tokens
        self._figures.counted += tokens
        self._tenant.generated += tokens

    def end(self) -> None:
        """Record the time per token of a stream that ended well."""
        if self._count > self._choices:
            span = (self._last - self._first) * self._choices
            self._figures.recorder.time_per_output_token.add(span / (self._count - self._choices))

    def _begin(self, now: float) -> None:
        figures, usage = self._figures, self._stream.usage
        self._first = now
        self._tenant.prompt += usage.prompt_tokens
        self._tenant.cached += usage.cached_tokens
        if figures.first is None:
            figures.first = now
            figures.recorder.time_to_first_token.add(now - figures.began)


def between(start: float | None, end: float | None) -> float | None:
    """Return the seconds from `start` to `end`, to the tenth of a millisecond; None where one is None."""
    return None if start is None or end is None else round(end - start, 4)
