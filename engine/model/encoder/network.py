"""`Encoder`: the one BERT-type encoder, driven by a spec; pure arithmetic on a batch of whole texts, on any device.

Owns the model's parameters; never knows a request, a plan or a scheduler. Every token attends to all of its own text:

    x' = norm(x + o(attention(qkv(x))))
    y  = norm(x' + down(gelu(up(x'))))

(Devlin et al., 2019). Tokens of all texts lie one after the other, without padding. Attention on a GPU in 16 bits takes
them so; elsewhere, only attention pads, in groups of texts of similar length. Next to read: runner.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from headrace.engine.model.encoder.spec import EncoderSpec
from headrace.engine.model.encoder.weights import Affine, BiasedWeight, EncoderLayer, EncoderWeights
from headrace.ops.sizes import padded_size

__all__ = ["Encoder", "Texts"]

_LONGEST = 1.25  # texts of one group differ at most by this factor in length, so that there is little padding
_SHORT = 8  # tokens, below which padding costs nothing
_STEPS = 4  # different numbers of tokens between two powers of two that a CPU multiplies
_EVEN = 8  # divisor of a head's size that attention without padding needs


@dataclass(frozen=True, slots=True)
class _Group:
    """Texts whose attention is one batched product."""

    places_BT: Tensor
    """Index among the N tokens of each cell, int64; padding repeats the text's first token."""
    mask_B11T: Tensor | None
    """Mask that is True where there is a token; None without padding."""
    tokens_M: Tensor
    """Index among the N tokens of each of the group's tokens, int64."""
    cells_M: Tensor
    """Index among the B * T cells of each of the group's tokens, int64."""


@dataclass(frozen=True, slots=True)
class Texts:
    """A batch of texts on the device, shortest first, whose N tokens lie one after the other."""

    tokens_N: Tensor
    positions_N: Tensor
    types_N: Tensor
    texts_N: Tensor
    """Index of the text that each token belongs to."""
    starts_B: Tensor
    lengths_B: Tensor
    bounds_C: Tensor
    """Index of each text's first token, and N at the end, int32 [B + 1]."""
    longest: int
    groups: tuple[_Group, ...]
    """Groups of texts of similar length; empty where attention does not pad."""

    @classmethod
    def of(cls, tokens: Sequence[Sequence[int]], seconds: Sequence[int], device: torch.device, *, pads: bool) -> Texts:
        """Put texts on `device`.

        Args:
            tokens: Token ids of each text, in ascending length.
            seconds: For each text, the position from which tokens belong to the second text of a pair; 0 for none.
            device: The encoder's device.
            pads: The encoder's `Encoder.pads`.
        """
        lengths_B = torch.tensor([len(text) for text in tokens])
        starts_B = lengths_B.cumsum(0) - lengths_B
        texts_N = torch.arange(len(tokens)).repeat_interleave(lengths_B)
        positions_N = torch.arange(len(texts_N)) - starts_B[texts_N]
        seconds_N = torch.tensor(list(seconds))[texts_N]
        types_N = ((seconds_N > 0) & (positions_N >= seconds_N)).long()
        tokens_N = torch.tensor([token for text in tokens for token in text])
        spans = _spans(lengths_B.tolist()) if pads else []
        return cls(
            tokens_N=tokens_N.to(device),
            positions_N=positions_N.to(device),
            types_N=types_N.to(device),
            texts_N=texts_N.to(device),
            starts_B=starts_B.to(device),
            lengths_B=lengths_B.to(device),
            bounds_C=torch.cat((starts_B, lengths_B.sum(0, keepdim=True))).int().to(device),
            longest=len(tokens[-1]),
            groups=tuple(_group(starts_B, lengths_B, slice(*span), device) for span in spans),
        )


def _spans(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Return slices of ascending lengths, cut where a length is too far above the first of its slice."""
    cuts = [0]
    for place, length in enumerate(lengths):
        if length > max(_LONGEST * lengths[cuts[-1]], _SHORT):
            cuts.append(place)
    return list(zip(cuts, [*cuts[1:], len(lengths)], strict=True))


def _group(starts_B: Tensor, lengths_B: Tensor, span: slice, device: torch.device) -> _Group:
    starts_B1, lengths_B1 = starts_B[span, None], lengths_B[span, None]
    longest = int(lengths_B1[-1])
    inside_BT = torch.arange(longest) < lengths_B1
    places_BT = starts_B1 + torch.arange(longest) * inside_BT
    mask_B11T = None if bool(inside_BT.all()) else inside_BT[:, None, None].to(device)
    cells_M = inside_BT.flatten().nonzero().squeeze(1)
    return _Group(places_BT.to(device), mask_B11T, places_BT[inside_BT].to(device), cells_M.to(device))


class _Dense(NamedTuple):
    """Weight [out, in] and bias of a product as torch multiplies by them."""

    weight_OI: Tensor
    bias_O: Tensor

    @classmethod
    def of(cls, product: BiasedWeight) -> _Dense:
        return cls(product.weight.dense(product.bias.dtype), product.bias)


class _Block(NamedTuple):
    qkv: _Dense
    o: _Dense
    attention_norm: Affine
    up: _Dense
    down: _Dense
    output_norm: Affine

    @classmethod
    def of(cls, layer: EncoderLayer) -> _Block:
        products = {name: _Dense.of(getattr(layer, name)) for name in ("qkv", "o", "up", "down")}
        return cls(attention_norm=layer.attention_norm, output_norm=layer.output_norm, **products)


class Encoder:
    """Embeddings, blocks and, if the model scores pairs, the head of one model."""

    def __init__(self, spec: EncoderSpec, weights: EncoderWeights) -> None:
        """Compute with `weights`."""
        self.spec = spec
        self.weights = weights
        self._blocks = tuple(map(_Block.of, weights.layers))
        self._head = None if weights.head is None else tuple(map(_Dense.of, weights.head))
        half = weights.words_VE.is_cuda and weights.words_VE.dtype in (torch.float16, torch.bfloat16)
        self.pads = not half or (spec.hidden_size // spec.num_heads) % _EVEN != 0
        """Whether attention pads texts."""
        self._varlen_attn: Any = None
        if not self.pads:  # otherwise not imported: it loads torch's compiler, the slowest of all imports
            from torch.nn.attention.varlen import varlen_attn

            self._varlen_attn = varlen_attn

    def hidden(self, texts: Texts) -> Tensor:
        """Return the hidden states after all blocks, [N, E]."""
        weights = self.weights
        x_NE = weights.words_VE[texts.tokens_N] + weights.types_TE[texts.types_N.clamp(max=self.spec.num_types - 1)]
        x_NE = self._norm(x_NE + weights.positions_PE[texts.positions_N + self.spec.first_position], weights.norm)
        x_NE = _few_sizes(x_NE)
        for block in self._blocks:
            attended_NE = _product(self._attention(_product(x_NE, block.qkv), texts), block.o)
            x_NE = self._norm(x_NE + attended_NE, block.attention_norm)
            x_NE = self._norm(x_NE + self._feed(x_NE, block), block.output_norm)
        return x_NE[: len(texts.tokens_N)]

    def scores(self, first_BE: Tensor) -> Tensor:
        """Return the head's logits, [B, 1], for the hidden states of the texts' first tokens."""
        assert self._head is not None
        dense, out = self._head
        return _product(torch.tanh(_product(_few_sizes(first_BE), dense)), out)[: len(first_BE)]

    def _feed(self, x_NE: Tensor, block: _Block) -> Tensor:
        return _product(functional.gelu(_product(x_NE, block.up), approximate=self.spec.gelu), block.down)

    def _norm(self, x_NE: Tensor, norm: Affine) -> Tensor:
        return functional.layer_norm(x_NE, (x_NE.shape[-1],), norm.weight, norm.bias, self.spec.norm_eps)

    def _attention(self, qkv_NX: Tensor, texts: Texts) -> Tensor:
        """Return softmax(q k^T / sqrt(D)) v of each text, [N, E]."""
        heads, hidden = self.spec.num_heads, self.spec.hidden_size
        if not self.pads:
            q_NHD, k_NHD, v_NHD = qkv_NX.unflatten(-1, (3, heads, -1)).unbind(1)
            bounds_C, longest = texts.bounds_C, texts.longest
            found_NHD = self._varlen_attn(q_NHD, k_NHD, v_NHD, bounds_C, bounds_C, longest, longest)
            assert isinstance(found_NHD, Tensor)
            return found_NHD.flatten(1)
        out_NE = torch.zeros(len(qkv_NX), hidden, dtype=qkv_NX.dtype, device=qkv_NX.device)
        for group in texts.groups:
            q_BHTD, k_BHTD, v_BHTD = qkv_NX[group.places_BT].unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
            found_BHTD = functional.scaled_dot_product_attention(q_BHTD, k_BHTD, v_BHTD, attn_mask=group.mask_B11T)
            out_NE[group.tokens_M] = found_BHTD.transpose(1, 2).reshape(-1, hidden)[group.cells_M]
        return out_NE


def _few_sizes(x_NE: Tensor) -> Tensor:
    """Add tokens on a CPU, whose products keep code for each number of them (see ops/sizes.py)."""
    missing = padded_size(len(x_NE), steps=_STEPS) - len(x_NE) if x_NE.is_cpu else 0
    return functional.pad(x_NE, (0, 0, 0, missing)) if missing else x_NE


def _product(x_NI: Tensor, dense: _Dense) -> Tensor:
    return functional.linear(x_NI, dense.weight_OI, dense.bias_O)
