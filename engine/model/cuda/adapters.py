"""`CudaBank`: the adapters on a GPU, slot by slot, and what a step's kernels must know of the rows that use them.

Owns the arena in which adapters' blocks lie, the tables that say where, and the stream on which they arrive beside the
steps; never assigns slots to rows, and never reads a file. Next to read: ops/cuda/adapters/products.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.adapters.heads import order_heads
from headrace.adapters.layout import EMBED, HEAD, MODULES, SITES, BlockLayout, ModelShape, module_row
from headrace.adapters.loaded import LoadedAdapter
from headrace.adapters.stored import DTYPES, PIECE_BYTES, Stored
from headrace.engine.model.cuda.compiling import compiles
from headrace.engine.model.shared.memory import borrow_stream, return_stream
from headrace.engine.model.spec import MixerSpec
from headrace.engine.scheduling.plan import Work
from headrace.ops.cuda.adapters.inside import CudaInsideOps
from headrace.ops.cuda.adapters.products import CudaAdapterOps, VirtualRows
from headrace.ops.cuda.adapters.rows import ALIKE, GROUP, SEGMENT, UNIT, LoraBatch, LoraSite, group_rows, pick
from headrace.ops.cuda.attention.steps import GivenRows
from headrace.ops.cuda.block import CudaOps
from headrace.ops.cuda.compiling.source import INSIDE_RANK
from headrace.ops.cuda.hazards import Launch
from headrace.ops.cuda.memory.unpack import Unpacker
from headrace.ops.cuda.products.fusion import Fusion
from headrace.ops.cuda.products.linear import MAX_ROWS
from headrace.ops.cuda.products.registry import WeightShape
from headrace.ops.host_memory import PiecePool

__all__ = ["NO_USE", "Adapted", "CudaBank", "AdapterUse", "sites_of", "table_lines"]

_RANKS = (16, 64, 256)
_FEED = MODULES.index("gate")
_PLACING: Final = Launch("the order of adapters", overlaps=False, writes=frozenset(("adapters",)))


Adapted: TypeAlias = Mapping[MixerSpec, CudaAdapterOps] | Mapping[MixerSpec, CudaInsideOps]
"""Operations of a step in which tokens use adapters, by mixer."""


class AdapterUse(NamedTuple):
    """Properties of a batch's adapters that decide which kernels and graphs serve it."""

    group: int
    """Rows that share one reading of an adapter; 0 where no row uses any."""
    rank: int
    """Upper bound of the adapters' ranks: one of a few values, so that few graphs serve all."""
    feeds: bool
    """Whether an adapter updates gate, up or down."""
    ends: bool
    """Whether an adapter updates the embeddings or the output head."""


NO_USE: Final = AdapterUse(0, 0, feeds=False, ends=False)


class CudaBank:
    """The adapters on a GPU, by LoRA slot."""

    granule_bytes: Final = 2 << 20
    most_granules: Final = (UNIT << 31) // (1 << 20)
    """Most granules of 16-bit elements that a table can address."""

    def __init__(
        self,
        shape: ModelShape,
        ops: Mapping[MixerSpec, CudaOps],
        *,
        slots: int,
        granules: int,
        max_rows: int,
        max_tokens: int,
        host: PiecePool,
        plain: bool = True,
    ) -> None:
        """Allocate room for adapters on the device of `ops`.

        Args:
            shape: The model's sizes.
            ops: The model's operations, by mixer.
            slots: Number of adapters that the device holds at a time.
            granules: Memory for low-rank updates, in units of `granule_bytes`.
            max_rows: Most rows of a step.
            max_tokens: Most tokens of a step.
            host: Pinned memory, in pieces of `PIECE_BYTES`, that adapters are read into.
            plain: Whether each product of a layer follows or precedes a norm of the stream, and none has a bias.
        """
        any_ops = next(iter(ops.values()))
        dtype, device = any_ops.shape.dtype, any_ops.device
        self._ops, self._device, self._shared_bytes = ops, device, any_ops.arch.shared_bytes
        self._note, self._tuning = any_ops.note, any_ops.arch.tuning
        self._elements = self.granule_bytes // dtype.itemsize
        self._stream: torch.cuda.Stream | None = None
        self._side: torch.cuda.Stream | None = None
        self._arena = torch.empty(granules * self._elements, dtype=dtype, device=device)
        self._table = torch.zeros(slots, len(MODULES) * shape.num_layers + 2, 4, dtype=torch.int32, device=device)
        self._sites = sites_of(shape)
        self._has_inside = plain and _has_updates_inside(shape, any_ops)
        self._own = torch.zeros_like(self._table[0])
        self._virtual: list[Tensor | None] = [None] * slots
        self._prefixes: list[Tensor | None] = [None] * slots
        self._ranks: NDArray[np.int64] = np.zeros((slots, self._table.shape[1]), np.int64)
        self._entries = torch.zeros(max_rows, 4, dtype=torch.int32, device=device)
        self._counts = torch.zeros(2, dtype=torch.int32, device=device)
        self._order, self._slots = (torch.zeros(max_rows, dtype=torch.int32, device=device) for _ in range(2))
        self._count = torch.arange(max(max_rows, max_tokens), dtype=torch.int32, device=device)
        self._unpack = Unpacker(self._arena, DTYPES, PIECE_BYTES)
        self._host = host

    def put(self, slot: int, start: int, adapter: LoadedAdapter) -> None:
        """Copy `adapter` to `slot`, in the granules from `start` on; blocks until it is there."""
        if self._stream is None:
            self._stream = borrow_stream(self._device)
        first, block = start * self._elements, adapter.block
        with torch.inference_mode(), torch.cuda.stream(self._stream):  # these copies wait only for each other
            if isinstance(block, Stored):
                given = first + block.recipe.elements
                if block.recipe.is_padded:
                    self._arena[first:given].zero_()
                self._unpack(block.pieces, block.recipe.parts, block.recipe.scales, first)
                order_heads(self._arena[first:given], adapter.layout)
            else:
                given = first + len(block)
                self._arena[first:given].copy_(block)
            self._table[slot].copy_(torch.from_numpy(table_lines(adapter.layout, first)))
            self._virtual[slot] = self._placed(given, adapter.virtual_PE)
            prefix_LPsD = self._placed(given, adapter.prefix_LPsD)
            self._prefixes[slot] = None if prefix_LPsD is None else prefix_LPsD.flatten(2)
            self._stream.synchronize()
        self._ranks[slot] = adapter.layout.ranks

    def memory(self, nbytes: int) -> Sequence[Tensor]:
        """Return pieces of pinned memory that hold `nbytes`, for an adapter that is about to be read."""
        return self._host.take(nbytes)

    def take(self, slot: int) -> None:
        """Release the adapter in `slot`, which no row uses now."""
        self._virtual[slot] = self._prefixes[slot] = None
        self._ranks[slot] = 0

    def close(self) -> None:
        """Return the device's memory; no step that used it may be running."""
        for stream in (self._stream, self._side):
            if stream is not None:
                stream.synchronize()
                return_stream(stream)
        held = "_arena _table _own _entries _counts _order _slots _count _virtual _prefixes _unpack _host"
        for name in held.split():
            delattr(self, name)

    def use_of(self, slots_B: NDArray[np.int32]) -> AdapterUse:
        """Return the properties of the adapters that rows in these slots use together; -1 is no adapter."""
        used = slots_B[slots_B >= 0]
        if not len(used):
            return NO_USE
        different = np.unique(used)
        ranks = self._ranks[different]
        rank = next(rank for rank in _RANKS if rank >= ranks.max())
        feeds = bool(ranks[:, :EMBED].reshape(len(ranks), -1, len(MODULES))[:, :, _FEED:].any())
        ends = bool(ranks[:, EMBED:].any())
        group = 1
        inside = self._has_inside and rank <= INSIDE_RANK
        if 1 < len(slots_B) <= MAX_ROWS and len(different) == 1 and (feeds or inside) and not ends:
            group = ALIKE
        elif len(used) >= max(self._tuning.adapter_rows, self._tuning.adapter_share * len(different)):
            group = GROUP
        return AdapterUse(group, rank, feeds, ends)

    def decode(self, slots_R: Tensor, batch_B: Tensor, use: AdapterUse, *, rotated: bool) -> Adapted | None:
        """Enqueue what a decode step's products need of adapters; return its operations, None if no row uses adapters.

        A graph can capture the launches.

        Args:
            slots_R: Slot of each row, int32.
            batch_B: Rows of the batch, int32.
            use: The result of `use_of` for these rows.
            rotated: Whether attention expects rotated queries, and keys and values that are already stored.
        """
        if use == NO_USE:
            return None
        if self._side is None:
            self._side = borrow_stream(self._device)
        rows = len(batch_B)
        entries = self._entries[:rows]
        batch = self._batch(entries, self._counts, self._order[:rows], self._slots[:rows], use.group, use.rank)
        group_rows(slots_R, batch_B, batch)
        self._note(_PLACING)
        inside = rotated and use.group == ALIKE and use.rank <= INSIDE_RANK and 1 < rows <= MAX_ROWS
        if inside and self._has_inside:
            pick(batch, self._own)
            self._note(_PLACING)
            return {
                mixer: CudaInsideOps(ops, batch, self._own, self._sites, feeds=use.feeds)
                for mixer, ops in self._ops.items()
            }
        return self._adapted(batch, use, side=self._side)

    def prefill_words(self, slots_W: NDArray[np.int32], counts_W: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return what the device must know of a prefill's tokens: the slot of each token, then the entries, flat.

        Args:
            slots_W: Slot of each work's row.
            counts_W: Number of tokens of each work; works follow each other.
        """
        ends = counts_W.cumsum()
        entries = [
            (slot, first, min(SEGMENT, end - first), first)
            for slot, count, end in zip(slots_W.tolist(), counts_W.tolist(), ends.tolist(), strict=True)
            for first in range(end - count, end, SEGMENT)
        ]
        return np.concatenate((slots_W.repeat(counts_W), np.array(entries).ravel()))

    def prefill(
        self, words: Tensor, tokens: int, use: AdapterUse, works: Sequence[Work], slots_W: NDArray[np.int32]
    ) -> Adapted:
        """Return the operations of a prefill of `tokens` tokens; `words` are its `prefill_words`, on the device."""
        slots_N, entries = words[:tokens].int(), words[tokens:].int().view(-1, 4)
        virtual = []
        for first, count, work, slot in _beginnings(works, slots_W):
            given_PE = self._virtual[slot]
            if given_PE is not None and work.start < len(given_PE):
                virtual.append(VirtualRows(first, given_PE[work.start : work.start + count]))
        counts = torch.full((2,), len(entries), dtype=torch.int32, device=self._device)
        batch = self._batch(entries, counts, self._count[:tokens], slots_N, SEGMENT, use.rank)
        return self._adapted(batch, use, virtual)

    def given(self, works: Sequence[Work], slots_W: NDArray[np.int32]) -> tuple[GivenRows, ...]:
        """Return the prefill's virtual tokens whose keys and values are given, not computed."""
        found = []
        for first, count, work, slot in _beginnings(works, slots_W):
            given_LPX = self._prefixes[slot]
            if given_LPX is not None and work.start < given_LPX.shape[1]:
                found.append(GivenRows(first, given_LPX[:, work.start : work.start + count]))
        return tuple(found)

    def single(self, slots_S: Tensor, use: AdapterUse) -> Adapted:
        """Return the operations of single tokens that use the adapters in `slots_S`: int32, on the device."""
        count = self._count[: len(slots_S)]
        entries = torch.stack((slots_S, count, torch.ones_like(count), count), 1)
        return self._adapted(self._batch(entries, self._counts, count, slots_S, 1, use.rank), use)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _batch(
        self, entries: Tensor, counts: Tensor, order: Tensor, slots: Tensor, rows: int, max_rank: int
    ) -> LoraBatch:
        return LoraBatch(self._arena, self._table, entries, counts, order, slots, rows, max_rank, self._shared_bytes)

    def _adapted(
        self,
        batch: LoraBatch,
        use: AdapterUse,
        virtual: Sequence[VirtualRows] = (),
        side: torch.cuda.Stream | None = None,
    ) -> Adapted:
        return {
            mixer: CudaAdapterOps(ops, batch, self._sites, feeds=use.feeds, ends=use.ends, virtual=virtual, side=side)
            for mixer, ops in self._ops.items()
        }

    def _placed(self, start: int, given: Tensor | None) -> Tensor | None:
        """Copy `given` into the arena from element `start` on, and return the copy; adapters have one such tensor."""
        if given is None:
            return None
        place = self._arena[start : start + given.numel()].view(given.shape)
        return place.copy_(given)


def _has_updates_inside(shape: ModelShape, ops: CudaOps) -> bool:
    """Return whether all products of layers without biases can have an adapter's updates inside; compile these.

    Those of latent attention have theirs beside them.
    """
    if ops.products.has_pieces or shape.latents is not None:
        return False
    builds: dict[str, Sequence[Callable[[], object]]] = {}
    needed = {each for layer in range(shape.num_layers) for each in _products_of(shape, layer)}
    for kind in ops.products.kinds:
        for size_out, size_in, fusion in needed:
            chosen = ops.products.resolved(WeightShape(size_out, size_in, shape.head_dim, kind=kind)).kernels[fusion]
            for kernel in (chosen.at(rows) for rows in (2, MAX_ROWS)):
                if kernel is None or not kernel.has_updates:
                    return False
                builds[kernel.name] = kernel.builds(updates=True)
    return compiles(itertools.chain(*builds.values()), "adapters are left to Triton, which is slower")


def _products_of(shape: ModelShape, layer: int) -> list[tuple[int, int, Fusion]]:
    """Return (outputs, inputs, fusion) of each product of a layer that may have updates."""
    hidden, heads = shape.hidden_size, shape.size("o", layer)[0]
    gates, ffn = (shape.size(module, layer)[1] for module in ("gate", "up"))
    gate_up: tuple[Fusion, ...] = ("gated", "factors gated") if gates and not shape.is_shared(layer) else ("plain",)
    down: tuple[Fusion, ...] = ("plain",) if shape.is_shared(layer) else ("plain", "residual")
    products: list[tuple[int, int, tuple[Fusion, ...]]] = [
        (sum(shape.size(module, layer)[1] for module in SITES["qkv"]), hidden, ("heads",)),
        (hidden, heads, ("plain", "residual")),
    ]
    if ffn:
        products += [(gates + ffn, hidden, gate_up), (hidden, ffn, down)]
    return [(size_out, size_in, fusion) for size_out, size_in, fusions in products for fusion in fusions]


def sites_of(shape: ModelShape) -> dict[tuple[int, str], LoraSite]:
    """Return every (layer, site) of a model; `embed` and `head` are sites of layer -1."""
    sites = {
        (layer, site): LoraSite(
            module_row(layer, modules[0]),
            shape.size(modules[0], layer)[0],
            tuple(shape.size(module, layer)[1] for module in modules),
        )
        for layer in range(shape.num_layers)
        for site in shape.sites
        if (modules := shape.modules(site, layer))
    }
    rows = shape.num_layers * len(MODULES) + 2
    for name, row in (("embed", rows + EMBED), ("head", rows + HEAD)):
        sites[-1, name] = LoraSite(row, shape.size(name)[0], (shape.size(name)[1],))
    return sites


def table_lines(layout: BlockLayout, start: int) -> NDArray[np.int32]:
    """Return an adapter's lines of `LoraBatch.table`, [modules, 4]; its block is at element `start` of the arena."""
    ranks = layout.ranks
    before = np.zeros_like(ranks)
    for modules in layout.shape.sites.values():
        for earlier, module in zip(modules, modules[1:], strict=False):
            at = np.arange(layout.shape.num_layers) * len(MODULES) + module_row(0, module)
            gap = module_row(0, module) - module_row(0, earlier)
            before[at] = before[at - gap] + ranks[at - gap]
    lines = np.stack(((start + layout.a) // UNIT, (start + layout.b) // UNIT, ranks, before), axis=1)
    return lines.astype(np.int32)


def _beginnings(works: Sequence[Work], slots_W: NDArray[np.int32]) -> list[tuple[int, int, Work, int]]:
    """Return (first token in the step, number of tokens, work, slot) of each work that uses an adapter."""
    found, first = [], 0
    for work, slot in zip(works, slots_W.tolist(), strict=True):
        if slot >= 0:
            found.append((first, work.num_tokens, work, slot))
        first += work.num_tokens
    return found
