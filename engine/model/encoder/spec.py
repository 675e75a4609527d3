"""Derives the shape of an encoder from its config.json; never imports torch or reads weights.

One `EncoderSpec` describes BERT, RoBERTa and XLM-R, which differ in names, in where positions begin and in their head.
What the encoder would have to ignore is refused by name. Next to read: weights.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from headrace.adapters.untrusted import Fields, read_object, refuse
from headrace.engine.model.spec import LIMITS

__all__ = ["ENCODERS", "EncoderSpec", "encoder_from_hf", "is_encoder", "longest_text"]

_FILE_BYTES = 1 << 20
_ACTIVATIONS = {"gelu": "none", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh"}
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "add_cross_attention": (None, False),
    "auto_map": (None,),
    "embedding_size": (None,),
    "is_decoder": (None, False),
    "position_embedding_type": (None, "absolute"),
    "quantization_config": (None,),
}
"""Fields that change the arithmetic, with the values under which they change nothing."""


@dataclass(frozen=True, slots=True)
class _Family:
    model_type: str
    prefix: str
    """Prefix of the names of tensors, where the encoder has a head beside it."""
    is_offset: bool
    """Whether positions begin behind the id of padding."""
    head: tuple[str, str]
    """Names of the two products of a head for pairs."""


_BERT = _Family("bert", "bert.", False, ("bert.pooler.dense", "classifier"))
_ROBERTA = _Family("roberta", "roberta.", True, ("classifier.dense", "classifier.out_proj"))
_XLMR = _Family("xlm-roberta", "roberta.", True, ("classifier.dense", "classifier.out_proj"))
ENCODERS = {"Bert": _BERT, "Roberta": _ROBERTA, "XLMRoberta": _XLMR}
_KINDS = ("Model", "ForSequenceClassification")


@dataclass(frozen=True, slots=True)
class EncoderSpec:
    """Everything that the encoder needs to know about a model, apart from its weights."""

    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    ffn_size: int
    vocab_size: int
    num_positions: int
    """Number of rows in the table of positions."""
    first_position: int
    """Row of the table of positions that the first token takes."""
    num_types: int
    norm_eps: float
    gelu: Literal["none", "tanh"]
    """Name of torch's approximation of GELU."""
    prefix: str
    """Prefix of the names of the encoder's tensors; the checkpoint may leave it out."""
    head: tuple[str, str] | None
    """Names of the two products of the head for pairs; None where the model embeds."""
    has_sigmoid: bool
    """Whether a score is the sigmoid of what the head gives."""

    @property
    def max_context(self) -> int:
        """Most tokens of a text."""
        return self.num_positions - self.first_position


def is_encoder(config: Mapping[str, object]) -> bool:
    """Return whether a config.json describes an encoder."""
    named = config.get("architectures")
    return isinstance(named, list) and len(named) == 1 and isinstance(named[0], str) and named[0] in _rows()


def _rows() -> dict[str, _Family]:
    return {name + kind: family for name, family in ENCODERS.items() for kind in _KINDS}


def encoder_from_hf(config: Mapping[str, object], origin: str = "config.json") -> EncoderSpec:
    """Return the spec of an encoder from its Hugging Face `config.json`.

    Args:
        config: The parsed file; `is_encoder` holds.
        origin: The file's base name, for messages.

    Raises:
        ModelRejected: A size is impossible, or a field asks for what the encoder does not compute.
    """
    fields = Fields(config, origin)
    named = config["architectures"]
    assert isinstance(named, list)
    family = _rows()[named[0]]
    if config.get("model_type", family.model_type) != family.model_type:
        fields.refuse("model_type", family.model_type)
    for field, neutral in _NEUTRAL.items():
        if not any(config.get(field) is value or config.get(field) == value for value in neutral):
            values = " or ".join(map(json.dumps, neutral))
            fields.refuse(field, f"{values}, since {named[0]} is computed without it")
    activation = config.get("hidden_act", "gelu")
    if not isinstance(activation, str) or activation not in _ACTIVATIONS:
        fields.refuse("hidden_act", ", ".join(_ACTIVATIONS))
    hidden = fields.size("hidden_size", LIMITS["hidden_size"])
    heads = fields.size("num_attention_heads", LIMITS["num_heads"])
    if hidden % heads:
        refuse(origin, "hidden_size", hidden, f"a multiple of the {heads} attention heads")
    positions = fields.size("max_position_embeddings", LIMITS["max_context"])
    first = _first_position(fields) if family.is_offset else 0
    if first >= positions:
        fields.refuse("max_position_embeddings", f"more than the {first} positions before the first token's")
    scores = named[0].endswith("ForSequenceClassification")
    if scores:
        _check_one_label(fields)
    return EncoderSpec(
        architecture=named[0],
        num_layers=fields.size("num_hidden_layers", LIMITS["num_layers"]),
        hidden_size=hidden,
        num_heads=heads,
        ffn_size=fields.size("intermediate_size", LIMITS["ffn_size"]),
        vocab_size=fields.size("vocab_size", LIMITS["vocab_size"]),
        num_positions=positions,
        first_position=first,
        num_types=fields.size("type_vocab_size", 1024, 2),
        norm_eps=fields.real("layer_norm_eps", 0.0, 1.0, 1e-12),
        gelu="tanh" if _ACTIVATIONS[activation] == "tanh" else "none",
        prefix=family.prefix,
        head=family.head if scores else None,
        has_sigmoid=scores and _has_sigmoid(config),
    )


def longest_text(folder: Path, spec: EncoderSpec) -> int:
    """Return the tokens of the longest text that the model was trained with, from the sentence-transformers file.

    Raises:
        ModelRejected: The file is damaged.
    """
    path = folder / "sentence_bert_config.json"
    if not path.is_file():
        return spec.max_context
    fields = Fields(read_object(path, _FILE_BYTES), path.name)
    return min(fields.size("max_seq_length", LIMITS["max_context"], spec.max_context), spec.max_context)


def _first_position(fields: Fields) -> int:
    """Return the position of the first token: in RoBERTa, one more than the id of padding, which is 1 by default."""
    padding = fields.data.get("pad_token_id")
    padding = 1 if padding is None else padding
    if isinstance(padding, bool) or not isinstance(padding, int) or not 0 <= padding < LIMITS["vocab_size"]:
        fields.refuse("pad_token_id", "a token id")
    return padding + 1


def _check_one_label(fields: Fields) -> None:
    labels = fields.data.get("id2label", {0: "", 1: ""})  # a config without labels has two
    if not isinstance(labels, Mapping) or len(labels) != 1:
        fields.refuse("id2label", "one label, whose logit is the score of a pair")


def _has_sigmoid(config: Mapping[str, object]) -> bool:
    """Return whether scores are sigmoids: the default of sentence-transformers, unless the config says otherwise."""
    own = config.get("sentence_transformers")
    named = own.get("activation_fn") if isinstance(own, Mapping) else None
    named = named or config.get("sbert_ce_default_activation_function") or "Sigmoid"
    return not str(named).endswith("Identity")
