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
    """Protocol of a device's operations in a block. Products, `step` and `kv` have the device's own types.

    `residual_NE` is the sum of the residual stream so far, None before the first; `x_NE` is added to it. Results may
    share memory with `x_NE` and `residual_NE`, which are not read afterwards. The result of `add_product` has the
    device's own form, for the one call that computes the norm named in it.
    """

    def pack(self, weight: Weight, bias_O: Tensor | None) -> Any:
        """Return a weight [O, I] and its bias in the form in which this device multiplies by them."""
        ...

    def product(self, x_NI: Tensor, packed: Any) -> Tensor:
        """Return x W^T + b, [N, O]."""
        ...

    def pack_head(self, weight_VE: Weight) -> Any:
        """Return the output head's weight in the form in which this device multiplies by it."""
        ...

    def logits(self, x_SE: Tensor, packed: Any) -> Tensor:
        """Return x W^T of the output head, float32 [S, V], whatever the dtype of `x_SE`."""
        ...

    def add_product(self, x_NI: Tensor, packed: Any, residual_NE: Tensor, norm_E: Tensor | None) -> tuple[Tensor, Any]:
        """Return (x_NE, residual_NE) for the norm of weight `norm_E` and the product after it; None: for `norm`."""
        ...

    def norm(self, x_NE: Tensor, residual_NE: Tensor | None, weight_E: Tensor) -> Tensor:
        """Return the RMS norm of the sum: s / sqrt(mean(s^2) + eps) * w (Zhang and Sennrich, 2019)."""
        ...

    def norm_product(self, x_NE: Tensor, residual_NE: Any, weight_E: Tensor, packed: Any) -> tuple[Any, Tensor]:
        """Return (product of the norm of the sum, as `attend` takes it, the sum)."""
        ...

    def norm_feed(self, x_NE: Tensor, residual_NE: Any, weight_E: Tensor, packed: Any) -> tuple[Tensor, Tensor]:
        """Return (silu(gate) * up, the sum), where the product of the norm of the sum holds F gates, then F ups."""
        ...

    def attend(
        self, qkv_NX: Any, q_norm_D: Tensor | None, k_norm_D: Tensor | None, step: Any, kv: Any, layer: int
    ) -> Tensor:
        """Norm and rotate q and k, store k and v in their pages, and return softmax(q k^T / sqrt(D)) v, [N, H * D]."""
        ...


class AdapterOps(Protocol):
    """Protocol of a device's products in a step in which tokens use adapters: its own products plus the updates.

    An object for each step knows which token uses which adapter. `site` is one of adapters/layout.py's.
    """

    def embed(self, x_NE: Tensor, tokens_N: Tensor) -> Tensor:
        """Return the step's embeddings with updates added; virtual tokens have embeddings of their own."""
        ...

    def add_product(
        self, x_NI: Tensor, packed: Any, residual_NE: Tensor, norm_E: Tensor | None, layer: int, site: str
    ) -> tuple[Tensor, Any]:
        """Do what `DecoderOps.add_product` does, with the site's updates."""
        ...

    def norm_product(
        self, x_NE: Tensor, residual_NE: Any, weight_E: Tensor, packed: Any, layer: int, site: str
    ) -> tuple[Any, Tensor]:
        """Do what `DecoderOps.norm_product` does, with the site's updates."""
        ...

    def norm_feed(
        self, x_NE: Tensor, residual_NE: Any, weight_E: Tensor, packed: Any, layer: int, site: str
    ) -> tuple[Tensor, Tensor]:
        """Do what `DecoderOps.norm_feed` does, with the site's updates."""
        ...

    def head(self, logits_SV: Tensor, hidden_SE: Tensor) -> Tensor:
        """Return the logits with the head's updates added, for the S tokens whose logits the step wants."""
        ...


class PlainProducts:
    """A block's products where no token uses an adapter, with the signatures of `AdapterOps`."""

    def __init__(self, ops: DecoderOps) -> None:
        """Compute with `ops`."""
        self._ops = ops

    def add_product(
        self, x_NI: Tensor, packed: Any, residual_NE: Tensor, norm_E: Tensor | None, _layer: int, _site: str
    ) -> tuple[Tensor, Any]:
        """Call `DecoderOps.add_product`."""
        return self._ops.add_product(x_NI, packed, residual_NE, norm_E)

    def norm_product(
        self, x_NE: Tensor, residual_NE: Any, weight_E: Tensor, packed: Any, _layer: int, _site: str
    ) -> tuple[Any, Tensor]:
        """Call `DecoderOps.norm_product`."""
        return self._ops.norm_product(x_NE, residual_NE, weight_E, packed)

    def norm_feed(
        self, x_NE: Tensor, residual_NE: Any, weight_E: Tensor, packed: Any, _layer: int, _site: str
    ) -> tuple[Tensor, Tensor]:
        """Call `DecoderOps.norm_feed`."""
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
        """Pack `weights` in the form that the device wants; the caller may drop them afterwards.

        Args:
            spec: The shape of the model.
            weights: The model's parameters.
            ops: The device's operations, by attention window of `spec`.
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
        """Run all blocks, write the tokens' keys and values into `kv`, and return hidden states.

        Args:
            tokens_N: Token ids, int32 or int64.
            steps: By attention window, the tokens' places in the cache, as the device's operations take them.
            kv: The paged cache.
            last_S: Indices of the tokens wanted, int64; None for all.
            adapters: The products with adapters; None where no token uses one.

        Returns:
            Hidden states after the final norm: [S, E], or [N, E] without `last_S`.
        """
        x_NE = self._embedding_VE[tokens_N]
        if adapters is not None:
            x_NE = adapters.embed(x_NE, tokens_N)
        x_NE, residual_NE = self._blocks_of(x_NE, steps, kv, adapters)
        if last_S is not None and residual_NE is not None:
            x_NE, residual_NE = x_NE[last_S], residual_NE[last_S]
        return self._top.norm(x_NE, residual_NE, self._final_norm_E)

    def logits(self, hidden_SE: Tensor, adapters: AdapterOps | None = None) -> Tensor:
        """Apply the output head: return float32 [S, V] for the S positions whose next token is wanted."""
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
