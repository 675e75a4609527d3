"""`TokenStream`, one caller's view of one generation; it yields the tokens and never decides what runs."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from headrace.engine.concurrency.threads import Poster, TaskWatch
from headrace.engine.delivery.chunks import ChunkIterator
from headrace.engine.delivery.generation import Generation
from headrace.engine.delivery.logprobs import token_logprobs
from headrace.engine.events import Chunk, FinishReason, Token, TokenLogprobs, Usage
from headrace.engine.intake.conversation import branch_turn, check_branch, check_single, following_turn
from headrace.engine.intake.intake import Intake, Turn
from headrace.engine.intake.prompts import Prompt
from headrace.engine.params import SamplingParams

__all__ = ["ChunkIterator", "TokenStream"]


class TokenStream:
    """Stream of the tokens of one request, as they are generated: `async for token in stream`.

    Leaving `async with stream` cancels the request if it still runs. So do `cancel`, `aclose`, cancelling the reading
    task, and dropping the last reference. Only one task may read at a time. `Engine.stream` makes streams.
    """

    def __init__(self, turn: Turn, intake: Intake, post: Poster) -> None:
        """Read `turn`, and begin further turns with `intake`."""
        self._intake = intake
        self._post = post
        self._sent: Generation | None = None
        """Generation of the next turn, while `send` waits for it."""
        self._begin(turn)

    def _begin(self, turn: Turn) -> None:
        self._turn = turn
        self._generation = turn.generation
        self._maker = turn.maker
        self._read = 0
        self._closed = False
        self._finish_reasons: list[FinishReason | None] = [None] * turn.asking.params.n
        prompt_logprobs = turn.asking.params.prompt_logprobs
        self._prompt_logprobs: list[TokenLogprobs | None] | None = None if prompt_logprobs is None else [None]
        """Log-probabilities of the prompt, as far as the reader has read them; None if not asked for."""
        self._unyielded: list[Token] = []
        """Tokens that were taken from the mailbox and not yielded, the next one last."""
        self._reader = TaskWatch(turn.generation.cancel, self._post)

    @property
    def prompt_token_ids(self) -> list[int]:
        """Token ids of the prompt, for a later turn those of all before it; empty until the request is admitted."""
        return list(self._generation.prompt)

    @property
    def usage(self) -> Usage:
        """Token counts so far; complete once every choice has ended."""
        return self._generation.usage

    @property
    def queued(self) -> bool:
        """Whether no step has computed any of the request yet."""
        requests = self._generation.requests
        return not requests or all(request.latest_step < 0 for request in requests)

    @property
    def taken_up(self) -> float | None:
        """Value of `time.perf_counter()` when the first step of the request was launched; None before that."""
        return self._generation.taken_up

    @property
    def finish_reasons(self) -> list[FinishReason | None]:
        """Reason for which each choice ended, as far as the stream has been read; None if it has not ended."""
        return list(self._finish_reasons)

    @property
    def prompt_logprobs(self) -> list[TokenLogprobs | None] | None:
        """Log-probabilities of each prompt token, None for the first; complete once the first token has been read.

        None if `SamplingParams.prompt_logprobs` asks for none.
        """
        found, generation = self._prompt_logprobs, self._generation
        if found is None:
            return None
        reports = generation.requests[0].prompt_reports if generation.requests else []
        for place in range(len(found), len(reports) + 1):
            found.append(token_logprobs(self._maker.table, generation.prompt[place], reports[place - 1]))
        return list(found)

    async def admitted(self) -> None:
        """Wait until the engine has accepted the request; the first read does so by itself.

        Raises:
            Rejected: The request can never run.
            EngineStopped: The engine closed before that.
            EngineCrashed: The step loop died before that.
        """
        await _admitted(self._turn, self._reader)

    async def send(
        self,
        added: Prompt,
        params: SamplingParams | None = None,
        *,
        deadline: float | None = None,
        priority: int | None = None,
    ) -> Self:
        """Continue after all tokens so far with `added`; the stream then yields the tokens of the next answer.

        Results of earlier turns are read from their pages if these are still cached; the stream keeps them until it is
        closed or others need the room. Tokens of the previous turn that were not read are dropped.

        Args:
            added: Text or token ids, which are appended as they are, or messages, which are written by the chat
                template from the end of the last answer to the beginning of the next.
            params: Parameters of the next turn; None for those of this one.
            deadline: Seconds from now after which the next turn stops; None for as many as
                this turn had.
            priority: Priority of the next turn, lower is served first; None for that of this one.

        Returns:
            The stream itself, once the request is accepted.

        Raises:
            RuntimeError: The previous turn still runs, or none ever ran.
            InvalidParams: The previous turn had several choices, or `added` is malformed; the stream is unchanged.
            PromptTooLong: All turns together leave no room for an answer; the stream is unchanged.
            EngineStopped: The engine is closed.
        """
        generation = self._generation
        if not generation.finished or self._sent is not None:
            raise RuntimeError("the stream still runs: read it to its end, or cancel it, before sending more")
        check_single(self._turn, "send")
        turn = following_turn(self._intake, self._turn, added, params, deadline, priority)
        self._sent, sender = turn.generation, TaskWatch(turn.generation.cancel, self._post)
        try:
            await _admitted(turn, sender)
        finally:
            self._sent = None
            sender.stop()
        self._let_go()
        self._begin(turn)
        if turn.generation.finished:  # cancelled by another task while it was sent
            self.cancel()
        return self

    def fork(self, *, seed: int | None = None) -> TokenStream:
        """Fork the stream after the tokens read so far; its pages are shared until one branch writes to them.

        The branch goes on with the same parameters and other noise; if this stream has been read to its end, the branch
        waits for `send`. Both go on independently.

        Args:
            seed: Seed of the branch's noise; None draws one.

        Returns:
            A stream of the tokens after that position; its `prompt_token_ids` are all before it.

        Raises:
            RuntimeError: The request has not been admitted.
            InvalidParams: The stream has several choices, or `seed` is no int.
            EngineStopped: The engine is closed.
        """
        check_single(self._turn, "fork")
        check_branch(self._intake, seed)
        generation = self._generation
        if not generation.finished or self._unyielded or len(generation.mailbox):
            return TokenStream(branch_turn(self._intake, self._turn, self._read, seed), self._intake, self._post)
        generation.share()
        forked = TokenStream(self._turn, self._intake, self._post)
        forked._finish_reasons = self.finish_reasons
        return forked

    def cancel(self) -> None:
        """Cancel the request if it still runs; its pages are freed within the steps already launched.

        Raises:
            RuntimeError: The request runs, and this is called on another event loop or thread.
        """
        if not self._generation.finished:
            self._post.check_here()
        self._let_go()
        self._generation.cancel()
        self._reader.stop()
        if self._sent is not None:
            self._sent.cancel()

    def _let_go(self) -> None:
        if not self._closed:
            self._closed = True
            self._generation.let_go()

    async def aclose(self) -> None:
        """Cancel the request, for `contextlib.aclosing` and the like."""
        self.cancel()

    async def __aenter__(self) -> Self:
        """Return the stream itself."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Cancel the request if it still runs."""
        self.cancel()

    def __aiter__(self) -> Self:
        """Return the stream itself, which can be read once."""
        return self

    async def __anext__(self) -> Token:
        """Return the next token of any choice.

        Raises:
            Rejected: Before the first token, if the request can never run.
            RequestFailed: The request ended early.
            EngineStopped: The engine closed before the request was taken in.
            EngineCrashed: The step loop died.
        """
        unyielded = self._unyielded
        if not unyielded:
            unyielded.extend(reversed(await self._take()))
            if not unyielded:
                raise StopAsyncIteration
        token = unyielded.pop()
        self._read += 1
        self._generation.held = len(unyielded)
        return token

    def chunks(self) -> ChunkIterator:
        """Iterate over merged tokens: each item holds all tokens since the last one was read."""
        return ChunkIterator(self.next_chunk)

    async def next_chunk(self) -> Chunk | None:
        """Return all tokens since the last read as one chunk, waiting for at least one; None at the end.

        Raises:
            HeadraceError: One of the errors of `__anext__`.
        """
        generation = self._generation
        if self._unyielded:
            tokens = self._unyielded[::-1]
            self._unyielded.clear()
        else:
            tokens = await self._take()
        self._read += len(tokens)
        generation.held = 0
        if generation.paused and not len(generation.mailbox):
            generation.drained()  # generation goes on while the reader handles the chunk
        return Chunk(text="".join([token.text for token in tokens]), tokens=tokens) if tokens else None

    def __del__(self) -> None:
        """Cancel a request whose reader is gone; may run in any thread, so it only posts."""
        if not (self._closed and self._generation.finished):
            self._post(_Closing(self._generation, self._reader, self._closed))

    async def _take(self) -> list[Token]:
        generation = self._generation
        self._reader.follow()
        if generation.paused and not len(generation.mailbox):
            generation.drained()
        try:
            items = await generation.mailbox.take()
        except RuntimeError:  # a second reader, which must not end the first one's request
            raise
        except BaseException:  # a cancelled reader, or an error that ended the stream
            generation.cancel()
            raise
        if generation.finished:
            self._reader.stop()
        make = self._maker.make
        tokens = [item.token or make(item) for item in items]
        for token in tokens:
            if token.finish_reason is not None:
                self._finish_reasons[token.index] = token.finish_reason
        return tokens


class _Closing:
    """Callback that ends a stream without references."""

    def __init__(self, generation: Generation, reader: TaskWatch, closed: bool) -> None:
        self._generation = generation
        self._reader = reader
        self._closed = closed

    def __call__(self) -> None:
        if not self._closed:
            self._generation.let_go()
        self._generation.cancel()
        self._reader.stop()


async def _admitted(turn: Turn, reader: TaskWatch) -> None:
    """Wait until the engine has accepted `turn`; cancelling `reader` cancels the turn."""
    generation = turn.generation
    reader.follow()
    try:
        await generation.admitted.wait()
    except BaseException:  # a cancelled reader
        generation.cancel()
        raise
    if generation.error is not None and not generation.requests:
        raise generation.error.with_traceback(None)
