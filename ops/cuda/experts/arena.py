"""`Arena`: the weights of all experts of a layer, equally far apart in memory, as kernels read them; never multiplies.

A model's weights lie one behind another, in the order in which they were loaded, so that those of a layer's experts
are equally far apart already, and nothing is copied. Imports no compiler. X experts, O outputs, I inputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from headrace.ops.cuda.codes.kinds import Kind
from headrace.ops.cuda.codes.layout import CodeLayout, codes_of
from headrace.ops.formats import Dense, Stored

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from headrace.ops.cuda.codes.layout import Codes

__all__ = ["Arena", "CodePitches", "arena_of", "common_kind", "kind_of_experts"]


class CodePitches(NamedTuple):
    """Distances from an expert to the next in each part of codes, in elements; of codes and high bits in words."""

    words: int
    high: int
    scales: int
    zeros: int
    factors: int
    table: int


class Arena(NamedTuple):
    """One weight [O, I] of each expert."""

    experts: int
    shape: tuple[int, int]
    first: Tensor | Codes
    """The first expert's weight."""
    pitch: int | CodePitches
    """Distance from an expert to the next, in elements: of a dense weight, or of each part of codes."""
    kept: tuple[Tensor, ...]
    """What holds the memory."""

    @property
    def kind(self) -> Kind | None:
        """Kind of the codes; None for dense weights."""
        return None if isinstance(self.first, torch.Tensor) else self.first.kind


def common_kind(kinds: Sequence[Kind | str]) -> Kind | str:
    """Return the kind of codes of all experts by that of each, or why there is none, in words."""
    for kind in kinds:
        if isinstance(kind, str):
            return kind
    if len(set(kinds)) > 1:
        return f"takes one kind of codes for all experts of a layer, not {len(set(kinds))}"
    if isinstance(kinds[0], Kind) and kinds[0].ordered:
        return "takes columns in the order of the inputs"
    return kinds[0]


def kind_of_experts(weights: Sequence[Stored]) -> Kind | None:
    """Return the kind of codes that all experts have; None where they are dense, or become so."""
    layouts = {weight.format for weight in weights if isinstance(weight.format, CodeLayout)}
    if len(layouts) != 1 or not all(isinstance(weight.format, CodeLayout) for weight in weights):
        return None
    kind = common_kind([layout.kind for layout in layouts])
    return kind if isinstance(kind, Kind) else None


def arena_of(weights: Sequence[Stored], dtype: torch.dtype) -> Arena:
    """Return the weights of all experts: codes of one kind as they are, and others dense in `dtype`.

    Codes of several kinds, or in orders of their own, become dense.
    """
    shape = weights[0].shape[0], weights[0].shape[1]
    if kind_of_experts(weights) is None:
        if any(weight.format != Dense(dtype) for weight in weights):
            weights = [Stored.from_dense(weight.dense(dtype)) for weight in weights]
        first, pitch, kept = _spaced([weight.parts["values"] for weight in weights])
        return Arena(len(weights), shape, first, pitch, kept)
    parts: dict[str, Tensor] = {}
    pitches: dict[str, int] = {}
    held: list[Tensor] = []
    for name in weights[0].parts:
        parts[name], pitches[name], kept = _spaced([weight.parts[name] for weight in weights])
        held += kept
    of_parts = CodePitches(
        pitches["codes"] // 4, pitches.get("high", 0), pitches["scales"], pitches.get("zeros", 0),
        pitches.get("factors", 0), pitches.get("table", 0),
    )  # fmt: skip
    return Arena(len(weights), shape, codes_of(Stored(weights[0].format, shape, parts)), of_parts, tuple(held))


def _spaced(tensors: Sequence[Tensor]) -> tuple[Tensor, int, tuple[Tensor, ...]]:
    """Return the first of some tensors, their distance in elements, and what holds them; a copy if it is not one."""
    places, size = [tensor.data_ptr() for tensor in tensors], tensors[0].element_size()
    if tensors[0].is_meta:
        return tensors[0], tensors[0].numel(), tuple(tensors)
    pitch = places[1] - places[0] if len(places) > 1 else 0
    # Kernels read four words at once, whichever expert's they are.
    is_even = pitch % 16 == 0 and all(place == places[0] + pitch * expert for expert, place in enumerate(places))
    is_one = len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1
    if is_even and is_one and all(tensor.is_contiguous() for tensor in tensors):
        return tensors[0], pitch // size, tuple(tensors)
    room = -(-tensors[0].numel() * size // 16) * 16 // size
    copy = torch.empty(len(tensors), room, dtype=tensors[0].dtype, device=tensors[0].device)
    for expert, tensor in enumerate(tensors):
        copy[expert, : tensor.numel()].view(tensor.shape).copy_(tensor)
    return copy[0, : tensors[0].numel()].view(tensors[0].shape), room, (copy,)
