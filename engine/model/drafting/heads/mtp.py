"""Reads the module for multi-token prediction that comes with a checkpoint; never reads a tensor.

DeepSeek-AI (2024), "DeepSeek-V3", section 2.2; GLM-4.5 Team (2025). The module stands behind the last layer under the
next number: `enorm`, `hnorm` and `eh_proj`, one whole layer like the last one, and `shared_head.norm`. Embeddings and
output head are stored once more, and are those of the model. Of several modules the first alone is read, and drafts
further tokens from its own states.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from headrace.adapters.untrusted import refuse
from headrace.engine.model.drafting.heads.spec import RecurrentSpec
from headrace.engine.model.spec import DecoderSpec

__all__ = ["has_mtp", "read_mtp"]

_ROLES = {"token_norm": "enorm", "state_norm": "hnorm", "fuse": "eh_proj", "final_norm": "shared_head.norm"}


def has_mtp(shapes: Mapping[str, tuple[int, ...]], target: DecoderSpec) -> bool:
    """Return whether a checkpoint holds a module for multi-token prediction, as DeepSeek-V3's and GLM's do."""
    return f"{_prefix(shapes, target)}eh_proj.weight" in shapes


def read_mtp(shapes: Mapping[str, tuple[int, ...]], target: DecoderSpec, origin: str) -> RecurrentSpec:
    """Return the spec of the first module.

    Args:
        shapes: Shapes of the checkpoint's tensors, by name: those of the model, and those of the module.
        target: The model.
        origin: Base name of the model's folder, for messages.

    Raises:
        ModelRejected: The checkpoint holds no such module, or the model's last layer is of a kind that none has.
    """
    prefix = _prefix(shapes, target)
    if not has_mtp(shapes, target):
        refuse(origin, f"{prefix}eh_proj.weight", None, "models whose checkpoint holds a module that drafts (MTP)")
    last, found = target.layers[-1], target.names.found_in(shapes)
    if last.norms.kind != "rms" or last.norms.placement != "pre" or found.joined or found.norm_offset:
        refuse(origin, "the last layer", last.norms, "layers with RMS norms before mixer and feed, as DeepSeek-V3's")
    names = replace(
        found,
        layer_prefix=prefix,
        roles={**found.roles, **{role: prefix + name for role, name in _ROLES.items()}},
        harmless=re.compile(rf"(?!{re.escape(prefix)}).*|{re.escape(prefix)}(embed_tokens|shared_head\.head)\..*"),
        prefix="",
        homes=(),
    )
    return RecurrentSpec(
        method="mtp",
        origin=origin,
        block=replace(target, layers=(last,), names=names),
        target_size=target.hidden_size,
        taps=(),
        draft_vocab_size=target.vocab_size,
        feeds_back_normed=True,
    )


def _prefix(shapes: Mapping[str, tuple[int, ...]], target: DecoderSpec) -> str:
    """Return the beginning of the names of the module's tensors, which stand where those of the model do."""
    return target.names.found_in(shapes).layer_prefix.format(target.num_layers)
