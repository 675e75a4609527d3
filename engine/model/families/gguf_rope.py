"""`read_gguf_rope`: the rotary embedding that a GGUF header and the file's own rope tensors describe."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from headrace.adapters.untrusted import Fields, refuse
from headrace.engine.model.rope import Divided, Linear, LongRope, Rope, RopeScaling, Yarn
from headrace.engine.model.spec import LIMITS

__all__ = ["ROPE_TENSORS", "read_gguf_rope", "stretched_context"]

_FREQS: Final = "rope_freqs.weight"
_LONG: Final = "rope_factors_long.weight"
_SHORT: Final = "rope_factors_short.weight"
ROPE_TENSORS: Final[tuple[str, ...]] = (_FREQS, _LONG, _SHORT)
"""Names of the tensors that hold divisors of frequencies."""
_MOST_FACTOR = 1e6
_YARN_MAGNITUDE = "rope.scaling.yarn_attn_factor"


def read_gguf_rope(header: Fields, name: str, tensors: Mapping[str, tuple[float, ...]], pairs: int) -> Rope:
    """Return the rope of a GGUF file.

    Args:
        header: The file's metadata.
        name: The file's `general.architecture`, which the keys begin with.
        tensors: The numbers of those of `ROPE_TENSORS` that the file has.
        pairs: Number of pairs of elements that are rotated in each head.

    Raises:
        ModelRejected: The kind of rope is not supported, or one of its numbers is impossible.
    """
    for tensor, divisors in tensors.items():
        if len(divisors) != pairs:
            refuse(header.origin, f"the length of {tensor}", len(divisors), pairs)
        if not all(math.isfinite(divisor) and divisor > 0 for divisor in divisors):
            refuse(header.origin, tensor, divisors, "positive numbers")
    theta = header.real(f"{name}.rope.freq_base", 1.0, 1e12, 10000.0)
    magnitude = header.real(f"{name}.rope.scaling.attn_factor", 1e-3, 1e3, 1.0)
    field = f"{name}.rope.scaling.type"
    kind = header.data.get(field, "none")
    if kind not in ("none", "linear", "yarn", "longrope"):
        header.refuse(field, "none, linear, yarn, longrope")
    if kind != "yarn" and header.data.get(f"{name}.{_YARN_MAGNITUDE}", 1.0) != 1.0:
        header.refuse(f"{name}.{_YARN_MAGNITUDE}", "1.0 without yarn")
    if _LONG in tensors or _SHORT in tensors or kind == "longrope":
        if kind not in ("none", "longrope"):
            header.refuse(field, f"longrope, since the file has {next(iter(tensors))}")
        return Rope(theta, _long_rope(header, name, tensors), magnitude)
    if kind == "yarn":
        if _FREQS in tensors:
            header.refuse(field, f"none or linear, since the file has {_FREQS}")
        yarn = _yarn(header, name, theta)
        return Rope(theta, yarn, magnitude * _yarn_magnitude(header, name, yarn.factor))
    scaling: RopeScaling | None = None
    if kind == "linear":
        scaling = Linear(header.real(f"{name}.rope.scaling.factor", 1.0, _MOST_FACTOR))
    if _FREQS in tensors:
        scaling = Divided(tensors[_FREQS], scaling)
    return Rope(theta, scaling, magnitude)


def stretched_context(header: Fields, name: str, context: int) -> int:
    """Return the most tokens of a model; by custom the context length leaves out what yarn adds to it."""
    if header.data.get(f"{name}.rope.scaling.type") != "yarn":
        return context
    factor = header.real(f"{name}.rope.scaling.factor", 1.0, _MOST_FACTOR)
    return min(max(context, round(factor * _original(header, name))), LIMITS["max_context"])


def _yarn(header: Fields, name: str, theta: float) -> Yarn:
    fast, slow = (f"{name}.rope.scaling.yarn_beta_{each}" for each in ("fast", "slow"))
    beta_fast, beta_slow = header.real(fast, 1e-3, _MOST_FACTOR, 32.0), header.real(slow, 1e-3, _MOST_FACTOR, 1.0)
    if beta_slow > beta_fast:
        header.refuse(slow, f"at most the value of {fast}, {beta_fast:g}")
    if theta <= 1.0:
        header.refuse(f"{name}.rope.freq_base", "more than 1 for yarn")
    factor = header.real(f"{name}.rope.scaling.factor", 1.0, _MOST_FACTOR)
    return Yarn(factor, _original(header, name), beta_fast, beta_slow)


def _yarn_magnitude(header: Fields, name: str, factor: float) -> float:
    """Return 0.1 ln(factor) + 1 (Peng et al., 2023, eq. 22), and refuse a key that says another number.

    Tools disagree whether that key is the magnitude or multiplies it.
    """
    usual, field = 0.1 * math.log(factor) + 1.0, f"{name}.{_YARN_MAGNITUDE}"
    given = header.real(field, 1e-3, 1e3, usual)
    if not math.isclose(given, usual, rel_tol=1e-4):
        header.refuse(field, f"0.1 ln(factor) + 1, which is {usual:.6g}")
    return usual


def _long_rope(header: Fields, name: str, tensors: Mapping[str, tuple[float, ...]]) -> LongRope:
    for tensor in (_LONG, _SHORT):
        if tensor not in tensors:
            refuse(header.origin, tensor, "missing", "both tensors of divisors for longrope")
    if _FREQS in tensors:
        refuse(header.origin, _FREQS, "left over", f"no tensor of this name beside {_LONG}")
    return LongRope(tensors[_SHORT], tensors[_LONG], _original(header, name))


def _original(header: Fields, name: str) -> int:
    return header.size(f"{name}.rope.scaling.original_context_length", LIMITS["max_context"])
