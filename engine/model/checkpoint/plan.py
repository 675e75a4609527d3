"""Lists the parameters that a spec calls for, each with the tensors that it is fused from; never holds a tensor.

Which parameters a layer has is said by its mixer and its feed; nothing here knows a kind of either.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from headrace.engine.model.roles import Fused, Names, Part, bias, matrix
from headrace.engine.model.spec import DecoderSpec

__all__ = [
    "Holding",
    "LayerPlan",
    "all_parameters",
    "all_parts",
    "final_norm_plan",
    "layer_plan",
    "per_layer_plan",
    "top_plan",
]


class LayerPlan(NamedTuple):
    """The parameters of one layer, by their names in `SublayerWeights`."""

    mixer: Mapping[str, Fused]
    feed: Mapping[str, Fused]


@dataclass(frozen=True, slots=True)
class Holding:
    """What a checkpoint must hold."""

    names: Names
    parameters: tuple[Fused, ...]
    num_layers: int = 0
    """Number of layers, which may have scales of an 8-bit cache."""
    tied_head: tuple[int, int] | None = None
    """Shape of an output head that may be stored though it is the embedding; None if there can be none."""

    @staticmethod
    def of(spec: DecoderSpec) -> Holding:
        """Return what a checkpoint of a decoder must hold."""
        tied_head = (spec.vocab_size, spec.hidden_size) if spec.tied_head else None
        return Holding(spec.names, tuple(all_parameters(spec)), spec.num_layers, tied_head)

    def parts(self) -> Iterator[tuple[Part, tuple[int, ...]]]:
        """Yield every tensor with its shape."""
        for fused in self.parameters:
            yield from fused.shapes


def layer_plan(spec: DecoderSpec, layer: int) -> LayerPlan:
    """Return the parameters that one layer has."""
    return LayerPlan(*(_stored(spec, plan, layer) for plan in spec.layers[layer].parameters(spec.hidden_size)))


def top_plan(spec: DecoderSpec) -> dict[str, Fused]:
    """Return the parameters outside the layers but those of the final norm, by their field in `DecoderWeights`."""
    plan = {"embedding_VE": matrix(spec.hidden_size, embedding=spec.vocab_size)}
    if spec.positions is not None:
        plan["positions_PE"] = matrix(spec.hidden_size, positions=spec.positions.rows)
    if not spec.tied_head:
        plan["head"] = matrix(spec.hidden_size, head=spec.vocab_size)
    if spec.head_bias and spec.has_head:
        plan["head_bias_V"] = bias(head=spec.vocab_size)
    return plan


def final_norm_plan(spec: DecoderSpec) -> dict[str, Fused]:
    """Return the parameters of the norm behind the last layer, by their names in `Norms.weights`."""
    return spec.layers[-1].norms.weights("final_norm", spec.hidden_size)


def per_layer_plan(spec: DecoderSpec) -> dict[str, Fused]:
    """Return the parameters of embeddings that each layer has for itself, by their names in `PerLayerWeights`."""
    return {} if spec.per_layer is None else spec.per_layer.parameters(spec.hidden_size, spec.num_layers)


def all_parameters(spec: DecoderSpec) -> Iterator[Fused]:
    """Yield every parameter of a decoder."""
    plans: list[Mapping[str, Fused]] = [top_plan(spec), final_norm_plan(spec), per_layer_plan(spec)]
    for layer in range(spec.num_layers):
        plans += layer_plan(spec, layer)
    for plan in plans:
        yield from plan.values()


def all_parts(spec: DecoderSpec) -> Iterator[tuple[Part, tuple[int, ...]]]:
    """Yield every tensor that a checkpoint of this spec holds, with its shape."""
    yield from Holding.of(spec).parts()


def _stored(spec: DecoderSpec, plan: Mapping[str, Fused], layer: int) -> dict[str, Fused]:
    return {name: spec.names.stored(fused.of_layer(layer)) for name, fused in plan.items()}
