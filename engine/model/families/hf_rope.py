"""`read_rope`: the rotary embedding that a config.json describes, in transformers 5's fields or the older ones."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Final

from headrace.adapters.untrusted import Fields, refuse
from headrace.engine.model.families.unread import refuse_unread
from headrace.engine.model.rope import Linear, Llama3, LongRope, Proportional, Rope, Yarn
from headrace.engine.model.spec import LIMITS, Attention

__all__ = ["PART", "read_rope", "rope_fields"]

PART: Final = "partial_rotary_factor"
"""Field that says which part of each head is rotated, within the object of the rope or beside it."""
_ORIGINAL = "original_max_position_embeddings"
_MOST_FACTOR = 1e6
_KNOWN: Final = frozenset(
    """
    rope_type type rope_theta factor original_max_position_embeddings partial_rotary_factor low_freq_factor
    high_freq_factor beta_fast beta_slow mscale mscale_all_dim attention_factor truncate short_factor long_factor
    finetuned max_position_embeddings mrope_section mrope_interleaved
    """.split()
)
"""Fields of a rope that some kind has, or that say nothing of text."""


def rope_fields(config: Fields) -> tuple[str, Mapping[str, object]]:
    """Return the name of the field that holds the rope's object, and the object, which is empty where there is none.

    Raises:
        ModelRejected: The field holds something else, or both of its names are used and contradict each other.
    """
    name = "rope_parameters" if config.data.get("rope_parameters") is not None else "rope_scaling"
    given = config.data.get(name)
    if given is None:
        given = {}
    if not isinstance(given, Mapping):
        config.refuse(name, "an object with rope_type")
    older = config.data.get("rope_scaling")
    if older and not _agrees(older, given):
        config.refuse("rope_scaling", "what rope_parameters says, or one of the two fields alone")
    return name, given


def _agrees(older: object, given: Mapping[str, object]) -> bool:
    """Return whether a `rope_scaling` repeats a part of what `rope_parameters` says, by either name of its kind."""
    if not isinstance(older, Mapping):
        return False
    both = {**given, "type": given.get("type", given.get("rope_type"))}
    return all(name in both and both[name] == value for name, value in older.items())


def read_rope(
    config: Fields,
    max_context: int,
    attention: Attention,
    default_theta: float,
    layer_type: str | None = None,
    own: Collection[str] = (),
) -> Rope:
    """Return the rope of a config, or of its layers of one type.

    Args:
        config: The config. Its `rope_parameters` are read, or the older `rope_theta` beside `rope_scaling`.
        max_context: Most tokens that the model was made for.
        attention: Attention with the heads that are rotated.
        default_theta: Base of the frequencies where the config gives none.
        layer_type: The type, under which `rope_parameters` may have an object of its own.
        own: Fields of the rope that the caller reads.

    Raises:
        ModelRejected: The kind of rope is not supported, or one of its numbers is impossible.
    """
    name, given = rope_fields(config)
    of_type = None if layer_type is None else given.get(layer_type)
    if isinstance(of_type, Mapping):
        name, given = f"{name}.{layer_type}", of_type
    found = {field: value for field, value in given.items() if value is not None}
    kind = found.get("rope_type", found.get("type", "default"))
    numbers = {"rope_theta": config.data.get("rope_theta"), _ORIGINAL: max_context, **found}
    if config.data.get(_ORIGINAL) is not None:  # as in Phi-3's configs, where it counts for more, as in transformers
        numbers[_ORIGINAL] = config.data[_ORIGINAL]
    rope = Fields(numbers, f"{config.origin}: {name}")
    theta = rope.real("rope_theta", 1.0, 1e12, default_theta)
    if kind == "proportional" and attention.rotary_dim is None:  # of whole heads, whose frequencies count
        return Rope(theta, Proportional(rope.real(PART, 0.0, 1.0, 1.0), rope.real("factor", 1e-6, _MOST_FACTOR, 1.0)))
    if PART in found and int(attention.head_dim * rope.real(PART, 0.0, 1.0)) != attention.rotated_dim:
        rope.refuse(PART, attention.rotated_dim / attention.head_dim)
    if isinstance(kind, str):
        _check_fields(rope, found, own)
    if kind == "default":
        return Rope(theta)
    if kind == "linear":
        return Rope(theta, Linear(rope.real("factor", 1.0, _MOST_FACTOR)))
    if kind == "llama3":
        return Rope(theta, _llama3(rope))
    if kind in ("longrope", "su") or (kind == "yarn" and "long_factor" in found):  # Phi-3's older names
        return _long_rope(rope, theta, max_context, attention.rotated_dim)
    if kind == "yarn":
        return _yarn(rope, theta, max_context)
    if kind == "dynamic":  # stretches by a request's length, once that is more than the model's own context
        rope.real("factor", 1.0, _MOST_FACTOR)
        return Rope(theta)
    refuse(rope.origin, "rope_type", kind, "default, linear, llama3, yarn, longrope, dynamic")


def _check_fields(rope: Fields, given: Mapping[str, object], own: Collection[str]) -> None:
    """Refuse fields of a rope that stand for ropes of several kinds of layers, or that nothing reads."""
    several = next((field for field, value in given.items() if isinstance(value, Mapping)), None)
    if several is not None:
        rope.refuse(several, "one rope for all layers")
    refuse_unread(given, _KNOWN.union(own), rope.origin, "this rope")


def _llama3(rope: Fields) -> Llama3:
    low = rope.real("low_freq_factor", 1e-6, _MOST_FACTOR)
    high = rope.real("high_freq_factor", 1e-6, _MOST_FACTOR)
    if high <= low:
        rope.refuse("high_freq_factor", f"more than low_freq_factor, which is {low:g}")
    return Llama3(rope.real("factor", 1.0, _MOST_FACTOR), low, high, _original(rope))


def _yarn(rope: Fields, theta: float, max_context: int) -> Rope:
    """Return yarn with the magnitude 0.1 ln(factor) + 1, unless the config says another (Peng et al., 2023, eq. 22)."""
    original = _original(rope)
    factor = rope.real("factor", 1.0, _MOST_FACTOR, max_context / original)
    fast, slow = rope.real("beta_fast", 1e-3, _MOST_FACTOR, 32.0), rope.real("beta_slow", 1e-3, _MOST_FACTOR, 1.0)
    if slow > fast:
        rope.refuse("beta_slow", f"at most beta_fast, which is {fast:g}")
    if theta <= 1.0:
        rope.refuse("rope_theta", "more than 1 for yarn")
    each, of_all = rope.real("mscale", 0.0, 1e3, 0.0), rope.real("mscale_all_dim", 0.0, 1e3, 0.0)
    stretched = math.log(factor)
    usual = (0.1 * each * stretched + 1.0) / (0.1 * of_all * stretched + 1.0) if each and of_all else None
    magnitude = rope.real("attention_factor", 1e-3, 1e3, 0.1 * stretched + 1.0 if usual is None else usual)
    return Rope(theta, Yarn(factor, original, fast, slow, rope.flag("truncate", True)), magnitude)


def _long_rope(rope: Fields, theta: float, max_context: int, rotary_dim: int) -> Rope:
    """Return longrope with the magnitude sqrt(1 + ln(factor) / ln(original context)), unless given."""
    original = _original(rope)
    factor = rope.real("factor", 0.0, _MOST_FACTOR, max_context / original)
    is_stretched = factor > 1.0 and original > 1
    usual = math.sqrt(1.0 + math.log(factor) / math.log(original)) if is_stretched else 1.0
    short, long = (_divisors(rope, field, rotary_dim // 2) for field in ("short_factor", "long_factor"))
    return Rope(theta, LongRope(short, long, original), rope.real("attention_factor", 1e-3, 1e3, usual))


def _original(rope: Fields) -> int:
    return rope.size(_ORIGINAL, LIMITS["max_context"])


def _divisors(rope: Fields, field: str, pairs: int) -> tuple[float, ...]:
    found = rope.data.get(field)
    if not isinstance(found, list) or len(found) != pairs:
        rope.refuse(field, f"a list of {pairs} numbers, half of the rotated elements of a head")
    numbers = []
    for each in found:
        if isinstance(each, bool) or not isinstance(each, (int, float)) or not 1e-6 <= each <= _MOST_FACTOR:
            rope.refuse(field, f"numbers from 1e-06 to {_MOST_FACTOR:g}")
        numbers.append(float(each))
    return tuple(numbers)
