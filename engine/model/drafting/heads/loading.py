"""Loads the weights of draft heads from checked checkpoints; never decides which there are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from headrace.engine.model.checkpoint.parameters import Empty, FileMaker, Layout, MetaMaker
from headrace.engine.model.checkpoint.weights import LayerWeights, sublayer_weights
from headrace.engine.model.drafting.heads.reading import HeadFiles
from headrace.engine.model.drafting.heads.spec import MedusaSpec, RecurrentSpec
from headrace.engine.model.spec import DecoderSpec
from headrace.ops.formats import Stored
from headrace.ops.quantise import Method

__all__ = ["MedusaWeights", "RecurrentWeights", "describe_head", "load_head"]


@dataclass(frozen=True, slots=True)
class RecurrentWeights:
    """Parameters of a recurrent head."""

    layers: tuple[LayerWeights, ...]
    fuse: Stored
    """First product: of token and state, or of several states of the target."""
    vectors: Mapping[str, Tensor]
    """Bias of the first product and weights of norms, by their names in `RecurrentSpec.parameters`."""
    embedding: Stored | None
    head: Stored | None
    ids_D: Tensor | None
    """Target's id of each token that the head can guess, int64; None if they are the target's own ids."""

    @property
    def products(self) -> Iterator[Stored]:
        """The weights of products inside the head: all but its output head."""
        yield self.fuse
        for layer in self.layers:
            yield from layer.mixer.matrices.values()
            yield from layer.feed.matrices.values()

    @property
    def outputs(self) -> tuple[Stored, ...]:
        """The output heads."""
        return () if self.head is None else (self.head,)

    @property
    def others(self) -> Iterator[Tensor]:
        """What is in no product: norms, biases, routers, embeddings as they are stored, and the map of ids."""
        yield from self.vectors.values()
        for layer in self.layers:
            yield from layer.mixer.vectors.values()
            yield from layer.feed.vectors.values()
        if self.embedding is not None:
            yield from self.embedding.parts.values()
        if self.ids_D is not None:
            yield self.ids_D


@dataclass(frozen=True, slots=True)
class MedusaWeights:
    """Parameters of Medusa's heads."""

    blocks: tuple[tuple[tuple[Stored, Tensor], ...], ...]
    """Weight and bias of each residual block of each head."""
    outputs: tuple[Stored, ...]
    """Output head of each head, [V, E]."""

    @property
    def products(self) -> Iterator[Stored]:
        """The weights of the residual blocks."""
        return (weight for blocks in self.blocks for weight, _ in blocks)

    @property
    def others(self) -> Iterator[Tensor]:
        """The biases."""
        return (bias_E for blocks in self.blocks for _, bias_E in blocks)


def load_head(
    found: HeadFiles,
    target: DecoderSpec,
    *,
    dtype: torch.dtype,
    device: torch.device,
    keep_packed: bool = False,
    empty: Empty | None = None,
    layout: Layout | None = None,
    quantize: Method | None = None,
) -> RecurrentWeights | MedusaWeights:
    """Return the parameters of a head.

    Args:
        found: The open checkpoint.
        target: The model that the head drafts for.
        dtype: A floating-point dtype for every tensor that is not kept as it is stored.
        device: The device of the parameters.
        keep_packed: Whether weights of products stay in the formats in which the checkpoint stores them.
        empty: Makes all tensors but the map of ids, always in the same order; None uses torch's own.
        layout: Returns a quantised weight of products in the form in which the device keeps it; None makes it dense,
            unless `keep_packed`.
        quantize: Way to quantise each dense matrix as it is loaded, output heads included, embeddings not; None leaves
            them as they are.

    Raises:
        InvalidParams: `quantize` is given, and a matrix is quantised already.
        ModelRejected: A tensor is not finite, or a file has changed.
    """
    empty = empty or partial(_empty, device)
    maker = FileMaker(found.inventory, target, empty, dtype, device, keep_packed, None, layout, quantize)
    made = _made(found, maker)
    maker.check_finite()
    return made


def describe_head(
    found: HeadFiles,
    target: DecoderSpec,
    *,
    dtype: torch.dtype,
    keep_packed: bool = False,
    quantize: Method | None = None,
) -> RecurrentWeights | MedusaWeights:
    """Return the parameters of a head without their numbers, on the meta device.

    Arguments and errors are those of `load_head`, without the errors that are about numbers.
    """
    device = torch.device("meta")
    empty = partial(_empty, device)
    maker = MetaMaker(found.inventory, target, empty, dtype, device, keep_packed, None, quantize=quantize)
    return _made(found, maker)


def _empty(device: torch.device, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


def _made(found: HeadFiles, maker: FileMaker) -> RecurrentWeights | MedusaWeights:
    spec = found.spec
    if isinstance(spec, MedusaSpec):
        return _medusa(spec, maker)
    return _recurrent(spec, maker, None if found.ids_D is None else found.ids_D.to(maker.device))


def _recurrent(spec: RecurrentSpec, maker: FileMaker, ids_D: Tensor | None) -> RecurrentWeights:
    plan = spec.parameters()
    plans = map(spec.layer_parameters, range(spec.block.num_layers))
    layers = tuple(LayerWeights(*(sublayer_weights(each, maker) for each in pair)) for pair in plans)
    vectors = {name: maker.dense(fused) for name, fused in plan.items() if fused.columns is None}
    embedding = maker.table(plan["embedding"]) if "embedding" in plan else None
    head = maker.weight(plan["head"]) if "head" in plan else None
    return RecurrentWeights(layers, maker.weight(plan["fuse"]), vectors, embedding, head, ids_D)


def _medusa(spec: MedusaSpec, maker: FileMaker) -> MedusaWeights:
    blocks = []
    for head in range(spec.heads):
        pairs = (spec.block(head, block) for block in range(spec.blocks))
        blocks.append(tuple((maker.weight(weight), maker.dense(bias)) for weight, bias in pairs))
    return MedusaWeights(tuple(blocks), tuple(maker.weight(spec.output(head)) for head in range(spec.heads)))
