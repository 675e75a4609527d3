"""`BlockLayout`: the places of the matrices of one LoRA adapter in its one contiguous block; never holds a tensor.

A low-rank update of a weight W [out, in] is y += (x A^T) B^T, A [r, in] and B [out, r] (Hu et al., 2021). A block holds
all of an adapter's updates at their own ranks, layer by layer, and in a layer site by site. A site is a group of
modules that the decoder multiplies in one product: `qkv` (modules q, k, v), `o`, `gate_up` (gate, up) and `down`. Each
site holds

    A  [sum of its modules' ranks, in]   the modules' rows, in order: one read of x serves them all
    B  [rank, out] for each module       transposed, so that it streams along its outputs, with the scale folded in

After the layers come `embed` (A [vocab, rank], one row a token id; B [rank, hidden]) and `head` (A [rank, hidden],
B [rank, vocab]). A rank is the module's own, rounded up to `RANK_MULTIPLE` with zeros, and 0 where the adapter leaves
the module alone. Every matrix therefore begins at a multiple of 8 elements. Layers with latent attention have the sites
of `LATENT_SITES` instead, each of one module up to `o`, in the same places of tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.adapters.names import AdapterNames

__all__ = [
    "EMBED",
    "HEAD",
    "LATENT_SITES",
    "MODULES",
    "RANK_MULTIPLE",
    "SITES",
    "BlockLayout",
    "LatentSizes",
    "LayerSizes",
    "ModelShape",
    "module_row",
]

RANK_MULTIPLE = 8
SITES: dict[str, tuple[str, ...]] = {
    "qkv": ("q", "k", "v"),
    "o": ("o",),
    "gate_up": ("gate", "up"),
    "down": ("down",),
}
"""The modules of each site of a layer, in the order of the block."""
LATENT_SITES: dict[str, tuple[str, ...]] = {
    "q": ("q",),
    "q_a": ("q_a",),
    "kv_a": ("kv_a",),
    **{site: SITES[site] for site in ("o", "gate_up", "down")},
}
"""The same of a layer with latent attention, whose queries are the module `q`, by a latent vector or not."""
MODULES = tuple(module for modules in SITES.values() for module in modules)
"""The seven modules of a layer, in the order of the table's rows."""
_PLACES = {
    module: place
    for sites in (LATENT_SITES, SITES)
    for place, module in enumerate(module for modules in sites.values() for module in modules)
}
EMBED, HEAD = -2, -1
"""Rows of the table, counted from its end, of the two modules that belong to no layer."""


def module_row(layer: int, module: str) -> int:
    """Return the table's row of a layer's module."""
    return layer * len(MODULES) + _PLACES[module]


class LayerSizes(NamedTuple):
    """Outputs of the products of one layer, 0 for a product that it does not have."""

    queries: int
    keys: int
    values: int
    gates: int
    ffn: int
    """Width of the feed that computes every token."""
    is_shared: bool = False
    """Whether this feed is the shared expert of a mixture, which has names of its own in files."""


class LatentSizes(NamedTuple):
    """Sizes of the products of latent attention, which all layers have alike."""

    query_latent: int
    """Width of the latent vector of queries; 0 for queries without one."""
    queries: int
    cached: int
    """Width of what a token adds to the cache."""
    values: int
    """Width of the values of all heads."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a model that decide how large an adapter of it is."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    """Width of every layer's feed; 0 where no layer has a feed that computes every token, but experts alone."""
    vocab_size: int
    virtual_scale: float = 1.0
    """Factor of the embeddings of virtual tokens, for a model that will multiply them by a factor they do not have."""
    head_places: tuple[int, ...] | None = None
    """The place on a device of each element of a query or key head in a file; None where all stay in order."""
    gated: bool = True
    """Whether feeds have gates, where all layers are alike; without them, the module `gate` has no outputs."""
    names: AdapterNames = AdapterNames()
    """Names of the modules in the files of adapters."""
    grouped: bool = False
    """Whether a joined module of queries, keys and values has the queries of a key, this key and its value together."""
    layers: tuple[LayerSizes, ...] = ()
    """Sizes of each layer's products, where layers differ; empty where all have the sizes above."""
    latents: LatentSizes | None = None
    """Sizes of latent attention; None where layers attend to keys and values."""
    takes_virtual: bool = True
    """Whether prompts may have virtual tokens."""
    left_out: str = ""
    """Which products adapters do not update, in words; empty where they update all."""

    def size(self, module: str, layer: int = 0) -> tuple[int, int]:
        """Return (inputs, outputs) of a module of `MODULES` in a layer, of `embed` or of `head`."""
        hidden, kv = self.hidden_size, self.num_kv_heads * self.head_dim
        gates = self.ffn_size if self.gated else 0
        alike = LayerSizes(self.num_heads * self.head_dim, kv, kv, gates, self.ffn_size)
        queries, keys, values, gates, ffn, _ = self.layers[layer] if self.layers else alike
        sizes = {
            "q": (hidden, queries),
            "k": (hidden, keys),
            "v": (hidden, values),
            "o": (queries, hidden),
            "gate": (hidden, gates),
            "up": (hidden, ffn),
            "down": (ffn, hidden if ffn else 0),
            "embed": (self.vocab_size, hidden),
            "head": (hidden, self.vocab_size),
        }
        if (latents := self.latents) is not None:
            sizes["q_a"], sizes["q"] = (hidden, latents.query_latent), (latents.query_latent or hidden, latents.queries)
            sizes["kv_a"], sizes["o"] = (hidden, latents.cached), (latents.values, hidden)
        return sizes[module]

    @property
    def sites(self) -> dict[str, tuple[str, ...]]:
        """The modules of each site of a layer, in the order of the block."""
        return SITES if self.latents is None else LATENT_SITES

    def is_shared(self, layer: int) -> bool:
        """Return whether the feed of a layer that computes every token is a shared expert."""
        return bool(self.layers) and self.layers[layer].is_shared

    def modules(self, site: str, layer: int = 0) -> tuple[str, ...]:
        """Return the modules of a site that a layer has."""
        return tuple(module for module in self.sites[site] if self.size(module, layer)[1])


@dataclass(frozen=True, slots=True, eq=False)
class BlockLayout:
    """The places of one adapter's matrices, in elements from the start of its block."""

    shape: ModelShape
    ranks: NDArray[np.int64]
    """[layers * 7 + 2]: padded rank of each module, layer by layer as in `MODULES`, then `embed`, then `head`."""
    a: NDArray[np.int64]
    """[layers * 7 + 2]: first element of each module's rows of A; a site's A begins with its first module's."""
    b: NDArray[np.int64]
    """[layers * 7 + 2]: first element of each module's B."""
    elements: int
    """Length of the block in elements; 0 for an adapter that has no low-rank updates."""

    @classmethod
    def of(cls, shape: ModelShape, ranks: Mapping[tuple[int, str], int]) -> BlockLayout:
        """Lay out an adapter.

        Args:
            shape: The model's sizes.
            ranks: The rank of each (layer, module) that the adapter has; the layer of `embed` and `head` is -1.
        """
        rows = shape.num_layers * len(MODULES) + 2
        padded, a, b = (np.zeros(rows, np.int64) for _ in range(3))
        for (layer, module), rank in ranks.items():
            row = {"embed": EMBED, "head": HEAD}[module] if layer < 0 else module_row(layer, module)
            padded[row] = -(-rank // RANK_MULTIPLE) * RANK_MULTIPLE
        end = 0
        groups = [
            [(module_row(layer, module), shape.size(module, layer)) for module in modules]
            for layer in range(shape.num_layers)
            for modules in shape.sites.values()
        ]
        tops = [[(rows + EMBED, shape.size("embed"))], [(rows + HEAD, shape.size("head"))]]
        for group in [*groups, *tops]:
            for row, (inputs, _) in group:
                a[row] = end
                end += int(padded[row]) * inputs
            for row, (_, outputs) in group:
                b[row] = end
                end += int(padded[row]) * outputs
        return cls(shape, padded, a, b, end)

    def head_spans(self) -> list[tuple[int, int]]:
        """Return the first element and the number of elements of each layer's B of q and k, which are side by side."""
        found = []
        for layer in range(self.shape.num_layers):
            row_q, row_k = (module_row(layer, module) for module in ("q", "k"))
            count = sum(
                int(self.ranks[row]) * self.shape.size(each, layer)[1] for each, row in (("q", row_q), ("k", row_k))
            )
            if count:
                found.append((int(self.b[row_q]), count))
        return found

    def places(self) -> list[tuple[int, str, int]]:
        """Return (layer, module, table row) of every module with an update; the layer of `embed` and `head` is -1."""
        names = [module for modules in self.shape.sites.values() for module in modules]
        found = []
        for row in np.flatnonzero(self.ranks).tolist():
            layer, place = divmod(row, len(names))
            if layer < self.shape.num_layers:
                found.append((layer, names[place], row))
            else:
                found.append((-1, ("embed", "head")[place], row))
        return found
