"""`Asking`: the arguments of a request besides its prompt, with the checks that need no prompt; makes no request.

Next to read: requests.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final

from headrace.engine.errors import InvalidParams
from headrace.engine.intake.tokenizing import Charge, charge_nobody
from headrace.engine.life.opened import Opened
from headrace.engine.params import SamplingParams, shown
from headrace.engine.scheduling.plan import Ability
from headrace.engine.scheduling.request import Request
from headrace.engine.scheduling.shaping import LogitsProcessor
from headrace.engine.steps.hooks import StopWhen, check_hook

__all__ = ["Asking", "asks_for", "check_abilities", "check_asking", "check_generates", "check_hooks", "check_streamed"]

_LONGEST = 1e9  # seconds: some 30 years, and exact when added to any clock
_NEEDS: Final[Mapping[Ability, Sequence[str]]] = {
    "shaping": (
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "logit_bias",
        "allowed_token_ids",
        "forbidden_token_ids",
        "bad_words",
        "min_tokens",
    ),
    "grammar": ("response_format",),
    "logprobs": ("best_of", "beam_width", "logprobs", "prompt_logprobs"),
}
"""Fields that a runner can only serve with an ability, if they are not at their defaults."""


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

    def stop_ids(self, eos_ids: Sequence[int]) -> frozenset[int]:
        """Return the token ids that end a choice."""
        return frozenset((*self.params.stop_token_ids, *(() if self.params.ignore_eos else eos_ids)))


def check_hooks(asking: Asking, abilities: AbstractSet[Ability]) -> None:
    """Refuse a hook that the device cannot serve.

    Raises:
        InvalidParams: The device has no hooks; names the hook.
    """
    if asking.logits_processor is not None and "hooks" not in abilities:
        raise InvalidParams(
            "logits_processor: this device cannot do it yet", field="logits_processor", value=asking.logits_processor
        )


def check_abilities(params: SamplingParams, abilities: AbstractSet[Ability]) -> None:
    """Refuse a field that asks for more than the device can do.

    Raises:
        InvalidParams: A field needs an ability that is not in `abilities`; names the first one.
    """
    for ability, fields in _NEEDS.items():
        for field in () if ability in abilities else fields:
            value = getattr(params, field)
            if value != SamplingParams.model_fields[field].default:
                raise InvalidParams(
                    f"{field}: this device cannot do it yet, got {shown(value)}", field=field, value=value
                )


def asks_for(params: SamplingParams, ability: Ability) -> bool:
    """Return whether a field was given that needs `ability`, perhaps at its default."""
    return not params.model_fields_set.isdisjoint(_NEEDS[ability])


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
