"""`Decoder`: the one transformer decoder, driven by a spec; pure arithmetic on one step's tokens, on any device.

Owns the model's parameters in the form the device wants; never knows a request, a plan or a scheduler. A block is

    x' = x + o(attention(rope(qkv(norm(x)))))
    y  = x' + down(silu(gate(norm(x'))) * up(norm(x')))

(Touvron et al., 2023), with q/k norms, biases and windows where the spec has them. Each sum waits for the norm that
reads it, so that a device can do both, and the product after them, at once. Next to read: operations.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic

from torch import Tensor

from headrace.engine.model.checkpoint.weights import DecoderWeights, LayerWeights
from headrace.engine.model.network.operations import BlockOps, DeviceOps, Kv, Packed, Step
from headrace.engine.model.shared.load_threads import Each
from headrace.engine.model.spec import DecoderSpec
from headrace.ops.stream import HeadNorms, Stream

__all__ = ["Decoder"]


@dataclass(frozen=True, slots=True)
class _Block(Generic[Packed]):
    window: int | None
    input_norm_E: Tensor
    qkv: Packed
    head_norms: HeadNorms | None
    o: Packed
    post_norm_E: Tensor
    gate_up: Packed
    down: Packed


class Decoder(Generic[Packed, Step, Kv]):
    """Embeddings, blocks and output head of one model."""

    def __init__(
        self,
        spec: DecoderSpec,
        weights: DecoderWeights,
        ops: Mapping[int | None, DeviceOps[Packed, Step, Kv]],
        each: Each = map,
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
        self._embedding_VE = weights.embedding_VE
        windows = spec.windows
        blocks = each(lambda layer: self._block(weights.layers[layer], windows[layer], ops), range(len(windows)))
        self._blocks = list(blocks)
        self._next_norms_E = [*(block.input_norm_E for block in self._blocks[1:]), None]
        self._final_norm_E = weights.final_norm_E
        self._head = ops[windows[0]].pack_head(weights.head)

    @staticmethod
    def _block(
        layer: LayerWeights, window: int | None, windows: Mapping[int | None, DeviceOps[Packed, Step, Kv]]
    ) -> _Block[Packed]:
        ops, mixer, feed = windows[window], layer.mixer, layer.feed
        head_norms = None
        if "q_norm_D" in mixer.vectors:
            head_norms = HeadNorms(mixer.vectors["q_norm_D"], mixer.vectors["k_norm_D"])
        return _Block(
            window=window,
            input_norm_E=mixer.vectors["norm_E"],
            qkv=ops.pack(mixer.matrices["qkv"], mixer.vectors.get("qkv_bias")),
            head_norms=head_norms,
            o=ops.pack(mixer.matrices["o"], mixer.vectors.get("o_bias")),
            post_norm_E=feed.vectors["norm_E"],
            gate_up=ops.pack(feed.matrices["gate_up"], feed.vectors.get("gate_up_bias")),
            down=ops.pack(feed.matrices["down"], feed.vectors.get("down_bias")),
        )

    def hidden(
        self,
        tokens_N: Tensor,
        steps: Mapping[int | None, Step],
        kv: Kv,
        last_S: Tensor | None = None,
        adapted: Mapping[int | None, BlockOps[Packed, Step, Kv]] | None = None,
    ) -> Tensor:
        """Run all blocks, write the tokens' keys and values into `kv`, and return hidden states.

        Args:
            tokens_N: Token ids, int32 or int64.
            steps: By attention window, the tokens' places in the cache, as the device's operations take them.
            kv: The paged cache.
            last_S: Indices of the tokens wanted, int64; None for all.
            adapted: By attention window, the operations with adapters; None where no token uses one.

        Returns:
            Hidden states after the final norm: [S, E], or [N, E] without `last_S`.
        """
        ops = self._ops if adapted is None else adapted
        first = self._first(adapted)
        stream = Stream(first.embed(self._embedding_VE[tokens_N], tokens_N))
        for layer, block in enumerate(self._blocks):
            here, step = ops[block.window], steps[block.window]
            x_NX, total_NE = here.attend(stream, block.input_norm_E, block.qkv, block.head_norms, step, kv, layer)
            stream = here.add(x_NX, block.o, total_NE, block.post_norm_E, layer, "o")
            x_NF, total_NE = here.feed(stream, block.post_norm_E, block.gate_up, layer)
            stream = here.add(x_NF, block.down, total_NE, self._next_norms_E[layer], layer, "down")
        if last_S is not None:
            stream = stream.rows(last_S)
        return first.normed(stream, self._final_norm_E)[0]

    def logits(
        self, hidden_SE: Tensor, adapted: Mapping[int | None, BlockOps[Packed, Step, Kv]] | None = None
    ) -> Tensor:
        """Apply the output head: return float32 [S, V] for the S positions whose next token is wanted."""
        return self._first(adapted).logits(hidden_SE, self._head)

    def _first(self, adapted: Mapping[int | None, BlockOps[Packed, Step, Kv]] | None) -> BlockOps[Packed, Step, Kv]:
        """Return the operations of the first layer's attention window, which compute what belongs to no layer."""
        window = self.spec.windows[0]
        return self._ops[window] if adapted is None else adapted[window]
