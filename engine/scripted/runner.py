"""`ScriptedRunner`: carries out plans without a device, on lists, as a real runner does on tensors.

It computes each token only from the tokens that it reads back through its page table, so a wrong, stale or doubly owned
page shows as a wrong token. Next to read: testing.py, which makes an engine of it, and rows.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.engine.scheduling import plan as plans
from headrace.engine.scheduling.plan import RowOptions, StepPlan, Work
from headrace.engine.scheduling.result import Choice, NoToken, StepResult
from headrace.engine.scheduling.shaping import Grammar, Report
from headrace.engine.scripted.adapters import ScriptedBank
from headrace.engine.scripted.rows import ScriptedRow, made_up_logits, report

__all__ = ["VECTOR", "Capacity", "ScriptedRunner", "ScriptedStep", "scripted_token", "scripted_vector"]

_POISON = -7
VECTOR = 8
"""Number of elements of a hidden state."""
_SEEDS = 2**63


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity(plans.Capacity):
    """Sizes of a scripted device: 256 pages of 16 tokens and 16 requests at a time, unless others are named."""

    num_pages: int = 256
    page_size: int = 16
    max_rows: int = 16
    max_batched_tokens: int = 256
    max_context: int = 4096
    vocab_size: int = 257


def scripted_token(tokens: Sequence[int], vocab_size: int) -> int:
    """Return the token of `ScriptedRunner` after `tokens`: a hash of all of them, below `vocab_size`."""
    digest = blake2b(b",".join(b"%d" % token for token in tokens), digest_size=8).digest()
    return int.from_bytes(digest, "little") % vocab_size


def scripted_vector(tokens: Sequence[int]) -> NDArray[np.float32]:
    """Return the hidden state of `ScriptedRunner` after `tokens`: 8 elements from 0 to 1, a hash of them."""
    digest = blake2b(b",".join(b"%d" % token for token in tokens), digest_size=VECTOR).digest()
    return np.array([byte / 255 for byte in digest], np.float32)


class ScriptedStep:
    """A step of `ScriptedRunner`: its result, or the error that it raises."""

    def __init__(self, result: StepResult, error: Exception | None, gate: Callable[[], None] | None) -> None:
        """Hold a result until it is waited for."""
        self._result = result
        self._error = error
        self._gate = gate

    def wait(self) -> StepResult:
        """Return the step's result after the runner's `gate`, or raise the scripted error."""
        if self._gate is not None:
            self._gate()
        if self._error is not None:
            raise self._error
        return self._result


class _Told(NamedTuple):
    """Results of a step besides its tokens, by index of the work."""

    chosen: dict[int, Report]
    prompts: dict[int, list[Report]]
    choices: dict[int, Choice]


class ScriptedRunner:
    """A runner without a device: carries out plans on lists, as a real one does on tensors."""

    def __init__(
        self,
        capacity: plans.Capacity | None = None,
        *,
        gate: Callable[[], None] | None = None,
        faults: Mapping[int, Exception | int | NoToken] | None = None,
        eos: Mapping[int, int] | None = None,
    ) -> None:
        """Start with every page poisoned.

        Args:
            capacity: Sizes of the pool and of the vocabulary; None is `Capacity()`.
            gate: Called by every `Step.wait`, in the waiter's thread; sleep in it to imitate a slow device.
            faults: By step number, an exception that the step raises, or what the first work
                gets: a token id, or what happens in its place.
            eos: By position, a token id to sample there, whatever the script says.
        """
        capacity = capacity or Capacity()
        self.capacity = capacity
        self.launched = 0
        self.closed = False
        self.bank = ScriptedBank()
        self.scripts: dict[tuple[str | None, tuple[int, ...], Grammar | None], list[int]] = {}
        """Tokens sampled after a prompt, by adapter, the prompt's ids and grammar; an end of sequence ends each."""
        self._gate = gate
        self._faults = faults or {}
        self._eos = eos or {}
        self._cells = [[_POISON] * capacity.page_size for _ in range(capacity.num_pages)]
        self._tokens: list[dict[int, int]] = [{} for _ in range(capacity.max_rows)]
        self._tables: list[dict[int, int]] = [{} for _ in range(capacity.max_rows)]
        self._slots = [-1] * capacity.max_rows
        self._options: dict[int, RowOptions] = {}
        self._asking: dict[int, ScriptedRow] = {}
        self._host: dict[int, list[int]] = {}
        self._lock = threading.Lock()

    def launch(self, plan: StepPlan) -> ScriptedStep:
        """Carry out `plan` at once; its result shows in `wait`."""
        with self._lock:
            self.launched += 1
            for row in plan.new_rows:
                self._tokens[row.row] = dict(enumerate(row.tokens, row.start))
                self._tables[row.row] = {}
                self._slots[row.row] = row.slot
                self._options.pop(row.row, None)
                self._asking.pop(row.row, None)
            for options in plan.options:
                self._options[options.row] = options
            for given in plan.given:
                self._tokens[given.row].update(enumerate(given.tokens, given.start))
            for page, place in plan.spills:
                self._host[place] = list(self._cells[page])
            for entry in plan.entries:
                self._tables[entry.row][entry.place] = entry.page
            for source, destination in plan.copies:
                self._cells[destination] = list(self._cells[source])
            for place, page in plan.fetches:
                self._cells[page] = self._host.pop(place)
            fault = self._faults.get(plan.step)
            if isinstance(fault, Exception):
                self._spoil(plan)
                return ScriptedStep(StepResult(()), fault, self._gate)
            self._write(plan)
            self._told = _Told({}, {}, {})
            sampled = self._sample(plan)
            if fault is not None:
                sampled[0] = fault
            return ScriptedStep(self._result(plan, sampled), None, self._gate)

    def open_host_pool(self, places: int) -> float:
        """Make room for any number of pages, and return 0 seconds as the time to move one."""
        return 0.0

    most_pages = 1 << 20

    def resize(self, num_pages: int) -> None:
        """Change the number of pages to `num_pages`; new ones are poisoned."""
        with self._lock:
            del self._cells[num_pages:]
            self._cells += [[_POISON] * self.capacity.page_size for _ in range(num_pages - len(self._cells))]

    def sleep(self, *, keep_weights: bool) -> None:
        """Drop all pages; there are no weights to keep."""
        self.resize(0)

    wake = resize

    def close(self) -> None:
        """Note that the runner is closed, and drop all pages."""
        self.closed = True
        self._cells = []

    def _write(self, plan: StepPlan) -> None:
        size = self.capacity.page_size
        for work in plan.works:
            table, tokens = self._tables[work.row], self._tokens[work.row]
            for position in range(work.start, work.start + work.num_tokens):
                self._cells[table[position // size]][position % size] = tokens[position]

    def _spoil(self, plan: StepPlan) -> None:
        size = self.capacity.page_size
        for _, place in plan.spills:
            self._host[place] = [_POISON] * size
        for _, page in [*plan.copies, *plan.fetches]:
            self._cells[page] = [_POISON] * size
        for work in plan.works:
            for position in range(work.start, work.start + work.num_tokens):
                self._cells[self._tables[work.row][position // size]][position % size] = _POISON
            self._tokens[work.row][work.start + work.num_tokens] = _POISON

    def _result(self, plan: StepPlan, sampled: Sequence[int | NoToken]) -> StepResult:
        """Return the result of a step that sampled these tokens, with all that its rows asked for."""
        pooled = {index: value for index, work in enumerate(plan.works) if (value := self._pool(work)) is not None}
        told = self._told
        return StepResult(
            [0 if isinstance(token, NoToken) else token for token in sampled],
            instead={index: token for index, token in enumerate(sampled) if isinstance(token, NoToken)},
            reports=told.chosen,
            prompt_reports=told.prompts,
            pooled=pooled,
            choices=told.choices,
        )

    def _sample(self, plan: StepPlan) -> list[int | NoToken]:
        sampled: list[int | NoToken] = []
        for index, work in enumerate(plan.works):
            token: int | NoToken = 0
            options = self._options.get(work.row)
            if options is not None and (found := self._prompt_reports(work, options)):
                self._told.prompts[index] = found
            if work.samples:
                token = self._choose(index, work, options)
                stored = token.value if isinstance(token, NoToken) else token
                self._tokens[work.row][work.start + work.num_tokens] = stored
            sampled.append(token)
        return sampled

    def _choose(self, index: int, work: Work, options: RowOptions | None) -> int | NoToken:
        """Return the token behind `work`: the scripted one for its place or its prompt, or else a hash."""
        read = self._read(work)
        token = self._eos.get(len(read))
        if token is None and self.scripts:
            token = self._scripted(work, read, None if options is None else options.grammar)
        scripted, hashed = token is not None, [*self.bank.contents(self._slots[work.row]), *read]
        if token is None:
            token = scripted_token(hashed, self.capacity.vocab_size)
        if options is None:
            return token
        row = self._asking.get(work.row)
        if row is None:
            row = self._asking[work.row] = ScriptedRow(options, self.capacity.vocab_size)
        ahead = token if scripted or options.grammar is None else None
        logits_V = made_up_logits(scripted_token(hashed, _SEEDS), self.capacity.vocab_size, ahead)
        choose = partial(row.choose, read, logits_V, scripted=scripted)
        if options.processor is not None:
            self._told.choices[index] = choose
            return NoToken.CHOSEN_LATER
        found, told = choose()
        if told is not None:
            self._told.chosen[index] = told
        return found

    def _scripted(self, work: Work, read: Sequence[int], grammar: Grammar | None) -> int | None:
        """Return the next token of the answer to the prompt, or for a beam, to its prompt before it branched off."""
        request = work.request
        known = tuple(read[request.virtual_tokens :])
        for length in range(request.prompt_len - request.virtual_tokens, 0, -1):
            script = self.scripts.get((request.asked.adapter, known[:length], grammar))
            if script is not None:
                return script[min(len(known) - length, len(script) - 1)]
        return None

    def _prompt_reports(self, work: Work, options: RowOptions) -> list[Report]:
        """Return reports on the tokens of the prompt behind those of `work`, if they are wanted."""
        if options.reporting is None or options.reporting.prompt is None:
            return []
        ends = range(work.start + 1, min(work.start + 1 + work.num_tokens, options.prompt_len))
        found, vocab_size = [], self.capacity.vocab_size
        for end in ends:
            seed, token = scripted_token(options.tokens[:end], _SEEDS), scripted_token(options.tokens[:end], vocab_size)
            logits_V = made_up_logits(seed, vocab_size, token)
            found.append(report(logits_V, options.tokens[end], options.reporting.prompt))
        return found

    def _read(self, work: Work) -> list[int]:
        """Return the tokens of a row that are within the attention window, read from its pages."""
        size, table = self.capacity.page_size, self._tables[work.row]
        end = work.start + work.num_tokens
        start = 0 if self.capacity.window is None else max(0, end - self.capacity.window)
        return [self._cells[table[position // size]][position % size] for position in range(start, end)]

    def _pool(self, work: Work) -> NDArray[np.float32] | None:
        """Return the pooled hidden states of a row that ends with `work`; None if the row is not pooled."""
        options = self._options.get(work.row)
        if options is None or options.pooling is None or work.start + work.num_tokens < options.prompt_len:
            return None
        read = self._read(work)
        states = np.stack([scripted_vector(read[: end + 1]) for end in range(len(read))])
        pooled: dict[str, NDArray[np.float32]] = {"last": states[-1], "mean": states.mean(0), "all": states}
        return pooled[options.pooling.kind]
