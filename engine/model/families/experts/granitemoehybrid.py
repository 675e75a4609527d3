"""Granite 4, its models whose layers all attend: Micro, 1B and 350M, which are dense, and any with experts.

Granite Team, IBM (2025), Granite 4.0 language models, as transformers computes them (`models/granitemoehybrid`). The
factors are those of Granite 3. Every layer has the feed that models with experts share, and experts beside it if there
are any. Heads are rotated where the config says so. Layers of Mamba, which the hybrids have, are refused by name.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from headrace.adapters.untrusted import refuse
from headrace.engine.model.experts import SharedExpert
from headrace.engine.model.families.experts.granitemoe import NAMES, granite_experts
from headrace.engine.model.families.experts.reading import expert_size
from headrace.engine.model.families.family import Family
from headrace.engine.model.families.granite import GRANITE, granite_decoder
from headrace.engine.model.families.hf import HF_NAMES, HfConfig
from headrace.engine.model.rope import UNROTATED
from headrace.engine.model.spec import DecoderSpec, DenseFeed

__all__ = ["GRANITE_MOE_HYBRID"]

_ATTENTION: Final = ("attention", "full_attention")
_DENSE_NAMES = replace(
    HF_NAMES,
    roles={**HF_NAMES.roles, "gate_up": "shared_mlp.input_linear", "down": "shared_mlp.output_linear"},
    joined={"gate_up": ("gate", "up")},
)
_OF_OTHERS: Final = frozenset(
    """
    mamba_chunk_size mamba_conv_bias mamba_d_conv mamba_d_head mamba_d_state mamba_expand mamba_n_groups mamba_n_heads
    mamba_proj_bias time_step_floor time_step_limit time_step_max time_step_min
    intermediate_size num_experts_per_tok
    """.split()
)
"""Fields about layers of Mamba and about experts, which every config has."""


def _from_config(config: HfConfig) -> DecoderSpec:
    config.expect("normalization_function", "rmsnorm")
    attending, shared = _attending(config), expert_size(config, "shared_intermediate_size", 1024)
    experts = config.data.get("num_local_experts")
    if type(experts) is int and experts == 0:
        spec = granite_decoder(attending, DenseFeed(shared), _DENSE_NAMES)
    else:
        feed = replace(granite_experts(config), shared=SharedExpert(shared))
        spec = granite_decoder(attending, feed, NAMES)
    is_rotated = config.expect("position_embedding_type", "nope", "rope") == "rope"
    return spec if is_rotated else replace(spec, ropes=(UNROTATED,))


def _attending(config: HfConfig) -> HfConfig:
    """Return the config without kinds of layers, which must all be attention."""
    kinds, count = config.data.get("layer_types"), config.num_layers
    if not isinstance(kinds, list) or len(kinds) != count:
        config.refuse("layer_types", f"attention for each of {count} layers: without the field they are of Mamba")
    for kind in kinds:
        if kind not in _ATTENTION:
            refuse(config.origin, "layer_types", kind, "attention alone: layers that keep a state have no native code")
    return replace(config, data=config.data.changed({"layer_types": None}))


GRANITE_MOE_HYBRID = Family(
    "GraniteMoeHybridForCausalLM",
    "granitemoehybrid",
    _from_config,
    heeds=GRANITE.heeds | {"num_local_experts"},
    unread=_OF_OTHERS,
)
