"""`Generation`: the engine's side of one stream, from committed tokens to the items that its reader has not read.

Owns the unread items of one caller's request, and `TokenMaker`, which makes tokens of them when they are read; never
talks to a device and never decides what runs. Next to read: concurrency/mailbox.py, and stream.py, which reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from typing import NamedTuple, Protocol

import anyio

from headrace.engine.concurrency.mailbox import Mailbox
from headrace.engine.delivery.logprobs import token_logprobs
from headrace.engine.errors import HeadraceError
from headrace.engine.events import FinishReason, Token, Usage
from headrace.engine.params import SamplingParams
from headrace.engine.scheduling.plan import Emission
from headrace.engine.scheduling.request import Request
from headrace.engine.scheduling.shaping import Report
from headrace.engine.tokens.spaced import SpacedDetokenizer
from headrace.engine.tokens.text import Detokenizer
from headrace.engine.tokens.token_table import TokenTable

__all__ = ["Control", "Delivered", "Generation", "TokenMaker", "detokenizer_of"]


class Delivered(NamedTuple):
    """One committed token of one choice, on its way to the reader."""

    choice: int
    id: int | None
    text: str | None
    """Text of the token, which stop strings need early; None if the reader turns the id into text."""
    finish_reason: FinishReason | None
    report: Report | None = None
    """Log-probabilities, if they are wanted."""
    stop_string: str | None = None
    """The stop string that ended the choice, if one did."""
    token: Token | None = None
    """The token for the reader, if a hook has seen it already."""
    score: float | None = None
    """Score of a beam, with its last token."""


# Does the work of `Delivered`'s own constructor in half the time: every token passes here.
_delivered = partial(tuple.__new__, Delivered)


class Control(Protocol):
    """The operations that a generation may ask of the step loop."""

    def finish(self, request: Request, reason: FinishReason) -> bool:
        """End a request; return False if it has ended already."""
        ...

    def pause(self, request: Request) -> None:
        """Stop planning a request."""
        ...

    def resume(self, request: Request) -> None:
        """Plan a paused request again."""
        ...

    def let_go(self, request: Request) -> None:
        """Note that one reader fewer may continue after a request."""
        ...


class Generation:
    """All choices of one caller's request."""

    def __init__(self, control: Control, choices: int, window: int) -> None:
        """Start before admission.

        Args:
            control: The step loop.
            choices: Number of choices.
            window: Unread tokens after which the choices pause.
        """
        self.requests: Sequence[Request] = ()
        self.prompt: list[int] = []
        self.mailbox: Mailbox[Delivered] = Mailbox()
        self.admitted = anyio.Event()
        """Event that is set once the scheduler has the request, or once it was refused or cancelled before."""
        self.held = 0
        """Number of items that the stream has taken and its reader has not read."""
        self.taken_up: float | None = None
        """`time.perf_counter()` at the launch of the first step with this request."""
        self.error: HeadraceError | None = None
        self._control = control
        self._window = window
        self.paused = False
        """Whether the choices wait for their reader."""
        self._choice_of: dict[int, int] = {}
        self._first: Request | None = None
        self._unfinished = choices

    def start(self, prompt: list[int], requests: Sequence[Request]) -> None:
        """Take in the choices, which the scheduler has accepted."""
        self.prompt = prompt
        self.requests = requests
        self._first = requests[0]
        self._choice_of = {request.id: choice for choice, request in enumerate(requests)}
        self.admitted.set()

    def take_up(self, now: float) -> None:
        """Note the launch of the first step with this request."""
        self.taken_up = now

    def share(self) -> None:
        """Note that one more reader may continue after this generation."""
        for request in self.requests:
            request.streams += 1

    def let_go(self) -> None:
        """Note that one reader fewer may continue after this generation; each reader says so once."""
        for request in self.requests:
            if request.streams:
                self._control.let_go(request)

    @property
    def finished(self) -> bool:
        """Whether every choice has ended."""
        return self._unfinished == 0

    @property
    def usage(self) -> Usage:
        """Tokens counted so far."""
        completion = sum(len(request.tokens) - request.virtual_tokens - len(self.prompt) for request in self.requests)
        return self._usage(completion)

    def _usage(self, completion: int) -> Usage:
        first = self._first
        cached = 0 if first is None else max(0, first.cached - first.virtual_tokens)
        return Usage(prompt_tokens=len(self.prompt), completion_tokens=completion, cached_tokens=cached)

    def deliver_token(self, request: Request, token: int) -> None:
        """Put a token, after which its choice continues, where the reader finds it."""
        item = _delivered((self._choice_of[request.id], token, None, None, None, None, None, None))
        self._await_reader(self.mailbox.put(item))

    def deliver(self, emission: Emission) -> None:
        """Put a commit's result where the reader finds it."""
        if self.finished:  # as when another choice failed in the same step
            return
        if emission.error is not None:
            self.fail(emission.error)
            return
        choice, reason = self._choice_of[emission.request.id], emission.finish_reason
        unread = self.mailbox.put(_delivered((choice, emission.token, None, reason, emission.report, None, None, None)))
        if reason is not None:
            self._count_end()
        else:
            self._await_reader(unread)

    def _await_reader(self, unread: int) -> None:
        """Pause the choices if their reader is far behind."""
        if unread + self.held >= self._window and not self.paused:
            self.paused = True
            for request in self.requests:
                self._control.pause(request)

    def drained(self) -> None:
        """Run paused choices again, since the reader has taken all items."""
        if self.paused:
            self.paused = False
            for request in self.requests:
                self._control.resume(request)

    def cancel(self) -> None:
        """End every choice that still runs with `cancelled`; do nothing to those that have ended."""
        if self.finished:
            return
        if not self.admitted.is_set():
            for choice in range(self._unfinished):
                self._end_cancelled(choice)
            self.admitted.set()
        for choice, request in enumerate(self.requests):
            if self._control.finish(request, "cancelled"):
                self._end_cancelled(choice)

    def _end_cancelled(self, choice: int, text: str | None = None) -> None:
        self.mailbox.put(Delivered(choice, None, text, "cancelled"))
        self._count_end()

    def fail(self, error: HeadraceError) -> None:
        """End the stream with `error`; choices that still run are dropped."""
        self.abandon(error)
        for request in self.requests:
            self._control.finish(request, "cancelled")

    def abandon(self, error: HeadraceError) -> None:
        """End the stream with `error` without telling the step loop, which is dead or never knew of it."""
        if not self.finished:
            self.error = error
            self._unfinished = 0
            self.mailbox.close(error)
            self.admitted.set()

    def _count_end(self) -> None:
        self._unfinished -= 1
        if not self._unfinished:
            self.mailbox.close()


_new_token = Token.__new__


class TokenMaker:
    """Makes the tokens of one stream, each choice's in order."""

    def __init__(self, table: TokenTable, params: SamplingParams, stop_ids: AbstractSet[int]) -> None:
        """Turn ids into text by `table` under `params`; `stop_ids` end a choice."""
        self.table = table
        self._hidden: AbstractSet[int] = frozenset() if params.include_stop_str_in_output else stop_ids
        self._detokenizers = [detokenizer_of(table, params) for _ in range(params.n)]
        self._positions = [0] * params.n

    def make(self, item: Delivered) -> Token:
        """Return the token of a delivered item."""
        choice, identity, text, reason, report, stop, _, score = item
        if text is None:
            hidden = identity is None or (reason == "stop" and identity in self._hidden)
            text = "" if hidden or identity is None else self._detokenizers[choice].feed(identity)
            if reason is not None:
                text += self.flush(choice)
        position = self._positions[choice]
        self._positions[choice] = position + 1
        token = _token(identity, text, choice, position, reason, stop)
        if report is not None and identity is not None:
            token.logprob = report.logprob
            token.logprobs = token_logprobs(self.table, identity, report)
        if score is not None:
            token.score = score
        return token

    def skip(self, ids: Sequence[int]) -> None:
        """Begin the only choice after its first tokens, whose text has been shown."""
        for token in ids:
            self._detokenizers[0].feed(token)
        self._positions[0] = len(ids)

    def flush(self, choice: int) -> str:
        """Return the rest of a choice's text, which ends here."""
        return self._detokenizers[choice].flush()


def _token(
    identity: int | None, text: str, choice: int, position: int, reason: FinishReason | None, stop: str | None
) -> Token:
    """Return a `Token`, built in a third of the time of its own constructor."""
    token = _new_token(Token)
    token.id = identity
    token.text = text
    token.index = choice
    token.position = position
    token.finish_reason = reason
    token.stop_string = stop
    token.logprob = token.logprobs = token.score = None
    return token


def detokenizer_of(table: TokenTable, params: SamplingParams) -> Detokenizer:
    """Return the detokenizer for the ids of one choice under `params`."""
    if params.spaces_between_special_tokens and not params.skip_special_tokens:
        return SpacedDetokenizer(table)
    return Detokenizer(table, params.skip_special_tokens)
