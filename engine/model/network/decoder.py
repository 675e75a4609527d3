"""`Decoder`: the one transformer decoder, driven by a spec; pure arithmetic on one step's tokens, on any device.

Owns the model's parameters in the form the device wants; never knows a request, a plan or a scheduler. A block is

    x' = x + o(attention(rope(qkv(norm(x)))))
    y  = x' + down(silu(gate(norm(x'))) * up(norm(x')))

(Touvron et al., 2023), with q/k norms, biases and windows where the spec has them. Each sum waits for the norm that
reads it, so that a device can do both, and the product after them, at once. Next to read: cpu/runner.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from headrace.engine.model.checkpoint.weights import DecoderWeights, LayerWeights, Weight
from headrace.engine.model.shared.load_threads import Each
from headrace.engine.model.spec import DecoderSpec

__all__ = ["AdapterOps", "Decoder", "DecoderOps", "PlainProducts"]


class DecoderOps(Protocol):
    """What a device offers to a block. Products, `step` and `kv` are the device's own and pass through untouched.

    `residual_NE` is what the sums so far have made, None before the first; `x_NE` is added to it. Results may share
    memory with `x_NE` and `residual_NE`, which nobody reads afterwards. What `add_product` returns is the device's own,
    for the one call that computes the norm that it was told of.
    """

    def pack(self, weight: Weight, bias_O: Tensor | None) -> Any:
        """A weight [O, I] and its bias in the form in which this device multiplies by them."""
        ...

    def product(self, x_NI: Tensor, packed: Any) -> Tensor:
        """x W^T + b, [N, O]."""
        ...

    def pack_head(self, weight_VE: Weight) -> Any:
        """The output head's weight in the form in which this device multiplies by it."""
        ...

    def logits(self, x_SE: Tensor, packed: Any) -> Tensor:
        """x W^T of the output head, [S, V], in float32 whatever the dtype of `x_SE`."""
        ...

    def add_product(self, x_NI: Tensor, packed: Any, residual_NE: Tensor, norm_E: Tensor | None) -> tuple[Tensor, Any]:
        """(x_NE, residual_NE) for the norm of weight `norm_E` and the product after it; None: for `norm`."""
        ...

    def norm(self, x_NE: Tensor, residual_NE: Tensor | None, weight_E: Tensor) -> Tensor:
        """RMS norm of the sum: s / sqrt(mean(s^2) + eps) * w (Zhang and Sennrich, 2019)."""
        ...

    def norm_product(self, x_NE: Tensor, residual_NE: Any, weight_E: Tensor, packed: Any) -> tuple[Any, Tensor]:
        """(product of the norm of the sum, as `attend` takes it, the sum)."""
        ...

    def norm_feed(self, x_NE: Tensor, residual_NE: Any, weight_E: Tensor, packed: Any) -> tuple[Tensor, Tensor]:
        """(silu(gate) * up, the sum), where the product of the norm of the sum holds F gates, then F ups."""
        ...

    def attend(
        self, qkv_NX: Any, q_norm_D: Tensor | None, k_norm_D: Tensor | None, step: Any, kv: Any, layer: int
    ) -> Tensor:
        """Norm and rotate q and k, store k and v in their pages, softmax(q k^T / sqrt(D)) v: [N, H * D]."""
        ...


class AdapterOps(Protocol):
    """What a device offers in a step in which tokens wear adapters: a device's own products, with the updates added.

    Made anew for each step, it knows which token wears what. `site` is one of adapters/layout.py's.
    """

    def embed(self, x_NE: Tensor, tokens_N: Tensor) -> Tensor:
        """The embeddings of the step's tokens, updated; those of virtual tokens take the place of the model's."""
        ...

    def add_product(
        self, x_NI: Tensor, packed: Any, residual_NE: Tensor, norm_E: Tensor | None, layer: int, site: str
    ) -> tuple[Tensor, Any]:
        """As `DecoderOps.add_product`, with the site's updates."""
        ...

    def norm_product(
        self, x_NE: Tensor, residual_NE: Any, weight_E: Tensor, packed: Any, layer: int, site: str
    ) -> tuple[Any, Tensor]:
        """As `DecoderOps.norm_product`, with the site's updates."""
        ...

    def norm_feed(
        self, x_NE: Tensor, residual_NE: Any, weight_E: Tensor, packed: Any, layer: int, site: str
    ) -> tuple[Tensor, Tensor]:
        """As `DecoderOps.norm_feed`, with the site's updates."""
        ...

    def head(self, logits_SV: Tensor, hidden_SE: Tensor) -> Tensor:
        """The logits, updated; its S tokens are those that the step asks logits of."""
        ...


class PlainProducts:
    """A block's products where nobody wears anything, called as those of `AdapterOps` are."""

    def __init__(self, ops: DecoderOps) -> None:
        """Compute with `ops`."""
        self._ops = ops

    def add_product(
        self, x_NI: Tensor, packed: Any, residual_NE: Tensor, norm_E: Tensor | None, _layer: int, _site: str
    ) -> tuple[Tensor, Any]:
        """As `DecoderOps.add_product`."""
        return self._ops.add_product(x_NI, packed, residual_NE, norm_E)

    def norm_product(
        self, x_NE: Tensor, residual_NE: Any, weight_E: Tensor, packed: Any, _layer: int, _site: str
    ) -> tuple[Any, Tensor]:
        """As `DecoderOps.norm_product`."""
        return self._ops.norm_product(x_NE, residual_NE, weight_E, packed)

    def norm_feed(
        self, x_NE: Tensor, residual_NE: Any, weight_E: Tensor, packed: Any, _layer: int, _site: str
    ) -> tuple[Tensor, Tensor]:
        """As `DecoderOps.norm_feed`."""
        return self._ops.norm_feed(x_NE, residual_NE, weight_E, packed)


@dataclass(frozen=True, slots=True)
class _Block:
    window: int | None
    input_norm_E: Tensor
    qkv: Any
    q_norm_D: Tensor | None
    k_norm_D: Tensor | None
    o: Any
    post_norm_E: Tensor
    gate_up: Any
    down: Any


class Decoder:
    """Embeddings, blocks and output head of one model."""

    def __init__(
        self, spec: DecoderSpec, weights: DecoderWeights, ops: Mapping[int | None, DecoderOps], each: Each = map
    ) -> None:
        """Take `weights` over in the form that the device wants; the caller may drop them afterwards.

        Args:
            spec: What the model looks like.
            weights: Its parameters.
            ops: The device's operations for each attention window of `spec`.
            each: Packs the layers, as `map` does, one after the other or several at a time.
        """
        self.spec = spec
        self._ops = ops
        self._plain = {window: PlainProducts(each) for window, each in ops.items()}
        self._embedding_VE = weights.embedding_VE
        windows = spec.windows
        blocks = each(lambda layer: self._block(weights.layers[layer], windows[layer], ops), range(len(windows)))
        self._blocks = list(blocks)
        self._final_norm_E = weights.final_norm_E
        self._top = ops[spec.windows[0]]
        self._head = self._top.pack_head(weights.head)

    @staticmethod
    def _block(layer: LayerWeights, window: int | None, windows: Mapping[int | None, DecoderOps]) -> _Block:
        ops = windows[window]
        return _Block(
            window=window,
            input_norm_E=layer.input_norm_E,
            qkv=ops.pack(layer.qkv, layer.qkv_bias),
            q_norm_D=layer.q_norm_D,
            k_norm_D=layer.k_norm_D,
            o=ops.pack(layer.o, layer.o_bias),
            post_norm_E=layer.post_norm_E,
            gate_up=ops.pack(layer.gate_up, layer.gate_up_bias),
            down=ops.pack(layer.down, layer.down_bias),
        )

    def hidden(
        self,
        tokens_N: Tensor,
        steps: Mapping[int | None, Any],
        kv: Any,
        last_S: Tensor | None = None,
        adapters: AdapterOps | None = None,
    ) -> Tensor:
        """Run all blocks, writing the tokens' keys and values into `kv`.

        Args:
            tokens_N: Token ids, int32 or int64.
            steps: For each attention window, where the tokens live, as the device's operations take it.
            kv: The paged cache.
            last_S: int64: the tokens wanted; None for all.
            adapters: What the step's tokens wear; None where none of them wears anything.

        Returns:
            [S, E] after the final norm, [N, E] without `last_S`.
        """
        x_NE = self._embedding_VE[tokens_N]
        if adapters is not None:
            x_NE = adapters.embed(x_NE, tokens_N)
        x_NE, residual_NE = self._blocks_of(x_NE, steps, kv, adapters)
        if last_S is not None and residual_NE is not None:
            x_NE, residual_NE = x_NE[last_S], residual_NE[last_S]
        return self._top.norm(x_NE, residual_NE, self._final_norm_E)

    def logits(self, hidden_SE: Tensor, adapters: AdapterOps | None = None) -> Tensor:
        """Output head: float32 [S, V] for the S positions whose next token is wanted."""
        logits_SV = self._top.logits(hidden_SE, self._head)
        return logits_SV if adapters is None else adapters.head(logits_SV, hidden_SE)

    def _blocks_of(
        self, x_NE: Tensor, steps: Mapping[int | None, Any], kv: Any, adapters: AdapterOps | None
    ) -> tuple[Tensor, Tensor | None]:
        residual_NE = None
        for layer, block in enumerate(self._blocks):
            ops, step = self._ops[block.window], steps[block.window]
            products = self._plain[block.window] if adapters is None else adapters
            qkv_NX, total_NE = products.norm_product(x_NE, residual_NE, block.input_norm_E, block.qkv, layer, "qkv")
            x_NX = ops.attend(qkv_NX, block.q_norm_D, block.k_norm_D, step, kv, layer)
            x_NE, residual_NE = products.add_product(x_NX, block.o, total_NE, block.post_norm_E, layer, "o")
            x_NF, total_NE = products.norm_feed(x_NE, residual_NE, block.post_norm_E, block.gate_up, layer, "gate_up")
            next_norm_E = self._blocks[layer + 1].input_norm_E if layer + 1 < len(self._blocks) else None
            x_NE, residual_NE = products.add_product(x_NF, block.down, total_NE, next_norm_E, layer, "down")
        return x_NE, residual_NE
