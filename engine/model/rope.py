"""`Rope`: how positions become the angles by which heads are rotated; never rotates a head, never imports torch.

A head's elements make pairs, the two halves of the head against each other, and each pair turns by its own frequency
(Su et al., 2021). Models that were stretched to longer contexts change these frequencies, each in a way of its own.

Devices know only that. Where a model pairs elements side by side, or rotates a part of each head, the rows that make a
head's elements are put in another order as they are loaded (`head_places`), and pairs that stay have the frequency 0.
Scores do not depend on the order, since queries and keys share it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Pairs: TypeAlias = NDArray[np.float64]

__all__ = [
    "UNROTATED",
    "Divided",
    "Linear",
    "Llama3",
    "LongRope",
    "Proportional",
    "PositionTable",
    "QueryGrowth",
    "Rope",
    "RopeScaling",
    "Yarn",
    "head_places",
]


class RopeScaling(ABC):
    """Base of the ways to change the frequencies: frozen dataclasses."""

    __slots__ = ()

    @abstractmethod
    def scaled(self, frequencies: Pairs, theta: float, context: int) -> Pairs:
        """Return the frequencies of a model that runs with `context` tokens at most.

        Args:
            frequencies: Radians per position of each pair, falling from 1, float64 [rotary_dim / 2].
            theta: Base of these frequencies.
            context: Most tokens of a prompt and its completion together.
        """

    def magnitude(self, context: int) -> float | None:
        """Return the factor of cosines and sines that goes with the context; None for `Rope.magnitude`."""
        return None


@dataclass(frozen=True, slots=True)
class Linear(RopeScaling):
    """Positions closer to each other by one factor (Chen et al., 2023, "Extending context window ...")."""

    factor: float

    def scaled(self, frequencies: Pairs, theta: float, context: int) -> Pairs:
        """Return frequencies divided by the factor."""
        return frequencies / self.factor


@dataclass(frozen=True, slots=True)
class Divided(RopeScaling):
    """A divisor for each frequency, as GGUF files store what a model was stretched by."""

    divisors: tuple[float, ...]
    then: RopeScaling | None = None
    """What is applied before the divisors."""

    def scaled(self, frequencies: Pairs, theta: float, context: int) -> Pairs:
        """Return frequencies divided by the divisors."""
        first = frequencies if self.then is None else self.then.scaled(frequencies, theta, context)
        return first / np.asarray(self.divisors, dtype=np.float64)


@dataclass(frozen=True, slots=True)
class Llama3(RopeScaling):
    """Long wavelengths stretched by a factor, short ones kept, and a blend between (Grattafiori et al., 2024)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int
    """Tokens of context that the model was first trained with."""

    def scaled(self, frequencies: Pairs, theta: float, context: int) -> Pairs:
        """Return frequencies by how often each turns within the original context."""
        turns = self.original_context * frequencies / (2 * math.pi)
        share = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        kept = np.clip(share, 0.0, 1.0)
        return frequencies * (kept + (1 - kept) / self.factor)


@dataclass(frozen=True, slots=True)
class Yarn(RopeScaling):
    """Slow pairs stretched by a factor, fast ones kept, and a ramp over the pairs between (Peng et al., 2023)."""

    factor: float
    original_context: int
    """Tokens of context that the model was first trained with."""
    beta_fast: float = 32.0
    """Turns within the original context from which on a pair is kept."""
    beta_slow: float = 1.0
    """Turns within the original context up to which a pair is stretched by the whole factor."""
    truncate: bool = True
    """Whether the ends of the ramp are rounded outward to whole pairs."""

    def scaled(self, frequencies: Pairs, theta: float, context: int) -> Pairs:
        """Return frequencies between kept and stretched ones, by the number of each pair."""
        pairs = len(frequencies)
        first, last = (
            pairs * math.log(self.original_context / (turns * 2 * math.pi)) / math.log(theta)
            for turns in (self.beta_fast, self.beta_slow)
        )
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * pairs - 1)
        ramp = np.clip((np.arange(pairs) - first) / (last - first or 0.001), 0.0, 1.0)
        kept: Pairs = 1 - ramp + ramp / self.factor
        return frequencies * kept


@dataclass(frozen=True, slots=True)
class LongRope(RopeScaling):
    """Two lists of divisors, one for contexts as long as the original and one for longer ones (Ding et al., 2024).

    Keys in the cache are rotated already, so the list is chosen once, by the most tokens that an engine lets a request
    have, and not by the tokens that it has so far.
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_context: int
    """Most tokens for which `short` is used."""
    magnitudes: tuple[float, float] | None = None
    """Factors of cosines and sines with `short` and with `long`; None for `Rope.magnitude` with both."""

    def scaled(self, frequencies: Pairs, theta: float, context: int) -> Pairs:
        """Return frequencies divided by the divisors for `context`."""
        divisors = self.long if context > self.original_context else self.short
        return frequencies / np.asarray(divisors, dtype=np.float64)

    def magnitude(self, context: int) -> float | None:
        """Return the factor of cosines and sines of a model that runs with `context` tokens; None for the rope's."""
        return None if self.magnitudes is None else self.magnitudes[context > self.original_context]


@dataclass(frozen=True, slots=True)
class Proportional(RopeScaling):
    """A part of the pairs rotated, with the frequencies that they have in a head that is rotated as a whole.

    Gemma Team (2026), Gemma 4, as transformers computes it (`proportional` in `modeling_rope_utils`).
    """

    part: float
    """Part of the pairs that are rotated, the first ones."""
    factor: float = 1.0
    """Divisor of their frequencies."""

    def scaled(self, frequencies: Pairs, theta: float, context: int) -> Pairs:
        """Return the first frequencies, divided, and zeros behind them."""
        rotated = np.arange(len(frequencies)) < int(self.part * 2 * len(frequencies) // 2)
        return np.where(rotated, frequencies / self.factor, 0.0)


@dataclass(frozen=True, slots=True)
class _Still(RopeScaling):
    """No rotation at all: attention without positions (Kazemnejad et al., 2023)."""

    def scaled(self, frequencies: Pairs, theta: float, context: int) -> Pairs:
        """Return zeros."""
        return np.zeros_like(frequencies)


@dataclass(frozen=True, slots=True)
class QueryGrowth:
    """Factor 1 + rate ln(1 + floor(position / context)) of queries, by which attention stays sharp over many tokens.

    Meta AI (2025), "The Llama 4 herd", which has it in layers without rotation; Ministral 3 has it in all.
    """

    rate: float
    context: int
    """Number of first positions whose factor is 1."""

    def factors(self, positions: int) -> NDArray[np.float32]:
        """Return the factors of the positions from 0 on, float32 [positions]."""
        steps = np.arange(positions) // self.context
        return (1.0 + self.rate * np.log1p(steps)).astype(np.float32)


@dataclass(frozen=True, slots=True)
class PositionTable:
    """Learned embeddings of positions, which are added to those of tokens (Gehring et al., 2017)."""

    rows: int
    offset: int = 0
    """Row of position 0."""


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding of a layer's queries and keys."""

    theta: float
    """Base of the frequencies, `theta ** (-2 i / rotary_dim)` for pair i."""
    scaling: RopeScaling | None = None
    magnitude: float = 1.0
    """Factor of the cosines and sines of rotated elements, by which yarn and longrope sharpen attention."""

    def inverse_frequencies(self, rotary_dim: int, context: int) -> NDArray[np.float32]:
        """Return the radians per position for each pair of rotated elements, float32 [rotary_dim / 2].

        Args:
            rotary_dim: Elements of a head that are rotated.
            context: Most tokens that a request may have.
        """
        frequencies = self.theta ** -(np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim)
        if self.scaling is not None:
            frequencies = self.scaling.scaled(frequencies, self.theta, context)
        return frequencies.astype(np.float32)

    def magnitude_within(self, context: int) -> float:
        """Return the factor of cosines and sines of a model that runs with `context` tokens at most."""
        own = None if self.scaling is None else self.scaling.magnitude(context)
        return self.magnitude if own is None else own


def head_places(head_dim: int, rotary_dim: int, *, interleaved: bool) -> NDArray[np.int64] | None:
    """Return the place that each element of a model's head has on a device; None where all stay in order.

    On a device, pair i has the elements i and i + head_dim / 2. The rotated pairs come first, in their order, then
    pairs of elements that are not rotated.

    Args:
        head_dim: Elements of a head.
        rotary_dim: Number of first elements that are rotated, even.
        interleaved: Whether the model's pair i has the elements 2 i and 2 i + 1, not i and i + rotary_dim / 2.
    """
    if rotary_dim == head_dim and not interleaved:
        return None
    pairs, half = rotary_dim // 2, head_dim // 2
    second, pair = np.divmod(np.arange(rotary_dim), pairs)
    if interleaved:
        pair, second = np.divmod(np.arange(rotary_dim), 2)
    places = [pair + second * half]
    if pairs < half:
        second, pair = np.divmod(np.arange(head_dim - rotary_dim), half - pairs)
        places.append(pairs + pair + second * half)
    return np.concatenate(places)


UNROTATED: Final = Rope(1.0, _Still())
"""Rotary embedding that leaves queries and keys as they are."""
