"""Makes the scheduler's requests from a caller's arguments, if the model can serve them; never queues them.

`Asking` holds these arguments. Next to read: scheduling/request.py.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.adapters.slots import AdapterVersion
from headrace.engine.errors import InvalidParams
from headrace.engine.intake.adapter_names import with_virtual_tokens
from headrace.engine.intake.prompts import Charge, charge_nobody
from headrace.engine.intake.shaping import SHAPING_FIELDS, make_shaping
from headrace.engine.life.opened import Opened
from headrace.engine.params import SamplingParams, shown
from headrace.engine.scheduling.asked import Asked, Sampling
from headrace.engine.scheduling.memory.prefix import root_of
from headrace.engine.scheduling.request import Request
from headrace.engine.scheduling.shaping import Grammar, LogitsProcessor, Reporting
from headrace.engine.steps.hooks import StopWhen, check_hook
from headrace.engine.tokens.interface import TokenizerLike

__all__ = ["NO_ADAPTERS", "Asking", "check_asking", "check_generates", "check_streamed", "make_requests"]

NO_ADAPTERS: Mapping[str, AdapterVersion] = {}
_UNLIMITED = 2**62
_LONGEST = 1e9  # seconds: some 30 years, and exact when added to any clock
_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 divided by the golden ratio: spreads the seeds of a prompt's choices
_COLDEST, _HOTTEST = 1e-6, 1e30  # bounds of temperatures that float32 can divide by
_MAX_PROMPT_REPORTS = 2**16
"""Most log-probabilities for one prompt: reading more of them would hold up the event loop."""


@dataclass(frozen=True, slots=True)
class Asking:
    """The arguments of `Engine.stream` besides the prompt."""

    params: SamplingParams
    adapter: str | None
    tenant: str | None
    cache_salt: str | None
    priority: int
    stop_when: StopWhen | None = None
    logits_processor: LogitsProcessor | None = None
    deadline: float | None = None
    """Seconds from `since` until the request ends at the latest; None for no limit."""
    since: float = 0.0
    """Time at which the request was made, in seconds on the step loop's clock."""
    charge: Charge = charge_nobody
    """Function that is told of work done for the request besides its steps, in tokens."""
    before: Request | None = None
    """The request of the turn that this one follows; None for the first turn."""

    @property
    def ends(self) -> float | None:
        """Time by which the request ends at the latest, in seconds on the step loop's clock; None for no limit."""
        return None if self.deadline is None else self.since + self.deadline

    @property
    def sharing(self) -> str | None:
        """Value that requests must have in common to share prefix pages."""
        return self.tenant if self.cache_salt is None else self.cache_salt

    @property
    def max_tokens(self) -> int:
        """Most tokens of the completion; a number beyond any context if there is no limit."""
        return _UNLIMITED if self.params.max_tokens is None else self.params.max_tokens

    def asked(self, version: AdapterVersion | None, limit: int, **options: Any) -> Asked:
        """Return what is asked of a request: its limit in tokens, its adapter, for whom it is, and other fields."""
        return Asked(
            limit=limit,
            version=version,
            root=root_of(version, self.sharing),
            priority=self.priority,
            tenant=self.tenant,
            adapter=self.adapter,
            **options,
        )

    def stop_ids(self, eos_ids: Sequence[int]) -> frozenset[int]:
        """Return the token ids that end a choice."""
        return frozenset((*self.params.stop_token_ids, *(() if self.params.ignore_eos else eos_ids)))


def check_streamed(params: object) -> None:
    """Refuse parameters that no stream can serve.

    Raises:
        InvalidParams: `params` are not `SamplingParams`, or ask for `best_of`.
    """
    if not isinstance(params, SamplingParams):
        raise InvalidParams(
            f"params: must be SamplingParams, got {type(params).__name__}", field="params", value=params
        )
    if params.best_of is not None:
        raise InvalidParams(
            "best_of: is ranked when all is generated and cannot be streamed; use generate",
            field="best_of",
            value=params.best_of,
        )


def check_generates(opened: Opened) -> None:
    """Refuse a generation where the model cannot choose tokens.

    Raises:
        InvalidParams: The model only embeds or scores texts.
    """
    if not opened.generates:
        name = opened.info.architecture
        raise InvalidParams(f"model: {name} cannot generate; use embed or score", field="model", value=name)


def _check_deadline(asking: Asking) -> None:
    seconds = asking.deadline
    if seconds is None:
        return
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0.0 < seconds <= _LONGEST:
        raise InvalidParams(
            f"deadline: must be more than 0 seconds and at most {_LONGEST:g}, got {shown(seconds)}",
            field="deadline",
            value=seconds,
            limit={"gt": 0, "le": _LONGEST},
        )
    if asking.params.beam_width is not None:
        raise InvalidParams("deadline: cannot go with beam_width", field="deadline", value=seconds)


def check_asking(asking: Asking, vocab_size: int) -> None:
    """Refuse arguments of the wrong kind, and token ids that a vocabulary of this size lacks.

    Raises:
        InvalidParams: An argument is refused; names the field.
    """
    if type(asking.priority) is not int:
        raise InvalidParams(
            f"priority: must be an int, got {asking.priority!r}", field="priority", value=asking.priority
        )
    named = {"adapter": asking.adapter, "tenant": asking.tenant, "cache_salt": asking.cache_salt}
    for field, value in named.items():
        if value is not None and not isinstance(value, str):
            raise InvalidParams(f"{field}: must be a str, got {value!r}", field=field, value=value)
    params = asking.params
    _check_deadline(asking)
    for field, hook in (("stop_when", asking.stop_when), ("logits_processor", asking.logits_processor)):
        if hook is not None:
            check_hook(hook, field)
            if params.beam_width is not None:
                raise InvalidParams(f"{field}: cannot go with beam_width", field=field, value=hook)
    listed = {
        "stop_token_ids": params.stop_token_ids,
        "logit_bias": [token for token, _ in params.logit_bias],
        "allowed_token_ids": params.allowed_token_ids or (),
        "forbidden_token_ids": params.forbidden_token_ids,
    }
    for field, tokens in listed.items():
        if tokens and (token := max(tokens)) >= vocab_size:
            raise InvalidParams(
                f"{field}: must be below the vocabulary's {vocab_size}, got {token}",
                field=field,
                value=token,
                limit=vocab_size - 1,
            )


def make_requests(
    ids: Sequence[int],
    asking: Asking,
    tokenizer: TokenizerLike,
    vocab_size: int,
    random_seeds: random.Random,
    grammar: Grammar | None = None,
    adapters: Mapping[str, AdapterVersion] = NO_ADAPTERS,
    speculates: bool = False,
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
        speculates: Whether the engine verifies drafts, where the request allows it.

    Raises:
        InvalidParams: A token is not in the vocabulary, or the masks leave none.
        UnknownAdapter: No adapter is loaded under the name in `asking`.
    """
    params = asking.params
    check_asking(asking, vocab_size)
    version, ids = (None, ids) if asking.adapter is None else with_virtual_tokens(asking.adapter, ids, params, adapters)
    seed = random_seeds.getrandbits(63) if params.seed is None else params.seed
    stop_ids = asking.stop_ids(tokenizer.eos_ids)
    shapes = not params.model_fields_set.isdisjoint(SHAPING_FIELDS)
    shaping = make_shaping(params, len(ids), stop_ids, tokenizer, vocab_size) if shapes else None
    requests: list[Request] = []
    for choice in range(params.n):
        asked = asking.asked(
            version,
            len(ids) + asking.max_tokens,
            sampling=_sampling(params, seed + choice * _GOLDEN),
            stop_ids=stop_ids,
            shaping=shaping,
            reporting=_reporting(params, choice, len(ids)),
            grammar=grammar,
            jumps=grammar is not None and shaping is None and _takes_runs(asking),
            processor=_processor(asking, version),
            alone=params.deterministic,
            speculates=speculates and _may_speculate(asking),
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


def _processor(asking: Asking, version: AdapterVersion | None) -> LogitsProcessor | None:
    """Return the caller's hook, wrapped so that it does not see the ids that stand for virtual tokens."""
    given = asking.logits_processor
    if given is None or version is None or not version.virtual_tokens:
        return given
    virtual = version.virtual_tokens
    return lambda tokens, logits_V: given(tokens[virtual:], logits_V)


def _may_speculate(asking: Asking) -> bool:
    """Return whether drafts may be verified: nothing outside the device has a say in each token before the next."""
    params = asking.params
    return params.speculate and asking.logits_processor is None and not params.deterministic


def _takes_runs(asking: Asking) -> bool:
    """Return whether several tokens may come at once, since nothing is asked of each by itself."""
    params = asking.params
    looks = params.stop or params.deterministic or asking.stop_when is not None or asking.logits_processor is not None
    return params.logprobs is None and not looks


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
