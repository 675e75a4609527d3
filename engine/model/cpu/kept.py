"""`kept_parts`: what a decoder's weights take on the CPU once they are packed, from their formats and shapes alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from headrace.engine.model.checkpoint.weight_parts import WeightSum, name_of, part_of_feed
from headrace.engine.model.checkpoint.weights import DecoderWeights, SublayerWeights
from headrace.engine.model.drafting.heads.loading import MedusaWeights, RecurrentWeights
from headrace.engine.model.experts import ROUTER
from headrace.engine.stats import ModelPart, WeightPart
from headrace.ops.cpu.block import CpuOps
from headrace.ops.cpu.head import CpuHead
from headrace.ops.cpu.linear import KeptWeight
from headrace.ops.cpu.native.block import NativeOps
from headrace.ops.cpu.products import kept_by
from headrace.ops.formats import Stored

__all__ = ["kept_head_parts", "kept_parts"]


def kept_parts(weights: DecoderWeights, ops: CpuOps) -> tuple[WeightPart, ...]:
    """Return the bytes of a decoder as `Decoder` keeps it after packing by `ops`.

    Args:
        weights: The parameters as they are loaded, on any device, the meta device included.
        ops: The operations of the model's first mixer.
    """
    total = WeightSum()
    if weights.positions_PE is not None:
        total.add("embedding", name_of(weights.positions_PE), weights.positions_PE.nbytes)
    if (own := weights.per_layer) is not None:
        total.add("embedding", own.table_VX.format.name, own.table_VX.nbytes)
        _add(total, "embedding", kept_by(own.product_XE, ops.dtype, ops.products))
    total.add_vectors(weights.top_tensors)
    known = _Known(ops)
    for number in range(len(weights.layers)):
        layer = weights.layers[number]
        _add_layer(total, layer.mixer, known, lambda _: "attention")
        _add_layer(total, layer.feed, known, part_of_feed)
    _add_ends(total, weights, ops)
    return total.parts()


def kept_head_parts(weights: RecurrentWeights | MedusaWeights, ops: CpuOps) -> tuple[WeightPart, ...]:
    """Return the bytes of a draft head once it is packed; arguments are those of `kept_parts`."""
    total = WeightSum()
    for tensor in weights.others:
        total.add("draft head", name_of(tensor), tensor.nbytes)
    for weight in weights.products:
        _add(total, "draft head", kept_by(weight, ops.dtype, ops.products))
    keep = kept_by if isinstance(ops, NativeOps) else CpuHead.kept
    for output in weights.outputs:
        _add(total, "draft head", keep(output, dtype=ops.dtype, products=ops.products))
    return total.parts()


class _Known:
    """What is kept of each matrix; those that are alike are one object, which is asked about once."""

    def __init__(self, ops: CpuOps) -> None:
        self.ops = ops
        self._kept: dict[int, tuple[Stored, list[KeptWeight]]] = {}
        """By the identity of a matrix, which is kept with it so that no other can have the same."""

    def of(self, weight: Stored) -> list[KeptWeight]:
        """Return what `kept_by` does for the operations."""
        if id(weight) not in self._kept:
            self._kept[id(weight)] = weight, kept_by(weight, self.ops.dtype, self.ops.products)
        return self._kept[id(weight)][1]


def _add_layer(total: WeightSum, of_layer: SublayerWeights, known: _Known, part: Callable[[str], ModelPart]) -> None:
    ops = known.ops
    for name, vector in of_layer.vectors.items():
        if name == ROUTER:
            _add(total, "other", kept_by(Stored.from_dense(vector), torch.float32, ops.products))
            continue
        kept = vector.float() if name.endswith("_bias") and isinstance(ops, NativeOps) else vector
        total.add("other", name_of(kept), kept.nbytes)
    for name, weight in of_layer.matrices.items():
        _add(total, part(name), known.of(weight))


def _add_ends(total: WeightSum, weights: DecoderWeights, ops: CpuOps) -> None:
    """Add the embedding and the head: where they are tied, one may use the other's memory."""
    embedding, is_tied, is_native = weights.embedding, weights.head is weights.embedding, isinstance(ops, NativeOps)
    kept = (kept_by if is_native else CpuHead.kept)(weights.head, dtype=ops.dtype, products=ops.products)
    _add(total, "head", (each for each in kept if not (each.is_shared and is_tied)))
    if is_tied and is_native:
        return  # the packed head hands out its rows
    total.add("embedding", embedding.format.name, embedding.nbytes)


def _add(total: WeightSum, part: ModelPart, kept: Iterable[KeptWeight]) -> None:
    for each in kept:
        total.add(part, each.format, each.nbytes)
