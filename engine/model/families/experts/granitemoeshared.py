"""Granite's models with experts and, beside them, perhaps one that every token has.

Granite Team, IBM (2024), "Granite 3.0 language models".
"""

from __future__ import annotations

from dataclasses import replace

from headrace.engine.model.experts import SharedExpert
from headrace.engine.model.families.experts.granitemoe import GRANITE_MOE, NAMES, granite_experts
from headrace.engine.model.families.family import Family
from headrace.engine.model.families.granite import granite_decoder
from headrace.engine.model.families.hf import HfConfig
from headrace.engine.model.spec import LIMITS, DecoderSpec

__all__ = ["GRANITE_MOE_SHARED"]


def _from_config(config: HfConfig) -> DecoderSpec:
    feed = granite_experts(config)
    if config.data.get("shared_intermediate_size"):
        feed = replace(feed, shared=SharedExpert(config.size("shared_intermediate_size", LIMITS["ffn_size"])))
    return granite_decoder(config, feed, NAMES)


GRANITE_MOE_SHARED = Family("GraniteMoeSharedForCausalLM", "granitemoeshared", _from_config, heeds=GRANITE_MOE.heeds)
