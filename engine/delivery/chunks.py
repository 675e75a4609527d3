"""`ChunkIterator`: the tokens of a stream, as many at a time as there are; reads no mailbox itself."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Self

from headrace.engine.events import Chunk

__all__ = ["ChunkIterator"]


class ChunkIterator:
    """Iterator over the chunks of a stream, for `async for chunk in stream.chunks()`."""

    def __init__(self, next_chunk: Callable[[], Awaitable[Chunk | None]]) -> None:
        """Iterate over what `next_chunk` returns, until that is None."""
        self._next_chunk = next_chunk

    def __aiter__(self) -> Self:
        """Return the iterator itself."""
        return self

    async def __anext__(self) -> Chunk:
        """Return the next chunk; errors are those of `TokenStream.__anext__`."""
        chunk = await self._next_chunk()
        if chunk is None:
            raise StopAsyncIteration
        return chunk
