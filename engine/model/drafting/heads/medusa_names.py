"""Reads which heads a Medusa checkpoint holds, by the names of its tensors; never reads a tensor.

The authors store `{head}.{block}.linear.weight` and `.bias` for residual blocks, and `{head}.{blocks}.weight` for the
output head behind them (Cai et al., 2024). Their configs give wrong numbers of heads, so tensors are counted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from headrace.adapters.untrusted import refuse
from headrace.engine.model.drafting.heads.spec import MedusaSpec
from headrace.engine.model.roles import Names
from headrace.engine.model.spec import DecoderSpec

__all__ = ["is_medusa", "read_medusa"]

_OUTPUT: Final = re.compile(r"((?:medusa_heads?\.)?)(\d{1,3})\.(\d{1,3})\.weight")
_MOST_HEADS: Final = 64
_MOST_BLOCKS: Final = 16


def is_medusa(shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Return whether tensors have the names of Medusa's heads."""
    return any(_OUTPUT.fullmatch(name) for name in shapes)


def read_medusa(shapes: Mapping[str, tuple[int, ...]], target: DecoderSpec, origin: str) -> MedusaSpec:
    """Return the spec of Medusa's heads.

    Args:
        shapes: Shapes of the tensors, by name.
        target: The model that the heads are to draft for.
        origin: Base name of the heads' folder, for messages.

    Raises:
        ModelRejected: The heads were made for a target of another shape, or their numbers have gaps.
    """
    outputs = [match for name in shapes if (match := _OUTPUT.fullmatch(name))]
    prefix = outputs[0][1]
    heads = 1 + max(int(match[2]) for match in outputs)
    blocks = max(int(match[3]) for match in outputs)
    if len(outputs) != heads or not 1 <= heads <= _MOST_HEADS:
        refuse(origin, "the number of heads", len(outputs), f"heads numbered from 0 on without gaps, to {_MOST_HEADS}")
    if blocks > _MOST_BLOCKS:
        refuse(origin, "the number of residual blocks", blocks, f"0 to {_MOST_BLOCKS}")
    _check_sizes(shapes[outputs[0][0]], target, outputs[0][0], origin)
    roles = {
        f"block_{head}_{block}": f"{prefix}{head}.{block}.linear" for head in range(heads) for block in range(blocks)
    }
    roles |= {f"head_{head}": f"{prefix}{head}.{blocks}" for head in range(heads)}
    names = Names(layer_prefix="", roles=roles, harmless=re.compile(r"(?!)"), prefix="")
    return MedusaSpec(origin, heads, blocks, target.hidden_size, target.vocab_size, names)


def _check_sizes(shape: tuple[int, ...], target: DecoderSpec, name: str, origin: str) -> None:
    """Refuse heads of another vocabulary or hidden size than the target's."""
    whose = f"as in the model that they are to draft for ({target.architecture})"
    if len(shape) != 2 or shape[1] != target.hidden_size:
        refuse(origin, f"the hidden size of {name}", shape[-1] if shape else None, f"{target.hidden_size}, {whose}")
    if shape[0] != target.vocab_size:
        refuse(origin, f"the vocabulary of {name}", shape[0], f"{target.vocab_size}, {whose}")
