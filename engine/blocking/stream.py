"""`LLMStream` and `LLMAdapters`: a stream and the adapters of an `LLM`, for the threads that call it; own no thread.

Next to read: host.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Self

from headrace.engine.adapters import AdapterInfo
from headrace.engine.blocking.host import Host
from headrace.engine.engine import Engine, Prompt
from headrace.engine.errors import EngineStopped
from headrace.engine.events import Chunk, FinishReason, Token, Usage
from headrace.engine.params import SamplingParams
from headrace.engine.stream import TokenStream

__all__ = ["LLMAdapters", "LLMStream"]


class LLMStream(Iterator[Token]):
    """The tokens of one request, as they come: `for token in llm.stream(prompt)`.

    `close`, the end of `with stream`, dropping the last reference, and Ctrl-C while a token is awaited cancel the
    request. A reader that falls behind pauses the request, as with `Engine.stream`. One thread reads at a time.
    `LLM.stream` makes the object.
    """

    def __init__(self, llm: object, host: Host, stream: TokenStream) -> None:
        """Read `stream`, which belongs to the event loop of `host`; keep `llm` referenced, and so open."""
        self._llm = llm
        self._host = host
        self._stream = stream
        self._unread: list[Token] = []
        """Tokens that were taken from the stream, the next one last."""

    def __next__(self) -> Token:
        """Wait for the next token of any choice and return it.

        Raises:
            Rejected: The request can never run; raised before the first token.
            RequestFailed: The request ended early.
            RuntimeError: The caller is a `stop_when` of the same `LLM`, which would wait for itself.
            EngineStopped: The `LLM` is closed, or was closed meanwhile.
        """
        if not self._unread:
            stream = self._stream

            async def take(_: Engine) -> Chunk | None:
                return await stream.next_chunk()

            chunk = self._host.ask(take)
            if chunk is None:
                raise StopIteration
            self._unread = chunk.tokens[::-1]
        return self._unread.pop()

    def send(
        self,
        added: Prompt,
        params: SamplingParams | None = None,
        *,
        deadline: float | None = None,
        priority: int | None = None,
    ) -> Self:
        """Continue after all tokens so far with `added`, the next turn. Arguments and errors: see
        `TokenStream.send`."""
        stream = self._stream
        self._host.ask(lambda _: stream.send(added, params, deadline=deadline, priority=priority))
        self._unread = []
        return self

    def close(self) -> None:
        """Cancel the running choices, and drop unread tokens; may be called more than once, even on a closed `LLM`."""
        self._unread = []
        stream = self._stream
        try:
            self._host.look(lambda _: stream.cancel())
        except EngineStopped:
            pass  # closing has cancelled the stream

    def __enter__(self) -> Self:
        """Return the stream itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Cancel the choices that still run."""
        self.close()

    @property
    def usage(self) -> Usage:
        """Tokens counted so far; complete once every choice has ended."""
        return self._stream.usage

    @property
    def finish_reasons(self) -> list[FinishReason | None]:
        """Finish reason of each choice; None for one that has not ended."""
        return self._stream.finish_reasons

    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt as token ids; empty until the request is admitted."""
        return self._stream.prompt_token_ids


class LLMAdapters:
    """The adapters of an `LLM`, as `llm.adapters`: the methods of `Engine.adapters`, each of which waits for its end.

    Each raises `EngineStopped` if the `LLM` is closed.
    """

    def __init__(self, host: Host) -> None:
        """Ask the engine of `host`."""
        self._host = host

    def load(
        self,
        name: str,
        path: str | os.PathLike[str],
        *,
        root: str | os.PathLike[str] | None = None,
        pinned: bool | None = None,
    ) -> AdapterInfo:
        """Load the PEFT folder at `path` under `name`. See `Engine.adapters.load` for arguments, result and errors."""

        async def load(engine: Engine) -> AdapterInfo:
            return await engine.adapters.load(name, path, root=root, pinned=pinned)

        return self._host.ask(load)

    def unload(self, name: str) -> None:
        """Forget `name`; requests that use it finish, and then its memory is released.

        Raises:
            UnknownAdapter: No adapter has that name.
        """

        async def unload(engine: Engine) -> None:
            await engine.adapters.unload(name)

        self._host.ask(unload)

    def list(self) -> list[AdapterInfo]:
        """Return all loaded adapters, by name."""
        return self._host.look(lambda engine: engine.adapters.list())

    def pin(self, name: str, pinned: bool = True) -> None:
        """Keep an adapter on the device, or stop keeping it.

        Raises:
            UnknownAdapter: No adapter has that name.
            InvalidParams: All slots but one are pinned.
        """
        self._host.look(lambda engine: engine.adapters.pin(name, pinned))
