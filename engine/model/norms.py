"""`Norms`: what the norms of a layer are, where they stand, and which weights they have; never holds a tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from headrace.engine.model.roles import Fused, bias, norm

__all__ = ["Norms"]


@dataclass(frozen=True, slots=True)
class Norms:
    """Norms of one layer."""

    epsilon: float
    kind: Literal["rms", "layer"] = "rms"
    """`rms` for x / rms(x) * w (Zhang and Sennrich, 2019), `layer` for (x - mean(x)) / std(x) * w + b (Ba et al.,
    2016)."""
    placement: Literal["pre", "post", "both", "parallel", "shared"] = "pre"
    """Where the norms are: `pre` for x + f(norm(x)) (Xiong et al., 2020), `post` for x + norm(f(x)) (OLMo Team, 2025),
    `both` for x + norm(f(norm(x))) (Ding et al., 2021). With mixer f and feed g side by side, `parallel` for
    x + f(norm(x)) + g(norm'(x)) (Black et al., 2022), and `shared` where norm is norm' (Wang and Komatsuzaki, 2021)."""
    bias: bool = False
    """Whether norms of the kind `layer` add a bias b."""

    def __post_init__(self) -> None:
        """Raise `ValueError` for norms of results that are no RMS norms: nothing computes them."""
        if self.kind != "rms" and self.placement in ("post", "both"):
            raise ValueError(f"a norm of the kind {self.kind} is computed before a mixer or feed, not behind it")

    @property
    def is_parallel(self) -> bool:
        """Whether mixer and feed stand side by side, and not one behind the other."""
        return self.placement in ("parallel", "shared")

    def parameters(self, hidden_size: int, sublayer: Literal["mixer", "feed"]) -> dict[str, Fused]:
        """Return the weights of one sublayer's norms.

        They are `norm_E` of its input, or `layer_norm_E` and `layer_norm_bias_E`, and `result_norm_E` of its result.
        """
        found: dict[str, Fused] = {}
        if self.placement != "post" and not (self.placement == "shared" and sublayer == "feed"):
            found |= self.weights(f"{sublayer}_norm", hidden_size)
        if self.placement in ("post", "both"):
            found["result_norm_E"] = norm(**{f"{sublayer}_result_norm": hidden_size})
        return found

    def weights(self, role: str, size: int) -> dict[str, Fused]:
        """Return the weights of one norm of this kind with the role `role`."""
        if self.kind == "rms":
            return {"norm_E": norm(**{role: size})}
        found = {"layer_norm_E": norm(**{role: size})}
        return found | {"layer_norm_bias_E": bias(**{role: size})} if self.bias else found
