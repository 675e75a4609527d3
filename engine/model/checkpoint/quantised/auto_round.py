"""Reads configs of AutoRound, which packs as other tools do, in as many ways as a model has layers."""

from __future__ import annotations

import re
from typing import Final, Literal

from headrace.adapters.untrusted import Fields
from headrace.engine.model.checkpoint.quantised.awq import AwqLayout
from headrace.engine.model.checkpoint.quantised.compressed_ints import CompressedInts
from headrace.engine.model.checkpoint.quantised.float4 import COMPRESSED_MXFP4, COMPRESSED_NVFP4
from headrace.engine.model.checkpoint.quantised.fp8 import Fp8Layout, block_size
from headrace.engine.model.checkpoint.quantised.gptq import BITS, GptqLayout
from headrace.engine.model.checkpoint.quantised.rules import (
    Layout,
    Rules,
    check_names,
    group_size,
    matched,
    names_module,
    objects_in,
    texts_in,
)

__all__ = ["PACKINGS", "parse"]

_V1: Final = ("auto_gptq", "gptq")
_V2: Final = ("auto_round", "gptqmodel", "exllamav2", "tritonv2")
_AWQ: Final = ("auto_awq", "awq")
_FP8: Final = ("fp8", "fp8_static")
_COMPRESSED: Final = ("llm_compressor",)
PACKINGS: Final = (*_V1, *_V2, *_AWQ, *_FP8, *_COMPRESSED)
"""Names of the packings that are read."""
_PLAIN_BITS: Final = 16
_EXPRESSION: Final = frozenset("*+?^$()[]{}|\\")


def parse(fields: Fields, modules: frozenset[str]) -> Rules:
    """Return the rules of `quant_method` auto-round."""
    packing = fields.data.get("packing_format", "auto_round:auto_gptq")
    name = packing.removeprefix("auto_round:") if isinstance(packing, str) else ""
    if name not in PACKINGS:
        fields.refuse("packing_format", ", ".join(f"auto_round:{each}" for each in PACKINGS))
    standard = _layout(fields, name)
    named = {
        key: _layout(Fields({**fields.data, **rule.data}, rule.origin), name)
        for key, rule in objects_in(fields, "extra_config")
    }
    keys = {f".*(?:{key})": key for key in named if _EXPRESSION & set(key)}
    found = matched(keys, modules, fields, "extra_config")
    expressions = {key: expression for expression, key in keys.items()}
    positive = {key: expressions.get(key, f"{re.escape(key)}$") for key, layout in named.items() if layout is not None}
    check_names(positive, modules, fields, "extra_config", rules="keys")
    blocks = _blocks(fields)
    ignored = texts_in(fields, "modules_to_not_convert")

    def rules(module: str) -> Layout | None:
        if module in named:
            return named[module]
        for pattern, names in found.items():
            if module in names:
                return named[keys[pattern]]
        if any(names_module(entry, module) for entry in ignored):
            return None
        return standard if not blocks or any(f"{module}.".startswith(f"{block}.") for block in blocks) else None

    return rules


def _blocks(fields: Fields) -> tuple[str, ...]:
    """Return the names of the blocks of which all layers are quantised; none if the config does not say."""
    value = fields.data.get("block_name_to_quantize")
    if isinstance(value, str):
        return tuple(name.strip() for name in value.split(","))
    return texts_in(fields, "block_name_to_quantize")


def _layout(fields: Fields, packing: str) -> Layout | None:
    bits = fields.data.get("bits")
    if isinstance(bits, int) and bits >= _PLAIN_BITS:
        return None
    kind = str(fields.data.get("data_type") or "int")
    if packing in _FP8 or kind.startswith("fp8"):
        blocks = block_size(fields, "group_size") if isinstance(fields.data.get("group_size"), list) else None
        return Fp8Layout(blocks)
    if kind.startswith(("mx_fp", "nv_fp")):
        if bits != 4:
            fields.refuse("bits", "4 for 4-bit floats")
        return COMPRESSED_MXFP4 if kind.startswith("mx_fp") else COMPRESSED_NVFP4
    if not kind.startswith("int"):
        fields.refuse("data_type", "int, fp8, mx_fp, nv_fp")
    if bits not in BITS:
        fields.refuse("bits", ", ".join(map(str, (*BITS, _PLAIN_BITS))))
    group, symmetric = group_size(fields, "group_size", 128), fields.flag("sym", True)
    eight_or_four: Literal[4, 8] = 8 if bits == 8 else 4
    if packing in _AWQ:
        if bits != 4:
            fields.refuse("bits", "4 in AWQ's packing")
        return AwqLayout(group)
    if packing in _COMPRESSED:
        return CompressedInts(eight_or_four, group, symmetric)
    return GptqLayout(eight_or_four, group, symmetric, is_v2=packing in _V2)
