"""Finds the family of a model by its config.json or GGUF header; a new family is a file here and an entry in FAMILIES.

Options that a family does not read are refused by name, so that every model that loads is computed correctly. Never
imports torch. Next: checkpoint/weights.py fills the parameters that a spec calls for.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Final

from headrace.adapters.untrusted import Fields, read_object, refuse
from headrace.engine.model.families.arcee import ARCEE
from headrace.engine.model.families.cohere import COHERE
from headrace.engine.model.families.cohere2 import COHERE2
from headrace.engine.model.families.cwm import CWM
from headrace.engine.model.families.ernie4_5 import ERNIE4_5
from headrace.engine.model.families.exaone4 import EXAONE4
from headrace.engine.model.families.experts.deepseek_v2 import DEEPSEEK_V2
from headrace.engine.model.families.experts.deepseek_v3 import DEEPSEEK_V3
from headrace.engine.model.families.experts.ernie4_5_moe import ERNIE_4_5_MOE
from headrace.engine.model.families.experts.glm4_moe import GLM4_MOE
from headrace.engine.model.families.experts.glm4_moe_lite import GLM4_MOE_LITE
from headrace.engine.model.families.experts.gpt_oss import GPT_OSS
from headrace.engine.model.families.experts.granitemoe import GRANITE_MOE
from headrace.engine.model.families.experts.granitemoehybrid import GRANITE_MOE_HYBRID
from headrace.engine.model.families.experts.granitemoeshared import GRANITE_MOE_SHARED
from headrace.engine.model.families.experts.mixtral import MIXTRAL
from headrace.engine.model.families.experts.olmoe import OLMOE
from headrace.engine.model.families.experts.phimoe import PHI_MOE
from headrace.engine.model.families.experts.qwen2_moe import QWEN2_MOE
from headrace.engine.model.families.experts.qwen3_moe import QWEN3_MOE
from headrace.engine.model.families.experts.solar_open import SOLAR_OPEN
from headrace.engine.model.families.falcon import FALCON
from headrace.engine.model.families.family import Family
from headrace.engine.model.families.gemma import GEMMA
from headrace.engine.model.families.gemma2 import GEMMA2
from headrace.engine.model.families.gemma3_text import GEMMA3
from headrace.engine.model.families.gemma4_text import GEMMA4, GEMMA4_UNIFIED
from headrace.engine.model.families.gguf import GgufHeader
from headrace.engine.model.families.glm import GLM
from headrace.engine.model.families.glm4 import GLM4
from headrace.engine.model.families.gpt2 import GPT2
from headrace.engine.model.families.gpt_neox import GPT_NEOX
from headrace.engine.model.families.granite import GRANITE
from headrace.engine.model.families.helium import HELIUM
from headrace.engine.model.families.hf import HfConfig
from headrace.engine.model.families.hunyuan_v1_dense import HUNYUAN
from headrace.engine.model.families.jais2 import JAIS2
from headrace.engine.model.families.llama import LLAMA
from headrace.engine.model.families.ministral import MINISTRAL
from headrace.engine.model.families.ministral3 import MINISTRAL3
from headrace.engine.model.families.mistral import MISTRAL
from headrace.engine.model.families.olmo2 import OLMO2
from headrace.engine.model.families.olmo3 import OLMO3
from headrace.engine.model.families.opt import OPT
from headrace.engine.model.families.own_code import has_other_code
from headrace.engine.model.families.phi import PHI
from headrace.engine.model.families.phi3 import PHI3
from headrace.engine.model.families.qwen2 import QWEN2
from headrace.engine.model.families.qwen3 import QWEN3
from headrace.engine.model.families.seed_oss import SEED_OSS
from headrace.engine.model.families.smollm3 import SMOLLM3
from headrace.engine.model.families.stablelm import STABLELM
from headrace.engine.model.families.starcoder2 import STARCODER2
from headrace.engine.model.families.text_parts import HOMES, MULTIMODAL, Multimodal, text_part
from headrace.engine.model.families.unread import FieldsRead
from headrace.engine.model.spec import DecoderSpec

__all__ = ["FAMILIES", "QUANTISATION_FILE", "from_gguf", "from_hf", "has_family", "read_hf_config"]

FAMILIES: Final = (
    LLAMA, MISTRAL, MINISTRAL, MINISTRAL3, QWEN2, QWEN3, GEMMA2, GEMMA3, GEMMA4, GEMMA4_UNIFIED, PHI3, GRANITE, SMOLLM3,
    OLMO2, OLMO3, EXAONE4, SEED_OSS, QWEN3_MOE, QWEN2_MOE, MIXTRAL, OLMOE, GRANITE_MOE, GRANITE_MOE_SHARED,
    GRANITE_MOE_HYBRID, ERNIE_4_5_MOE, GLM4_MOE, GPT_OSS, PHI_MOE, DEEPSEEK_V2, DEEPSEEK_V3, GLM4_MOE_LITE,
    SOLAR_OPEN, GLM, GLM4, ERNIE4_5, HELIUM, HUNYUAN, GEMMA, CWM,
    STARCODER2, GPT2, OPT, FALCON, COHERE, COHERE2, GPT_NEOX, PHI, STABLELM, JAIS2, ARCEE,
)  # fmt: skip

QUANTISATION_FILE: Final = "hf_quant_config.json"
"""The file that ModelOpt writes."""
_CONFIG_BYTES = 4 << 20


def read_hf_config(folder: Path) -> dict[str, object]:
    """Return `config.json` of a Hugging Face folder, at most 4 MiB of it.

    ModelOpt says in a file of its own, hf_quant_config.json, how weights are quantised; that counts as the config's
    `quantization_config` where there is none, and so does what is said of a text part, or of what has it in a model
    that speaks.

    Raises:
        ModelRejected: A file is missing, too long, or not an unambiguous JSON object.
    """
    config = read_object(folder / "config.json", _CONFIG_BYTES)
    if config.get("quantization_config") is None and (folder / QUANTISATION_FILE).exists():
        beside = read_object(folder / QUANTISATION_FILE, _CONFIG_BYTES).get("quantization")
        if not isinstance(beside, Mapping):
            refuse(QUANTISATION_FILE, "quantization", beside, "an object")
        config["quantization_config"] = {**beside, "quant_method": "modelopt"}
    found = (each.get("quantization_config") for each in _with_inner(config))
    if (said := next((each for each in found if each is not None), None)) is not None:
        config["quantization_config"] = said
    return config


def _with_inner(config: Mapping[str, object]) -> Iterator[Mapping[str, object]]:
    """Yield a config.json, and what is within it about a text part and about what has one."""
    for whole in (config, *(config.get(each.within) for each in MULTIMODAL if each.within is not None)):
        if isinstance(whole, Mapping):
            yield from (each for each in (whole, whole.get("text_config")) if isinstance(each, Mapping))


def has_family(config: Mapping[str, object], families: Sequence[Family] = FAMILIES) -> bool:
    """Return whether a config.json names a family here, whether or not the rest of it can be read."""
    if _multimodal(config) is not None:
        return True
    named = config.get("architectures")
    if named is None:
        return any(config.get("model_type") == family.model_type for family in families)
    known = _by_architecture(families)
    return isinstance(named, list) and len(named) == 1 and isinstance(named[0], str) and named[0] in known


def from_hf(
    config: Mapping[str, object], origin: str = "config.json", families: Sequence[Family] = FAMILIES
) -> DecoderSpec:
    """Return the spec of a model from its Hugging Face `config.json`; of a multimodal model, that of its text part.

    Args:
        config: The parsed file; both `rope_theta`/`rope_scaling` and `rope_parameters` are understood.
        origin: The file's base name, for messages.
        families: The families to choose from.

    Raises:
        ModelRejected: The architecture is not supported, a size is impossible, or a field asks for what the decoder
            does not compute; the error has the field, its value and what is supported.
    """
    whole = _multimodal(config)
    if whole is not None:
        return _of_text_part(whole, config, origin, families)
    architecture, family = _family(Fields(config, origin), families)
    read = HfConfig(FieldsRead(config), origin, architecture, has_head=architecture == family.architecture)
    read.check(family.heeds)
    spec = family.from_config(read)
    read.check_read(family.unread)
    return spec


def from_gguf(
    metadata: Mapping[str, object],
    shapes: Mapping[str, Sequence[int]],
    rope_tensors: Mapping[str, tuple[float, ...]] | None = None,
    origin: str = "the GGUF file",
    families: Sequence[Family] = FAMILIES,
) -> DecoderSpec:
    """Return the spec of a model from a GGUF file's metadata.

    Args:
        metadata: Keys to plain Python values.
        shapes: Tensor names to shapes, outer size first: they decide what the metadata leaves open (a tied head,
            biases, the vocabulary).
        rope_tensors: The numbers of the file's tensors with divisors of frequencies (`ROPE_TENSORS`), by their names.
        origin: The file's base name, for messages.
        families: The families to choose from.

    Raises:
        ModelRejected: The same errors as from `from_hf`.
    """
    name = metadata.get("general.architecture")
    known = {family.gguf: family for family in families if family.gguf is not None}
    if not isinstance(name, str) or name not in known or (read := known[name].from_header) is None:
        refuse(origin, "general.architecture", name, ", ".join(known))
    header = GgufHeader(metadata, origin, name, known[name].architecture, shapes, rope_tensors or {})
    header.check(known[name].gguf_heeds)
    return read(header)


def _multimodal(config: Mapping[str, object]) -> Multimodal | None:
    """Return the architecture with a text part that a config names; None if it names none."""
    named, kind = config.get("architectures"), config.get("model_type")
    if named is None:
        return next((each for each in MULTIMODAL if each.model_type == kind), None)
    return next((each for each in MULTIMODAL if each.is_named(named)), None)


def _of_text_part(
    whole: Multimodal, config: Mapping[str, object], origin: str, families: Sequence[Family]
) -> DecoderSpec:
    """Return the spec of the text part of a multimodal model, whose tensors may lie under several beginnings."""
    part = text_part(whole, config, origin)
    family = next((each for each in families if each.model_type == part.family), None)
    if family is None:
        known = ", ".join(each.model_type for each in families)
        refuse(part.origin, "model_type", part.family, f"a family with native code: {known}")
    for kind, data, place in part.containers:
        if (named := data.get("architectures")) is not None and not kind.is_named(named):
            refuse(place, "architectures", named, f"{kind.architecture}, which goes with {whole.architecture}")
        if has_other_code(data, kind.names):
            refuse(place, "auto_map", data["auto_map"], "models that need no code of their own")
        if data.get("model_type", kind.model_type) != kind.model_type:
            refuse(place, "model_type", data["model_type"], f"{kind.model_type}, which goes with {kind.architecture}")
    for data, place in (*((each.config, each.origin) for each in part.containers), (part.config, part.origin)):
        read = HfConfig(FieldsRead(data), place, whole.architecture, has_head=True)
        read.check(family.heeds | {"text_config", "vision_config"})
    spec = family.from_config(read)
    read.check_read(family.unread)
    return replace(spec, names=replace(spec.names, homes=HOMES, others=whole.others))


def _family(fields: Fields, families: Sequence[Family]) -> tuple[str, Family]:
    """Return the config's one architecture and its family, by `architectures` or else `model_type`."""
    named = fields.data.get("architectures")
    if named is None:
        for family in families:
            if fields.data.get("model_type") == family.model_type:
                _check_code(fields, family)
                return family.architecture, family
        fields.refuse("model_type", ", ".join(family.model_type for family in families))
    known = _by_architecture(families)
    if not isinstance(named, list) or len(named) != 1 or not isinstance(named[0], str) or named[0] not in known:
        _check_code(fields)
        fields.refuse("architectures", _nearest([*known, *(each.architecture for each in MULTIMODAL)], named))
    family = known[named[0]]
    _check_code(fields, family)
    if fields.data.get("model_type", family.model_type) != family.model_type:
        fields.refuse("model_type", f"{family.model_type}, which goes with {named[0]}")
    return family.architecture if named[0] in family.former_names else named[0], family


def _nearest(known: Collection[str], named: object) -> str:
    """Return in words which architectures are supported: a few with names like the one asked for, and how many more."""
    stems = {_stem(name): name for name in known}
    asked = str(named[0]) if isinstance(named, list) and named else ""
    near = get_close_matches(_stem(asked), stems, 3) or list(stems)[:3]
    more = len(known) - len(near)
    return ", ".join(stems[stem] for stem in near) + (f" and {more} more, listed in docs/models.md" if more else "")


def _stem(architecture: str) -> str:
    return architecture.removesuffix("ForCausalLM").removesuffix("ForConditionalGeneration").lower()


def _by_architecture(families: Sequence[Family]) -> dict[str, Family]:
    """Return the families by the names of their architectures: with a head, without, and former ones."""
    headless = {family.headless or family.architecture.replace("ForCausalLM", "Model"): family for family in families}
    former = {name: family for family in families for name in family.former_names}
    return {family.architecture: family for family in families} | headless | former


def _check_code(fields: Fields, family: Family | None = None) -> None:
    """Refuse a model that says it needs code of its own, unless that code is of the family's own class."""
    known = _by_architecture((family,)) if family is not None else ()
    if has_other_code(fields.data, known):
        fields.refuse("auto_map", "models that need no code of their own")
