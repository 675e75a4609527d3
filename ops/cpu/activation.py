"""`activate`: the activation of a gated feed on the CPU, by torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn import functional

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.ops.stream import Activation

__all__ = ["activate"]


def activate(gate_up_N2F: Tensor, activation: Activation) -> Tensor:
    """Return `activation(gate) * up`, [N, F], where the input holds gate, then up."""
    gate_NF, up_NF = gate_up_N2F.chunk(2, -1)
    active_NF = functional.silu(gate_NF) if activation == "silu" else functional.gelu(gate_NF, approximate="tanh")
    return active_NF.mul_(up_NF)
