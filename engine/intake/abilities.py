"""Refuses what a device cannot serve, by the abilities of its runner; a device with all of them is not asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Final, get_args

from headrace.engine.errors import InvalidParams
from headrace.engine.intake.requests import Asking
from headrace.engine.intake.shaping import SHAPING_FIELDS
from headrace.engine.params import SamplingParams, shown
from headrace.engine.scheduling.plan import Ability

__all__ = ["ABILITIES", "check_abilities", "check_hooks"]

ABILITIES: Final[frozenset[Ability]] = frozenset(get_args(Ability))
"""All abilities that a runner may have."""
_NEEDS: Final[Mapping[Ability, Sequence[str]]] = {
    "shaping": SHAPING_FIELDS,
    "grammar": ("response_format",),
    "logprobs": ("best_of", "beam_width", "logprobs", "prompt_logprobs"),
}
"""Fields that a runner can only serve with an ability, if they are not at their defaults."""


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


def check_hooks(asking: Asking, abilities: AbstractSet[Ability]) -> None:
    """Refuse a hook that the device cannot serve.

    Raises:
        InvalidParams: The device has no hooks; names the hook.
    """
    if asking.logits_processor is not None and "hooks" not in abilities:
        raise InvalidParams(
            "logits_processor: this device cannot do it yet", field="logits_processor", value=asking.logits_processor
        )
