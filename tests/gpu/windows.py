"""Requests far longer than the page pool, where every layer has a window: what any device must do with them."""

from __future__ import annotations

import anyio
from gpu.checkpoints import PAGE, WINDOW, kv_bytes
from gpu.conftest import Zoo
from gpu.driving import at_rest, draw, one_by_one, open_engine, together
from gpu.judge import Judge, Output

from headrace.engine import Engine, SamplingParams

__all__ = ["FEW", "check_windows"]

FEW = 9
"""Pages of the pool: three rows of a window and a page, and no more than a quarter of the longest request."""
PER_ROW = -(-WINDOW // PAGE) + 1


async def _most_held(engine: Engine, prompt: list[int], count: int) -> tuple[Output, int]:
    """A greedy output of a request that is alone, and the most pages that it held while it decoded.

    The pages of the prompt's last chunk count until the first new page after it.
    """
    most = 0
    params = SamplingParams(temperature=0, max_tokens=count)
    tokens: list[int] = []
    async for token in engine.stream(prompt, params):
        assert token.id is not None
        tokens.append(token.id)
        if len(tokens) > PAGE + 2:
            most = max(most, engine.stats().pages_held)
    return Output(prompt, tokens), most


def check_windows(zoo: Zoo, judge: Judge, device: str) -> None:
    """Assert that tokens are right, alone and side by side, and that a request holds its window and a page at most."""
    folder = zoo.folder("mistral")

    async def run() -> None:
        memory = kv_bytes(folder, FEW)
        options = {"kv_memory": memory, "max_rows": 4, "max_context": 512, "max_batched_tokens": 64}
        async with open_engine(folder, device, **options) as engine:
            output, most = await _most_held(engine, draw(300, 1), 150)
            assert most == PER_ROW
            judge.check([output], "alone")
            again = await one_by_one(engine, [[*output.prompt, *output.tokens]], 12)
            judge.check(again, "after a prefix whose first pages are gone")
            assert engine.stats().cached_tokens > 300, "the last pages of a prefix are enough"
            outputs = await together(engine, [draw(length, length) for length in (5, 60, 200, 333, 40)], _greedy(60))
            judge.check(outputs, "side by side, in too few pages for all")
            await at_rest(engine)

    anyio.run(run)


def _greedy(count: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count)
