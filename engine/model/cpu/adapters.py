"""`CpuBank`: the adapters on the CPU, slot by slot, and which tokens of a step use them; never assigns slots.

A slot's matrices are views of the adapter's block in host memory: nothing is copied. Next to read: runner.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.adapters.layout import EMBED, HEAD, BlockLayout, module_row
from headrace.adapters.loaded import LoadedAdapter
from headrace.engine.scheduling.plan import NewRow
from headrace.ops.cpu.lora import AdapterUsers, CpuUpdates, Place, SiteUpdate, UpdatePart
from headrace.ops.paged import GivenKv

__all__ = ["CpuBank"]


class CpuBank:
    """The adapters and each row's LoRA slot on a CPU."""

    def __init__(self, slots: int, max_rows: int, dtype: torch.dtype) -> None:
        """Start with empty slots and rows that use no adapter; `dtype` is that of activations."""
        self._dtype = dtype
        self._updates: list[CpuUpdates | None] = [None] * slots
        self._prefixes: list[Tensor | None] = [None] * slots
        self._slots: NDArray[np.int64] = np.full(max_rows, -1, np.int64)

    def put(self, slot: int, start: int, adapter: LoadedAdapter) -> None:
        """Put `adapter` into `slot`, which no row uses now; its matrices stay where they lie in memory."""
        layout, block, prefix, virtual = adapter.layout, adapter.block, adapter.prefix_LPsD, adapter.virtual_PE
        assert isinstance(block, Tensor), "nothing unpacks what is stored"
        self._prefixes[slot] = None if prefix is None else prefix.to(self._dtype)
        self._updates[slot] = CpuUpdates(
            _sites(layout, block), _embedding(layout, block), None if virtual is None else virtual.to(self._dtype)
        )

    def take(self, slot: int) -> None:
        """Release the adapter in `slot`, which no row uses now."""
        self._updates[slot] = self._prefixes[slot] = None

    def update(self, new_rows: Sequence[NewRow]) -> None:
        """Note the slots of new rows."""
        for new in new_rows:
            self._slots[new.row] = new.slot

    def users(self, rows_N: NDArray[np.int64], positions_N: NDArray[np.int64]) -> list[AdapterUsers]:
        """Return the tokens that use adapters, one entry for each adapter.

        Args:
            rows_N: The row of each token.
            positions_N: The position of each token.
        """
        slots_N = self._slots[rows_N]
        found = []
        for slot in np.unique(slots_N[slots_N >= 0]).tolist():
            tokens_M = np.flatnonzero(slots_N == slot)
            updates = self._updates[slot]
            assert updates is not None, f"a row uses slot {slot}, which is empty"
            first, last = int(tokens_M[0]), int(tokens_M[-1]) + 1
            side_by_side = last - first == len(tokens_M)
            tokens = slice(first, last) if side_by_side else torch.from_numpy(tokens_M)
            found.append(AdapterUsers(updates, tokens, torch.from_numpy(positions_N[tokens_M])))
        return found

    def given(self, rows_N: NDArray[np.int64], positions_N: NDArray[np.int64]) -> tuple[GivenKv, ...]:
        """Return the step's virtual tokens whose keys and values are given, not computed."""
        slots_N = self._slots[rows_N]
        found = []
        for slot, prefix_LPsD in enumerate(self._prefixes):
            if prefix_LPsD is None:
                continue
            tokens_M = np.flatnonzero((slots_N == slot) & (positions_N < prefix_LPsD.shape[1]))
            if len(tokens_M):
                chosen = prefix_LPsD.index_select(1, torch.from_numpy(positions_N[tokens_M]))
                found.append(GivenKv(torch.from_numpy(tokens_M), chosen))
        return tuple(found)


def _sites(layout: BlockLayout, block: Tensor) -> dict[Place, SiteUpdate]:
    """Return the updates of an adapter, by the site that each applies to."""
    groups: list[tuple[Place, list[tuple[str, int]]]] = [
        ((layer, site), [(module, module_row(layer, module)) for module in modules])
        for layer in range(layout.shape.num_layers)
        for site, modules in layout.shape.sites.items()
    ]
    groups.append(((-1, "head"), [("head", HEAD)]))
    return {
        place: _site(layout, block, modules, max(place[0], 0))
        for place, modules in groups
        if any(layout.ranks[row] for _, row in modules)
    }


def _site(layout: BlockLayout, block: Tensor, modules: Sequence[tuple[str, int]], layer: int) -> SiteUpdate:
    inputs = layout.shape.size(modules[0][0], layer)[0]
    ranks = [int(layout.ranks[row]) for _, row in modules]
    first = int(layout.a[modules[0][1]])
    a_RI = block[first : first + sum(ranks) * inputs].view(sum(ranks), inputs)
    parts = []
    start = column = 0
    for (module, row), rank in zip(modules, ranks, strict=True):
        outputs = layout.shape.size(module, layer)[1]
        if rank:
            b = int(layout.b[row])
            parts.append(UpdatePart(start, column, block[b : b + rank * outputs].view(rank, outputs)))
        start += rank
        column += outputs
    return SiteUpdate(a_RI.T, tuple(parts))


def _embedding(layout: BlockLayout, block: Tensor) -> tuple[Tensor, Tensor] | None:
    rank = int(layout.ranks[EMBED])
    if not rank:
        return None
    vocab, hidden = layout.shape.size("embed")
    a, b = int(layout.a[EMBED]), int(layout.b[EMBED])
    return block[a : a + vocab * rank].view(vocab, rank), block[b : b + rank * hidden].view(rank, hidden)
