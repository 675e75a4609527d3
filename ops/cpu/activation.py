"""`activate` and `activate_plain`: the activations of feeds with and without a gate on the CPU, by torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn import functional

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.ops.stream import Activation, PlainActivation

__all__ = ["activate", "activate_plain"]


def activate(gate_up_N2F: Tensor, activation: Activation) -> Tensor:
    """Return `activation(gate) * up`, [N, F], where the input holds gate, then up."""
    gate_NF, up_NF = gate_up_N2F.chunk(2, -1)
    active_NF = functional.silu(gate_NF) if activation == "silu" else functional.gelu(gate_NF, approximate="tanh")
    return active_NF.mul_(up_NF)


def activate_plain(x_NF: Tensor, activation: PlainActivation) -> Tensor:
    """Return `activation(x)`, [N, F]."""
    if activation in ("relu", "relu2"):
        active_NF = functional.relu(x_NF)
        return active_NF.square_() if activation == "relu2" else active_NF
    return functional.gelu(x_NF, approximate="tanh" if activation == "gelu_tanh" else "none")
