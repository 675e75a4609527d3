"""`Decoder`: the loop over a model's layers, whatever these are; pure arithmetic on one step's tokens, on any device.

Owns the model's parameters in the form the device wants; never knows a request, a plan or a scheduler. A layer is a
mixer, and a feed behind or beside it, each of which adds to the residual stream. Each sum waits for the norm that reads
it, so that a device can do both, and the product after them, at once. Next to read: serial.py, mixers/attention.py and
feeds/dense.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, Generic, NamedTuple

import torch
from torch import Tensor

from headrace.adapters.untrusted import refuse
from headrace.engine.model.checkpoint.weights import DecoderWeights
from headrace.engine.model.network.layers import FEEDS, MIXERS, Feeds, Mixers
from headrace.engine.model.network.operations import (
    BlockOps,
    DeviceOps,
    Kv,
    Packed,
    ReadableHead,
    Step,
    Table,
    TableOps,
)
from headrace.engine.model.network.parallel import ParallelLayer
from headrace.engine.model.network.per_layer import PerLayerInputs
from headrace.engine.model.network.placement import Entry
from headrace.engine.model.network.serial import SerialLayer
from headrace.engine.model.network.tail import Tail
from headrace.engine.model.rope import PositionTable
from headrace.engine.model.shared.load_threads import Each
from headrace.engine.model.spec import DecoderSpec, MixerSpec
from headrace.ops.formats import Dense, Stored
from headrace.ops.stream import Stream

__all__ = ["Decoder", "HiddenStates"]


class HiddenStates(NamedTuple):
    """Hidden states of a step's tokens, as draft heads read them."""

    final_NE: Tensor
    """States behind the final norm, in the dtype of products."""
    inputs: tuple[Tensor, ...] = ()
    """Inputs of the layers asked for, the residual stream before any norm, [N, E] each in the dtype of products."""


class _Made(NamedTuple, Generic[Packed, Step, Kv]):
    run: SerialLayer[Packed, Step, Kv] | ParallelLayer[Packed, Step, Kv]
    tail: Tail[Packed, Step, Kv] | None


class _Layer(NamedTuple, Generic[Packed, Step, Kv]):
    kind: int
    """Index of the mixer's spec among the model's different ones."""
    made: _Made[Packed, Step, Kv]
    next_norm_E: Tensor | None
    """Weight of the norm that reads what `run` returns; None behind the last layer and before a tail."""


class Decoder(Generic[Packed, Step, Kv]):
    """Embeddings, layers and output head of one model."""

    is_foreign: Final = False
    """Whether the layers are another library's, as `Network` says."""

    def __init__(
        self,
        spec: DecoderSpec,
        weights: DecoderWeights,
        ops: Mapping[MixerSpec, DeviceOps[Packed, Step, Kv]],
        each: Each = map,
        mixers: Mixers = MIXERS,
        feeds: Feeds = FEEDS,
    ) -> None:
        """Pack `weights` in the form that the device wants; the caller may drop them afterwards.

        Args:
            spec: The shape of the model.
            weights: The model's parameters.
            ops: The device's operations, by each of the different mixers of `spec`.
            each: Packs the layers, as `map` does, one after the other or several at a time.
            mixers: What computes each kind of mixer.
            feeds: What computes each kind of feed.

        Raises:
            ModelRejected: Nothing computes a mixer or feed of `spec`.
        """
        _check_kinds(spec, mixers, feeds)
        self.spec = spec
        self._ops = ops
        self._kinds = spec.mixer_kinds

        def packed(number: int) -> _Made[Packed, Step, Kv]:
            layer, of_layer = spec.layers[number], weights.layers[number]
            here, norms = ops[layer.mixer], layer.norms
            mixer = mixers[type(layer.mixer)](layer, of_layer.mixer, here, number)
            feed = feeds[type(layer.feed)](layer, of_layer.feed, here, number)
            tail = None if layer.tail is None else Tail(layer.tail, of_layer.feed, here, number)
            if not norms.is_parallel:
                return _Made(SerialLayer(mixer, feed, here, number), tail)
            own_entry = None if norms.placement == "shared" else Entry(of_layer.feed.vectors, here)
            return _Made(ParallelLayer(mixer, feed, Entry(of_layer.mixer.vectors, here), own_entry), tail)

        made = list(each(packed, range(spec.num_layers)))
        next_norms_E = [*(layer.run.entry_norm_E for layer in made[1:]), None]
        next_norms_E = [norm if end.tail is None else None for norm, end in zip(next_norms_E, made, strict=True)]
        kinds = [self._kinds.index(layer.mixer) for layer in spec.layers]
        self._layers = [_Layer(*each) for each in zip(kinds, made, next_norms_E, strict=True)]
        first = ops[self._kinds[0]]
        self._final_norm = Entry(weights.final_norm, first)
        self._positions: tuple[PositionTable, Tensor, Callable[[Step], Tensor]] | None = None
        if spec.positions is not None and weights.positions_PE is not None:
            self._positions = spec.positions, weights.positions_PE, first.positions
        self._head, self._head_bias_V = first.pack_head(weights.head), weights.head_bias_V
        self._embedding_VE = _table(weights, self._head, first)
        self._per_layer: PerLayerInputs[Packed, Step, Kv] | None = None
        if spec.per_layer is not None and weights.per_layer is not None:
            rows = _rows_of(weights.per_layer.table_VX, first)
            self._per_layer = PerLayerInputs(spec.per_layer, weights.per_layer, rows, first)

    def hidden(
        self,
        tokens_N: Tensor,
        steps: Mapping[MixerSpec, Step],
        kv: Kv,
        last_S: Tensor | None = None,
        adapted: Mapping[MixerSpec, BlockOps[Packed, Step, Kv]] | None = None,
    ) -> Tensor:
        """Run all layers, write the tokens' keys and values into `kv`, and return hidden states.

        Args:
            tokens_N: Token ids, int32 or int64.
            steps: By mixer, the tokens' places in the cache, as the device's operations take them.
            kv: The paged cache.
            last_S: Indices of the tokens wanted, int64; None for all.
            adapted: By mixer, the operations with adapters; None where no token uses one.

        Returns:
            Hidden states after the final norm: [S, E], or [N, E] without `last_S`.
        """
        here = self._here(steps, adapted)
        stream, own_NLP = self._begun(tokens_N, here[0])
        stream = self._run(stream, range(len(self._layers)), here, kv, own_NLP)
        if last_S is not None:
            stream = stream.rows(last_S)
        return self._final_norm(here[0][0], stream)[0]

    def hidden_states(
        self,
        tokens_N: Tensor,
        steps: Mapping[MixerSpec, Step],
        kv: Kv,
        inputs: Sequence[int] = (),
        adapted: Mapping[MixerSpec, BlockOps[Packed, Step, Kv]] | None = None,
    ) -> HiddenStates:
        """Do what `hidden` does for all tokens, and keep the inputs of some layers, too.

        Args:
            tokens_N: Token ids, int32 or int64.
            steps: By mixer, the tokens' places in the cache, as the device's operations take them.
            kv: The paged cache.
            inputs: Numbers of the layers whose inputs are wanted, in rising order; the number of layers stands for the
                output of the last one, before the final norm.
            adapted: By mixer, the operations with adapters; None where no token uses one.
        """
        here = self._here(steps, adapted)
        first, done = here[0][0], 0
        stream, own_NLP = self._begun(tokens_N, here[0])
        kept = []
        for layer in inputs:
            stream = self._run(stream, range(done, layer), here, kv, own_NLP, is_cut=True)
            summed_NE, total_NE = first.summed(stream)
            kept.append(summed_NE.clone())  # the stream goes on in the same memory
            stream, done = Stream(total_NE), layer
        stream = self._run(stream, range(done, len(self._layers)), here, kv, own_NLP)
        return HiddenStates(self._final_norm(first, stream)[0], tuple(kept))

    def embedded(self, tokens_N: Tensor) -> Tensor:
        """Return the rows of the table of embeddings, [N, E], of token ids, int32 or int64."""
        return self._embedding_VE[tokens_N]

    def _here(
        self, steps: Mapping[MixerSpec, Step], adapted: Mapping[MixerSpec, BlockOps[Packed, Step, Kv]] | None
    ) -> list[tuple[BlockOps[Packed, Step, Kv], Step]]:
        """Return operations and places for each of the different mixers."""
        by_mixer = self._ops if adapted is None else adapted
        return [(by_mixer[mixer], steps[mixer]) for mixer in self._kinds]

    def _begun(self, tokens_N: Tensor, first: tuple[BlockOps[Packed, Step, Kv], Step]) -> tuple[Stream, Tensor | None]:
        """Return the input of the first layer, and each layer's own embeddings [N, layers, P] in a model with such."""
        ops, step = first
        x_NE = ops.embed(self._embedding_VE[tokens_N], tokens_N)
        x_NE = _times(self.spec.embedding_scale, x_NE)
        if self._positions is not None:  # of virtual tokens, too; padding behind the step's tokens has none
            table, rows_PE, positions_of = self._positions
            places_N = positions_of(step) + table.offset
            x_NE[: len(places_N)] += rows_PE[places_N]
        own_NLP = None if self._per_layer is None else self._per_layer(ops, tokens_N, x_NE)
        return Stream(x_NE), own_NLP

    def _run(
        self,
        stream: Stream,
        layers: range,
        here: Sequence[tuple[BlockOps[Packed, Step, Kv], Step]],
        kv: Kv,
        own_NLP: Tensor | None,
        *,
        is_cut: bool = False,
    ) -> Stream:
        """Run the layers with these numbers; `is_cut` leaves the whole sum behind them, for whoever reads it next."""
        for number in layers:
            kind, (run, tail), next_norm_E = self._layers[number]
            ops, step = here[kind]
            last = is_cut and number == layers[-1]
            stream = run(ops, stream, None if last else next_norm_E, step, kv)
            if tail is not None:
                stream = tail(ops, stream, None if own_NLP is None else own_NLP[:, number])
        return stream

    def logits(
        self, hidden_SE: Tensor, adapted: Mapping[MixerSpec, BlockOps[Packed, Step, Kv]] | None = None
    ) -> Tensor:
        """Apply the output head: return float32 [S, V] for the S positions whose next token is wanted."""
        by_mixer = self._ops if adapted is None else adapted
        logits_SV = by_mixer[self._kinds[0]].logits(_times(self.spec.logits_scale, hidden_SE), self._head)
        if self._head_bias_V is not None:
            logits_SV = logits_SV.add_(self._head_bias_V)
        cap = self.spec.logits_cap
        return logits_SV if cap is None else logits_SV.div_(cap).tanh_().mul_(cap)


class _StoredRows:
    """Rows of a weight that is kept as it is stored."""

    def __init__(self, weight: Stored) -> None:
        self._weight = weight

    def __getitem__(self, ids_N: Tensor, /) -> Tensor:
        return self._weight.rows(ids_N, torch.float32)


class _HeadRows:
    """Rows of a packed head."""

    def __init__(self, head: ReadableHead) -> None:
        self._head = head

    def __getitem__(self, ids_N: Tensor, /) -> Tensor:
        return self._head.read_rows(ids_N)


def _table(weights: DecoderWeights, head: object, ops: object) -> Table:
    """Return the embeddings: a tied head if it hands out rows, so that there is no second copy, else as they are."""
    embedding = weights.embedding
    if embedding is weights.head and isinstance(head, ReadableHead):
        return _HeadRows(head)
    return _rows_of(embedding, ops)


def _rows_of(table: Stored, ops: object) -> Table:
    if isinstance(table.format, Dense):
        return table.parts["values"]
    return ops.read_table(table) if isinstance(ops, TableOps) else _StoredRows(table)


def _times(factor: float, x_NE: Tensor) -> Tensor:
    return x_NE if factor == 1.0 else x_NE * factor


def _check_kinds(spec: DecoderSpec, mixers: Mixers, feeds: Feeds) -> None:
    for layer in spec.layers:
        if type(layer.mixer) not in mixers:
            refuse(spec.architecture, "the mixer of a layer", layer.mixer, _names(mixers))
        if type(layer.feed) not in feeds:
            refuse(spec.architecture, "the feed of a layer", layer.feed, _names(feeds))


def _names(kinds: Mapping[type, object]) -> str:
    return ", ".join(kind.__name__ for kind in kinds)
