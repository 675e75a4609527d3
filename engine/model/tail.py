"""`LayerTail` and `PerLayerEmbedding`: specs of what a layer has behind its feed; never computes.

Every layer of Gemma 4 ends with a factor of the residual stream. In small models each also has an embedding of each
token that is its own, and that it adds behind its feed. Next to read: network/tail.py and network/per_layer.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.engine.model.roles import Fused, Part, matrix, norm
from headrace.ops.stream import PlainActivation

__all__ = ["LayerTail", "PerLayerEmbedding"]


@dataclass(frozen=True, slots=True)
class LayerTail:
    """What one layer does to the residual stream behind its feed: x' = s * (x + norm(W_p (act(W_g x) * e))).

    Gemma Team (2026), Gemma 4, as transformers computes it (`models/gemma4`).
    """

    size: int | None = None
    """Elements of the layer's own embedding e of each token; None for x' = s * x."""
    activation: PlainActivation = "gelu_tanh"

    def parameters(self, hidden_size: int) -> dict[str, Fused]:
        """Return the factor s, and the products and the norm of a layer's own embeddings."""
        factor = Fused((Part("layer.layer_scalar", 1),), None, is_norm=True, in_float32=True)
        if self.size is None:
            return {"factor_1": factor}
        return {
            "factor_1": factor,
            "own_gate": matrix(hidden_size, own_gate=self.size),
            "own_result": matrix(self.size, own_result=hidden_size),
            "own_norm_E": norm(own_norm=hidden_size),
        }


@dataclass(frozen=True, slots=True)
class PerLayerEmbedding:
    """Embeddings of tokens that each layer has for itself, blended with a product of those of the whole model.

    For the embedding x of a token, scaled, and a layer's part of the table's row t and of the product W x:
    e = (norm(W x / sqrt(E)) + scale * t) / sqrt(2).
    """

    rows: int
    """Tokens of the table."""
    size: int
    """Elements of a layer's embedding."""
    scale: float
    """Factor of the table's rows."""

    def parameters(self, hidden_size: int, num_layers: int) -> dict[str, Fused]:
        """Return the table, the product and the norm, by their names in `PerLayerWeights`."""
        width = num_layers * self.size
        return {
            "table_VX": matrix(width, per_layer_table=self.rows),
            "product_XE": matrix(hidden_size, per_layer_product=width),
            "norm_P": norm(per_layer_norm=self.size),
        }
