"""`RecurrentHead`: drafts one token after another, each from a token and the state before it.

A token t_{p+1}, embedded as e, and the target's hidden state of the token before it make the head's state g of position
p, and its scores are the logits of the draft for position p + 2. For the next draft, g takes the place of the target's
state.

    EAGLE     g = layer(W [e; h] + b),  whose attention has no norm before it; scores head(g)
    MTP       g = norm(layer(W [norm(e); norm(h)])),  scores head(g)
    EAGLE-3   g = f + feed(f),  f = h' + attention([norm(e); norm(h')]),  h' = W [h_1; h_2; h_3],  scores head(norm(g))

h is the state behind the target's final norm, h_i are inputs of three of its layers, and h' of a position that the
target has not computed is the head's own state. Li et al. (2024), "EAGLE", and "EAGLE-2" for the same head; Li et al.
(2025), "EAGLE-3", section 3.1; DeepSeek-AI (2024), "DeepSeek-V3", equations 21 to 23. Keys and values of position p
lie in the place of position p of the head's own pages.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Generic, Protocol

import torch
from torch import Tensor

from headrace.engine.model.checkpoint.weights import LayerWeights
from headrace.engine.model.drafting.heads.loading import RecurrentWeights
from headrace.engine.model.drafting.heads.spec import RecurrentSpec
from headrace.engine.model.network.decoder import HiddenStates
from headrace.engine.model.network.layers import FEEDS, MIXERS, Feed, Mixer
from headrace.engine.model.network.operations import DeviceOps, Kv, Packed, Step
from headrace.engine.model.network.serial import SerialLayer
from headrace.engine.model.spec import MixerSpec
from headrace.ops.stream import Stream

__all__ = ["RecurrentHead", "Target"]


class Target(Protocol):
    """Protocol of what a head borrows from the model that it drafts for."""

    def embedded(self, tokens_N: Tensor) -> Tensor:
        """Return the rows of the table of embeddings, [N, E], of token ids, int32 or int64."""
        ...

    def logits(self, hidden_SE: Tensor) -> Tensor:
        """Return float32 logits [S, V] of hidden states behind the final norm."""
        ...


class RecurrentHead(Generic[Packed, Step, Kv]):
    """A head of EAGLE, EAGLE-2 or EAGLE-3, or a module for multi-token prediction."""

    def __init__(
        self,
        spec: RecurrentSpec,
        weights: RecurrentWeights,
        ops: Mapping[MixerSpec, DeviceOps[Packed, Step, Kv]],
        target: Target,
        embedding_dtype: torch.dtype = torch.float32,
    ) -> None:
        """Pack `weights` in the form that the device wants; the caller may drop them afterwards.

        Args:
            spec: The shape of the head.
            weights: Its parameters.
            ops: The device's operations, by each of the different mixers of `spec.block`.
            target: The model that the head drafts for.
            embedding_dtype: Dtype in which the device takes embeddings that the head has of its own.
        """
        self.spec = spec
        self._mixer = spec.block.layers[0].mixer
        self._ops = ops[self._mixer]
        self._vectors, self._target = weights.vectors, target
        self._fuse = self._ops.pack(weights.fuse, weights.vectors.get("fuse_bias"))
        self._first, self._feed = self._packed(weights.layers[0])
        self._layer = SerialLayer(self._first, self._feed, self._ops, 0)
        self._embedding, self._embedding_dtype = weights.embedding, embedding_dtype
        self._head = None if weights.head is None else self._ops.pack_head(weights.head)
        self.ids_D: Final = weights.ids_D
        """Target's id of each token that the head can guess, int64; None if they are the target's own ids."""

    def _packed(self, weights: LayerWeights) -> tuple[Mixer[Packed, Step, Kv], Feed[Packed, Step, Kv]]:
        layer = self.spec.block.layers[0]
        mixer = MIXERS[type(layer.mixer)](layer, weights.mixer, self._ops, 0)
        return mixer, FEEDS[type(layer.feed)](layer, weights.feed, self._ops, 0)

    def fused(self, hidden: HiddenStates) -> Tensor:
        """Return what takes the place of a state where the target has computed one, [N, E].

        Args:
            hidden: Hidden states of the target, with the inputs of the layers that `RecurrentSpec.taps` names.
        """
        if not self.spec.taps:
            return hidden.final_NE
        inputs = list(hidden.inputs)
        if self.spec.norms_each:
            weights = (self._vectors[f"tap_norm_{number}"] for number in range(len(inputs)))
            inputs = [self._normed(x_NE, norm_E) for x_NE, norm_E in zip(inputs, weights, strict=True)]
        x_NX = torch.cat(inputs, 1)
        if self.spec.norms_fused:
            x_NX = self._normed(x_NX, self._vectors["fused_norm"])
        return self._ops.linear(x_NX, self._fuse, 0, "fuse")

    def advance(
        self,
        tokens_N: Tensor,
        states_NE: Tensor,
        steps: Mapping[MixerSpec, Step],
        kv: Kv,
        last_S: Tensor | None = None,
    ) -> Tensor:
        """Compute the states of some positions, and write their keys and values into `kv`.

        Args:
            tokens_N: Token behind each of the positions, int32 or int64.
            states_NE: What `fused` returns of a position, or the state of the position before it; left as it is.
            steps: By mixer, the positions' places in the head's pages, as the device's operations take them.
            kv: The head's pages.
            last_S: Indices of the positions whose states are wanted, int64; None for all. The others pass no feed.

        Returns:
            States [S, E], or [N, E] without `last_S`, for `logits` and for the next position.
        """
        step, ops = steps[self._mixer], self._ops
        e_NE = ops.embed(self._embedded(tokens_N), tokens_N)
        if self.spec.method == "eagle3":
            stream = self._beside(e_NE, states_NE, step, kv, last_S)
        else:
            if self.spec.method == "mtp":
                e_NE = self._normed(e_NE, self._vectors["token_norm"])
                states_NE = self._normed(states_NE, self._vectors["state_norm"])
            x_N2E = torch.cat((e_NE.to(states_NE.dtype), states_NE), 1)
            x_NE = ops.linear(x_N2E, self._fuse, 0, "fuse")
            if last_S is None:
                stream = self._layer(ops, Stream(x_NE), None, step, kv)
            else:
                stream = self._first(ops, Stream(x_NE), None, step, kv).rows(last_S)
                stream = self._feed(ops, stream, None)
        if self.spec.feeds_back_normed:
            return ops.normed(stream, self._vectors["final_norm"])[0]
        return ops.summed(stream)[0]

    def logits(self, states_SE: Tensor) -> Tensor:
        """Return the logits of the tokens `ids_D` behind each of some states, float32 [S, D]."""
        if self.spec.method == "eagle3" and not self.spec.feeds_back_normed:
            states_SE = self._normed(states_SE, self._vectors["final_norm"])
        return self._target.logits(states_SE) if self._head is None else self._ops.logits(states_SE, self._head)

    def _beside(self, e_NE: Tensor, states_NE: Tensor, step: Step, kv: Kv, last_S: Tensor | None) -> Stream:
        """Return the output of a layer whose attention reads token and state side by side, as `advance` says."""
        ops = self._ops
        normed_NE = self._normed(states_NE, self._vectors["state_norm"])
        token_NE = self._normed(e_NE, self._vectors["token_norm"])
        attended_NE = self._first.result(ops, torch.cat((token_NE, normed_NE), 1), step, kv)
        residual_NE = normed_NE if self.spec.norm_before_residual else states_NE
        if last_S is not None:
            attended_NE, residual_NE = attended_NE[last_S], residual_NE[last_S]
        elif residual_NE is states_NE:
            residual_NE = states_NE.clone()  # what follows adds to it in place
        total_NE = ops.summed(Stream(residual_NE))[1]
        return self._feed(ops, Stream(attended_NE, total_NE), None)

    def _normed(self, x_NE: Tensor, norm_E: Tensor) -> Tensor:
        return self._ops.normed(Stream(x_NE), norm_E)[0]

    def _embedded(self, tokens_N: Tensor) -> Tensor:
        if self._embedding is None:
            return self._target.embedded(tokens_N)
        return self._embedding.rows(tokens_N, self._embedding_dtype)
