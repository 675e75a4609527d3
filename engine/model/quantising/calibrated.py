"""`Calibration`: quantises a decoder layer by layer by GPTQ, with the inputs that each product has in given sequences.

A half of a layer is run twice. The first time its products' inputs are counted; then its matrices are quantised, and
the second run, with these, gives the inputs of the next half. So errors of earlier layers are seen by later ones, and
one half of a layer is in memory at a time, in float32, with all hidden states.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from headrace.engine.errors import ModelRejected
from headrace.engine.model.checkpoint.parameters import FileMaker
from headrace.engine.model.checkpoint.plan import final_norm_plan, layer_plan, top_plan
from headrace.engine.model.checkpoint.weights import SublayerWeights
from headrace.engine.model.network.layers import FEEDS, MIXERS
from headrace.engine.model.network.placement import Entry
from headrace.engine.model.quantising.calibration_ops import CalibrationOps
from headrace.engine.model.quantising.read_back import HostMemory
from headrace.engine.model.quantising.selected import Module, Selection
from headrace.engine.model.roles import Fused, Part
from headrace.engine.model.spec import DecoderSpec, LayerSpec
from headrace.ops.formats import Stored
from headrace.ops.gptq import Hessian, gptq
from headrace.ops.stream import Stream

__all__ = ["Calibration", "Keep", "Kept"]

Keep: TypeAlias = Callable[[Module, Stored], None]
"""Function that writes a quantised module."""
Kept: TypeAlias = Callable[[Module], Stored | None]
"""Function that returns a module that an earlier run has written; None if none has."""
_Half: TypeAlias = Callable[[Stream], Stream]
_BATCH_TOKENS = 4096


class Calibration:
    """The hidden states of all sequences, before the layer that is next."""

    def __init__(self, spec: DecoderSpec, maker: FileMaker, selection: Selection, ids_ST: Tensor) -> None:
        """Embed the sequences.

        Args:
            spec: The shape of the model.
            maker: Reads parameters in float32, to the device that computes.
            selection: The modules to quantise.
            ids_ST: Token ids, int64.
        """
        self._selection = selection
        self._spec, self._maker, self._by_weight = spec, maker, selection.by_weight
        self._tokens = ids_ST.shape[1]
        (table,) = top_plan(spec)["embedding_VE"].parts
        self._hidden = [
            self._placed(embedded.to(maker.device) * spec.embedding_scale).flatten(0, 1)
            for embedded in _embedded(maker, table, ids_ST).split(max(_BATCH_TOKENS // self._tokens, 1))
        ]
        self._hessians: dict[Stored, Hessian] = {}

    def _placed(self, embedded_STE: Tensor) -> Tensor:
        """Return embeddings with those of their positions added, where positions are learned."""
        table = self._spec.positions
        if table is None:
            return embedded_STE
        rows_PE = self._maker.dense(top_plan(self._spec)["positions_PE"])
        return embedded_STE + rows_PE[table.offset : table.offset + self._tokens]

    @torch.inference_mode()
    def run(self, keep: Keep, kept: Kept) -> None:
        """Quantise all modules, in the order of the layers; those that `kept` returns are computed with as they are.

        Raises:
            ModelRejected: A weight or an activation is not finite, or a layer is of a kind that is not computed here.
        """
        for number, layer in enumerate(self._spec.layers):
            ops = CalibrationOps(self._spec, layer, self._tokens, self._see, self._maker.device)
            mixer, feed = layer_plan(self._spec, number)
            self._advance(mixer, lambda weights: self._mixer(ops, layer, weights, number), keep, kept)  # noqa: B023
            self._advance(feed, lambda weights: self._feed(ops, layer, weights, number), keep, kept)  # noqa: B023
        self._quantise_head(keep, kept)

    def _mixer(self, ops: CalibrationOps, layer: LayerSpec, weights: SublayerWeights, number: int) -> _Half:
        mixer = MIXERS[type(layer.mixer)](layer, weights, ops, number)
        return lambda stream: mixer(ops, stream, None, self._tokens, None)

    def _feed(self, ops: CalibrationOps, layer: LayerSpec, weights: SublayerWeights, number: int) -> _Half:
        feed = FEEDS[type(layer.feed)](layer, weights, ops, number)
        return lambda stream: feed(ops, stream, None)

    def _advance(
        self, plan: Mapping[str, Fused], half: Callable[[SublayerWeights], _Half], keep: Keep, kept: Kept
    ) -> None:
        """Quantise half of a layer, and compute the hidden states behind it."""
        vectors = {name: self._maker.dense(fused) for name, fused in plan.items() if fused.columns is None}
        matrices = {name: fused for name, fused in plan.items() if fused.columns is not None}
        modules = [module for fused in matrices.values() for module in self._modules(fused) if module is not None]
        found = {module: weight for module in modules if (weight := kept(module)) is not None}
        plain = {name: Stored.from_dense(self._maker.dense(fused)) for name, fused in matrices.items()}
        self._maker.check_finite()
        if len(found) < len(modules):
            self._hessians = {weight: Hessian(weight.shape[1], self._maker.device) for weight in plain.values()}
            run = half(SublayerWeights(plain, vectors))
            for hidden_NE in self._hidden:
                run(Stream(hidden_NE))
        made = {}
        for name, fused in matrices.items():
            made[name] = self._quantised(fused, plain.pop(name), found, keep)
        self._hessians = {}
        run = half(SublayerWeights(made, vectors))
        for number, hidden_NE in enumerate(self._hidden):
            x_NE, total_NE, _ = run(Stream(hidden_NE))
            self._hidden[number] = x_NE if total_NE is None else total_NE + x_NE

    def _quantised(self, fused: Fused, plain: Stored, found: Mapping[Module, Stored], keep: Keep) -> Stored:
        """Return a product's matrix as it is kept, dense; those of its modules that are new are handed to `keep`."""
        values_OI, first = plain.parts["values"], 0
        for part, module in zip(fused.parts, self._modules(fused), strict=True):
            rows_OI, order = values_OI[first : first + part.rows], self._maker.row_order(part)
            first += part.rows
            if module is None:
                continue
            weight = found.get(module)
            if weight is None:
                in_file_OI = rows_OI if order is None else rows_OI[order]
                weight = self._rounded(module, in_file_OI, self._hessians[plain])
                keep(module, weight)
            kept_OI = weight.to(values_OI.device).dense(torch.float32)
            if order is None:
                rows_OI.copy_(kept_OI)
            else:
                rows_OI.index_copy_(0, order, kept_OI)
        return plain

    def _rounded(self, module: Module, values_OI: Tensor, hessian: Hessian) -> Stored:
        try:
            dense, how = Stored.from_dense(values_OI), self._selection
            return gptq(dense, hessian, how.method, symmetric=how.symmetric, group=how.group)
        except ValueError as error:
            message = f"model: the inputs of {module.name} are not finite for the calibration data"
            raise ModelRejected(message, field=module.weight, limit="finite activations") from error

    def _quantise_head(self, keep: Keep, kept: Kept) -> None:
        if self._spec.tied_head:
            return
        top = top_plan(self._spec)
        (module,) = self._modules(top["head"])
        if module is None or kept(module) is not None:
            return
        hessian = Hessian(self._spec.hidden_size, self._maker.device)
        ops = CalibrationOps(self._spec, self._spec.layers[-1], self._tokens, self._see, self._maker.device)
        vectors = {name: self._maker.dense(fused) for name, fused in final_norm_plan(self._spec).items()}
        norm = Entry(vectors, ops)
        for x_NE in self._hidden:
            hessian.add(norm(ops, Stream(x_NE))[0])
        values_VE = self._maker.dense(top["head"])
        self._maker.check_finite()
        keep(module, self._rounded(module, values_VE, hessian))

    def _modules(self, fused: Fused) -> list[Module | None]:
        """Return the module of each part of a product; None for one that stays dense."""
        return [self._by_weight.get(self._maker.names.of(part)) for part in fused.parts]

    def _see(self, weight: Stored, x_NI: Tensor) -> None:
        if (hessian := self._hessians.get(weight)) is not None:
            hessian.add(x_NI)


def _embedded(maker: FileMaker, part: Part, ids_ST: Tensor) -> Tensor:
    """Return the embeddings of tokens, float32 [S, T, E]; the table is read in blocks."""
    found = maker.inventory.of(part)
    wanted_U, places_ST = ids_ST.unique(return_inverse=True)
    rows_UE = torch.empty(len(wanted_U), found.shape[1])
    for first, piece in found.pieces(maker.block_elements, HostMemory()):
        here_U = (wanted_U >= first) & (wanted_U < first + piece.shape[0])
        rows_UE[here_U] = piece.dense(torch.float32)[wanted_U[here_U] - first]
    return rows_UE[places_ST]
