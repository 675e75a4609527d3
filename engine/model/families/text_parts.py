"""The multimodal models whose text part is read, and where their config.json describes it; knows no family's fields.

A model that sees or hears is one of the families with other parts beside it: encoders of images or sound, and what
projects their results to embeddings. Given text alone it computes what its text part computes. `MULTIMODAL` says of
each architecture what its other parts are called; their tensors are left unread. Next: registry.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from headrace.adapters.untrusted import refuse

__all__ = ["HOMES", "MULTIMODAL", "Multimodal", "TextPart", "Container", "text_part"]

HOMES: Final = (
    ("model.language_model.", ""),
    ("model.language_model.model.", ""),
    ("language_model.model.", "language_model."),
    ("language_model.model.model.", "language_model."),
    ("language_model.model.model.", ""),
    ("language_model.", ""),
    ("model.text_model.", ""),
    ("text_model.", ""),
    ("model.", ""),
    ("thinker.model.language_model.", "thinker."),
    ("thinker.model.", "thinker."),
)
"""Beginnings that the names of a text part's tensors may have, in files of transformers 5 and older ones.

Each stands in place of `Names.prefix`, and beside it what stands before the name of the head. Of two that fit, that
counts whose head is there.
"""
_CONFIG: Final = "text_config"
_ROPES: Final = ("rope_parameters", "rope_scaling")
_PLAIN: Final = {"mrope": "default", "xdrope": "dynamic"}
"""What ropes with sections are in text, by their type."""
_OF_PARTS: Final = re.compile("(image|video|vision|visual|audio|perceiver|pixel|resampler)_.*|use_resampler")
"""Fields about other parts, which may stand among those of the text part."""


@dataclass(frozen=True, slots=True)
class Multimodal:
    """An architecture with a text part."""

    architecture: str
    """Name in a config's `architectures`."""
    model_type: str
    """Name in a config's `model_type`."""
    text_type: str
    """Kind of the text part where its config names none."""
    others: tuple[str, ...]
    """Names of the other parts and tensors, which may stand behind `model.`."""
    has_own_text: bool = False
    """Whether all text parts are of this kind, whatever their config says. Older files have their fields beside
    `vision_config`, and not in an object of their own."""
    within: str | None = None
    """Field with the config of what the text part is a part of, in models that speak, too; None for the whole file.
    For `x_config` in a `model_type` m, that is of the `model_type` m_x, which is one of these architectures itself."""
    former_names: tuple[str, ...] = ()
    """Names that `architectures` of published configs have in place of `architecture`."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names in `architectures` that the model may have."""
        return (self.architecture, *self.former_names)

    def is_named(self, architectures: object) -> bool:
        """Return whether the `architectures` of a config are this one alone."""
        return architectures in [[name] for name in self.names]


_LLAVA: Final = ("vision_tower", "multi_modal_projector")
_HUNYUAN: Final = ("vit", "vision_tower")
_NEXT: Final = (*_LLAVA, "image_newline")
_IDEFICS: Final = ("vision_model", "connector")
_AUDIO: Final = ("audio_tower", "multi_modal_projector")
_THINKER: Final = ("audio_tower", "visual")
_SPEAKING: Final = tuple(f"thinker.{home}{part}" for part in _THINKER for home in ("", "model."))
_UNIFIED: Final = ("embed_vision", "vision_embedder", "embed_audio")
_GEMMA4: Final = ("vision_tower", "embed_vision", "audio_tower", "embed_audio")

MULTIMODAL: Final = (
    Multimodal("Gemma3ForConditionalGeneration", "gemma3", "gemma3_text", _LLAVA),
    Multimodal("Gemma4ForConditionalGeneration", "gemma4", "gemma4_text", _GEMMA4),
    Multimodal("Gemma4UnifiedForConditionalGeneration", "gemma4_unified", "gemma4_unified_text", _UNIFIED),
    Multimodal("Mistral3ForConditionalGeneration", "mistral3", "mistral", _LLAVA),
    Multimodal("Qwen2VLForConditionalGeneration", "qwen2_vl", "qwen2_vl_text", ("visual",), has_own_text=True),
    Multimodal("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl", "qwen2_vl_text", ("visual",), has_own_text=True),
    Multimodal("Qwen3VLForConditionalGeneration", "qwen3_vl", "qwen3_vl_text", ("visual",), has_own_text=True),
    Multimodal("Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe", "qwen3_vl_moe_text", ("visual",), True),
    Multimodal("Glm4vForConditionalGeneration", "glm4v", "glm4v_text", ("visual",), has_own_text=True),
    Multimodal("Glm4vMoeForConditionalGeneration", "glm4v_moe", "glm4v_moe_text", ("visual",), has_own_text=True),
    Multimodal("LlavaForConditionalGeneration", "llava", "llama", _LLAVA),
    Multimodal("LlavaNextForConditionalGeneration", "llava_next", "llama", _NEXT),
    Multimodal("LlavaNextVideoForConditionalGeneration", "llava_next_video", "llama", _NEXT),
    Multimodal("LlavaOnevisionForConditionalGeneration", "llava_onevision", "qwen2", _NEXT),
    Multimodal("InternVLForConditionalGeneration", "internvl", "qwen2", _LLAVA),
    Multimodal("AyaVisionForConditionalGeneration", "aya_vision", "cohere2", _LLAVA),
    Multimodal("Cohere2VisionForConditionalGeneration", "cohere2_vision", "cohere2", _LLAVA),
    Multimodal("Idefics2ForConditionalGeneration", "idefics2", "mistral", _IDEFICS),
    Multimodal("Idefics3ForConditionalGeneration", "idefics3", "llama", _IDEFICS),
    Multimodal("SmolVLMForConditionalGeneration", "smolvlm", "llama", _IDEFICS),
    Multimodal("Qwen2AudioForConditionalGeneration", "qwen2_audio", "qwen2", _AUDIO),
    Multimodal("HunYuanVLForConditionalGeneration", "hunyuan_vl", "hunyuan_vl_text", _HUNYUAN, has_own_text=True),
    Multimodal(
        "Qwen2_5OmniThinkerForConditionalGeneration", "qwen2_5_omni_thinker", "qwen2_5_omni_text", _THINKER, True,
        former_names=("Qwen2OmniNaViTThinkerForConditionalGeneration",),
    ),
    Multimodal(
        "Qwen2_5OmniForConditionalGeneration", "qwen2_5_omni", "qwen2_5_omni_text",
        (*_SPEAKING, "talker", "token2wav"), True, within="thinker_config", former_names=("Qwen2_5OmniModel",),
    ),
    Multimodal(
        "Qwen3OmniMoeThinkerForConditionalGeneration", "qwen3_omni_moe_thinker", "qwen3_omni_moe_text", _THINKER, True
    ),
    Multimodal(
        "Qwen3OmniMoeForConditionalGeneration", "qwen3_omni_moe", "qwen3_omni_moe_text",
        (*_SPEAKING, "talker", "code2wav"), True, within="thinker_config",
    ),
    Multimodal("GraniteSpeechForConditionalGeneration", "granite_speech", "granite", ("encoder", "projector")),
    Multimodal("VoxtralForConditionalGeneration", "voxtral", "llama", _AUDIO),
)  # fmt: skip
"""The architectures, each of which computes text alone as its text part does (tests/parity/test_text_parts.py)."""

_FAMILIES: Final = {
    "qwen2_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
    "glm4v_text": "glm4",
    "glm4v_moe_text": "glm4_moe",
    "qwen2_5_omni_text": "qwen2",
    "qwen3_omni_moe_text": "qwen3_moe",
    "hunyuan_vl_text": "hunyuan_v1_dense",
}
"""The families of text parts that are of a kind of their own."""


def _sizes(
    vocab: int, hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, context: int
) -> dict[str, object]:
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": context,
    }


_DEFAULTS: Final[Mapping[str, Mapping[str, object]]] = {
    "llama": _sizes(32000, 4096, 11008, 32, 32, 32, 2048),
    "mistral": _sizes(32000, 4096, 14336, 32, 32, 8, 131072),
    "ministral3": _sizes(131072, 4096, 14336, 34, 32, 8, 262144),
    "granite": _sizes(32000, 4096, 11008, 32, 32, 32, 2048),
    "qwen2": _sizes(151936, 4096, 22016, 32, 32, 32, 32768),
    "gemma3_text": _sizes(262208, 2304, 9216, 26, 8, 4, 131072),
    "gemma4_text": _sizes(262144, 2304, 9216, 30, 8, 4, 131072),
    "gemma4_unified_text": _sizes(262144, 2304, 9216, 30, 8, 4, 262144),
    "cohere2": _sizes(256000, 8192, 22528, 40, 64, 64, 8192),
    "qwen2_vl_text": {
        **_sizes(152064, 8192, 29568, 80, 64, 8, 32768),
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-5,
        "max_window_layers": 80,
    },
    "qwen3_vl_text": {**_sizes(151936, 4096, 22016, 32, 32, 32, 128000), "rope_theta": 5e5, "head_dim": 128},
    "qwen3_vl_moe_text": {
        **_sizes(151936, 2048, 5632, 24, 16, 16, 128000),
        "rope_theta": 5e5,
        "moe_intermediate_size": 1408,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
    },
    "glm4v_text": {
        **_sizes(151552, 4096, 13696, 40, 32, 2, 32768),
        "rms_norm_eps": 1e-5,
        "attention_bias": True,
        "partial_rotary_factor": 1.0,
    },
    "qwen2_5_omni_text": {**_sizes(152064, 3584, 18944, 28, 28, 4, 32768), "rope_theta": 1e6, "max_window_layers": 28},
    "qwen3_omni_moe_text": {
        **_sizes(3584, 2048, 18944, 28, 28, 4, 32768),
        "rope_theta": 1e6,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
    },
    "hunyuan_vl_text": _sizes(290943, 4096, 11008, 32, 32, 32, 2048),
    "glm4v_moe_text": {**_sizes(151424, 4096, 10944, 46, 96, 8, 65536), "attention_bias": True},
}
"""What fields mean that a text part's config leaves out, by its kind: published files say no more than they must."""


_TIED_BY_THE_WHOLE: Final = ("qwen3_vl_moe_text", "qwen2_5_omni_text")
"""Kinds whose own class says that the head is the embedding, whether or not it is in the whole model."""


class Container(NamedTuple):
    """What a text part is a part of, as its config describes it."""

    kind: Multimodal
    config: Mapping[str, object]
    origin: str
    """Where the fields stand, for messages."""


@dataclass(frozen=True, slots=True)
class TextPart:
    """The text part of a multimodal model, as its config.json describes it."""

    containers: tuple[Container, ...]
    """The model, and within one that speaks what has the text part."""
    family: str
    """The `model_type` of its family."""
    config: Mapping[str, object]
    """The fields of the text part, and those of the whole model that concern it."""
    origin: str
    """Where the fields stand, for messages."""


def text_part(whole: Multimodal, config: Mapping[str, object], origin: str) -> TextPart:
    """Return the text part of a model of the architecture `whole`.

    Raises:
        ModelRejected: There is no description of a text part.
    """
    containers = [Container(whole, config, origin)]
    if whole.within is not None:
        containers.append(_inside(containers[0], whole.within))
        dtype = _first(config, containers[1].config, "dtype", "torch_dtype")
        config, origin = {**containers[1].config, "dtype": dtype}, containers[1].origin
    given, place = config.get(_CONFIG), f"{origin}: {_CONFIG}"
    if given is None and whole.has_own_text:
        given, place = {name: value for name, value in config.items() if name != "vision_config"}, origin
    if not isinstance(given, Mapping):
        refuse(origin, _CONFIG, given, "an object that describes the text part")
    named = given.get("model_type", whole.text_type)
    kind = whole.text_type if whole.has_own_text or not isinstance(named, str) else named
    of_text = {name: value for name, value in given.items() if not _OF_PARTS.fullmatch(name)}
    if of_text.get("num_local_experts") is not None:  # another name of the same field
        of_text = {"num_experts": of_text["num_local_experts"], **of_text}
    fields: dict[str, object] = {**_DEFAULTS.get(kind, {}), **of_text}
    fields["dtype"] = _first(config, given, "dtype", "torch_dtype")
    fields["tie_word_embeddings"] = _tied(config, {} if kind in _TIED_BY_THE_WHOLE else given)
    if whole.has_own_text:
        fields.update((name, _of_text(fields[name])) for name in _ROPES if name in fields)
    if kind == "glm4v_text" and fields.get("head_dim") is None:
        fields["head_dim"] = _shared_out(fields["hidden_size"], fields["num_attention_heads"])
    return TextPart(tuple(containers), _FAMILIES.get(kind, kind), fields, place)


def _inside(outer: Container, field: str) -> Container:
    """Return what a field of a model that speaks describes: one that has a name of its own, too."""
    config, model_type = outer.config.get(field), f"{outer.kind.model_type}_{field.removesuffix('_config')}"
    if not isinstance(config, Mapping):
        refuse(outer.origin, field, config, "an object that describes what has the text part")
    kind = next(each for each in MULTIMODAL if each.model_type == model_type)
    return Container(kind, config, f"{outer.origin}: {field}")


def _shared_out(hidden: object, heads: object) -> int | None:
    """Return the hidden size shared out among heads; None where that is not possible."""
    return hidden // heads if isinstance(hidden, int) and isinstance(heads, int) and heads > 0 else None


def _first(config: Mapping[str, object], given: Mapping[str, object], *names: str) -> object:
    """Return the first value that is there, in the whole model's config or in that of the text part."""
    found = (fields.get(name) for fields in (config, given) for name in names)
    return next((value for value in found if value is not None), None)


def _tied(config: Mapping[str, object], given: Mapping[str, object]) -> object:
    """Return whether the head is the embedding: older files say so of the text part, newer ones of the whole model."""
    found = [fields.get("tie_word_embeddings") for fields in (config, given)]
    said = [value for value in found if value is not None]
    return next((value for value in said if value is not False), said[0] if said else None)


def _of_text(rope: object) -> object:
    """Return a rope whose sections rotate by the same positions, as they do in text: one without sections."""
    if not isinstance(rope, Mapping):
        return rope
    plain = {name: value for name, value in rope.items() if not name.startswith(("mrope_", "xdrope_"))}
    kinds = {name: plain[name] for name in ("rope_type", "type") if isinstance(plain.get(name), str)}
    return {**plain, **{name: _PLAIN.get(str(kind), kind) for name, kind in kinds.items()}}
