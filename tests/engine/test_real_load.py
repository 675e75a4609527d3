"""The real model under minutes of mixed load on the CPU: memory stays flat, nothing leaks, no task is left.

Runs only where `HEADRACE_SOAK_MINUTES` says for how long, as `make soak` does.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import random
import time
from collections import Counter
from pathlib import Path

import anyio
import psutil
import pytest
from leftovers import Threads
from scripted import no_leaks, until

from headrace.engine import Engine, RequestFailed, SamplingParams

_MINUTES = float(os.environ.get("HEADRACE_SOAK_MINUTES", "0"))
_CALLERS = 8
_WARM = 0.3  # of the time: pages are touched and pools grow for the first time
_MOST_GROWTH = 16 * 2**20  # bytes: the code of a few shapes that nothing needed while all was warming
_WORDS = "the cat sat on a mat and saw that rain was near so it ran in to eat".split()


class Load:
    """Callers of one engine."""

    def __init__(self, engine: Engine) -> None:
        self.reached: Counter[str] = Counter()
        self.resident: list[int] = []
        """Bytes, again and again."""
        self.held: list[tuple[int, int]] = []
        """(resident bytes, Python objects) at rest, with what is free given back: when all is warm, and in the end."""
        self._engine = engine
        self._chances = [random.Random(number) for number in range(_CALLERS)]
        self._until = 0.0

    async def run(self, seconds: float) -> None:
        """Call for so long, and see what the engine holds when all is done."""
        self._until = time.monotonic() + seconds
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._sample)
            for chance in self._chances:
                tasks.start_soon(self._call, chance)
        await until(lambda: not (self._engine.stats().pages_held or self._engine.stats().steps_in_flight))
        gc.collect()
        with contextlib.suppress(OSError, AttributeError):  # where the C library is not glibc
            ctypes.CDLL("libc.so.6").malloc_trim(0)
        self.held.append((psutil.Process().memory_info().rss, len(gc.get_objects())))

    async def _sample(self) -> None:
        while time.monotonic() < self._until:
            self.resident.append(psutil.Process().memory_info().rss)
            await anyio.sleep(2.0)

    async def _call(self, chance: random.Random) -> None:
        ways = [self._reads, self._reads, self._cancels, self._gives_up, self._drops, self._talks, self._generates]
        ways += [self._embeds]
        while time.monotonic() < self._until:
            way = chance.choice(ways)
            try:
                await way(chance)
            except RequestFailed as error:  # nothing here should
                raise AssertionError(f"{way.__name__}: {error!r}") from error
            self.reached[way.__name__] += 1

    def _asked(self, chance: random.Random, **fields: object) -> tuple[str, SamplingParams]:
        words = _WORDS[: chance.choice([0, 0, len(_WORDS)])] + chance.choices(_WORDS, k=chance.randint(1, 60))
        tokens = chance.choice([4, 20, 60])
        stops = chance.choice([(), (), (" the", ".")])
        params = SamplingParams(temperature=chance.choice([0.0, 1.0]), max_tokens=tokens, stop=stops, **fields)
        return " ".join(words), params

    async def _reads(self, chance: random.Random) -> None:
        prompt, params = self._asked(chance, n=chance.choice([1, 1, 3]))
        async with self._engine.stream(prompt, params, priority=chance.choice([0, 1])) as stream:
            async for token in stream:
                if chance.random() < 0.05:
                    await anyio.sleep(0.2)
                assert token.finish_reason in (None, "stop", "length")
        assert None not in stream.finish_reasons

    async def _cancels(self, chance: random.Random) -> None:
        stream = self._engine.stream(*self._asked(chance))
        most = chance.randrange(10)
        async for token in stream:
            if token.position >= most:
                stream.cancel()
        assert stream.finish_reasons[0] is not None

    async def _gives_up(self, chance: random.Random) -> None:
        with anyio.move_on_after(2 * chance.random()):
            await self._engine.generate(*self._asked(chance, n=2), deadline=chance.choice([None, 1.0]))

    async def _drops(self, chance: random.Random) -> None:
        stream = self._engine.stream(*self._asked(chance))
        async for _ in stream:
            break

    async def _talks(self, chance: random.Random) -> None:
        stream = self._engine.stream(*self._asked(chance))
        async for _ in stream:
            pass
        branch = stream.fork()
        for each in (stream, branch):
            await each.send(" " + chance.choice(_WORDS))
            async for _ in each:
                pass
            each.cancel()

    async def _generates(self, chance: random.Random) -> None:
        answer = await self._engine.generate(*self._asked(chance))
        assert answer.choices[0].finish_reason in ("stop", "length")

    async def _embeds(self, chance: random.Random) -> None:
        found = await self._engine.embed([" ".join(chance.choices(_WORDS, k=20)) for _ in range(3)], pooling="mean")
        assert len(found.vectors) == 3


async def _serve(model: Path) -> Load:
    """Load an engine of few pages, and see that all comes back."""
    async with no_leaks():
        async with Engine(model, max_rows=6, kv_memory="8MiB", swap_memory="4MiB", max_context=512) as engine:
            load = Load(engine)
            for part in (_WARM, 1 - _WARM):
                await load.run(60 * _MINUTES * part)
            stats = engine.stats()
            load.reached["preemptions"], load.reached["swaps"] = stats.preemptions, stats.swaps
            load.reached["tokens"] = stats.generated_tokens
            assert not (stats.waiting or stats.running or stats.paused or stats.swapped or stats.live_tokens)
            assert engine._life.loop is not None
            engine._life.loop.scheduler.roster.check()
            assert not engine._life.loop.scheduler.roster.requests and not engine._life.loop._generations
    return load


@pytest.mark.skipif(not _MINUTES, reason="HEADRACE_SOAK_MINUTES says for how long; make soak does")
def test_memory_is_flat_under_minutes_of_load(smollm2: Path) -> None:
    threads = Threads()
    load = anyio.run(_serve, smollm2)
    (resident, objects), (resident_then, objects_then) = load.held
    series = load.resident[:: max(1, len(load.resident) // 10)]
    print(f"\n{_MINUTES:g} minutes: {dict(load.reached)}")
    print(f"resident, MiB: {' '.join(str(size >> 20) for size in series)}")
    print(
        f"when all was warm and in the end, with what malloc had free given back: {resident >> 20} and "
        f"{resident_then >> 20} MiB, {objects} and {objects_then} Python objects"
    )
    assert resident_then - resident < _MOST_GROWTH and objects_then - objects < 10_000
    threads.check_ended()
    assert load.reached["preemptions"] or _MINUTES < 5, "the load was too small to preempt anybody"
