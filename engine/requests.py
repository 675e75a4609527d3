"""Makes the scheduler's requests from what a caller asks; checks them against the model and never queues them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.engine.errors import InvalidParams, UnknownAdapter
from headrace.engine.params import SamplingParams
from headrace.engine.scheduling.request import Request, Sampling

__all__ = ["Asking", "make_requests"]

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 divided by the golden ratio: spreads the seeds of a prompt's choices
_UNLIMITED = 2**62


@dataclass(frozen=True, slots=True)
class Asking:
    """Who asks and for what: the arguments of `Engine.stream` besides the prompt."""

    params: SamplingParams
    adapter: str | None
    tenant: str | None
    cache_salt: str | None
    priority: int

    @property
    def sharing(self) -> str | None:
        """What requests have in common that may share prefix pages."""
        return self.tenant if self.cache_salt is None else self.cache_salt

    def stop_ids(self, eos_ids: Sequence[int]) -> frozenset[int]:
        """Token ids that end a choice."""
        return frozenset((*self.params.stop_token_ids, *(() if self.params.ignore_eos else eos_ids)))


def make_requests(
    ids: Sequence[int], asking: Asking, eos_ids: Sequence[int], vocab_size: int, random_seeds: random.Random
) -> list[Request]:
    """One request for each of the `n` choices of a prompt; the others fork the first one's pages.

    Raises:
        InvalidParams: A stop token is not in the vocabulary.
        UnknownAdapter: No adapter is loaded under that name.
    """
    params = asking.params
    _check(asking, vocab_size)
    seed = random_seeds.getrandbits(63) if params.seed is None else params.seed
    limit = len(ids) + (params.max_tokens if params.max_tokens is not None else _UNLIMITED)
    stop_ids = asking.stop_ids(eos_ids)
    root = repr((asking.adapter, asking.sharing)).encode()
    requests: list[Request] = []
    for choice in range(params.n):
        sampling = Sampling(
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            seed=(seed + choice * _GOLDEN) & _MASK,
        )
        requests.append(
            Request(
                tokens=list(ids),
                prompt_len=len(ids),
                limit=limit,
                sampling=sampling,
                stop_ids=stop_ids,
                root=root,
                priority=asking.priority,
                leader=requests[0] if requests else None,
                forked=params.n > 1,
            )
        )
    return requests


def _check(asking: Asking, vocab_size: int) -> None:
    if type(asking.priority) is not int:
        raise InvalidParams(
            f"priority: must be an int, got {asking.priority!r}", field="priority", value=asking.priority
        )
    named = {"adapter": asking.adapter, "tenant": asking.tenant, "cache_salt": asking.cache_salt}
    for field, value in named.items():
        if value is not None and not isinstance(value, str):
            raise InvalidParams(f"{field}: must be a str, got {value!r}", field=field, value=value)
    for token in asking.params.stop_token_ids:
        if token >= vocab_size:
            raise InvalidParams(
                f"stop_token_ids: must be below the vocabulary's {vocab_size}, got {token}",
                field="stop_token_ids",
                value=token,
                limit=vocab_size - 1,
            )
    if asking.adapter is not None:
        raise UnknownAdapter(
            f"adapter: none is loaded under the name {asking.adapter!r}", field="adapter", value=asking.adapter
        )
