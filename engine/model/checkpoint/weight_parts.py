"""`WeightSum`: adds up a model's weights by part and format, as `EngineInfo` tells them; never holds a tensor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import get_args

from torch import Tensor

from headrace.engine.model.checkpoint.inventory import Inventory
from headrace.engine.model.checkpoint.plan import final_norm_plan, layer_plan, per_layer_plan, top_plan
from headrace.engine.model.checkpoint.weights import DecoderWeights
from headrace.engine.model.experts import is_of_expert
from headrace.engine.model.roles import Fused
from headrace.engine.model.spec import DecoderSpec
from headrace.engine.stats import ModelPart, WeightPart

__all__ = ["WeightSum", "name_of", "part_of_feed", "parts_in_files", "stored_parts"]


class WeightSum:
    """Bytes of weights by part of the model and format."""

    def __init__(self) -> None:
        """Begin with no bytes."""
        self._bytes: Counter[tuple[ModelPart, str]] = Counter()

    def add(self, part: ModelPart, format: str, nbytes: int) -> None:
        """Add `nbytes` of a weight in a format to a part."""
        self._bytes[part, format] += nbytes

    def add_vectors(self, vectors: Iterable[Tensor]) -> None:
        """Add norms and biases."""
        for vector in vectors:
            self.add("other", name_of(vector), vector.nbytes)

    def parts(self) -> tuple[WeightPart, ...]:
        """Return the sums in the order of `ModelPart`, of a part's formats the largest first."""
        order = get_args(ModelPart)
        found = (WeightPart(part, format, nbytes) for (part, format), nbytes in self._bytes.items() if nbytes)
        return tuple(sorted(found, key=lambda each: (order.index(each.part), -each.nbytes, each.format)))


def name_of(tensor: Tensor) -> str:
    """Return the name of a tensor's dtype."""
    return str(tensor.dtype).removeprefix("torch.")


def part_of_feed(name: str) -> ModelPart:
    """Return the part of the model to which the matrix of a feed with a name in `SublayerWeights` belongs."""
    return "experts" if is_of_expert(name) else "feed-forward"


def stored_parts(weights: DecoderWeights) -> tuple[WeightPart, ...]:
    """Return the bytes of a decoder whose products take the weights as they are stored, without a copy."""
    total = WeightSum()
    total.add("embedding", weights.embedding.format.name, weights.embedding.nbytes)
    if weights.head is not weights.embedding:
        total.add("head", weights.head.format.name, weights.head.nbytes)
    if weights.positions_PE is not None:
        total.add("embedding", name_of(weights.positions_PE), weights.positions_PE.nbytes)
    if weights.per_layer is not None:
        for each in (weights.per_layer.table_VX, weights.per_layer.product_XE):
            total.add("embedding", each.format.name, each.nbytes)
    total.add_vectors(weights.top_tensors)
    for number in range(len(weights.layers)):
        layer = weights.layers[number]
        total.add_vectors((*layer.mixer.vectors.values(), *layer.feed.vectors.values()))
        for weight in layer.mixer.matrices.values():
            total.add("attention", weight.format.name, weight.nbytes)
        for name, weight in layer.feed.matrices.items():
            total.add(part_of_feed(name), weight.format.name, weight.nbytes)
    return total.parts()


def parts_in_files(inventory: Inventory, spec: DecoderSpec) -> tuple[WeightPart, ...]:
    """Return the bytes of a decoder as its files hold it."""
    total = WeightSum()

    def add(part: ModelPart, plan: Mapping[str, Fused]) -> None:
        for name, fused in plan.items():
            here = "other" if fused.columns is None or fused.in_float32 else part
            here = part_of_feed(name) if here == "feed-forward" else here
            for tensor in fused.parts:
                found = inventory.of(tensor)
                total.add(here, found.format.name, found.nbytes(inventory.files))

    top = top_plan(spec)
    add("embedding", {name: fused for name, fused in top.items() if name != "head"})
    add("head", {name: fused for name, fused in top.items() if name == "head"})
    add("embedding", per_layer_plan(spec))
    add("other", final_norm_plan(spec))
    for number in range(spec.num_layers):
        layer = layer_plan(spec, number)
        add("attention", layer.mixer)
        add("feed-forward", layer.feed)
    return total.parts()
