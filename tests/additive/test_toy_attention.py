"""A variant of attention, softcapped scores, and a family that has it, without a change to the package.

Scores are cap * tanh(q k^T / sqrt(D) / cap), as in Gemma 2 (Gemma Team, 2024).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from additive.toy_models import EPSILON, Reference, check, plain_feed, plain_mixer, toy_spec
from torch import Tensor

from headrace.engine.errors import ModelRejected
from headrace.engine.model.cpu.operations import cpu_ops
from headrace.engine.model.cuda.listed import list_kernels
from headrace.engine.model.families.family import Family
from headrace.engine.model.families.hf import HfConfig
from headrace.engine.model.families.registry import FAMILIES, from_hf
from headrace.engine.model.network.layers import MIXERS
from headrace.engine.model.network.mixers.attention import SoftmaxAttention
from headrace.engine.model.spec import Attention, DecoderSpec, DenseFeed, LayerSpec, Norms
from headrace.ops.cpu.scores import Weigh
from headrace.ops.cuda.arch import Arch

CAP = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Softcapped(Attention):
    """Attention whose scores lie between -cap and cap."""

    scores: ClassVar[str] = "toy softcap"
    cap: float


def softcapped(attention: Attention) -> Weigh:
    assert isinstance(attention, Softcapped)
    cap = attention.cap

    def weigh(scores: Tensor, mask: Tensor, scale: float) -> Tensor:
        return torch.softmax(cap * torch.tanh(scores * (scale / cap)) + mask, -1)

    return weigh


VARIANTS = {"toy softcap": softcapped}


def capped_mixer(reference: Reference, x_NE: Tensor, layer: int) -> Tensor:
    normed_NE = reference.layer_norm(x_NE, layer, "input_layernorm")
    return x_NE + reference.attention(normed_NE, layer, lambda scores: CAP * torch.tanh(scores / CAP))


def spec_of(*windows: int | None) -> DecoderSpec:
    first = Softcapped(heads=4, kv_heads=2, head_dim=8, cap=CAP)
    layer = LayerSpec(first, DenseFeed(40), Norms(EPSILON))
    return toy_spec([replace(layer, mixer=replace(first, window=window)) for window in windows])


def test_softcapped_scores(tmp_path: Path) -> None:
    parts, unlike = (capped_mixer, plain_feed), (plain_mixer, plain_feed)
    mixers = {**MIXERS, Softcapped: SoftmaxAttention}
    check(tmp_path, spec_of(None, None), parts, unlike, mixers=mixers, variants=VARIANTS)


def test_a_variant_that_nothing_computes_is_refused_by_name() -> None:
    with pytest.raises(ModelRejected, match="the scores of a layer's attention is 'toy softcap'") as caught:
        cpu_ops(spec_of(None), page_size=4, max_positions=8, dtype=torch.float32)
    assert caught.value.limit == "softmax, sink, softcap"
    with pytest.raises(ModelRejected, match="the scores of a layer's attention is 'toy softcap'"):
        list_kernels(spec_of(None), Arch.named("sm_90"))


def from_config(config: HfConfig) -> DecoderSpec:
    plain = config.attention()
    cap = config.real("attn_logit_softcapping", 1e-3, 1e3)
    attention = Softcapped(heads=plain.heads, kv_heads=plain.kv_heads, head_dim=plain.head_dim, cap=cap)
    layers = [LayerSpec(attention, config.dense(), config.norms())] * config.num_layers
    return config.decoder(layers, [config.rope(attention)])


TOY = Family("ToyForCausalLM", "toy", from_config, heeds=frozenset(("attn_logit_softcapping",)))
CONFIG = {
    "architectures": ["ToyForCausalLM"],
    "model_type": "toy",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 48,
    "max_position_embeddings": 64,
    "attn_logit_softcapping": CAP,
    "rms_norm_eps": EPSILON,
}


def test_a_family_of_ones_own() -> None:
    spec = from_hf(CONFIG, families=(*FAMILIES, TOY))
    assert spec.layers == spec_of(None, None).layers
    with pytest.raises(ModelRejected, match="architectures is"):
        from_hf(CONFIG)
    with pytest.raises(ModelRejected, match="final_logit_softcapping is 30"):
        from_hf({**CONFIG, "final_logit_softcapping": 30}, families=(*FAMILIES, TOY))
    with pytest.raises(ModelRejected, match="attn_logit_softcapping is 0"):
        from_hf({**CONFIG, "attn_logit_softcapping": 0}, families=(*FAMILIES, TOY))
