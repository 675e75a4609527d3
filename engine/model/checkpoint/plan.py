"""Lists the parameters that a spec calls for, the tensors each is fused from, and their names; never holds a tensor."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from headrace.engine.model.spec import DecoderSpec

__all__ = ["BARE_NAMES", "GGUF_NAMES", "HF_NAMES", "Fused", "Names", "Part", "all_parts", "layer_plan", "top_plan"]


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of a checkpoint: its role, and the rows that it has."""

    role: str
    rows: int
    layer: int | None = None
    rotary: bool = False
    """Whether the rows are the elements of heads that are rotated: queries and keys."""


@dataclass(frozen=True, slots=True)
class Fused:
    """A parameter: its parts, one above the other, and their inner size (None for vectors)."""

    parts: tuple[Part, ...]
    columns: int | None
    is_norm: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The parameter's shape, [out, in] or [out]."""
        rows = sum(part.rows for part in self.parts)
        return (rows,) if self.columns is None else (rows, self.columns)


def layer_plan(spec: DecoderSpec, layer: int) -> dict[str, Fused]:
    """Return the parameters that one layer has, by their field in `LayerWeights`."""
    hidden, ffn = spec.hidden_size, spec.ffn_size
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim

    def parts(kind: str, **rows: int) -> tuple[Part, ...]:
        return tuple(Part(f"{role}.{kind}", count, layer, role in ("q", "k")) for role, count in rows.items())

    def norm(role: str, size: int) -> Fused:
        return Fused((Part(f"{role}.weight", size, layer),), None, is_norm=True)

    plan = {
        "input_norm_E": norm("input_norm", hidden),
        "qkv": Fused(parts("weight", q=queries, k=keys, v=keys), hidden),
        "o": Fused(parts("weight", o=hidden), queries),
        "post_norm_E": norm("post_norm", hidden),
        "gate_up": Fused(parts("weight", gate=ffn, up=ffn), hidden),
        "down": Fused(parts("weight", down=hidden), ffn),
    }
    if spec.qkv_bias:
        plan["qkv_bias"] = Fused(parts("bias", q=queries, k=keys, v=keys), None)
    if spec.o_bias:
        plan["o_bias"] = Fused(parts("bias", o=hidden), None)
    if spec.mlp_bias:
        plan["gate_up_bias"] = Fused(parts("bias", gate=ffn, up=ffn), None)
        plan["down_bias"] = Fused(parts("bias", down=hidden), None)
    if spec.qk_norm:
        plan["q_norm_D"] = norm("q_norm", spec.head_dim)
        plan["k_norm_D"] = norm("k_norm", spec.head_dim)
    return plan


def top_plan(spec: DecoderSpec) -> dict[str, Fused]:
    """Return the parameters outside the layers, by their field in `DecoderWeights`."""
    plan = {
        "embedding_VE": Fused((Part("embedding.weight", spec.vocab_size),), spec.hidden_size),
        "final_norm_E": Fused((Part("final_norm.weight", spec.hidden_size),), None, is_norm=True),
    }
    if not spec.tied_head:
        plan["head"] = Fused((Part("head.weight", spec.vocab_size),), spec.hidden_size)
    return plan


def all_parts(spec: DecoderSpec) -> Iterator[tuple[Part, tuple[int, ...]]]:
    """Yield every tensor that a checkpoint of this spec holds, with its shape."""
    plans = [top_plan(spec), *(layer_plan(spec, layer) for layer in range(spec.num_layers))]
    for plan in plans:
        for fused in plan.values():
            for part in fused.parts:
                yield part, (part.rows, *fused.shape[1:])


@dataclass(frozen=True, slots=True)
class Names:
    """Names that one file format gives to the roles."""

    layer_prefix: str
    roles: Mapping[str, str]
    harmless: re.Pattern[str]
    """Names that may be left over: they hold only what is computed from the spec."""

    def of(self, part: Part) -> str:
        """Return the format's name for a part."""
        role, kind = part.role.split(".")
        prefix = "" if part.layer is None else self.layer_prefix.format(part.layer)
        return f"{prefix}{self.roles[role]}.{kind}"


HF_NAMES = Names(
    "model.layers.{}.",
    {
        "embedding": "model.embed_tokens",
        "final_norm": "model.norm",
        "head": "lm_head",
        "input_norm": "input_layernorm",
        "q": "self_attn.q_proj",
        "k": "self_attn.k_proj",
        "v": "self_attn.v_proj",
        "o": "self_attn.o_proj",
        "q_norm": "self_attn.q_norm",
        "k_norm": "self_attn.k_norm",
        "post_norm": "post_attention_layernorm",
        "gate": "mlp.gate_proj",
        "up": "mlp.up_proj",
        "down": "mlp.down_proj",
    },
    re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"),
)
BARE_NAMES = Names(  # for a checkpoint saved without the class that holds the head
    HF_NAMES.layer_prefix.removeprefix("model."),
    {role: name.removeprefix("model.") for role, name in HF_NAMES.roles.items()},
    re.compile(r"(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"),
)
GGUF_NAMES = Names(
    "blk.{}.",
    {
        "embedding": "token_embd",
        "final_norm": "output_norm",
        "head": "output",
        "input_norm": "attn_norm",
        "q": "attn_q",
        "k": "attn_k",
        "v": "attn_v",
        "o": "attn_output",
        "q_norm": "attn_q_norm",
        "k_norm": "attn_k_norm",
        "post_norm": "ffn_norm",
        "gate": "ffn_gate",
        "up": "ffn_up",
        "down": "ffn_down",
    },
    # GgufFile.spec() has put the tensor into the spec.
    re.compile(r"rope_freqs\.weight"),
)
