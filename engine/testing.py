"""Public fakes: a runner and a tokenizer that need no model, for tests of applications and of headrace itself.

Owns nothing of the engine. `ScriptedRunner` computes each token only from what it reads back through its page table,
so a wrong, stale or doubly owned page shows as a wrong token.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.engine.engine import Engine
from headrace.engine.errors import InvalidParams
from headrace.engine.messages import Message
from headrace.engine.opened import Opened
from headrace.engine.prompts import ChatEnd
from headrace.engine.scheduling.plan import NON_FINITE, Capacity, RowOptions, StepPlan, Work
from headrace.engine.scheduling.pooling import Embedding
from headrace.engine.scheduling.shaping import ReportedTokens
from headrace.engine.stats import EngineInfo
from headrace.engine.text import TokenTable

__all__ = [
    "NON_FINITE",
    "ByteTokenizer",
    "Capacity",
    "ScriptedEngine",
    "ScriptedRunner",
    "scripted_token",
    "scripted_vector",
]

_POISON = -7
_VECTOR = 8


def scripted_token(tokens: Sequence[int], vocab_size: int) -> int:
    """The token that `ScriptedRunner` gives after `tokens`: a hash of all of them, below `vocab_size`."""
    digest = blake2b(b",".join(b"%d" % token for token in tokens), digest_size=8).digest()
    return int.from_bytes(digest, "little") % vocab_size


def scripted_vector(tokens: Sequence[int]) -> NDArray[np.float32]:
    """The hidden state that `ScriptedRunner` gives after `tokens`: 8 elements from 0 to 1, a hash of them."""
    digest = blake2b(b",".join(b"%d" % token for token in tokens), digest_size=_VECTOR).digest()
    return np.array([byte / 255 for byte in digest], np.float32)


class ScriptedStep:
    """A step of `ScriptedRunner`: its result, or what it raises."""

    def __init__(self, tokens: list[int], error: Exception | None, gate: Callable[[], None] | None) -> None:
        """Hold a result until it is waited for."""
        self._tokens = tokens
        self._error = error
        self._gate = gate

    def wait(self) -> Sequence[int]:
        """Return the step's tokens after the runner's `gate`, or raise what was scripted."""
        if self._gate is not None:
            self._gate()
        if self._error is not None:
            raise self._error
        return self._tokens


class ScriptedRunner:
    """A runner without a device: carries out plans on lists, the way a real one does on tensors."""

    def __init__(
        self,
        capacity: Capacity,
        *,
        gate: Callable[[], None] | None = None,
        faults: Mapping[int, Exception | int] | None = None,
        eos: Mapping[int, int] | None = None,
    ) -> None:
        """Start with every page poisoned.

        Args:
            capacity: Sizes of the pool and of the vocabulary.
            gate: Called by every `Step.wait`, in the waiter's thread; sleep in it to imitate a slow device.
            faults: Step number -> exception the step raises, or a token id it returns for its first work instead.
            eos: Position -> token id to sample there, whatever the script says.
        """
        self.capacity = capacity
        self.launched = 0
        self.closed = False
        self._gate = gate
        self._faults = faults or {}
        self._eos = eos or {}
        self._cells = [[_POISON] * capacity.page_size for _ in range(capacity.num_pages)]
        self._tokens: list[dict[int, int]] = [{} for _ in range(capacity.max_rows)]
        self._tables: list[dict[int, int]] = [{} for _ in range(capacity.max_rows)]
        self._options: dict[int, RowOptions] = {}
        self._host: dict[int, list[int]] = {}
        self._lock = threading.Lock()

    def launch(self, plan: StepPlan) -> ScriptedStep:
        """Carry out `plan` at once; its result shows when it is waited for."""
        with self._lock:
            self.launched += 1
            for row in plan.new_rows:
                self._tokens[row.row] = dict(enumerate(row.tokens, row.start))
                self._tables[row.row] = {}
                self._options.pop(row.row, None)
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
                return ScriptedStep([], fault, self._gate)
            self._write(plan)
            sampled = self._sample(plan)
            if isinstance(fault, int):
                sampled[0] = fault
            pooled = {index: value for index, work in enumerate(plan.works) if (value := self._pool(work)) is not None}
            return ScriptedStep(ReportedTokens(sampled, {}, {}, pooled) if pooled else sampled, None, self._gate)

    def open_host_pool(self, places: int) -> float:
        """Have room for any number of pages; moving one takes no time."""
        return 0.0

    most_pages = 1 << 20

    def resize(self, num_pages: int) -> None:
        """Have so many pages; new ones are poisoned."""
        with self._lock:
            del self._cells[num_pages:]
            self._cells += [[_POISON] * self.capacity.page_size for _ in range(num_pages - len(self._cells))]

    def sleep(self, *, keep_weights: bool) -> None:
        """Have no pages; there are no weights to keep."""
        self.resize(0)

    wake = resize

    def close(self) -> None:
        """Forget everything."""
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

    def _sample(self, plan: StepPlan) -> list[int]:
        sampled = []
        for work in plan.works:
            end = work.start + work.num_tokens
            token = 0
            if work.samples:
                token = self._eos.get(end, scripted_token(self._read(work), self.capacity.vocab_size))
                self._tokens[work.row][end] = token
            sampled.append(token)
        return sampled

    def _read(self, work: Work) -> list[int]:
        """All tokens of a row, from its pages."""
        size, table = self.capacity.page_size, self._tables[work.row]
        end = work.start + work.num_tokens
        return [self._cells[table[position // size]][position % size] for position in range(end)]

    def _pool(self, work: Work) -> NDArray[np.float32] | None:
        """What came of the hidden states of a row that is pooled and ends with `work`."""
        options = self._options.get(work.row)
        if options is None or options.pooling is None or work.start + work.num_tokens < options.prompt_len:
            return None
        read = self._read(work)
        states = np.stack([scripted_vector(read[: end + 1]) for end in range(len(read))])
        pooled: dict[str, NDArray[np.float32]] = {"last": states[-1], "mean": states.mean(0), "all": states}
        return pooled[options.pooling.kind]


class ByteTokenizer:
    """One token a byte: ids 0 to 255; 256 ends a sequence. Any text round-trips."""

    name = "bytes"
    vocab_size = 257
    eos_ids = (256,)
    special_tokens: Mapping[str, Any] = {"eos_token": "<end>"}
    chat_template = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"

    def __init__(self) -> None:
        """Build the table of single bytes."""
        self.table = TokenTable([bytes([value]) for value in range(256)] + [b"<end>"], special_ids=frozenset({256}))

    def encode(self, text: str) -> list[int]:
        """The UTF-8 bytes of `text`."""
        try:
            return list(text.encode())
        except UnicodeEncodeError as error:
            raise InvalidParams(f"prompt: is not text: {error.reason}", field="prompt", value=text) from None

    def encode_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        end: ChatEnd = "answer",
    ) -> list[int]:
        """`role: content` lines, one a message, the last one without its line feed where it is to be continued.

        Tools are left out.
        """
        for index, message in enumerate(messages):
            if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
                field = f"messages[{index}]"
                raise InvalidParams(f"{field}: needs role and content, got {message!r}", field=field, value=message)
        text = "".join(f"{message['role']}: {message['content']}\n" for message in messages)
        return self.encode(text.removesuffix("\n") if end == "open" else text)

    def encode_more(self, text: str) -> list[int]:
        """The same as any text."""
        return self.encode(text)

    def encode_reply(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None) -> list[int]:
        """The end of the answer's line, and the messages."""
        return [*b"\n", *self.encode_chat(messages)]

    def close(self) -> None:
        """There is nothing to return."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, with U+FFFD for what is not UTF-8."""
        return bytes(value for value in ids if value < 256).decode(errors="replace")


class ScriptedEngine(Engine):
    """An engine over a `ScriptedRunner` and a `ByteTokenizer`: all of headrace but the model, in milliseconds."""

    def __init__(self, capacity: Capacity, make_runner: Callable[[], ScriptedRunner] | None = None, **options: Any):
        """Serve whatever `make_runner` returns, by default a plain `ScriptedRunner`.

        Args:
            capacity: Sizes of the pool, the rows and the vocabulary (257 for the tokenizer's).
            make_runner: Called when the engine opens.
            options: Fields of `EngineConfig` other than the model.
        """
        super().__init__("scripted", **options)
        self._capacity = capacity
        self._make_runner = make_runner or (lambda: ScriptedRunner(capacity))

    def _open(self) -> Opened:
        capacity = self._capacity
        names = {"model": "scripted", "architecture": "scripted", "dtype": "none", "device": "none"}
        info = EngineInfo.of(capacity, **names, page_bytes=capacity.page_size, embedding_size=_VECTOR)
        embedding = Embedding(_VECTOR, ("last", "mean"), "last", normalize=True)
        return Opened(self._make_runner(), ByteTokenizer(), capacity, info, frozenset(("pooling",)), embedding)
