"""Loads a checkpoint into the decoder's fused parameters, or invents them; never decides what a model looks like.

Layers are read one by one as they are packed, so the host never holds a second copy of all of them. Next to read:
parameters.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from headrace.engine.model.checkpoint.gguf import GgufFile
from headrace.engine.model.checkpoint.inventory import Inventory
from headrace.engine.model.checkpoint.parameters import BlankMaker, Empty, FileMaker, Layout, MetaMaker, Progress, kept
from headrace.engine.model.checkpoint.plan import final_norm_plan, layer_plan, per_layer_plan, top_plan
from headrace.engine.model.checkpoint.readers import READERS, Checkpoint, Reader
from headrace.engine.model.checkpoint.safetensors import SafetensorsFolder
from headrace.engine.model.roles import Fused
from headrace.engine.model.spec import DecoderSpec
from headrace.ops.formats import Stored
from headrace.ops.paged import KvScales
from headrace.ops.quantise import Method

__all__ = [
    "DecoderWeights",
    "LayerWeights",
    "Layers",
    "Maker",
    "PerLayerWeights",
    "Source",
    "SublayerWeights",
    "describe_weights",
    "load_weights",
    "open_files",
    "open_inventory",
    "open_weights",
    "sublayer_weights",
]

Source: TypeAlias = str | os.PathLike[str] | GgufFile | Inventory | Literal["random"]
"""Hugging Face folder with safetensors, GGUF file (a path, or an open file), inventory of such files, or `"random"`.
What is open stays open."""
_INIT_STD = 0.02


@dataclass(frozen=True, slots=True)
class SublayerWeights:
    """Parameters of a mixer or a feed, by the names that its spec gives to them."""

    matrices: Mapping[str, Stored]
    """Matrices [out, in]."""
    vectors: Mapping[str, Tensor]
    """Biases, the weights of norms, and what a router has; only those that the spec has."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Parameters of one layer."""

    mixer: SublayerWeights
    feed: SublayerWeights


@dataclass(frozen=True, slots=True)
class PerLayerWeights:
    """What makes the embeddings of tokens that each layer has for itself, P elements in each of L layers."""

    table_VX: Stored
    """Table of the tokens, [V, L * P]."""
    product_XE: Stored
    """Weight of the product of the model's own embedding, [L * P, E]."""
    norm_P: Tensor
    """Weight of the norm of that product."""


class Layers(Protocol):
    """The parameters of each layer, by its number."""

    def __getitem__(self, layer: int, /) -> LayerWeights: ...

    def __len__(self) -> int: ...


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All parameters of a decoder."""

    embedding: Stored
    """Embeddings of the tokens, [V, E]."""
    layers: Layers
    final_norm: Mapping[str, Tensor]
    """Weights of the norm behind the last layer, by their names in `Norms.weights`."""
    head: Stored
    """Output head [V, E]; the very object `embedding` where the spec ties them and the head is not quantised."""
    kv_scales: Mapping[int, KvScales] = field(default_factory=dict)
    """Scales of an 8-bit cache, for the layers for which the checkpoint has them."""
    positions_PE: Tensor | None = None
    """Embeddings of positions, where these are learned."""
    per_layer: PerLayerWeights | None = None
    """What makes embeddings that each layer has for itself, in models with such."""
    head_bias_V: Tensor | None = None

    @property
    def top_tensors(self) -> tuple[Tensor, ...]:
        """Norms and biases outside the layers."""
        biases = () if self.head_bias_V is None else (self.head_bias_V,)
        norms = () if self.per_layer is None else (self.per_layer.norm_P,)
        return (*self.final_norm.values(), *norms, *biases)

    @property
    def embedding_VE(self) -> Tensor:
        """The embeddings as a tensor, which they are unless they are kept packed."""
        return self.embedding.parts["values"]


class Maker(Protocol):
    """Protocol that makes one parameter: as a tensor, or in the format in which it is stored."""

    quantize_head: bool

    def dense(self, fused: Fused) -> Tensor: ...

    def weight(self, fused: Fused) -> Stored: ...

    def table(self, fused: Fused) -> Stored: ...


class _UnreadLayers:
    """Reads a layer each time it is asked for, in whichever thread asks."""

    def __init__(self, spec: DecoderSpec, maker: Maker) -> None:
        self._spec, self._maker = spec, maker

    def __getitem__(self, layer: int, /) -> LayerWeights:
        return _layer(self._spec, self._maker, layer)

    def __len__(self) -> int:
        return self._spec.num_layers


def _assemble(
    spec: DecoderSpec, maker: Maker, layers: Layers | None = None, *, keep_embedding: bool = False
) -> DecoderWeights:
    """Make all parameters, except those of `layers` where they are given."""
    top = top_plan(spec)
    embedding = (
        maker.table(top["embedding_VE"]) if keep_embedding else Stored.from_dense(maker.dense(top["embedding_VE"]))
    )
    if layers is None:
        layers = tuple(_layer(spec, maker, layer) for layer in range(spec.num_layers))
    final_norm = {name: maker.dense(fused) for name, fused in final_norm_plan(spec).items()}
    head = _head(spec, maker, top, embedding)
    positions_PE, head_bias_V = (
        maker.dense(top[name]) if name in top else None for name in ("positions_PE", "head_bias_V")
    )
    made = DecoderWeights(embedding, layers, final_norm, head, positions_PE=positions_PE, head_bias_V=head_bias_V)
    return replace(made, per_layer=_per_layer(spec, maker, keep_embedding=keep_embedding))


def _per_layer(spec: DecoderSpec, maker: Maker, *, keep_embedding: bool) -> PerLayerWeights | None:
    """Make what belongs to embeddings of each layer; nothing of it is ever quantised here."""
    plan = per_layer_plan(spec)
    if not plan:
        return None
    table = maker.table(plan["table_VX"]) if keep_embedding else Stored.from_dense(maker.dense(plan["table_VX"]))
    return PerLayerWeights(table, maker.table(plan["product_XE"]), maker.dense(plan["norm_P"]))


def _head(spec: DecoderSpec, maker: Maker, top: Mapping[str, Fused], embedding: Stored) -> Stored:
    """Return the output head: the embedding itself where they are tied, but for a head that is quantised."""
    own = top.get("head")
    if maker.quantize_head and spec.has_head:
        return maker.weight(top["embedding_VE"] if own is None else own)
    return embedding if own is None else maker.table(own)


def _layer(spec: DecoderSpec, maker: Maker, layer: int) -> LayerWeights:
    mixer, feed = layer_plan(spec, layer)
    return LayerWeights(sublayer_weights(mixer, maker), sublayer_weights(feed, maker))


def sublayer_weights(plan: Mapping[str, Fused], maker: Maker) -> SublayerWeights:
    """Make the parameters of a mixer or a feed."""
    dense = {name: fused for name, fused in plan.items() if fused.columns is None or fused.in_float32}
    vectors = {name: maker.dense(fused) for name, fused in dense.items()}
    matrices = {name: _matrix(fused, maker) for name, fused in plan.items() if name not in dense}
    return SublayerWeights(matrices, vectors)


def _matrix(fused: Fused, maker: Maker) -> Stored:
    return Stored.from_dense(maker.dense(fused)) if fused.is_split else maker.weight(fused)


class _Random:
    """Makes random parameters that depend on the seed alone."""

    def __init__(
        self,
        empty: Empty,
        dtype: torch.dtype,
        device: torch.device,
        seed: int,
        layout: Layout | None,
        quantize: Method | None,
        quantize_head: bool,
    ) -> None:
        self.empty = empty
        self.layout, self.quantize, self.quantize_head = layout, quantize, quantize_head
        self.dtype = dtype
        self.device = device
        self.generator = None if device.type == "meta" else torch.Generator(device=device).manual_seed(seed)

    def dense(self, fused: Fused) -> Tensor:
        dtype = torch.float32 if fused.in_float32 else self.dtype
        return self._filled(fused, self.empty(fused.shape, dtype))

    def _filled(self, fused: Fused, out: Tensor) -> Tensor:
        if out.is_meta:
            return out
        return out.fill_(1.0) if fused.is_norm else out.normal_(0.0, _INIT_STD, generator=self.generator)

    def weight(self, fused: Fused) -> Stored:
        if self.quantize is None:
            return self.table(fused)
        temporary = torch.empty(fused.shape, dtype=self.dtype, device=self.device)
        return kept(Stored.from_dense(self._filled(fused, temporary)), self.empty, self.layout, self.quantize)

    def table(self, fused: Fused) -> Stored:
        return Stored.from_dense(self.dense(fused))


@contextmanager
def open_weights(
    source: Source,
    spec: DecoderSpec,
    *,
    dtype: torch.dtype,
    keep_packed: bool = False,
    keep_embedding: bool = False,
    seed: int = 0,
    progress: Progress | None = None,
    readers: Sequence[Reader] = READERS,
    quantize: Method | None = None,
    quantize_head: bool = False,
) -> Iterator[DecoderWeights]:
    """Yield a model's parameters on the CPU until the block ends; each layer is read when it is asked for.

    Several threads may ask for layers. Arguments and errors are those of `load_weights`; asking for a layer raises
    them, too. Random layers are made at once. With `keep_embedding` the embeddings, too, stay as they are stored.
    """
    device = torch.device("cpu")
    with ExitStack() as files:
        if source == "random":
            yield load_weights(
                source, spec, dtype=dtype, device=device, seed=seed, quantize=quantize, quantize_head=quantize_head
            )
            return
        inventory = files.enter_context(open_inventory(source, spec, readers))
        inventory.check_numbers()
        empty = partial(_empty, device)
        maker = FileMaker(
            inventory, spec, empty, dtype, device, keep_packed, progress, quantize=quantize, quantize_head=quantize_head
        )
        yield _load(maker, spec, _UnreadLayers(spec, maker), keep_embedding=keep_embedding)


def load_weights(
    source: Source,
    spec: DecoderSpec,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    keep_packed: bool = False,
    seed: int = 0,
    progress: Progress | None = None,
    readers: Sequence[Reader] = READERS,
    empty: Empty | None = None,
    layout: Layout | None = None,
    quantize: Method | None = None,
    quantize_head: bool = False,
    blank: bool = False,
) -> DecoderWeights:
    """Return a model's parameters in `dtype` on `device`.

    Args:
        source: Source of the parameters; `"random"` draws N(0, 0.02), and norms of 1.
        spec: The shape of the model.
        dtype: A floating-point dtype for every tensor that is not kept as it is stored.
        device: The device of the parameters.
        keep_packed: Whether weights of products stay in the formats in which the checkpoint stores them.
        seed: Seed of the numbers that `"random"` draws.
        progress: Called after each tensor with the bytes done and the bytes in all.
        readers: Readers of the ways in which a checkpoint may store a weight, in the order in which they are asked;
            an inventory has been made with its own.
        empty: Makes all tensors, parts of stored weights included, always in the same order; None uses torch's own.
        layout: Returns a quantised matrix in the form in which the device keeps it, the embeddings included; None makes
            it dense, unless `keep_packed`, and the embeddings in any case.
        quantize: Way to quantise each dense matrix of the layers as it is loaded; None leaves them as they are.
        quantize_head: Whether to quantise the output head, too; a tied one becomes a matrix beside the embedding.
        blank: Whether to leave the checkpoint's weights unread: they become zeros in their formats.

    Raises:
        InvalidParams: `quantize` is given, and the checkpoint is quantised already.
        ModelRejected: A tensor is missing, left over, of another shape or not finite, or a file is damaged.
    """
    device = torch.device(device)
    empty = empty or partial(_empty, device)
    with ExitStack() as files:
        if source == "random":
            return _assemble(spec, _Random(empty, dtype, device, seed, layout, quantize, quantize_head))
        inventory = files.enter_context(open_inventory(source, spec, readers))
        if not blank:
            inventory.check_numbers()
        make = BlankMaker if blank else FileMaker
        maker = make(inventory, spec, empty, dtype, device, keep_packed, progress, layout, quantize, quantize_head)
        return _load(maker, spec, keep_embedding=layout is not None)


def describe_weights(
    source: Source,
    spec: DecoderSpec,
    *,
    dtype: torch.dtype,
    keep_packed: bool = False,
    keep_embedding: bool = False,
    readers: Sequence[Reader] = READERS,
    layout: Layout | None = None,
    quantize: Method | None = None,
    quantize_head: bool = False,
) -> DecoderWeights:
    """Return a model's parameters without their numbers, on the meta device, in the formats that loading gives them.

    Reads headers, and of some formats the order of columns, but neither weights nor scales. Arguments and errors are
    those of `load_weights` and `open_weights`, without the errors that are about numbers. Matrices that are alike in
    format and shape, as those of experts are, may be one object.
    """
    device = torch.device("meta")
    empty = partial(_empty, device)
    with ExitStack() as files:
        if source == "random":
            return _assemble(spec, _Random(empty, dtype, device, 0, layout, quantize, quantize_head))
        inventory = files.enter_context(open_inventory(source, spec, readers))
        maker = MetaMaker(inventory, spec, empty, dtype, device, keep_packed, None, layout, quantize, quantize_head)
        return _assemble(spec, maker, keep_embedding=keep_embedding or layout is not None)


def _empty(device: torch.device, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


def open_files(source: str | os.PathLike[str] | GgufFile, files: ExitStack) -> Checkpoint:
    """Return the checkpoint at `source`; `files` will close it unless it was open already.

    Raises:
        ModelRejected: A file is missing or damaged.
    """
    if isinstance(source, GgufFile):
        return source
    path = Path(source)
    if path.suffix == ".gguf":
        return files.enter_context(GgufFile(path))
    return files.enter_context(SafetensorsFolder(path))


@contextmanager
def open_inventory(
    source: str | os.PathLike[str] | GgufFile | Inventory, spec: DecoderSpec, readers: Sequence[Reader] = READERS
) -> Iterator[Inventory]:
    """Yield the inventory of the checkpoint at `source`, which is closed afterwards unless it was open already.

    Raises:
        ModelRejected: A file is missing or damaged, or a tensor is missing, left over or of another shape.
    """
    with ExitStack() as files:
        yield source if isinstance(source, Inventory) else Inventory(open_files(source, files), spec, readers)


def _load(
    maker: FileMaker, spec: DecoderSpec, layers: Layers | None = None, *, keep_embedding: bool = False
) -> DecoderWeights:
    if spec.tied_head:
        maker.check_tied(top_plan(spec)["embedding_VE"].parts[0])
    kv_scales = maker.kv_scales()
    weights = _assemble(spec, maker, layers, keep_embedding=keep_embedding)
    maker.check_finite()
    return replace(weights, kv_scales=kv_scales)
