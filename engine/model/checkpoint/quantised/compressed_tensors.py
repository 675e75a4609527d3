"""Reads configs of compressed-tensors: groups of modules by name, expression or class, each with a scheme."""

from __future__ import annotations

import re
from typing import NamedTuple

from headrace.adapters.untrusted import Fields
from headrace.engine.model.checkpoint.quantised.compressed_ints import CompressedInts
from headrace.engine.model.checkpoint.quantised.float4 import COMPRESSED_MXFP4, COMPRESSED_NVFP4
from headrace.engine.model.checkpoint.quantised.fp8 import Fp8Layout, block_size
from headrace.engine.model.checkpoint.quantised.rules import (
    Layout,
    Rules,
    check_names,
    fields_in,
    group_size,
    matched,
    objects_in,
    texts_in,
)

__all__ = ["FORMATS", "parse"]

FORMATS = (
    "float-quantized",
    "int-quantized",
    "naive-quantized",
    "pack-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mixed-precision",
    "dense",
)
"""Names of the formats that are read."""
_EXPRESSION = "re:"
_MOST_GROUPS = 256
_KV_SCHEME = "a scheme of 8-bit floats"


class _Names(NamedTuple):
    """Modules by name, expression or class."""

    texts: frozenset[str]
    matched: frozenset[str]
    """Names that an expression among the texts matches."""

    @staticmethod
    def of(fields: Fields, field: str, modules: frozenset[str]) -> _Names:
        texts = texts_in(fields, field)
        expressions = [text.removeprefix(_EXPRESSION) for text in texts if text.startswith(_EXPRESSION)]
        return _Names(frozenset(texts), frozenset().union(*matched(expressions, modules, fields, field).values()))

    def expressions(self) -> dict[str, str]:
        """Return the regular expression of each text that is no class, which alone begins with a capital."""
        return {
            text: text.removeprefix(_EXPRESSION) if text.startswith(_EXPRESSION) else f"{re.escape(text)}$"
            for text in sorted(self.texts)
            if not text[:1].isupper()
        }

    def rank(self, module: str) -> int:
        """Return how closely a module is named: 3 in full, 2 by expression, 1 by class, 0 not at all."""
        if module in self.texts:
            return 3
        if module in self.matched:
            return 2
        # Of a decoder's modules with matrices only the embedding is no Linear.
        return int(("Embedding" if module.endswith("embed_tokens") else "Linear") in self.texts)


class _Group(NamedTuple):
    fields: Fields
    targets: _Names
    layout: Layout | None


def parse(fields: Fields, modules: frozenset[str]) -> Rules:
    """Return the rules of `quant_method` compressed-tensors, for a checkpoint with the given modules."""
    _check_format(fields)
    for name in ("transform_config", "sparsity_config"):
        inner = fields_in(fields, name)
        if inner is not None and inner.data.get("format", "dense" if not inner.data else None) != "dense":
            fields.refuse(name, "none")
    scheme = fields_in(fields, "kv_cache_scheme")
    if scheme is not None and (scheme.data.get("num_bits"), scheme.data.get("type")) != (8, "float"):
        fields.refuse("kv_cache_scheme", _KV_SCHEME)
    given = dict(objects_in(fields, "config_groups"))
    if len(given) > _MOST_GROUPS or (not given and scheme is None):
        fields.refuse("config_groups", f"up to {_MOST_GROUPS} groups of modules, or a kv_cache_scheme")
    groups = [_group(group, modules) for group in given.values()]
    ignored = _Names.of(fields, "ignore", modules)
    for group in groups:
        if group.layout is not None and not any(map(group.targets.rank, modules)):
            group.fields.refuse("targets", "names of modules that the checkpoint has; it has none of these")
        if group.layout is not None:
            check_names(group.targets.expressions(), modules, group.fields, "targets", rules="names, expressions")

    def rules(module: str) -> Layout | None:
        best = max(groups, key=lambda group: group.targets.rank(module), default=None)
        if best is None or ignored.rank(module) or not best.targets.rank(module):
            return None
        return best.layout

    return rules


def _check_format(fields: Fields) -> None:
    if fields.data.get("format") not in (None, *FORMATS):
        fields.refuse("format", ", ".join(FORMATS))


def _group(fields: Fields, modules: frozenset[str]) -> _Group:
    _check_format(fields)
    weights = fields_in(fields, "weights")
    return _Group(fields, _Names.of(fields, "targets", modules), None if weights is None else _layout(weights))


def _layout(weights: Fields) -> Layout:
    """Return the layout that the scheme of a group's weights says."""
    bits, kind, strategy = (weights.data.get(name) for name in ("num_bits", "type", "strategy"))
    group = group_size(weights, "group_size") if strategy in (None, "group", "tensor_group") else None
    if kind == "float" and bits == 8:
        return Fp8Layout(_blocks(weights, strategy))
    if kind == "float" and bits == 4:
        by_group = {16: COMPRESSED_NVFP4, 32: COMPRESSED_MXFP4}
        if group not in by_group:
            weights.refuse("group_size", "16 (NVFP4) or 32 (MXFP4) for 4-bit floats")
        return by_group[group]
    if kind not in ("int", None):
        weights.refuse("type", "int, float")
    if bits not in (4, 8):
        weights.refuse("num_bits", "4, 8")
    if strategy not in (None, "group", "channel", "tensor"):
        weights.refuse("strategy", "group, channel, tensor")
    is_ordered = group is not None and weights.data.get("actorder") in ("group", "dynamic", True)
    return CompressedInts(8 if bits == 8 else 4, group, weights.flag("symmetric", True), is_ordered)


def _blocks(weights: Fields, strategy: object) -> tuple[int, int] | None:
    if strategy not in (None, "tensor", "channel", "block"):
        weights.refuse("strategy", "tensor, channel, block for 8-bit floats")
    blocks = block_size(weights, "block_structure")
    if strategy == "block" and blocks is None:
        weights.refuse("block_structure", "outputs and inputs of a block")
    return blocks if strategy == "block" else None
