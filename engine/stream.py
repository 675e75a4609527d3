"""`TokenStream`: one caller's view of one generation; hands out its tokens and never decides what runs."""

from __future__ import annotations

from collections import deque
from types import TracebackType
from typing import Self

from headrace.engine.delivered import Delivered, TokenMaker, token_logprobs
from headrace.engine.events import Chunk, FinishReason, Token, TokenLogprobs, Usage
from headrace.engine.generation import Generation
from headrace.engine.params import SamplingParams
from headrace.engine.threads import Poster, TaskWatch

__all__ = ["ChunkIterator", "TokenStream"]


class TokenStream:
    """The tokens of one request, as they come: `async for token in stream`.

    `async with stream` cancels at its end what still runs. So do `cancel`, `aclose`, cancelling the reading task, and
    dropping the last reference. One task reads at a time. Made by `Engine.stream`.
    """

    def __init__(self, generation: Generation, maker: TokenMaker, post: Poster, params: SamplingParams) -> None:
        """Read `generation`, which was asked for with `params`, as the tokens of `maker`."""
        self._generation = generation
        self._post = post
        self._maker = maker
        self._prompt_logprobs: list[TokenLogprobs | None] | None = None if params.prompt_logprobs is None else [None]
        """As far as anybody has looked."""
        self._finish_reasons: list[FinishReason | None] = [None] * params.n
        self._unyielded: deque[Token] = deque()
        self._reader = TaskWatch(generation.cancel)

    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt as token ids; empty until the request is admitted."""
        return list(self._generation.prompt)

    @property
    def usage(self) -> Usage:
        """Tokens counted so far; complete once every choice has ended."""
        return self._generation.usage

    @property
    def queued(self) -> bool:
        """Whether no step has taken it up yet."""
        requests = self._generation.requests
        return not requests or all(request.latest_step < 0 for request in requests)

    @property
    def taken_up(self) -> float | None:
        """`time.perf_counter()` when the first step with it was launched; None while it waits for that."""
        return self._generation.taken_up

    @property
    def finish_reasons(self) -> list[FinishReason | None]:
        """Why each choice ended, as far as it has been read; None where it has not ended."""
        return list(self._finish_reasons)

    @property
    def prompt_logprobs(self) -> list[TokenLogprobs | None] | None:
        """One for each token of the prompt, None for the first; complete once the first token has been read.

        None where `SamplingParams.prompt_logprobs` asks for none.
        """
        found, generation = self._prompt_logprobs, self._generation
        if found is None:
            return None
        reports = generation.requests[0].prompt_reports if generation.requests else []
        for place in range(len(found), len(reports) + 1):
            found.append(token_logprobs(self._maker.table, generation.prompt[place], reports[place - 1]))
        return list(found)

    async def admitted(self) -> None:
        """Wait until the engine has taken the request in; the first read does so by itself.

        Raises:
            Rejected: The request can never run.
            EngineStopped: The engine closed before.
            EngineCrashed: The step loop died before.
        """
        generation = self._generation
        self._reader.follow()
        try:
            await generation.admitted.wait()
        except BaseException:  # a cancelled reader
            generation.cancel()
            raise
        if generation.error is not None and not generation.requests:
            raise generation.error.with_traceback(None)

    def cancel(self) -> None:
        """End what still runs, from the event loop's thread; its pages return within the steps already launched."""
        self._generation.cancel()
        self._reader.stop()

    async def aclose(self) -> None:
        """Cancel, for `contextlib.aclosing` and the like."""
        self.cancel()

    async def __aenter__(self) -> Self:
        """Return the stream itself."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Cancel what still runs."""
        self.cancel()

    def __aiter__(self) -> Self:
        """Return the stream itself: it is read once."""
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
            unyielded.extend(await self._take())
            if not unyielded:
                raise StopAsyncIteration
        token = unyielded.popleft()
        self._generation.held = len(unyielded)
        return token

    def chunks(self) -> ChunkIterator:
        """Iterate over merged tokens: each item holds all that came since the last look."""
        return ChunkIterator(self)

    async def next_chunk(self) -> Chunk | None:
        """Return all tokens since the last look as one chunk, waiting for at least one; None at the end.

        Raises:
            HeadraceError: As `__anext__` does.
        """
        tokens = list(self._unyielded) or await self._take()
        self._unyielded.clear()
        generation = self._generation
        generation.held = 0
        if not len(generation.mailbox):
            generation.drained()  # it goes on while the reader is at work on the chunk
        return Chunk(text="".join([token.text for token in tokens]), tokens=tokens) if tokens else None

    def __del__(self) -> None:
        """Cancel a request whose reader is gone; runs in any thread, so it only posts."""
        generation, reader = self._generation, self._reader
        if not generation.finished:
            self._post(generation.cancel)
            self._post(reader.stop)

    async def _take(self) -> list[Token]:
        generation = self._generation
        self._reader.follow()
        if not len(generation.mailbox):
            generation.drained()
        try:
            items = await generation.mailbox.take()
        except RuntimeError:  # a second reader: the first one's request goes on
            raise
        except BaseException:  # a cancelled reader, or an error that ended the stream
            generation.cancel()
            raise
        if generation.finished:
            self._reader.stop()
        return [self._token(item) for item in items]

    def _token(self, item: Delivered) -> Token:
        token = item.token or self._maker.make(item)
        if token.finish_reason is not None:
            self._finish_reasons[token.index] = token.finish_reason
        return token


class ChunkIterator:
    """`async for chunk in stream.chunks()`."""

    def __init__(self, stream: TokenStream) -> None:
        """Iterate over `stream`."""
        self._stream = stream

    def __aiter__(self) -> Self:
        """Return the iterator itself."""
        return self

    async def __anext__(self) -> Chunk:
        """Return the next chunk; raises as `TokenStream.__anext__` does."""
        chunk = await self._stream.next_chunk()
        if chunk is None:
            raise StopAsyncIteration
        return chunk
