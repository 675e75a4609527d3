"""`Decoder`: the one transformer decoder, driven by a spec; pure arithmetic on one step's tokens.

Owns the model's parameters in the form the device wants; never knows a request, a plan or a scheduler. A block is

    x' = x + o(attention(rope(qkv(norm(x)))))
    y  = x' + down(silu(gate(norm(x'))) * up(norm(x')))

(Touvron et al., 2023), with q/k norms, biases and windows where the spec has them. Next to read: cpu_runner.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.engine.model.spec import DecoderSpec
from headrace.engine.model.weights import DecoderWeights, LayerWeights
from headrace.ops.cpu import CpuKv, CpuOps, CpuStep
from headrace.ops.linear import CpuLinear, linear
from headrace.ops.paged import PagedBatch

__all__ = ["Decoder", "cpu_ops"]


def cpu_ops(spec: DecoderSpec, *, page_size: int, max_positions: int, dtype: torch.dtype) -> dict[int | None, CpuOps]:
    """The operations of each kind of layer that `spec` has: one for each attention window."""
    positions = torch.arange(max_positions, dtype=torch.float32)
    angles = torch.outer(positions, torch.from_numpy(spec.rope.inverse_frequencies(spec.head_dim)))
    cos, sin = angles.cos(), angles.sin()
    return {
        window: CpuOps(
            heads=spec.num_heads,
            kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            page_size=page_size,
            eps=spec.norm_eps,
            cos=cos,
            sin=sin,
            dtype=dtype,
            window=window,
        )
        for window in dict.fromkeys(spec.windows)
    }


@dataclass(frozen=True, slots=True)
class _Block:
    window: int | None
    ops: CpuOps
    input_norm_E: Tensor
    qkv: CpuLinear
    q_norm_D: Tensor | None
    k_norm_D: Tensor | None
    o: CpuLinear
    post_norm_E: Tensor
    gate_up: CpuLinear
    down: CpuLinear


class Decoder:
    """Embeddings, blocks and output head of one model."""

    def __init__(
        self, spec: DecoderSpec, weights: DecoderWeights, ops: Mapping[int | None, CpuOps], dtype: torch.dtype
    ) -> None:
        """Pack `weights` for products in `dtype`; the caller may drop them afterwards."""
        self.spec = spec
        self._ops = ops
        self._dtype = dtype
        self._embedding_VE = weights.embedding_VE
        self._blocks = [self._block(layer, window) for layer, window in zip(weights.layers, spec.windows, strict=True)]
        self._final_norm_E = weights.final_norm_E
        self._head = linear(weights.head, None, dtype=dtype)

    def _block(self, layer: LayerWeights, window: int | None) -> _Block:
        dtype = self._dtype
        return _Block(
            window=window,
            ops=self._ops[window],
            input_norm_E=layer.input_norm_E,
            qkv=linear(layer.qkv, layer.qkv_bias, dtype=dtype),
            q_norm_D=layer.q_norm_D,
            k_norm_D=layer.k_norm_D,
            o=linear(layer.o, layer.o_bias, dtype=dtype),
            post_norm_E=layer.post_norm_E,
            gate_up=linear(layer.gate_up, layer.gate_up_bias, dtype=dtype),
            down=linear(layer.down, layer.down_bias, dtype=dtype),
        )

    def hidden(self, tokens_N: Tensor, batch: PagedBatch, kv: CpuKv) -> Tensor:
        """Run all blocks, writing the tokens' keys and values into `kv`.

        Args:
            tokens_N: int64 token ids.
            batch: Where the tokens live.
            kv: The paged cache.

        Returns:
            [N, E] after the final norm.
        """
        steps: dict[int | None, CpuStep] = {window: ops.prepare(batch) for window, ops in self._ops.items()}
        residual_NE = self._embedding_VE[tokens_N]
        x_NE = self._blocks[0].ops.rms_norm(residual_NE, self._blocks[0].input_norm_E)
        for layer, block in enumerate(self._blocks):
            ops, step = block.ops, steps[block.window]
            q_NHD = ops.rope_and_write(block.qkv(x_NE), step, kv, layer, block.q_norm_D, block.k_norm_D)
            attended_NE = block.o(ops.attention(q_NHD, step, kv, layer))
            x_NE, residual_NE = ops.add_rms_norm(attended_NE, residual_NE, block.post_norm_E)
            down_NE = block.down(ops.silu_mul(block.gate_up(x_NE)))
            last = layer + 1 == len(self._blocks)
            norm_E = self._final_norm_E if last else self._blocks[layer + 1].input_norm_E
            x_NE, residual_NE = ops.add_rms_norm(down_NE, residual_NE, norm_E)
        return x_NE

    def logits(self, hidden_SE: Tensor) -> Tensor:
        """Output head: [S, V] for the S positions whose next token is wanted."""
        return self._head(hidden_SE)
