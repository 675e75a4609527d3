"""`MedusaHeads`: drafts several tokens at once, each by a head of its own.

    scores_i = V_i b_n(... b_1(h)),   b_j(x) = x + silu(W_j x + c_j)

h is the hidden state of a token t_p, behind the target's final norm, from which the target chooses t_{p+1}; head i
gives t_{p+2+i}. Cai et al. (2024), "Medusa", section 2.1.1.
"""

from __future__ import annotations

from typing import Generic

from torch import Tensor
from torch.nn import functional

from headrace.engine.model.drafting.heads.loading import MedusaWeights
from headrace.engine.model.drafting.heads.spec import MedusaSpec
from headrace.engine.model.network.operations import DeviceOps, Kv, Packed, Step

__all__ = ["MedusaHeads"]


class MedusaHeads(Generic[Packed, Step, Kv]):
    """Heads of which each guesses the token at one distance. They keep nothing from one step to the next."""

    def __init__(self, spec: MedusaSpec, weights: MedusaWeights, ops: DeviceOps[Packed, Step, Kv]) -> None:
        """Pack `weights` in the form that the device wants; the caller may drop them afterwards."""
        self.spec, self._ops = spec, ops
        self._blocks = [[ops.pack(weight, bias_E) for weight, bias_E in blocks] for blocks in weights.blocks]
        self._outputs = [ops.pack_head(output) for output in weights.outputs]

    def logits(self, head: int, final_RE: Tensor) -> Tensor:
        """Return the logits of one head, float32 [R, V].

        Args:
            head: Number of the head, from 0 to `MedusaSpec.most_drafts` - 1.
            final_RE: Hidden state, behind the final norm, of the token from which each row's next one was chosen.
        """
        x_RE = final_RE
        for packed in self._blocks[head]:
            x_RE = x_RE + functional.silu(self._ops.linear(x_RE, packed, 0, f"medusa_{head}"))
        return self._ops.logits(x_RE, self._outputs[head])
