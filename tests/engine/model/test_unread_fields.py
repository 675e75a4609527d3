"""Fields of a config.json that nothing reads are refused by name, and published configs have none."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import fallback_models
import pytest
import tiny_models
from published_configs import GIVEN, PUBLISHED, PUBLISHED_OTHERS
from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from headrace.engine import EngineConfig, ModelRejected
from headrace.engine.model.fallback.choice import fallback_for
from headrace.engine.model.fallback.config import model_class
from headrace.engine.model.fallback.model import FallbackModel
from headrace.engine.model.families.family import Family
from headrace.engine.model.families.hf import HfConfig
from headrace.engine.model.families.registry import FAMILIES, from_hf
from headrace.engine.model.families.text_parts import MULTIMODAL
from headrace.engine.model.families.unread import FieldsRead, says_nothing

ARITHMETIC: dict[str, Any] = {
    "scale_emb": 12, "scale_depth": 1.4, "residual_scale": 0.5, "attn_output_gate": True, "attention_sinks": 4,
    "position_embedding_type": "alibi", "norm_type": "layer_norm", "logit_softcap": 30.0, "swiglu_limit": 7.0,
    "qk_norm": True, "v_head_dim": 64, "embedding_scale": 8.0, "moe_layer_freq": 2, "value_residual": "yes",
    "use_sliding_window": True, "sliding_window": 128,
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_read(name: str) -> None:
    config = PUBLISHED[name]
    kept = config if "text_config" in config else {**config, "value_residual": "yes"}
    assert from_hf(config).num_layers > 1
    place = {"text_config": {**config["text_config"], "value_residual": "yes"}} if "text_config" in config else {}
    with pytest.raises(ModelRejected, match="value_residual is 'yes'; supported: null or nothing, since no code for"):
        from_hf({**kept, **place})


def test_a_config_of_nearly_every_family_has_been_written_down() -> None:
    read = {from_hf(config).architecture for config in PUBLISHED.values()}
    missing = {family.architecture for family in FAMILIES} - read
    assert missing == {
        "CwmForCausalLM",
        "Gemma4ForCausalLM",
        "Gemma4UnifiedForCausalLM",
        "GraniteMoeSharedForCausalLM",
        "Jais2ForCausalLM",
        "Ministral3ForCausalLM",
        "MinistralForCausalLM",
    }, "write a config.json of the family down in published_configs.py, or its name here if there is none"
    assert read & {each.architecture for each in MULTIMODAL}


@pytest.mark.parametrize("field", ARITHMETIC)
def test_what_llama_has_no_use_for_is_refused_by_name(field: str) -> None:
    with pytest.raises(
        ModelRejected, match=rf"config.json: {field} is .*LlamaForCausalLM reads it; take the"
    ) as caught:
        from_hf({**tiny_models.CONFIG, field: ARITHMETIC[field]})
    assert caught.value.field == field and caught.value.value == ARITHMETIC[field]


@pytest.mark.parametrize("value", [None, False, 0, 0.0, "", [], {}])
def test_what_is_left_out_is_not_refused(value: object) -> None:
    assert from_hf({**tiny_models.CONFIG, "value_residual": value}) == from_hf(tiny_models.CONFIG)


@pytest.mark.parametrize(
    "field",
    [
        "_commit_hash", "image_token_id", "eos_token_ids", "expert_dropout", "unsloth_version", "use_flash_attention_2",
        "fused_mlp", "mixed_aux_loss_weight", "fuse_rope", "summary_type", "initializer_cutoff_factor",
    ],
)  # fmt: skip
def test_fields_about_other_things_than_arithmetic_are_not_refused(field: str) -> None:
    assert from_hf({**tiny_models.CONFIG, field: 7}) == from_hf(tiny_models.CONFIG)


@pytest.mark.parametrize(
    "field", ["experts_per_token", "num_experts_per_token", "head_scale", "mask_tokens", "top_k_gate"]
)
def test_names_that_resemble_those_of_harmless_fields_are_refused(field: str) -> None:
    assert not says_nothing(field, 2)


@pytest.mark.parametrize(
    ("name", "changes", "field"),
    [
        ("starcoder2-7b", {"norm_type": "rms_norm"}, "norm_type"),
        ("starcoder2-7b", {"mlp_type": "gated"}, "mlp_type"),
        ("Phi-4-mini-instruct", {"full_attn_mod": 2}, "full_attn_mod"),
        ("ERNIE-4.5-0.3B-PT", {"compression_ratio": 2.0}, "compression_ratio"),
        (
            "c4ai-command-r7b-12-2024",
            {"order_of_interleaved_layers": "global_attn_first"},
            "order_of_interleaved_layers",
        ),
        ("falcon-7b", {"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post_layernorm"),
        ("opt-1.3b", {"learned_embeddings": "sinusoidal"}, "learned_embeddings"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ("AFM-4.5B", {"hidden_act": "silu"}, "hidden_act"),
        ("Solar-Open-100B", {"first_k_dense_replace": 1}, "first_k_dense_replace"),
        ("Solar-Open-100B", {"use_qk_norm": True}, "use_qk_norm"),
    ],
)
def test_fields_of_published_configs_have_the_value_that_is_computed(
    name: str, changes: dict[str, Any], field: str
) -> None:
    with pytest.raises(ModelRejected) as caught:
        from_hf({**PUBLISHED[name], **changes})
    assert caught.value.field == field


def test_a_rope_has_no_other_fields_than_its_family_reads() -> None:
    rope = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    for field in ("alpha", "llama_4_scaling_beta", "long_mscale", "ntk"):
        with pytest.raises(ModelRejected, match=f"config.json: rope_parameters: {field} is 0.5") as caught:
            from_hf({**tiny_models.CONFIG, "rope_parameters": {**rope, field: 0.5}})
        assert caught.value.field == field
    plain = from_hf({**tiny_models.CONFIG, "rope_parameters": rope})
    assert from_hf({**tiny_models.CONFIG, "rope_parameters": {**rope, "finetuned": True, "beta_fast": 32}}) == plain


def read_by(family: Family) -> frozenset[str]:
    """The names of fields that a family's reader looks up, in a config that transformers writes."""
    kind = CONFIG_MAPPING[family.model_type]
    config = json.loads(kind(**GIVEN.get(family.model_type, {})).to_json_string(use_diff=False))
    read = HfConfig(FieldsRead(config), "config.json", family.architecture, has_head=True)
    read.check(family.heeds)
    family.from_config(read)
    return frozenset(read.data.looked_up)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: str(family.model_type))
def test_each_field_of_transformers_class_is_read_or_known_to_change_nothing(family: Family) -> None:
    """A field that a later transformers has shows here, and has to be read or listed."""
    if family.model_type not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {family.model_type}")
    of_all = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    kind = CONFIG_MAPPING[family.model_type]
    names = {kind.attribute_map.get(field.name, field.name) for field in dataclasses.fields(kind)} - of_all
    unknown = names - read_by(family) - family.unread
    assert not {name for name in unknown if not says_nothing(name, "planted")}


def test_fields_that_all_configs_of_transformers_have_are_known() -> None:
    written = json.loads(PreTrainedConfig().to_json_string(use_diff=False))
    assert from_hf({**written, **tiny_models.CONFIG}) == from_hf(tiny_models.CONFIG)


def test_a_drafting_reader_may_change_fields_and_still_remember() -> None:
    fields = FieldsRead({"n_embd": 8, "other": 1})
    changed = fields.changed({"hidden_size": 8})
    assert changed["hidden_size"] == 8 and "n_embd" in changed and changed.get("missing") is None
    assert fields.looked_up == {"hidden_size", "n_embd", "missing"} and len(changed) == 3


def test_the_context_of_a_model_with_chunks_ends_where_they_begin() -> None:
    config = PUBLISHED["Qwen2.5-7B-Instruct-1M"]
    assert from_hf(config).max_context == 262144 - 8192
    for chunks in ({"chunk_size": 4, "local_size": 4}, {"chunk_size": -1, "local_size": 1}, [1], {"local_size": 8}):
        with pytest.raises(ModelRejected, match="chunk"):
            from_hf({**config, "dual_chunk_attention_config": chunks})


@pytest.mark.parametrize("name", PUBLISHED_OTHERS)
@pytest.mark.filterwarnings("ignore")
def test_published_configs_of_others_are_read(name: str) -> None:
    config = PUBLISHED_OTHERS[name]
    assert [model_class(config).kind.__name__] == config["architectures"]
    with pytest.raises(ModelRejected, match="residual_gate"):
        model_class({**config, "residual_gate": 2})


@pytest.mark.parametrize("name", fallback_models.FAMILIES)
@pytest.mark.filterwarnings("ignore")
def test_the_fallback_refuses_fields_that_transformers_class_does_not_have(name: str) -> None:
    config = fallback_models.described(name)
    assert FallbackModel.read({**config, "unsloth_version": "1", "qk_norm_of_mine": False}, "random") is not None
    with pytest.raises(
        ModelRejected, match=r"residual_gate is 12; supported: null or .* transformers' \w+Config"
    ) as caught:
        FallbackModel.read({**config, "residual_gate": 12}, "random")
    assert caught.value.field == "residual_gate"


@pytest.mark.filterwarnings("ignore")
def test_the_fallback_takes_older_names_of_fields() -> None:
    older = fallback_models.described("olmo", rope_parameters=..., rope_theta=500.0, rope_scaling=None)
    model = FallbackModel.read(older, "random")
    assert model.spec.max_context == 128


@pytest.mark.filterwarnings("ignore")
def test_a_field_that_is_unknown_is_named_whoever_computes_the_model() -> None:
    config = fallback_models.described("apertus", scale_emb=12)
    with pytest.raises(ModelRejected, match="scale_emb is 12") as caught:
        fallback_for(EngineConfig(model="m"), config, "random")
    assert caught.value.field == "scale_emb"
