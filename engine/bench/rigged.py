"""Rigs random weights so that it is known which experts tokens choose: all the same, or each row others; times nothing.

Tokens have classes, the token t that of t modulo their number, and each class has a code, orthogonal to the others. The
embedding of a token is the code of its class, so large that what layers add changes little: a router reads the code,
whatever came before. A router's row for an expert is the sum of the codes of the classes that are to choose it. Rows of
the output head are the codes again, so that the likeliest token behind another is one of its class. Nothing but these
numbers changes: shapes, formats and what is computed stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import sqrt
from typing import Any, Final

import torch
from torch import Tensor

from headrace.engine.bench.opening import BenchmarkFailed, Target
from headrace.engine.bench.profile import replaced
from headrace.engine.bench.shapes import located, spec_of
from headrace.engine.model.checkpoint.weights import DecoderWeights
from headrace.engine.model.experts import ROUTER, ExpertsFeed, routing_of
from headrace.engine.model.network.decoder import Decoder
from headrace.engine.model.spec import DecoderSpec
from headrace.ops.routing import Routing

__all__ = ["ROUTINGS", "RiggedRouting", "rigged"]

ROUTINGS: Final = ("uniform", "one", "each")
"""What tokens choose: as random weights have it, all of them the same experts, or each row others."""
_EMBEDDED: Final = 256.0
"""Size of an embedding's numbers, beside which layers with random weights add little."""
_LOGIT: Final = 16.0
"""Logit, of a router or of the head, of what goes with a token's class; of all else it is near 0."""


@dataclass(frozen=True, slots=True)
class RiggedRouting:
    """What the tokens of each class choose."""

    how: str
    """One of `ROUTINGS`."""
    routing: Routing

    @property
    def classes(self) -> int:
        """Number of classes: one, or as many as it takes until each expert is chosen."""
        return 1 if self.how == "one" else -(-self.routing.experts // self.routing.top_k)

    def distinct(self, rows: int) -> int:
        """Return the distinct experts of a layer that a step of so many rows chooses."""
        return min(min(rows, self.classes) * self.routing.top_k, self.routing.experts)

    def check(self, rows: int, chosen: float | None) -> None:
        """Refuse figures of steps that did not choose what they should have.

        Args:
            rows: Rows of each step.
            chosen: Distinct experts of a layer that they were seen to choose; None where none was seen.

        Raises:
            BenchmarkFailed: They are not those that were meant, within a twentieth.
        """
        meant = self.distinct(rows)
        if chosen is None or abs(chosen - meant) > 0.05 * meant:
            seen = "none" if chosen is None else f"{chosen:.1f}"
            raise BenchmarkFailed(f"--routing: {rows} rows are to choose {meant} experts of a layer, and chose {seen}")

    def ended(self, prompts: Sequence[list[int]]) -> list[list[int]]:
        """Return prompts that end with tokens of different classes, as far as there are any."""
        return [[*prompt[:-1], row % self.classes] for row, prompt in enumerate(prompts)]

    def rig(self, spec: DecoderSpec, weights: DecoderWeights) -> None:
        """Change the numbers of a model's embedding, head and routers."""
        embedding = weights.embedding_VE
        codes_CE = _codes(self.classes, spec.hidden_size)
        of_tokens_VE = codes_CE.to(embedding)[torch.arange(spec.vocab_size, device=embedding.device) % self.classes]
        embedding.copy_(of_tokens_VE * _EMBEDDED)
        if weights.head is not weights.embedding:
            weights.head.parts["values"].copy_(of_tokens_VE * (_LOGIT / spec.hidden_size))
        router_XE = self._router(codes_CE) * (_LOGIT / spec.hidden_size)
        for number, layer in enumerate(spec.layers):
            if isinstance(layer.feed, ExpertsFeed):
                weights.layers[number].feed.vectors[ROUTER].copy_(router_XE)

    def _router(self, codes_CE: Tensor) -> Tensor:
        """Return the sums of the codes of the classes that choose each expert, [X, E]: each class the next few ones."""
        chosen_CK = torch.arange(self.classes * self.routing.top_k).view(self.classes, -1) % self.routing.experts
        router_XE = torch.zeros(self.routing.experts, codes_CE.shape[1])
        return router_XE.index_add_(0, chosen_CK.flatten(), codes_CE.repeat_interleave(self.routing.top_k, 0))


def _codes(count: int, size: int) -> Tensor:
    """Return random codes, [count, size], which are orthogonal, and whose numbers are of size 1."""
    drawn_EC = torch.randn(size, count, generator=torch.Generator().manual_seed(0))
    orthogonal_EC: Tensor = torch.linalg.qr(drawn_EC).Q
    return orthogonal_EC.T * sqrt(size)


@contextmanager
def rigged(how: str, target: Target) -> Iterator[RiggedRouting | None]:
    """Rig the weights of the models that are opened in the block, which are to be `target`; not those of `uniform`.

    Raises:
        BenchmarkFailed: `how` is none of `ROUTINGS`, or the weights of `target` cannot be rigged.
        ModelRejected: The model is not one that headrace computes.
    """
    if how not in ROUTINGS:
        raise BenchmarkFailed(f"--routing {how}: give one of {', '.join(ROUTINGS)}")
    if how == "uniform":
        yield None
        return
    made = RiggedRouting(how, _routing(how, target))

    def rigging(original: Callable[..., None]) -> Callable[..., None]:
        def call(decoder: Any, spec: DecoderSpec, weights: DecoderWeights, *rest: Any, **named: Any) -> None:
            made.rig(spec, weights)
            original(decoder, spec, weights, *rest, **named)

        return call

    with replaced(Decoder, "__init__", rigging):
        yield made


def _routing(how: str, target: Target) -> Routing:
    """Return how the routers of `target` choose, if its weights can be rigged."""
    with located(target.model) as (path, only_shape):
        options = target.options(only_shape=only_shape)
        if options["load_format"] != "random":
            why = "rigs random weights alone; use --load-format random"
        elif any(target.more.get(name) for name in ("speculation", "quantize_head")):
            why = "rigs neither what drafts nor an output head that is quantised"
        elif (routing := routing_of(spec_of(path))) is None:
            why = f"{target.model} has no experts"
        else:
            return routing
    raise BenchmarkFailed(f"--routing {how}: {why}")
