"""`TokenStream`: one caller's view of one generation; turns delivered ids into text and never decides what runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from headrace.engine.events import Chunk, FinishReason, Logprob, Token, TokenLogprobs, Usage
from headrace.engine.generation import Delivered, Generation
from headrace.engine.params import SamplingParams
from headrace.engine.scheduling.shaping import Report
from headrace.engine.text import Detokenizer, SpacedDetokenizer, TokenTable
from headrace.engine.threads import Poster, TaskWatch

__all__ = ["ChunkIterator", "TokenStream", "detokenizer_of"]


class TokenStream:
    """The tokens of one request, as they come: `async for token in stream`.

    `async with stream` cancels at its end what still runs. So do `cancel`, `aclose`, cancelling the reading task, and
    dropping the last reference. One task reads at a time. Made by `Engine.stream`.
    """

    def __init__(self, generation: Generation, table: TokenTable, post: Poster, params: SamplingParams) -> None:
        """Read `generation`, turning ids into text by `table` as `params` want it."""
        self._generation = generation
        self._post = post
        self._table = table
        self._detokenizers = [detokenizer_of(table, params) for _ in range(params.n)]
        self._reports_prompt = params.prompt_logprobs is not None
        self._shows_stop = params.include_stop_str_in_output
        self._positions = [0] * params.n
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
        if not self._reports_prompt:
            return None
        generation = self._generation
        reports = generation.requests[0].prompt_reports if generation.requests else []
        pairs = zip(generation.prompt[1:], reports, strict=False)
        return [None, *(_token_logprobs(self._table, token, report) for token, report in pairs)]

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
        choice = item.choice
        reason = item.finish_reason
        text = item.text
        if text is None:
            detokenizer = self._detokenizers[choice]
            hidden = item.id is None or (reason == "stop" and not self._shows_stop and self._stops(item))
            text = "" if hidden or item.id is None else detokenizer.feed(item.id)
            if reason is not None:
                text += detokenizer.flush()
        if reason is not None:
            self._finish_reasons[choice] = reason
        position = self._positions[choice]
        self._positions[choice] = position + 1
        token = Token(
            id=item.id,
            text=text,
            index=choice,
            position=position,
            finish_reason=reason,
            stop_string=item.stop_string,
        )
        if item.report is not None and item.id is not None:
            token.logprob = item.report.logprob
            token.logprobs = _token_logprobs(self._table, item.id, item.report)
        return token

    def _stops(self, item: Delivered) -> bool:
        return item.id in self._generation.stop_ids


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


def detokenizer_of(table: TokenTable, params: SamplingParams) -> Detokenizer:
    """What turns the ids of one choice into text as `params` want it."""
    if params.spaces_between_special_tokens and not params.skip_special_tokens:
        return SpacedDetokenizer(table)
    return Detokenizer(table, params.skip_special_tokens)


def _token_logprobs(table: TokenTable, token: int, report: Report) -> TokenLogprobs:
    piece = _piece(table, token)
    return TokenLogprobs(
        id=token,
        token=piece.decode(errors="replace"),
        bytes=piece,
        logprob=report.logprob,
        rank=report.rank,
        top_logprobs=_ranked(table, report.top),
    )


def _ranked(table: TokenTable, top: Sequence[tuple[int, float]]) -> list[Logprob]:
    """Tokens in falling order of likelihood; equals share a rank."""
    found: list[Logprob] = []
    for place, (token, logprob) in enumerate(top):
        equal = place and logprob == top[place - 1][1]
        piece = _piece(table, token)
        rank = found[-1].rank if equal else place + 1
        found.append(Logprob(id=token, token=piece.decode(errors="replace"), bytes=piece, logprob=logprob, rank=rank))
    return found


def _piece(table: TokenTable, token: int) -> bytes:
    return table.pieces[token] if token < len(table.pieces) else b""
