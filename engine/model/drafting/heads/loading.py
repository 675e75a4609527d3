"""Loads the weights of draft heads from checked checkpoints; never decides which there are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.engine.model.checkpoint.parameters import FileMaker
from headrace.engine.model.checkpoint.weights import LayerWeights, sublayer_weights
from headrace.engine.model.drafting.heads.reading import HeadFiles
from headrace.engine.model.drafting.heads.spec import MedusaSpec, RecurrentSpec
from headrace.engine.model.spec import DecoderSpec
from headrace.ops.formats import Stored

__all__ = ["MedusaWeights", "RecurrentWeights", "load_head"]


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


@dataclass(frozen=True, slots=True)
class MedusaWeights:
    """Parameters of Medusa's heads."""

    blocks: tuple[tuple[tuple[Stored, Tensor], ...], ...]
    """Weight and bias of each residual block of each head."""
    outputs: tuple[Stored, ...]
    """Output head of each head, [V, E]."""


def load_head(
    found: HeadFiles, target: DecoderSpec, *, dtype: torch.dtype, device: torch.device, keep_packed: bool = False
) -> RecurrentWeights | MedusaWeights:
    """Return the parameters of a head.

    Args:
        found: The open checkpoint.
        target: The model that the head drafts for.
        dtype: A floating-point dtype for every tensor that is not kept as it is stored.
        device: The device of the parameters.
        keep_packed: Whether weights of products stay in the formats in which the checkpoint stores them.

    Raises:
        ModelRejected: A tensor is not finite, or a file has changed.
    """

    def empty(shape: Sequence[int], of_dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=of_dtype, device=device)

    maker = FileMaker(found.inventory, target, empty, dtype, device, keep_packed, None)
    spec = found.spec
    made = _medusa(spec, maker) if isinstance(spec, MedusaSpec) else _recurrent(spec, maker, found.ids_D)
    maker.check_finite()
    return made


def _recurrent(spec: RecurrentSpec, maker: FileMaker, ids_D: Tensor | None) -> RecurrentWeights:
    plan = spec.parameters()
    plans = map(spec.layer_parameters, range(spec.block.num_layers))
    layers = tuple(LayerWeights(*(sublayer_weights(each, maker) for each in pair)) for pair in plans)
    vectors = {name: maker.dense(fused) for name, fused in plan.items() if fused.columns is None}
    embedding, head = (maker.table(plan[name]) if name in plan else None for name in ("embedding", "head"))
    return RecurrentWeights(layers, maker.weight(plan["fuse"]), vectors, embedding, head, ids_D)


def _medusa(spec: MedusaSpec, maker: FileMaker) -> MedusaWeights:
    blocks = []
    for head in range(spec.heads):
        pairs = (spec.block(head, block) for block in range(spec.blocks))
        blocks.append(tuple((maker.weight(weight), maker.dense(bias)) for weight, bias in pairs))
    return MedusaWeights(tuple(blocks), tuple(maker.table(spec.output(head)) for head in range(spec.heads)))
