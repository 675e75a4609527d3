"""The policies besides `FirstCome`: ageing, size classes, fair shares and deadlines; each defines an order, no more.

docs/scheduling.md describes what each is for and what it costs, with figures.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from itertools import islice
from math import inf, log
from typing import Annotated, Any

from pydantic import ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass as checked

from headrace.engine.errors import InvalidParams
from headrace.engine.params import shown
from headrace.engine.scheduling.order.background import BackgroundLast
from headrace.engine.scheduling.order.pace import Pace
from headrace.engine.scheduling.order.shares import Account, Shares
from headrace.engine.scheduling.plan import Work
from headrace.engine.scheduling.policy import FirstCome, Policy
from headrace.engine.scheduling.request import Request

__all__ = ["POLICIES", "Ageing", "Deadlines", "FairShare", "SizeClasses", "policy_of"]

_SETTINGS = ConfigDict(extra="forbid", allow_inf_nan=False)
_FAR = 600.0  # natural logarithm of the largest weight: a priority is any int, but a float overflows
_GIVES_WAY = 2  # preemptions after which only arrival counts, so that no request is preempted for ever


@checked(frozen=True, config=_SETTINGS)
class Ageing(FirstCome):
    """Highest score first: `weight * (1 + min(wait / seconds, most) + model + adapter)`.

    The weight of priority `p` is `ratio ** -p`, and the wait counts from arrival. The defaults are the preset
    for a dense model; `moe=2.0` suits a mixture of experts. Newcomers of the next higher priority pass a
    request only for a time wherever `ratio` is below `(1 + most + moe + 1) / (1 + moe + adapter)`.
    """

    ratio: Annotated[float, Field(ge=1.0)] = 2.0
    """Factor between the weights of two neighbouring priorities."""
    seconds: Annotated[float, Field(gt=0.0)] = 60.0
    most: Annotated[float, Field(ge=0.0)] = 10.0
    moe: Annotated[float, Field(ge=0.0)] = 1.0
    """Model term of the score; 2.0 for a mixture of experts."""
    adapter: Annotated[float, Field(ge=0.0)] = 1.5
    """Adapter term of the score for requests with an adapter; it is 1.0 for those without."""

    def lane(self, request: Request) -> Hashable:
        """Return the lane of requests whose scores grow alike, so that the first to arrive always stays ahead."""
        return request.asked.priority, request.asked.adapter is None

    def urgency(self, request: Request, now: float) -> Any:
        """Order by score, highest first, then by arrival."""
        return -self.score(request, now), request.order

    def score(self, request: Request, now: float) -> float:
        """Return the score of `request` at `now` (seconds)."""
        waited = min((now - request.arrived) / self.seconds, self.most)
        extra = self.moe + (1.0 if request.asked.adapter is None else self.adapter)
        most = _FAR / max(log(self.ratio), 0.001)
        return float(self.ratio ** max(-most, min(-request.asked.priority, most))) * (1.0 + waited + extra)


@checked(frozen=True, config=_SETTINGS)
class SizeClasses(FirstCome):
    """Short prompts first, then medium and long ones; requests that have waited `most_wait` seconds come before all."""

    short: Annotated[int, Field(ge=1)] = 128
    """Prompt length in tokens from which a prompt is medium."""
    long: Annotated[int, Field(ge=1)] = 512
    """Prompt length in tokens from which a prompt is long."""
    most_wait: Annotated[float, Field(ge=0.0)] = 5.0
    """Seconds after which a waiting request precedes all size classes."""

    def lane(self, request: Request) -> Hashable:
        """Return size class and priority; the first to arrive in a lane has also waited longest."""
        return self.size(request), request.asked.priority

    def urgency(self, request: Request, now: float) -> Any:
        """Order overdue requests first, by arrival, then by size class."""
        return -1 if self.is_late(request, now) else self.size(request), request.order

    def standing(self, request: Request, now: float) -> Any:
        """Order as in the queue: an overdue request is preempted for none that came later."""
        return self.urgency(request, now)

    def overtakes(self, waiting: Request, prefilling: Request, now: float) -> bool:
        """Let a smaller class start before a larger prompt goes on, until the larger one is overdue."""
        return self.size(waiting) < self.size(prefilling) and not self.is_late(prefilling, now)

    def size(self, request: Request) -> int:
        """Return 0 for short prompts, 1 for medium ones and 2 for long ones."""
        return (request.prompt_len >= self.short) + (request.prompt_len >= self.long)

    def is_late(self, request: Request, now: float) -> bool:
        """Return whether the request arrived at least `most_wait` seconds ago."""
        return now - request.arrived >= self.most_wait


@checked(config=_SETTINGS)
class FairShare(FirstCome):
    """Tokens shared by weight: serves the tenant that was given least, and within it the adapter that was given least.

    A counter for each tenant grows with every token that it is given, divided by its weight. A tenant that asks for
    less than its share saves up no more than `burst`: with nothing in the queue its counter keeps up with the others.
    A tenant that is alone gets everything: sharing is work-conserving. Rows are shared, too: if none is free, a
    tenant that was given an eighth of `burst` more than another loses rows to it.
    """

    weights: dict[str, Annotated[float, Field(gt=0.0)]] = field(default_factory=dict)
    """Weight of each tenant; 1.0 for tenants that are not listed."""
    adapter_weights: dict[str, Annotated[float, Field(gt=0.0)]] = field(default_factory=dict)
    """Weight of each adapter among those of the same tenant; 1.0 for adapters that are not listed, and for none."""
    prompt_cost: Annotated[float, Field(ge=0.0)] = 1.0
    """Cost of a computed prompt token, and of a token that a grammar forces after a sampled one."""
    output_cost: Annotated[float, Field(gt=0.0)] = 2.0
    """Cost of a sampled token."""
    burst: Annotated[float, Field(ge=0.0)] = 16384.0
    """Weighted tokens that a tenant may save up while it runs something and asks for less than its share."""

    def __post_init__(self) -> None:
        """Start with empty accounts."""
        self._tenants = Shares(self.burst)
        self._margin = self.burst / 8  # lead at which a tenant counts as ahead: smaller leads change with every request
        self._paid: dict[int, int] = {}
        """Request id -> its leading tokens that are not charged again; only for requests with tokens beyond their
        prompt."""

    def lane(self, request: Request) -> Hashable:
        """Return tenant and adapter."""
        return request.asked.tenant, request.asked.adapter

    def urgency(self, request: Request, now: float) -> Any:
        """Order by what the tenant was given, then the adapter, then by arrival."""
        tenant, adapter = self._accounts(request)
        return tenant.served, adapter.served, request.order

    def standing(self, request: Request, now: float) -> Any:
        """Order requests that were preempted too often first, by arrival; then by what the tenant was given."""
        if request.preemptions >= _GIVES_WAY:
            return 0, 0.0, request.order
        return 1, self._accounts(request)[0].served, request.order

    def overtakes(self, waiting: Request, prefilling: Request, now: float) -> bool:
        """Let a tenant that was given less start first, but not before a prompt that was preempted too often."""
        if prefilling.preemptions >= _GIVES_WAY:
            return False
        return self._accounts(waiting)[0].served < self._accounts(prefilling)[0].served

    def displaced(self, running: Sequence[Request], coming: int) -> Iterator[Request]:
        """Yield requests of tenants that are ahead, latest first; a waiting tenant counts as given its next prompts."""
        accounts = self._tenants.accounts
        least = inf
        for name, each in accounts.items():
            if len(each.queued) > coming and each.served < least:
                prompts = sum(islice(each.queued.values(), coming + 1))
                least = min(least, each.served + self.prompt_cost * prompts / self._weight(name))
        bound = least + self._margin
        ahead: dict[str | None, list[Request]] = {name: [] for name, each in accounts.items() if each.served > bound}
        for request in running if ahead else ():
            if request.preemptions < _GIVES_WAY and request.asked.tenant in ahead:
                ahead[request.asked.tenant].append(request)
        for name in sorted(ahead, key=lambda name: accounts[name].served, reverse=True):
            yield from reversed(ahead[name])

    def is_ahead(self, request: Request) -> bool:
        """Return whether the request's tenant is ahead of another busy tenant."""
        accounts = self._tenants.accounts
        least = min(each.served for each in accounts.values() if each.live)
        return accounts[request.asked.tenant].served > least + self._margin

    def share(self, tenant: str | None) -> float:
        """Return the fraction of the device that `tenant` would get among the tenants that are busy now and itself."""
        busy = {name for name, account in self._tenants.accounts.items() if account.live} | {tenant}
        return self._weight(tenant) / sum(map(self._weight, busy))

    def arrived(self, request: Request) -> None:
        """Queue the request in the accounts of its tenant and adapter, which catch up if they had nothing queued."""
        self._tenants.join(request.asked.tenant, request).parts.join(request.asked.adapter, request)

    def started(self, request: Request) -> None:
        """Charge the prompt tokens that are yet to be computed; recomputing after a preemption is free."""
        if not request.preemptions:
            tenant, adapter = request.asked.tenant, request.asked.adapter
            self._tenants.start(tenant, request)
            self._tenants.accounts[tenant].parts.start(adapter, request)
            self._charge(tenant, adapter, self.prompt_cost * (request.known - request.planned))
        if request.known > request.prompt_len:
            self._paid[request.id] = request.known

    def served(self, works: Iterable[Work]) -> None:
        """Charge the tokens that will be sampled, and those that were forced after earlier ones."""
        given: dict[tuple[str | None, str | None], float] = defaultdict(float)
        for request, _, start, count, samples in works:
            if count > 1 and start >= request.prompt_len:
                forced = start + count - max(start + 1, self._paid.get(request.id, 0))
                given[request.asked.tenant, request.asked.adapter] += self.prompt_cost * max(0, forced)
            if samples:
                given[request.asked.tenant, request.asked.adapter] += self.output_cost
        for (tenant, adapter), tokens in given.items():
            self._charge(tenant, adapter, tokens)

    def ended(self, request: Request) -> None:
        """Forget tenants and adapters that have no requests and are not ahead of the busy ones."""
        self._tenants.accounts[request.asked.tenant].parts.leave(request.asked.adapter, request)
        self._tenants.leave(request.asked.tenant, request)
        self._paid.pop(request.id, None)

    def _charge(self, tenant: str | None, adapter: str | None, tokens: float) -> None:
        account = self._tenants.accounts[tenant]
        account.served += tokens / self._weight(tenant)
        account.parts.accounts[adapter].served += tokens / self.adapter_weights.get(adapter or "", 1.0)

    def _accounts(self, request: Request) -> tuple[Account, Account]:
        tenant = self._tenants.accounts[request.asked.tenant]
        return tenant, tenant.parts.accounts[request.asked.adapter]

    def _weight(self, tenant: str | None) -> float:
        return 1.0 if tenant is None else self.weights.get(tenant, 1.0)


@checked(config=_SETTINGS)
class Deadlines(FairShare):
    """Earliest deadline first within a tenant's share; refuses or ends requests that can no longer meet their deadline.

    Requests without a deadline come after those with one, in the order of arrival.
    """

    answer: Annotated[int, Field(ge=1)] = 256
    """Number of generated tokens, or `max_tokens` if less, that a request must have time for in order to be started."""

    def lane(self, request: Request) -> Hashable:
        """Return the tenant, whose adapters share a queue."""
        return request.asked.tenant

    def place(self, request: Request) -> Any:
        """Order by deadline, then by arrival."""
        return inf if request.asked.deadline is None else request.asked.deadline, request.order

    def urgency(self, request: Request, now: float) -> Any:
        """Order by what the tenant was given, then by deadline."""
        return self._accounts(request)[0].served, self.place(request)

    def standing(self, request: Request, now: float) -> Any:
        """Order as in the queue, after the requests that were preempted too often."""
        if request.preemptions >= _GIVES_WAY:
            return super().standing(request, now)
        return 1, *self.urgency(request, now)

    def overtakes(self, waiting: Request, prefilling: Request, now: float) -> bool:
        """Let the earlier deadline start first within a tenant, and the tenant that was given less among tenants."""
        if waiting.asked.tenant == prefilling.asked.tenant and prefilling.preemptions < _GIVES_WAY:
            return bool(self.place(waiting) < self.place(prefilling))
        return super().overtakes(waiting, prefilling, now)

    def worthwhile(self, request: Request, now: float, pace: Pace) -> bool:
        """Return whether the prompt and `answer` tokens can be computed in time if the request starts now."""
        return request.asked.deadline is None or now + self._needs(request, pace) <= request.asked.deadline

    def expected_wait(self, request: Request, tokens: int, pace: Pace) -> float:
        """Return the seconds that the queue before the request takes, at the tenant's share of the device."""
        return pace.prefill(tokens) / self.share(request.asked.tenant)

    def _needs(self, request: Request, pace: Pace) -> float:
        left = max(0, min(request.limit, request.prompt_len + self.answer) - len(request.tokens))
        return pace.prefill(request.known) + left * pace.turn_seconds


POLICIES: dict[str, Callable[..., Policy]] = {
    "first_come": FirstCome,
    "ageing": Ageing,
    "size_classes": SizeClasses,
    "fair_share": FairShare,
    "deadlines": Deadlines,
}
"""Built-in policies by the names that `EngineConfig.policy` accepts."""

_FAIR = ("fair_share", "deadlines")
_BACKGROUND_LAST = "background_last"
"""Setting of the policies in `_FAIR`, which by themselves respect priorities only within a tenant."""


def policy_of(wanted: str | Mapping[str, Any] | Policy) -> Policy:
    """Return the policy that `wanted` is or names; a mapping has its `name` and settings.

    Raises:
        InvalidParams: The policy has no such setting, or the setting's value is out of range.
        ValueError: No policy has that name.
    """
    if isinstance(wanted, Policy):
        return wanted
    if not isinstance(wanted, str | Mapping):
        raise ValueError("must be a name, a mapping with a name, or a Policy")
    settings = {"name": wanted} if isinstance(wanted, str) else dict(wanted)
    name = settings.pop("name", None)
    if not isinstance(name, str) or name not in POLICIES:
        raise ValueError(f"must be one of {', '.join(POLICIES)}")
    background_last = settings.pop(_BACKGROUND_LAST, False)
    if not isinstance(background_last, bool):
        raise _refused(_BACKGROUND_LAST, "must be true or false", background_last)
    if background_last and name not in _FAIR:
        raise _refused(_BACKGROUND_LAST, f"goes with {' or '.join(_FAIR)}, not with {name}", background_last)
    if name == "first_come" and settings:
        raise ValueError(f"first_come has no settings, got {', '.join(settings)}")
    try:
        policy = POLICIES[name](**settings)
        return BackgroundLast(policy, POLICIES[name](**settings)) if background_last else policy
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise _refused(".".join(map(str, first["loc"])), first["msg"], first["input"]) from None


def _refused(setting: str, problem: str, value: object) -> InvalidParams:
    field = f"policy.{setting}"
    return InvalidParams(f"{field}: {problem}, got {shown(value)}", field=field, value=value)
