"""Makes the scheduler's requests from a caller's arguments, if the model can serve them; never queues them."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.adapters.slots import AdapterVersion
from headrace.engine.errors import InvalidParams
from headrace.engine.intake.adapter_names import version_of, with_virtual_tokens
from headrace.engine.intake.asking import Asking, asks_for, check_asking
from headrace.engine.intake.shaping import make_shaping
from headrace.engine.params import SamplingParams
from headrace.engine.scheduling.asked import Asked, Sampling, root_of
from headrace.engine.scheduling.beams import BeamSearch
from headrace.engine.scheduling.pooling import Pooling
from headrace.engine.scheduling.request import Request
from headrace.engine.scheduling.shaping import Grammar, LogitsProcessor, Reporting
from headrace.engine.tokens.interface import TokenizerLike

__all__ = ["begin_search", "make_pooling_request", "make_requests"]

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 divided by the golden ratio: spreads the seeds of a prompt's choices
_UNLIMITED = 2**62
_COLDEST, _HOTTEST = 1e-6, 1e30  # bounds of temperatures that float32 can divide by
_NO_ADAPTERS: Mapping[str, AdapterVersion] = {}
_MAX_PROMPT_REPORTS = 2**16
"""Most log-probabilities for one prompt: reading more of them would hold up the event loop."""


def make_requests(
    ids: Sequence[int],
    asking: Asking,
    tokenizer: TokenizerLike,
    vocab_size: int,
    random_seeds: random.Random,
    grammar: Grammar | None = None,
    adapters: Mapping[str, AdapterVersion] = _NO_ADAPTERS,
) -> list[Request]:
    """Return one request for each of the `n` choices of a prompt; the others fork the first one's pages.

    Args:
        ids: Token ids of the prompt.
        asking: The other arguments of the caller.
        tokenizer: The model's tokenizer.
        vocab_size: Width of the logits.
        random_seeds: Source of seeds where the caller gives none.
        grammar: The compiled `response_format`.
        adapters: Adapter versions by name.

    Raises:
        InvalidParams: A token is not in the vocabulary, or the masks leave none.
        UnknownAdapter: No adapter is loaded under the name in `asking`.
    """
    params = asking.params
    check_asking(asking, vocab_size)
    version, ids = (None, ids) if asking.adapter is None else with_virtual_tokens(asking.adapter, ids, params, adapters)
    if params.beam_width is not None:
        return [_first_beam(ids, asking, begin_search(asking, tokenizer), vocab_size, version)]
    seed = random_seeds.getrandbits(63) if params.seed is None else params.seed
    stop_ids = asking.stop_ids(tokenizer.eos_ids)
    shaping = make_shaping(params, len(ids), stop_ids, tokenizer, vocab_size) if asks_for(params, "shaping") else None
    limit = len(ids) + (_UNLIMITED if params.max_tokens is None else params.max_tokens)
    requests: list[Request] = []
    for choice in range(params.n):
        asked = _asked(
            asking,
            version,
            limit,
            sampling=_sampling(params, seed + choice * _GOLDEN),
            stop_ids=stop_ids,
            shaping=shaping,
            reporting=_reporting(params, choice, len(ids)),
            grammar=grammar,
            jumps=grammar is not None and shaping is None and _takes_runs(asking),
            processor=_processor(asking, version),
            alone=params.deterministic,
            deadline=asking.ends,
        )
        requests.append(
            Request(
                asked,
                list(ids),
                leader=requests[0] if requests else None,
                forked=params.n > 1 or asking.before is not None,
                before=asking.before,
                streams=int(params.n == 1),
            )
        )
    return requests


def _asked(asking: Asking, version: AdapterVersion | None, limit: int, **options: Any) -> Asked:
    """Return what is asked of a request: its limit in tokens, its adapter, for whom it is, and other fields."""
    return Asked(
        limit=limit,
        version=version,
        root=root_of(version, asking.sharing),
        priority=asking.priority,
        tenant=asking.tenant,
        adapter=asking.adapter,
        **options,
    )


def _processor(asking: Asking, version: AdapterVersion | None) -> LogitsProcessor | None:
    """Return the caller's hook, wrapped so that it does not see the ids that stand for virtual tokens."""
    given = asking.logits_processor
    if given is None or version is None or not version.virtual_tokens:
        return given
    virtual = version.virtual_tokens
    return lambda tokens, logits_V: given(tokens[virtual:], logits_V)


def _takes_runs(asking: Asking) -> bool:
    """Return whether several tokens may come at once, since nothing is asked of each by itself."""
    params = asking.params
    looks = params.stop or params.deterministic or asking.stop_when is not None or asking.logits_processor is not None
    return params.logprobs is None and not looks


def make_pooling_request(
    ids: Sequence[int],
    asking: Asking,
    pooling: Pooling,
    vocab_size: int,
    adapters: Mapping[str, AdapterVersion] = _NO_ADAPTERS,
) -> Request:
    """Return a request that generates nothing; the arguments are those of `make_requests`.

    Raises:
        InvalidParams: A keyword is of the wrong kind, or the adapter has virtual tokens.
        UnknownAdapter: No adapter is loaded under the name in `asking`.
    """
    check_asking(asking, vocab_size)
    version = version_of(asking.adapter, adapters)
    if version is not None and version.virtual_tokens:
        raise InvalidParams(
            "adapter: one with virtual tokens cannot be pooled", field="adapter", value=asking.adapter, limit=0
        )
    return Request(_asked(asking, version, len(ids) + 1, pooling=pooling), list(ids))


def _reporting(params: SamplingParams, choice: int, prompt_len: int) -> Reporting | None:
    """Return the reports that a choice makes; only the first reports on the prompt, which is the same for all."""
    _check_prompt_logprobs(params, prompt_len)
    reporting = Reporting(params.logprobs, params.prompt_logprobs if choice == 0 else None)
    return None if reporting == Reporting() else reporting


def _sampling(params: SamplingParams, seed: int) -> Sampling:
    return Sampling(
        temperature=min(max(params.temperature, _COLDEST), _HOTTEST) if params.temperature else 0.0,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        seed=seed & _MASK,
    )


def begin_search(asking: Asking, tokenizer: TokenizerLike) -> BeamSearch:
    """Return a beam search that has just begun."""
    params = asking.params
    return BeamSearch(
        width=params.beam_width or 1,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        stop_ids=asking.stop_ids(tokenizer.eos_ids),
        limit=_UNLIMITED if params.max_tokens is None else params.max_tokens,
    )


def _first_beam(
    ids: Sequence[int], asking: Asking, search: BeamSearch, vocab_size: int, version: AdapterVersion | None
) -> Request:
    """Return the request whose likeliest tokens begin a beam search.

    Raises:
        InvalidParams: The vocabulary has fewer tokens than the search has candidates.
    """
    if search.candidates > vocab_size:
        raise InvalidParams(
            f"beam_width: {search.width} beams look at {search.candidates} tokens of a vocabulary of {vocab_size}",
            field="beam_width",
            value=search.width,
            limit=vocab_size,
        )
    reporting = Reporting(completion=search.candidates)
    return Request(_asked(asking, version, len(ids) + 1, reporting=reporting, holds=True), list(ids))


def _check_prompt_logprobs(params: SamplingParams, prompt_len: int) -> None:
    if params.prompt_logprobs is None:
        return
    most = _MAX_PROMPT_REPORTS // (1 + params.prompt_logprobs)
    if prompt_len > most:
        raise InvalidParams(
            f"prompt_logprobs: {params.prompt_logprobs} are for prompts of up to {most} tokens, got {prompt_len}",
            field="prompt_logprobs",
            value=params.prompt_logprobs,
            limit=most,
        )
