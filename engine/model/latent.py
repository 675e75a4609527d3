"""`LatentAttention`: the spec of a mixer that keeps one latent vector of each token; reads no file, computes nothing.

Multi-head latent attention (DeepSeek-AI, 2024, "DeepSeek-V2", section 2.1). Next to read: network/mixers/latent.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from headrace.adapters.untrusted import refuse
from headrace.engine.model.roles import Fused, bias, matrix, norm
from headrace.engine.model.spec import Attention, DecoderSpec, MixerSpec, Paged

__all__ = ["LatentAttention", "has_latents", "uniform_latents"]


@dataclass(frozen=True, slots=True)
class LatentAttention(MixerSpec):
    """Softmax attention whose keys and values are products of one latent vector that a token has for all heads.

    Each key has one more part, which is rotated, and which all heads share. Each query has two parts, as well.
    """

    heads: int
    latent_dim: int
    """Elements of a token's latent vector: `kv_lora_rank`."""
    plain_dim: int
    """Elements of a head's query and key that are not rotated: `qk_nope_head_dim`."""
    rotated_dim: int
    """Elements of a head's query, and of the key of all heads, that are rotated: `qk_rope_head_dim`."""
    value_dim: int
    """Elements of a head's value: `v_head_dim`."""
    scale: float
    """Factor of the scores."""
    query_latent_dim: int | None = None
    """Elements of the latent vector that queries are a product of (`q_lora_rank`); None for queries without one."""
    interleaved: bool = True
    """Whether checkpoints hold pairs of rotated elements side by side, not half of the rotated part apart."""
    biased: bool = False
    """Whether the products that make latent vectors, and the last one, have biases."""
    latent_epsilon: float = 1e-6
    """Epsilon of the norms of latent vectors."""
    rope: int = 0
    """Index of the rotary embedding in `DecoderSpec.ropes`."""

    @property
    def rotated(self) -> Attention:
        """The rotated parts of queries and of the shared key, as if they were heads of their own."""
        return Attention(self.heads, 1, self.rotated_dim, rope=self.rope)

    @property
    def cached_dim(self) -> int:
        """Elements of what a token adds to the cache: its latent vector and the rotated part of its key."""
        return self.latent_dim + self.rotated_dim

    @property
    def state(self) -> Paged:
        """Return what each token adds to the pages: no key or value of a head, but what all of them are made of."""
        return Paged(self.cached_dim)

    def parameters(self, hidden_size: int) -> dict[str, Fused]:
        """Return the products, by the letters of their tensors, and the norms of latent vectors."""
        queries = self.heads * (self.plain_dim + self.rotated_dim)
        if self.query_latent_dim is None:
            found = {"q": matrix(hidden_size, q=queries)}
        else:
            rank = self.query_latent_dim
            found = {
                "q_a": matrix(hidden_size, q_a=rank),
                "q_a_norm": norm(q_a_norm=rank),
                "q_b": matrix(rank, q_b=queries),
            }
            if self.biased:
                found["q_a_bias"] = bias(q_a=rank)
        found["kv_a"] = matrix(hidden_size, kv_a=self.cached_dim)
        found["kv_a_norm"] = norm(kv_a_norm=self.latent_dim)
        up = matrix(self.latent_dim, kv_b=self.heads * (self.plain_dim + self.value_dim))
        found["kv_b"] = replace(up, is_split=True)
        found["o"] = matrix(self.heads * self.value_dim, o=hidden_size)
        if self.biased:
            found["kv_a_bias"], found["o_bias"] = bias(kv_a=self.cached_dim), bias(o=hidden_size)
        return found


def has_latents(spec: DecoderSpec) -> bool:
    """Return whether a layer of a model has latent attention."""
    return any(isinstance(kind, LatentAttention) for kind in spec.mixer_kinds)


def uniform_latents(spec: DecoderSpec) -> LatentAttention:
    """Return the latent attention that all layers have alike.

    Raises:
        ModelRejected: A layer has another mixer: one paged cache cannot hold it.
    """
    first, *others = spec.mixer_kinds
    if others or not isinstance(first, LatentAttention):
        refuse(spec.architecture, "the mixer of a layer", others or first, "the same latent attention in all layers")
    return first
