"""The policies besides `FirstCome`: ageing, size classes, fair shares and deadlines; each is order and nothing else.

docs/scheduling.md says what each is for and what it costs, with figures.
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
_FAR = 600.0  # logarithm of the largest weight: a priority is any int, and a float has its end
_GIVES_WAY = 2  # times that a request gives way where standings change; from then on only arrival counts


@checked(frozen=True, config=_SETTINGS)
class Ageing(FirstCome):
    """Highest score first: `weight * (1 + min(wait / seconds, most) + model + adapter)`.

    The weight of priority `p` is `ratio ** -p`, and the wait is since the request arrived. The defaults are the preset
    for a dense model; `moe=2.0` is the one for a mixture of experts. Newcomers of the next higher priority pass a
    request only for a time wherever `ratio` is below `(1 + most + moe + 1) / (1 + moe + adapter)`.
    """

    ratio: Annotated[float, Field(ge=1.0)] = 2.0
    """How many times the weight of a priority is that of the next."""
    seconds: Annotated[float, Field(gt=0.0)] = 60.0
    most: Annotated[float, Field(ge=0.0)] = 10.0
    moe: Annotated[float, Field(ge=0.0)] = 1.0
    """2.0 for a mixture of experts."""
    adapter: Annotated[float, Field(ge=0.0)] = 1.5
    """For requests with an adapter; those without get 1.0."""

    def lane(self, request: Request) -> Hashable:
        """Requests whose scores grow alike: the first that came is ahead for ever."""
        return request.priority, request.adapter is None

    def urgency(self, request: Request, now: float) -> Any:
        """The score, highest first, then arrival."""
        return -self.score(request, now), request.order

    def score(self, request: Request, now: float) -> float:
        """The score of `request` at `now`."""
        waited = min((now - request.arrived) / self.seconds, self.most)
        extra = self.moe + (1.0 if request.adapter is None else self.adapter)
        most = _FAR / max(log(self.ratio), 0.001)
        return float(self.ratio ** max(-most, min(-request.priority, most))) * (1.0 + waited + extra)


@checked(frozen=True, config=_SETTINGS)
class SizeClasses(FirstCome):
    """Short prompts first, then medium and long ones; whoever has waited `most_wait` seconds comes before all."""

    short: Annotated[int, Field(ge=1)] = 128
    """Tokens of a prompt from which it is no longer short."""
    long: Annotated[int, Field(ge=1)] = 512
    """Tokens from which it is long."""
    most_wait: Annotated[float, Field(ge=0.0)] = 5.0
    """Seconds."""

    def lane(self, request: Request) -> Hashable:
        """Class and priority: who came first in it has waited longest, too."""
        return self.size(request), request.priority

    def urgency(self, request: Request, now: float) -> Any:
        """Requests that have waited too long come first, by arrival; then one class after another."""
        return -1 if self.is_late(request, now) else self.size(request), request.order

    def standing(self, request: Request, now: float) -> Any:
        """Order as in the queue: a request that has waited too long gives way to none that came later."""
        return self.urgency(request, now)

    def overtakes(self, waiting: Request, prefilling: Request, now: float) -> bool:
        """A lower class starts before the prompt of a higher one goes on, until that has waited too long."""
        return self.size(waiting) < self.size(prefilling) and not self.is_late(prefilling, now)

    def size(self, request: Request) -> int:
        """0 for short prompts, 1 for medium ones, 2 for long ones."""
        return (request.prompt_len >= self.short) + (request.prompt_len >= self.long)

    def is_late(self, request: Request, now: float) -> bool:
        """Whether it has been there for `most_wait`."""
        return now - request.arrived >= self.most_wait


@checked(config=_SETTINGS)
class FairShare(FirstCome):
    """Tokens shared by weight: the tenant that was given least is next, and within it the adapter that was.

    A counter for each tenant grows with every token that it is given, divided by its weight. Who asks for less
    than its share saves up no more than `burst`: with nothing in the queue its counter keeps up with those of the
    others. Whoever is alone gets all: the share is work-conserving. Rows are shared, too: where none is free, a
    tenant that was given an eighth of `burst` more than another gives one up to it.
    """

    weights: dict[str, Annotated[float, Field(gt=0.0)]] = field(default_factory=dict)
    """Tenant -> its weight; 1.0 for the others."""
    adapter_weights: dict[str, Annotated[float, Field(gt=0.0)]] = field(default_factory=dict)
    """Adapter -> its weight among those of the same tenant; 1.0 for the others, and for none."""
    prompt_cost: Annotated[float, Field(ge=0.0)] = 1.0
    """What a computed token of a prompt counts, and one that a grammar forces behind a sampled one."""
    output_cost: Annotated[float, Field(gt=0.0)] = 2.0
    """What a sampled token counts."""
    burst: Annotated[float, Field(ge=0.0)] = 16384.0
    """Weighted tokens that a tenant may save up while it runs something and asks for less than its share."""

    def __post_init__(self) -> None:
        """Start with nobody served."""
        self._tenants = Shares(self.burst)
        self._margin = self.burst / 8  # by which one is ahead: less comes and goes with every request
        self._paid: dict[int, int] = {}
        """Request -> its leading tokens that nobody pays for again; only of those with more than a prompt."""

    def lane(self, request: Request) -> Hashable:
        """Tenant and adapter."""
        return request.tenant, request.adapter

    def urgency(self, request: Request, now: float) -> Any:
        """What the tenant was given, then the adapter, then arrival."""
        tenant, adapter = self._accounts(request)
        return tenant.served, adapter.served, request.order

    def standing(self, request: Request, now: float) -> Any:
        """Requests that gave way too often already come first, by arrival; then the tenant that was given least."""
        if request.preemptions >= _GIVES_WAY:
            return 0, 0.0, request.order
        return 1, self._accounts(request)[0].served, request.order

    def overtakes(self, waiting: Request, prefilling: Request, now: float) -> bool:
        """The tenant that was given less comes first, but not before one that gave way too often already."""
        if prefilling.preemptions >= _GIVES_WAY:
            return False
        return self._accounts(waiting)[0].served < self._accounts(prefilling)[0].served

    def displaced(self, running: Sequence[Request], coming: int) -> Iterator[Request]:
        """The latest of whoever is ahead of one that waits, the next prompts of that one paid."""
        accounts = self._tenants.accounts
        least = inf
        for name, each in accounts.items():
            if len(each.queued) > coming and each.served < least:
                prompts = sum(islice(each.queued.values(), coming + 1))
                least = min(least, each.served + self.prompt_cost * prompts / self._weight(name))
        bound = least + self._margin
        ahead: dict[str | None, list[Request]] = {name: [] for name, each in accounts.items() if each.served > bound}
        for request in running if ahead else ():
            if request.preemptions < _GIVES_WAY and request.tenant in ahead:
                ahead[request.tenant].append(request)
        for name in sorted(ahead, key=lambda name: accounts[name].served, reverse=True):
            yield from reversed(ahead[name])

    def is_ahead(self, request: Request) -> bool:
        """Whether its tenant is ahead of another that is busy."""
        accounts = self._tenants.accounts
        least = min(each.served for each in accounts.values() if each.live)
        return accounts[request.tenant].served > least + self._margin

    def share(self, tenant: str | None) -> float:
        """The part of the device that `tenant` would get beside those that are busy now, itself included."""
        busy = {name for name, account in self._tenants.accounts.items() if account.live} | {tenant}
        return self._weight(tenant) / sum(map(self._weight, busy))

    def arrived(self, request: Request) -> None:
        """Let the request's tenant and adapter catch up with those served now, if they had nothing in the queue."""
        self._tenants.join(request.tenant, request).parts.join(request.adapter, request)

    def started(self, request: Request) -> None:
        """Charge the prompt as far as it is to be computed; the engine pays for computing it again."""
        if not request.preemptions:
            self._tenants.start(request.tenant, request)
            self._tenants.accounts[request.tenant].parts.start(request.adapter, request)
            self._charge(request.tenant, request.adapter, self.prompt_cost * (request.known - request.planned))
        if request.known > request.prompt_len:
            self._paid[request.id] = request.known

    def served(self, works: Iterable[Work]) -> None:
        """Charge the tokens that will be sampled, and those that were forced behind earlier ones."""
        given: dict[tuple[str | None, str | None], float] = defaultdict(float)
        for request, _, start, count, samples in works:
            if count > 1 and start >= request.prompt_len:
                forced = start + count - max(start + 1, self._paid.get(request.id, 0))
                given[request.tenant, request.adapter] += self.prompt_cost * max(0, forced)
            if samples:
                given[request.tenant, request.adapter] += self.output_cost
        for (tenant, adapter), tokens in given.items():
            self._charge(tenant, adapter, tokens)

    def ended(self, request: Request) -> None:
        """Forget whoever has nothing left and is not ahead of the busy ones."""
        self._tenants.accounts[request.tenant].parts.leave(request.adapter, request)
        self._tenants.leave(request.tenant, request)
        self._paid.pop(request.id, None)

    def _charge(self, tenant: str | None, adapter: str | None, tokens: float) -> None:
        account = self._tenants.accounts[tenant]
        account.served += tokens / self._weight(tenant)
        account.parts.accounts[adapter].served += tokens / self.adapter_weights.get(adapter or "", 1.0)

    def _accounts(self, request: Request) -> tuple[Account, Account]:
        tenant = self._tenants.accounts[request.tenant]
        return tenant, tenant.parts.accounts[request.adapter]

    def _weight(self, tenant: str | None) -> float:
        return 1.0 if tenant is None else self.weights.get(tenant, 1.0)


@checked(config=_SETTINGS)
class Deadlines(FairShare):
    """The earliest deadline first within a tenant's share; what cannot be met is refused, or ended before it is begun.

    Requests without a deadline come after those with one, in the order of arrival.
    """

    answer: Annotated[int, Field(ge=1)] = 256
    """Begin only what can be done in time, counting so many generated tokens, or `max_tokens` where that is less."""

    def lane(self, request: Request) -> Hashable:
        """Tenant: its adapters share a queue."""
        return request.tenant

    def place(self, request: Request) -> Any:
        """Deadline, then arrival."""
        return inf if request.deadline is None else request.deadline, request.order

    def urgency(self, request: Request, now: float) -> Any:
        """What the tenant was given, then the deadline."""
        return self._accounts(request)[0].served, self.place(request)

    def standing(self, request: Request, now: float) -> Any:
        """Order as in the queue, after the requests that gave way too often already."""
        if request.preemptions >= _GIVES_WAY:
            return super().standing(request, now)
        return 1, *self.urgency(request, now)

    def overtakes(self, waiting: Request, prefilling: Request, now: float) -> bool:
        """Within a tenant the earlier deadline, among tenants the one that was given less."""
        if waiting.tenant == prefilling.tenant and prefilling.preemptions < _GIVES_WAY:
            return bool(self.place(waiting) < self.place(prefilling))
        return super().overtakes(waiting, prefilling, now)

    def worthwhile(self, request: Request, now: float, pace: Pace) -> bool:
        """Whether enough of it can be had in time if it starts now."""
        return request.deadline is None or now + self._needs(request, pace) <= request.deadline

    def expected_wait(self, request: Request, tokens: int, pace: Pace) -> float:
        """What waits before it within its tenant, at the tenant's share of the device."""
        return pace.prefill(tokens) / self.share(request.tenant)

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
"""The built-in policies by the names that `EngineConfig.policy` knows."""

_FAIR = ("fair_share", "deadlines")
_BACKGROUND_LAST = "background_last"
"""A setting of those in `_FAIR`, whose own order knows priorities only within a tenant."""


def policy_of(wanted: str | Mapping[str, Any] | Policy) -> Policy:
    """The policy of that name, with settings where `wanted` is a mapping of `name` and settings; or `wanted` itself.

    Raises:
        InvalidParams: The policy has no such setting, or the setting's value is out of range.
        ValueError: There is no such policy.
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
