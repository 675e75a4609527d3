"""`Generation`: the engine's side of one stream, from committed tokens to the items that its reader has not read.

Owns the unread items and the stop strings of one caller's request; never talks to a device and never decides what runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

import anyio

from headrace.engine.delivery.delivered import Delivered
from headrace.engine.delivery.mailbox import Mailbox
from headrace.engine.delivery.stops import StopText, StopWatch
from headrace.engine.errors import HeadraceError, HookFailed
from headrace.engine.events import FinishReason, Token, Usage
from headrace.engine.scheduling.plan import Emission
from headrace.engine.scheduling.request import Request

__all__ = ["Control", "Generation"]

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

    def __init__(
        self,
        control: Control,
        choices: int,
        window: int,
        stop_texts: Sequence[StopText] = (),
        watch: StopWatch | None = None,
    ) -> None:
        """Start before admission.

        Args:
            control: The step loop.
            choices: Number of choices.
            window: Unread tokens after which the choices pause.
            stop_texts: Stop-string state of each choice, if there are stop strings.
            watch: The caller's `stop_when` hook, if there is one.
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
        self._stop_texts = stop_texts
        self._watch = watch
        self._choice_of: dict[int, int] = {}
        self._first: Request | None = None
        self._unfinished = choices
        self._stopped: set[int] = set()
        """Ids of requests that had ended in another way before their text was found to be complete."""

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

    def skip(self, ids: Sequence[int]) -> None:
        """Look for stop strings after the first tokens of the only choice, which have been shown."""
        for token in ids:
            for stop_text in self._stop_texts:
                stop_text.feed(token, last=False)

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
        if self._stop_texts or self._watch is not None:
            self.deliver(Emission(request, token, None))
        else:
            item = _delivered((self._choice_of[request.id], token, None, None, None, None, None, None))
            self._await_reader(self.mailbox.put(item))

    def deliver(self, emission: Emission) -> None:
        """Put a commit's result where the reader finds it."""
        if self.finished or emission.request.id in self._stopped:  # as when another choice failed in the same step
            return
        if emission.error is not None:
            self.fail(emission.error)
            return
        choice = self._choice_of[emission.request.id]
        reason = emission.finish_reason
        text = stop = None
        if self._stop_texts:
            text, matched = self._stop_texts[choice].feed(emission.token, last=reason is not None)
            if matched:
                reason, stop = self._stop(emission.request), self._stop_texts[choice].stop
        item = _delivered((choice, emission.token, text, reason, emission.report, stop, None, None))
        if self._watch is None:
            unread = self.mailbox.put(item)
        else:
            token = self._watch.maker.make(item)
            unread = self.mailbox.put(
                item._replace(token=token)
            )  # before it is looked at: the hook may cancel the stream
            if reason is None:
                reason = self._asked(self._watch, token, emission.request)
        if reason is not None:
            self._count_end()
        else:
            self._await_reader(unread)

    def _stop(self, request: Request) -> FinishReason:
        """End a choice whose text is complete, even if its deadline passed or a later step failed meanwhile."""
        if not self._control.finish(request, "stop"):
            self._stopped.add(request.id)  # another end of the choice is on its way
        return "stop"

    def _await_reader(self, unread: int) -> None:
        """Pause the choices if their reader is far behind."""
        if unread + self.held >= self._window and not self.paused:
            self.paused = True
            for request in self.requests:
                self._control.pause(request)

    def _asked(self, watch: StopWatch, token: Token, request: Request) -> FinishReason | None:
        """Ask the caller's hook about `token`; return "stop" if the hook ends the choice."""
        try:
            stops = watch.stops(token)
        except HookFailed as error:
            self.fail(error)
            return None
        if not stops or request.finish_reason == "cancelled":  # by the hook itself
            return None
        self._stop(request)
        text = self._stop_texts[token.index].feed(None, last=True)[0] if self._stop_texts else None
        token.text += watch.maker.flush(token.index) if text is None else text
        token.finish_reason = "stop"
        return "stop"

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

    def _end_cancelled(self, choice: int) -> None:
        text = self._stop_texts[choice].feed(None, last=True)[0] if self._stop_texts else None
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
