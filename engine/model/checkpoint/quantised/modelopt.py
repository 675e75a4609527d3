"""Reads configs of ModelOpt, of config.json or hf_quant_config.json: FP8, its blocks, NVFP4 and mixtures of these.

The names of algorithms are those of ModelOpt's exporter (`modelopt/torch/export/quant_utils.py`); FP8_PB is what newer
versions call blocks of 8-bit floats.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

from headrace.adapters.untrusted import Fields
from headrace.engine.model.checkpoint.quantised.float4 import MODELOPT_NVFP4
from headrace.engine.model.checkpoint.quantised.fp8 import Fp8Layout
from headrace.engine.model.checkpoint.quantised.rules import Layout, Rules, objects_in, texts_in

__all__ = ["ALGORITHMS", "parse"]

_BLOCKS = Fp8Layout((128, 128))
_LAYOUTS: Mapping[str, Layout] = {
    "FP8": Fp8Layout(),
    "FP8_PER_CHANNEL_PER_TOKEN": Fp8Layout(),
    "FP8_PB_WO": _BLOCKS,
    "FP8_PB": _BLOCKS,
    "NVFP4": MODELOPT_NVFP4,
}
_MIXED = "MIXED_PRECISION"
ALGORITHMS = (*_LAYOUTS, _MIXED)
"""Names of the algorithms that are read."""


def parse(fields: Fields, _modules: frozenset[str]) -> Rules:
    """Return the rules of `quant_method` modelopt."""
    if fields.data.get("kv_cache_quant_algo") not in (None, "FP8"):
        fields.refuse("kv_cache_quant_algo", "FP8")
    ignored = texts_in(fields, "ignore", "exclude_modules")
    if fields.data.get("quant_algo") == _MIXED:
        named = {module: _layout(rule) for module, rule in objects_in(fields, "quantized_layers")}
        standard: Layout | None = None
    else:
        named, standard = {}, _layout(fields)

    def rules(module: str) -> Layout | None:
        if any(_covers(entry, module) for entry in ignored):
            return None
        return named.get(module, standard)

    return rules


def _layout(fields: Fields) -> Layout:
    algorithm = fields.data.get("quant_algo")
    layout = _LAYOUTS.get(algorithm.upper()) if isinstance(algorithm, str) else None  # some versions write fp8_pb_wo
    if layout is None:
        fields.refuse("quant_algo", ", ".join(ALGORITHMS))
    return layout


def _covers(pattern: str, module: str) -> bool:
    """Return whether a pattern with asterisks names a module, or what contains it."""
    return fnmatchcase(module, pattern) or fnmatchcase(module, f"{pattern}.*")
