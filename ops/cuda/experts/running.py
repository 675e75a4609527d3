"""The kernels of experts on one stream: each enqueues its launches in order, and declares them to the check of hazards.

Imports the compiler; kernels.py declares what runs here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeAlias

import torch

from headrace.ops.cuda.codes.kinds import E4M3
from headrace.ops.cuda.experts.choose import allocate_choices, allocate_lists, choose
from headrace.ops.cuda.experts.coded.byte_tiles import byte_tile_products, byte_tiling, takes_bytes
from headrace.ops.cuda.experts.coded.byte_vector import byte_vector_down, byte_vector_up
from headrace.ops.cuda.experts.coded.code_inputs import CodeInputs, in_code_order
from headrace.ops.cuda.experts.coded.coded_tiles import MOST_ROWS, coded_tile_products
from headrace.ops.cuda.experts.coded.coded_vector import coded_vector_down, coded_vector_up
from headrace.ops.cuda.experts.combine import combine
from headrace.ops.cuda.experts.logits import allocate_logits, router_logits
from headrace.ops.cuda.experts.registry import launches
from headrace.ops.cuda.experts.tiles import tile_products, tile_rows, tiling
from headrace.ops.cuda.experts.vector import vector_down, vector_up

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.ops.cuda.experts.choose import Choices, Lists
    from headrace.ops.cuda.experts.registry import ExpertWeights, Padding
    from headrace.ops.cuda.products.registry import ProductRoom

__all__ = ["ListedRun", "Multiply", "TileExpertsRun", "VectorExpertsRun"]

Multiply: TypeAlias = Callable[["Tensor", "ExpertWeights", "Choices", "Lists", "Tensor", "Tensor"], None]
"""Enqueues the products: of inputs, weights, choices and lists, to activations at places and results at pairs."""

_EXACT_ROWS: Final = 64
"""Most tokens whose results stay in float32 until they are added: with more, their memory traffic takes too long. It is
also the most tokens that 8-bit floats are not multiplied by as 8-bit floats."""


class _Run:
    """What all kernels begin with."""

    def __init__(self, room: ProductRoom) -> None:
        self._room, self._pdl = room, room.pdl
        self._router, self._rest = launches(pdl=room.pdl)

    def _logits(self, x_NE: Tensor, weights: ExpertWeights) -> Tensor:
        logits_SNX = allocate_logits(len(x_NE), weights.routing.experts, x_NE.device)
        self._room.chain.note(self._router)
        router_logits(x_NE, weights.router_3XE, weights.router_bias_X, logits_SNX, pdl=self._pdl)
        return logits_SNX


class VectorExpertsRun(_Run):
    """Experts of few tokens, each of which reads its own."""

    def run(
        self, x_NE: Tensor, routed_NE: Tensor, weights: ExpertWeights, out_NE: Tensor, padding: Padding | None
    ) -> None:
        """Enqueue logits, choices, gates and ups, and the sums of downs."""
        pdl, routing, (up, down) = self._pdl, weights.routing, (weights.gate_up, weights.down)
        logits_SNX = self._logits(routed_NE, weights)
        chosen = allocate_choices(len(x_NE), routing, x_NE.device)
        self._room.chain.note(self._rest)
        choose(logits_SNX, routing, weights.correction_X, chosen, scales_X=weights.scales_X, padding=padding, pdl=pdl)
        act_PF = torch.empty(chosen.ids_NK.numel(), down.shape[1], dtype=x_NE.dtype, device=x_NE.device)
        in_bytes = [takes_bytes(each.kind, each.shape, self._room.scratch.arch) for each in (up, down)]
        multiply = vector_up if up.kind is None else byte_vector_up if in_bytes[0] else coded_vector_up
        multiply(x_NE, up, weights.gate_up_bias_XL, chosen, act_PF, weights.activation, pdl=pdl)
        add = vector_down if down.kind is None else byte_vector_down if in_bytes[1] else coded_vector_down
        add(act_PF, down, weights.down_bias_XE, chosen, out_NE, pdl=pdl)


class ListedRun(_Run, ABC):
    """Experts of any number of tokens, which lists bring together in tiles."""

    def __init__(self, room: ProductRoom) -> None:
        """Allocate what launches leave for each other."""
        super().__init__(room)
        self._finished = torch.zeros(2, dtype=torch.int32, device=room.scratch.counters.device)

    @abstractmethod
    def _way(self, weights: ExpertWeights, pairs: int) -> tuple[Multiply, int]:
        """Return what enqueues the products of `pairs` pairs, and the rows of a tile."""

    def run(
        self, x_NE: Tensor, routed_NE: Tensor, weights: ExpertWeights, out_NE: Tensor, padding: Padding | None
    ) -> None:
        """Enqueue logits, choices with their lists, gates and ups, downs, and the sums."""
        pdl, routing, device = self._pdl, weights.routing, x_NE.device
        logits_SNX = self._logits(routed_NE, weights)
        chosen = allocate_choices(len(x_NE), routing, device)
        pairs = chosen.ids_NK.numel()
        multiply, rows = self._way(weights, pairs)
        lists = allocate_lists(len(x_NE), routing, rows, self._finished)
        self._room.chain.note(self._rest)
        choose(
            logits_SNX, routing, weights.correction_X, chosen, lists, scales_X=weights.scales_X, padding=padding,
            pdl=pdl,
        )  # fmt: skip
        act_PF = torch.empty(pairs, weights.down.shape[1], dtype=x_NE.dtype, device=device)
        dtype = torch.float32 if len(x_NE) <= _EXACT_ROWS else x_NE.dtype
        results_PE = torch.empty(pairs, out_NE.shape[1], dtype=dtype, device=device)
        multiply(x_NE, weights, chosen, lists, act_PF, results_PE)
        combine(results_PE, chosen, out_NE, pdl=pdl)


class TileExpertsRun(ListedRun):
    """Tiles of Triton's."""

    def _way(self, weights: ExpertWeights, pairs: int) -> tuple[Multiply, int]:
        arch, both = self._room.scratch.arch, (weights.gate_up, weights.down)
        rows = tile_rows(pairs, weights.routing.experts, arch.tuning.expert_tile_rows)
        if all(takes_bytes(each.kind, each.shape, arch) for each in both):
            return self._multiply_bytes, rows
        return self._multiply, rows if all(each.kind is None for each in both) else min(rows, MOST_ROWS)

    def _multiply(
        self, x_NE: Tensor, weights: ExpertWeights, chosen: Choices, lists: Lists, act_PF: Tensor, results_PE: Tensor
    ) -> None:
        """Multiply by dense weights, or by codes that become numbers in registers."""
        how = tiling(lists.rows, self._room.scratch.arch)
        up = weights.gate_up, weights.gate_up_bias_XL, chosen, lists, act_PF
        down = weights.down, weights.down_bias_XE, chosen, lists, results_PE
        if weights.gate_up.kind is None:
            tile_products(x_NE, *up, how, activation=weights.activation, pdl=self._pdl)
        else:
            coded_tile_products(x_NE, *up, activation=weights.activation, pdl=self._pdl)
        if weights.down.kind is None:
            tile_products(act_PF, *down, how, pdl=self._pdl)
        else:
            coded_tile_products(act_PF, *down, pdl=self._pdl)

    def _multiply_bytes(
        self, x_NE: Tensor, weights: ExpertWeights, chosen: Choices, lists: Lists, act_PF: Tensor, results_PE: Tensor
    ) -> None:
        """Multiply by codes of 8 bits, in their order."""
        pdl, arch = self._pdl, self._room.scratch.arch
        few = len(x_NE) <= _EXACT_ROWS
        coded = [
            not few and each.kind is not None and each.kind.codes == E4M3 for each in (weights.gate_up, weights.down)
        ]
        dtype = torch.float8_e4m3fn if coded[0] else torch.float16 if few else x_NE.dtype
        byte_tile_products(
            in_code_order(x_NE, 8, dtype, pdl=pdl), weights.gate_up, weights.gate_up_bias_XL, chosen, lists, act_PF,
            byte_tiling(lists.rows, arch, coded=coded[0]),
            activation=weights.activation, ordered=not coded[1], pdl=pdl,
        )  # fmt: skip
        act = in_code_order(act_PF, 8, torch.float8_e4m3fn, pdl=pdl) if coded[1] else CodeInputs(act_PF, None)
        byte_tile_products(
            act, weights.down, weights.down_bias_XE, chosen, lists, results_PE,
            byte_tiling(lists.rows, arch, coded=coded[1]), pdl=pdl,
        )  # fmt: skip
