"""Shapes of models as `ModelShape`: from a spec, or as far as the metadata goes where no spec can be read from it."""

from __future__ import annotations

from collections.abc import Mapping

from headrace.engine.inspection.facts import ModelShape
from headrace.engine.model.encoder.spec import EncoderSpec
from headrace.engine.model.experts import routing_of
from headrace.engine.model.latent import has_latents, uniform_latents
from headrace.engine.model.spec import Attention, DecoderSpec

__all__ = ["shape_of_config", "shape_of_decoder", "shape_of_encoder", "shape_of_header"]


def shape_of_decoder(spec: DecoderSpec, family: object) -> ModelShape:
    """Return the shape of a decoder of the family `family`; where layers have other heads, with those of the first."""
    routing = routing_of(spec)
    if has_latents(spec):
        latents = uniform_latents(spec)
        heads, kv_heads, head_size = latents.heads, latents.heads, latents.plain_dim + latents.rotated_dim
    else:
        attention = next(kind for kind in spec.mixer_kinds if isinstance(kind, Attention))
        heads, kv_heads, head_size = attention.heads, attention.kv_heads, attention.head_dim
    return ModelShape(
        kind="decoder",
        architecture=spec.architecture,
        family=_text(family),
        layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        vocab_size=spec.vocab_size,
        max_context=spec.max_context,
        experts=None if routing is None else routing.experts,
        experts_per_token=None if routing is None else routing.top_k,
    )


def shape_of_encoder(spec: EncoderSpec, family: object) -> ModelShape:
    """Return the shape of an encoder of the family `family`."""
    return ModelShape(
        kind="encoder",
        architecture=spec.architecture,
        family=_text(family),
        layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        heads=spec.num_heads,
        kv_heads=spec.num_heads,
        head_size=spec.hidden_size // spec.num_heads,
        vocab_size=spec.vocab_size,
        max_context=spec.max_context,
    )


def shape_of_config(config: Mapping[str, object]) -> ModelShape:
    """Return what a config.json says under its usual names, of a model that is not read."""
    named = config.get("architectures")
    architecture = named[0] if isinstance(named, list) and named else None
    return ModelShape(
        kind="unknown",
        architecture=_text(architecture) or "unknown",
        family=_text(config.get("model_type")),
        layers=_number(config, "num_hidden_layers"),
        hidden_size=_number(config, "hidden_size"),
        heads=_number(config, "num_attention_heads"),
        kv_heads=_number(config, "num_key_value_heads"),
        head_size=_number(config, "head_dim"),
        vocab_size=_number(config, "vocab_size"),
        max_context=_number(config, "max_position_embeddings"),
    )


def shape_of_header(metadata: Mapping[str, object]) -> ModelShape:
    """Return what the metadata of a GGUF file says under the usual names, of a model that is not read."""
    family = _text(metadata.get("general.architecture"))
    return ModelShape(
        kind="unknown",
        architecture=family or "unknown",
        family=family,
        layers=_number(metadata, f"{family}.block_count"),
        hidden_size=_number(metadata, f"{family}.embedding_length"),
        heads=_number(metadata, f"{family}.attention.head_count"),
        kv_heads=_number(metadata, f"{family}.attention.head_count_kv"),
        head_size=_number(metadata, f"{family}.attention.key_length"),
        vocab_size=_number(metadata, f"{family}.vocab_size"),
        max_context=_number(metadata, f"{family}.context_length"),
    )


def _text(value: object) -> str | None:
    return value[:200] if isinstance(value, str) else None


def _number(data: Mapping[str, object], name: str) -> int | None:
    value = data.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None
