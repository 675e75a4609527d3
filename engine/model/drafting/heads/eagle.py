"""Reads EAGLE heads: what a config.json and the names of tensors say of one; never reads a tensor.

Checkpoints of EAGLE and EAGLE-2 (Li et al., 2024) hold a layer without its first norm, `layers.0`, and `fc`, which
joins token and state. Those of EAGLE-3 (Li et al., 2025) hold `midlayer` or `layers.0` with a `hidden_norm`, an `fc`
that joins three states of the target, and an output head for the most frequent tokens. Their configs are those of
Llama's classes in transformers with a few fields more.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Final, Literal

from headrace.adapters.untrusted import Fields
from headrace.engine.model.drafting.heads.spec import RecurrentSpec
from headrace.engine.model.families.hf import HF_NAMES, HfConfig
from headrace.engine.model.families.unread import FieldsRead
from headrace.engine.model.roles import Names
from headrace.engine.model.spec import LIMITS, DecoderSpec, LayerSpec

__all__ = ["MAPS", "read_eagle", "read_eagle3"]

MAPS: Final = ("d2t", "t2d")
"""Names of the maps between the vocabularies of head and target, which are read apart: drafting/heads/vocabulary.py."""
_TAPS: Final = "eagle_aux_hidden_state_layer_ids"
_FEWEST_LAYERS: Final = 7
_READ: Final = frozenset(("attention_bias", "mlp_bias"))


def read_eagle(
    config: Mapping[str, object], shapes: Mapping[str, tuple[int, ...]], target: DecoderSpec, origin: str
) -> RecurrentSpec:
    """Return the spec of a head of EAGLE or EAGLE-2.

    Args:
        config: The config.json of the head.
        shapes: Shapes of its tensors, by name.
        target: The model that the head is to draft for.
        origin: Base name of the head's folder, for messages.

    Raises:
        ModelRejected: The head was made for a target of another shape, or a field asks for what is not computed.
    """
    fields = _config(config, origin)
    _expect(fields, "hidden_size", target.hidden_size, target)
    block = _block(fields, shapes, target, _names(_layer_prefix(shapes)))
    return RecurrentSpec(
        method="eagle",
        origin=origin,
        block=block,
        target_size=target.hidden_size,
        taps=(),
        draft_vocab_size=target.vocab_size,
        fuse_bias="fc.bias" in shapes,
        has_embedding="embed_tokens.weight" in shapes,
        has_head="lm_head.weight" in shapes,
    )


def read_eagle3(
    config: Mapping[str, object],
    shapes: Mapping[str, tuple[int, ...]],
    target: DecoderSpec,
    origin: str,
    numbering: Literal["inputs", "outputs"] = "inputs",
) -> RecurrentSpec:
    """Return the spec of a head of EAGLE-3; arguments and errors are those of `read_eagle`.

    Args:
        config: The config.json of the head.
        shapes: Shapes of its tensors, by name.
        target: The model that the head is to draft for.
        origin: Base name of the head's folder, for messages.
        numbering: Whether a number in the config stands for the input of a layer of the target or for its output.
    """
    fields = _config(config, origin)
    of_target = fields.size("target_hidden_size", LIMITS["hidden_size"], fields.hidden_size)
    if of_target != target.hidden_size:
        name = "target_hidden_size" if config.get("target_hidden_size") is not None else "hidden_size"
        _expect(fields, name, target.hidden_size, target)
    has_embedding = "embed_tokens.weight" in shapes
    if not has_embedding:  # then those of the target have to fit
        _expect(fields, "hidden_size", target.hidden_size, target)
    drafts = fields.size("draft_vocab_size", target.vocab_size, target.vocab_size)
    prefix = _layer_prefix(shapes)
    roles = {
        "token_norm": f"{prefix}input_layernorm",
        "state_norm": f"{prefix}hidden_norm",
        "fused_norm": "input_norm",
        **{f"tap_norm_{number}": f"fc_norm.{number}" for number in range(target.num_layers + 1)},
    }
    return RecurrentSpec(
        method="eagle3",
        origin=origin,
        block=_block(fields, shapes, target, _names(prefix, roles)),
        target_size=of_target,
        taps=_taps(fields, target, numbering),
        draft_vocab_size=drafts,
        fuse_bias="fc.bias" in shapes,
        has_embedding=has_embedding,
        has_head="lm_head.weight" in shapes or drafts != target.vocab_size,
        norm_before_residual=fields.flag("norm_before_residual", False),
        norms_fused=fields.flag("norm_before_fc", False),
        norms_each=fields.flag("fc_norm", False),
        feeds_back_normed=fields.flag("norm_output", False),
    )


def _config(config: Mapping[str, object], origin: str) -> HfConfig:
    """Return the config, whose fields have the meaning that Llama's have."""
    inner = config.get("eagle_config")
    given = {**inner, **config} if isinstance(inner, Mapping) else config
    read = HfConfig(FieldsRead(given), f"{origin}/config.json", "LlamaForCausalLM", has_head=True)
    read.check(_READ)
    return read


def _expect(fields: Fields, field: str, value: int, target: DecoderSpec) -> None:
    """Refuse a size that is not the one of the target."""
    if fields.data.get(field) != value:
        fields.refuse(field, f"{value}, as in the model that it is to draft for ({target.architecture})")


def _block(config: HfConfig, shapes: Mapping[str, tuple[int, ...]], target: DecoderSpec, names: Names) -> DecoderSpec:
    """Return the layers of a head. Their biases are decided by which tensors there are."""
    _expect(config, "vocab_size", target.vocab_size, target)
    attention, feed, norms = config.attention(), config.dense(), config.norms()
    prefix = names.layer_prefix.format(0)
    attention = replace(
        attention,
        qkv_bias=f"{prefix}self_attn.q_proj.bias" in shapes,
        o_bias=f"{prefix}self_attn.o_proj.bias" in shapes,
        qk_norm=f"{prefix}self_attn.q_norm.weight" in shapes,
    )
    layer = LayerSpec(attention, replace(feed, bias=f"{prefix}mlp.down_proj.bias" in shapes), norms)
    if config.num_layers != 1:
        config.refuse("num_hidden_layers", "1: a head of one layer")
    return config.decoder([layer], [config.rope(attention)], names, is_tied=False)


def _layer_prefix(shapes: Collection[str]) -> str:
    return "midlayer." if any(name.startswith("midlayer.") for name in shapes) else "layers.0."


def _names(layer_prefix: str, roles: Mapping[str, str] | None = None) -> Names:
    """Return the names of a head: those of Llama's classes in transformers, without the prefix of a whole model."""
    usual = {role: name.removeprefix(HF_NAMES.prefix) for role, name in HF_NAMES.roles.items()}
    harmless = rf"{'|'.join(MAPS)}|verifier_(norm|lm_head)\.weight|.*rotary_emb\.inv_freq"
    return replace(
        HF_NAMES,
        layer_prefix=layer_prefix,
        roles={**usual, "fuse": "fc", **(roles or {})},
        harmless=re.compile(harmless),
        prefix="",
    )


def _taps(fields: Fields, target: DecoderSpec, numbering: Literal["inputs", "outputs"]) -> tuple[int, ...]:
    """Return the layers of the target whose inputs the head reads: by default early, in the middle and late."""
    count = target.num_layers
    given = fields.data.get(_TAPS)
    if given is None:
        if count < _FEWEST_LAYERS:  # the usual ones would not rise
            fields.refuse(_TAPS, f"three numbers of layers, since the model has only {count}")
        return 2, count // 2, count - 3
    shift = 1 if numbering == "outputs" else 0
    if (
        not isinstance(given, list)
        or not 1 <= len(given) <= count + 1
        or any(isinstance(each, bool) or not isinstance(each, int) or not 0 <= each + shift <= count for each in given)
        or sorted(set(given)) != given
    ):
        most = count - shift
        fields.refuse(_TAPS, f"a list of rising numbers of layers, from {-shift} to {most} ({target.architecture})")
    return tuple(each + shift for each in given)
