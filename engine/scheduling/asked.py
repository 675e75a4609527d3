"""`Asked`: what a caller asks of one choice of one generation, as a frozen value; nothing in it ever changes.

Next to read: request.py, which holds how far the choice got and where it lies.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.adapters.slots import AdapterVersion
from headrace.engine.scheduling.pooling import Pooling
from headrace.engine.scheduling.shaping import Grammar, LogitsProcessor, Reporting, Shaping

__all__ = ["Asked", "Sampling"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """Rules by which a row chooses its next token: the part of `SamplingParams` that a runner needs."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    """Seed of the noise, which depends on this and the token's position alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What is asked of one choice: how tokens are chosen, when it ends, and for whom it is."""

    limit: int
    """Number of tokens, prompt and completion, at which the choice ends with `length`. The context and the pool may
    lower it."""
    sampling: Sampling = Sampling()
    stop_ids: frozenset[int] = frozenset()
    """Token ids that end the choice with `stop`."""
    priority: int = 0
    """Priority of service; lower is served first."""
    tenant: str | None = None
    """Tenant that the work is counted for."""
    deadline: float | None = None
    """Latest end, in seconds on the step loop's clock; None for no deadline."""
    root: bytes = b""
    """First link of the prefix hash chain: adapter and tenant salt."""
    adapter: str | None = None
    """Name of the LoRA adapter; None for the model itself."""
    version: AdapterVersion | None = None
    """Version of `adapter` that the row uses: the one that was loaded when the request arrived."""
    shaping: Shaping | None = None
    """Changes to the logits before a token is chosen."""
    reporting: Reporting | None = None
    """Log-probabilities to report."""
    grammar: Grammar | None = None
    """Constraint on the text of the completion."""
    jumps: bool = False
    """Whether tokens that `grammar` forces are accepted at once and computed together."""
    processor: LogitsProcessor | None = None
    """Caller's hook, which runs on the host between any two tokens: the next is planned only when the last is known."""
    pooling: Pooling | None = None
    """Kind of result wanted of the hidden states; the choice then samples nothing and ends when its tokens are
    computed."""
    speculates: bool = False
    """Whether steps may verify drafts of the tokens to come, each of which is kept where the choice would be the same
    without it."""
    alone: bool = False
    """Whether the choice is computed in steps of its own, which depend on its tokens alone (alone.py)."""
    holds: bool = False
    """Whether the choice pauses at its limit, holding its pages for others to fork, until it is ended."""
