"""`Recorder`: the counts of a server since its start, as plain numbers; never formats them and never reads a clock.

The watchdog's thread counts `stalls`; the event loop's thread counts everything else, so that counting is an addition
and takes no lock. exporter.py turns the counts into Prometheus' families when somebody asks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass
from typing import Final

__all__ = ["ABORT_REASONS", "OTHER", "Histogram", "Recorder", "TenantTokens"]

OTHER: Final = "other"
"""Label for everything beyond the bounded number of labels."""

ABORT_REASONS: Final = frozenset(
    {
        "adapter_unavailable",
        "cancelled",
        "deadline_exceeded",
        "disconnected",
        "engine_dead",
        "engine_stalled",
        "internal_error",
        "non_finite_logits",
        "out_of_memory",
        "queue_timeout",
        "request_failed",
        "server_overloaded",
        "server_shutting_down",
        "slow_consumer",
        "tokenizer_failed",
    }
)
"""Reasons for which an admitted request may end without its answer."""

_FINE = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0)
_WIDE = (*_FINE, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
_TOKENS = tuple(float(1 << power) for power in range(0, 21, 2))


class Histogram:
    """Counts of values by size."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        """Start empty; a value counts for the first of the rising `bounds` that it does not exceed."""
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """Number of values for each bound, followed by the number beyond all bounds."""
        self.total = 0.0
        """Sum of the values."""

    def add(self, value: float, times: int = 1) -> None:
        """Count `value` `times` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times


@dataclass(slots=True)
class TenantTokens:
    """Requests of one tenant, and their tokens."""

    requests: int = 0
    prompt: int = 0
    cached: int = 0
    generated: int = 0


class Recorder:
    """The counts of one server."""

    def __init__(self, max_tenants: int) -> None:
        """Start at zero; tenants beyond `max_tenants` share the label `other`."""
        self.time_to_first_token = Histogram(_WIDE)
        self.inter_token_latency = Histogram(_FINE)
        self.time_per_output_token = Histogram(_FINE)
        self.request_latency = Histogram(_WIDE)
        self.tokenize_time = Histogram(_FINE)
        self.queue_time = Histogram(_WIDE)
        self.prefill_time = Histogram(_WIDE)
        self.decode_time = Histogram(_WIDE)
        self.prompt_tokens = Histogram(_TOKENS)
        self.generation_tokens = Histogram(_TOKENS)
        self.loop_lag = Histogram(_FINE)
        self.finished: Counter[str] = Counter(stop=0, length=0)
        """Choices that ended, by finish reason."""
        self.aborted: Counter[str] = Counter(dict.fromkeys(sorted(ABORT_REASONS), 0))
        """Requests that ended without their answer, by reason."""
        self.http: Counter[tuple[str, str, str]] = Counter()
        """HTTP requests by method, route and status."""
        self.stalls = 0
        """Times that the watchdog found no step ending."""
        self.tenants: dict[tuple[str, str], TenantTokens] = {}
        """Counts by tenant and adapter; the adapter is empty for requests without one."""
        self._max_tenants = max_tenants

    def tenant(self, name: str, adapter: str = "") -> TenantTokens:
        """Return the counts of a tenant with an adapter; beyond `max_tenants`, those of the label `other`."""
        key = (name, adapter)
        found = self.tenants.get(key)
        if found is None:
            if len(self.tenants) >= self._max_tenants:
                key = (OTHER, "")
            found = self.tenants.setdefault(key, TenantTokens())
        return found

    def abort(self, reason: str) -> None:
        """Count a request that ended without its answer."""
        self.aborted[reason if reason in ABORT_REASONS else OTHER] += 1
