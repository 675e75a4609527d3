"""`HostChoices`: rows whose next token the host chooses, because their callers' own code has a say in it.

Owns the options of such rows - penalties, masks, grammar, reports - so that the device only has to give their logits.
Choosing runs later, in a thread outside the runner, and may take long. Next to read: engine/steps/hooks.py.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.engine.scheduling.asked import Sampling
from headrace.engine.scheduling.plan import Capacity, RowOptions, StepPlan
from headrace.engine.scheduling.result import Choice, Chosen, NoToken
from headrace.engine.scheduling.shaping import GrammarState, LogitsProcessor, Report, Reporting
from headrace.engine.steps.shaped_logits import processed_logits, shaper_of
from headrace.ops.cpu.logprobs import logprobs
from headrace.ops.cpu.sample import Choosing, sample

__all__ = ["HostChoices"]

_Logits = NDArray[np.float32]


class HostChoices:
    """The rows of one runner whose next tokens the host chooses."""

    def __init__(self, capacity: Capacity) -> None:
        """Start without rows.

        Args:
            capacity: Most rows, and the width of the logits.
        """
        self._vocab_size = capacity.vocab_size
        self._rows: dict[int, _HostRow] = {}
        self.asks = np.zeros(capacity.max_rows + 1, np.bool_)
        """Whether the host chooses for each row, bool [rows]."""

    def take(self, plan: StepPlan) -> StepPlan:
        """Add the plan's new rows that the host chooses for; return the plan without the options of the host."""
        for row in (*plan.left_rows, *(new.row for new in plan.new_rows)) if self._rows else ():
            self._rows.pop(row, None)
            self.asks[row] = False
        hosted = [options for options in plan.options if options.processor is not None]
        if not hosted:
            return plan
        sampling = {new.row: new.sampling for new in plan.new_rows}
        for options in hosted:
            if options.processor is not None:
                self.asks[options.row] = True
                self._rows[options.row] = _HostRow(options, options.processor, sampling[options.row], self._vocab_size)
        return replace(
            plan,
            new_rows=[new._replace(stop_ids=frozenset()) if self.asks[new.row] else new for new in plan.new_rows],
            options=[_left_to_device(options) for options in plan.options],
        )

    def choice(self, row: int, logits_V: _Logits) -> Choice:
        """Return a function that chooses the next token of `row`, from a copy of `logits_V`."""
        return partial(self._rows[row].choose, logits_V.copy())


def _left_to_device(options: RowOptions) -> RowOptions:
    """Return the options that a device still serves where the host chooses: log-probabilities of the prompt."""
    if options.processor is None:
        return options
    wanted = options.reporting is not None and options.reporting.prompt is not None
    reporting = Reporting(prompt=options.reporting.prompt) if wanted and options.reporting is not None else None
    return options._replace(shaping=None, grammar=None, reporting=reporting)


class _HostRow:
    """One row, for as long as one request uses it; not for concurrent calls."""

    def __init__(self, options: RowOptions, processor: LogitsProcessor, sampling: Sampling, vocab_size: int) -> None:
        self._options, self._processor, self._sampling, self._vocab_size = options, processor, sampling, vocab_size
        self._tokens = list(options.tokens)
        self._shaper = None if options.shaping is None else shaper_of(options, options.shaping, vocab_size)
        self._state: GrammarState | None = None

    def choose(self, logits_V: _Logits) -> Chosen:
        """Return the next token, and the report on it if one is wanted.

        Raises:
            HookFailed: The hook raised, or returned something other than logits.
        """
        if not math.isfinite(logits_V.max()):
            return NoToken.NON_FINITE, None
        reporting = self._options.reporting
        top = None if reporting is None else reporting.completion
        given_V = None if top is None else logits_V.copy()
        token = self._chosen(processed_logits(self._processor, list(self._tokens), logits_V))
        if isinstance(token, NoToken):
            return token, None
        self._keep(token)
        if given_V is None or top is None:
            return token, None
        return token, Report(*logprobs(torch.from_numpy(given_V[None]), [token], [top])[0])

    def _keep(self, token: int) -> None:
        self._tokens.append(token)
        if self._shaper is not None:
            self._shaper.append(token)
        if self._state is not None:
            self._state.advance(token)

    def _chosen(self, logits_V: _Logits) -> int | NoToken:
        if self._shaper is not None and not self._shaper.shape(logits_V, np.array(self._tokens)):
            return NoToken.NOTHING_LEFT
        if self._options.grammar is not None:
            self._mask(logits_V)
        if logits_V.max() == -math.inf:
            return NoToken.NOTHING_LEFT
        asked = self._sampling
        choosing = Choosing(asked.temperature, asked.top_k, asked.top_p, asked.min_p, asked.seed, len(self._tokens))
        return sample(torch.from_numpy(logits_V[None]), [choosing])[0]

    def _mask(self, logits_V: _Logits) -> None:
        """Ban the tokens that the grammar does not allow; all of them if the grammar failed."""
        options = self._options
        try:
            if self._state is None and options.grammar is not None:
                self._state = options.grammar.begin(options.tokens[options.prompt_len :])
            allowed = b"" if self._state is None else self._state.allowed()
        except Exception:
            allowed = b""
        bits = np.unpackbits(np.frombuffer(allowed, np.uint8), bitorder="little")[: self._vocab_size]
        logits_V[: len(bits)][bits == 0] = -np.inf
        logits_V[len(bits) :] = -np.inf
