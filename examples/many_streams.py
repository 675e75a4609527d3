"""Many streams at once on one engine: concurrency, cancellation, timeouts, back-pressure and several choices.

python examples/many_streams.py [model folder or .gguf file]
"""

from __future__ import annotations

import sys
import time

import anyio

from headrace.engine import Engine, SamplingParams
from headrace.server.demo import demo_model

TOPICS = ("rain", "bread", "bicycles", "rivers", "owls", "mills", "maps", "salt")


async def main(model: str) -> None:
    async with Engine(model, kv_memory="256MiB", max_unread_tokens=8) as engine:
        await together(engine)
        await cancelled(engine)
        await timed_out(engine)
        await slow_reader(engine)
        await several_choices(engine)


def about(topic: str) -> list[dict[str, str]]:
    return [
        {"role": "system", "content": "You are a helpful assistant who explains things in plain words."},
        {"role": "user", "content": f"Tell me something about {topic}."},
    ]


async def together(engine: Engine) -> None:
    """Tasks that each read a stream: the engine runs them in one batch and computes their common start once."""
    answers: dict[str, str] = {}

    async def ask(topic: str) -> None:
        async with engine.stream(about(topic), SamplingParams(max_tokens=12, temperature=0)) as stream:
            answers[topic] = "".join([token.text async for token in stream])

    started = time.perf_counter()
    async with anyio.create_task_group() as tasks:
        for topic in TOPICS:
            tasks.start_soon(ask, topic)
    stats = engine.stats()
    for topic, answer in answers.items():
        print(f"together: {topic}: {answer!r}")
    print(f"together: {stats.generated_tokens} tokens in {time.perf_counter() - started:.1f} s")
    print(f"together: {stats.cached_tokens} of {stats.prompt_tokens} prompt tokens came from the prefix cache")


async def cancelled(engine: Engine) -> None:
    """Leaving `async with` cancels the request at once; its pages return when the steps in flight are done."""
    async with engine.stream(about("tea"), SamplingParams(ignore_eos=True)) as stream:
        async for token in stream:
            if token.position == 4:
                break
        held = engine.stats().pages_held
    await engine.generate("Next", SamplingParams(max_tokens=1))  # a few steps, which is all it takes
    print(f"cancelled: after 5 tokens, {held} pages held, then {engine.stats().pages_held}")


async def timed_out(engine: Engine) -> None:
    """A timeout around the reading cancels the request too, and what was read so far is kept."""
    tokens = 0
    stream = engine.stream(about("trains"), SamplingParams(ignore_eos=True))
    with anyio.move_on_after(0.5):
        async for _ in stream:
            tokens += 1
    rest = [token async for token in stream]  # not empty: the last item says how it ended
    print(f"timed out: {tokens} tokens in 0.5 s, ended {rest[-1].finish_reason!r}")


async def slow_reader(engine: Engine) -> None:
    """A reader that falls behind pauses its own request and nobody else's; what it missed arrives merged."""
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    async with engine.stream(about("clocks"), params) as slow:
        first = await slow.next_chunk()
        assert first is not None
        quick = await engine.generate(about("candles"), params)
        paused = engine.stats().paused
        print(f"slow reader: {paused} paused with {len(first.tokens)} tokens read; a quick one got {quick.usage}")
        sizes = [len(chunk.tokens) async for chunk in slow.chunks()]
        print(f"slow reader: the rest came in chunks of {sizes} tokens")


async def several_choices(engine: Engine) -> None:
    """`n` choices of one prompt: its pages are computed once and shared until the choices differ."""
    completion = await engine.generate(about("ships"), SamplingParams(n=3, seed=7, max_tokens=12))
    for choice in completion.choices:
        print(f"choices: {choice.index}: {choice.text!r} ({choice.finish_reason})")
    print(f"choices: {completion.usage}")


if __name__ == "__main__":
    anyio.run(main, sys.argv[1] if len(sys.argv) > 1 else str(demo_model()))
