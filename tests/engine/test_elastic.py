"""An engine gives memory back and takes it again while it serves: every answer is what it would have been anyway."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
import tiny_models
from leftovers import Threads
from scripted import Gate, capacity, expected_ids, greedy, no_leaks, read, serving, until

from headrace.engine import (
    DeviceUnavailable,
    Engine,
    EngineCrashed,
    EngineStopped,
    HeadraceError,
    InvalidParams,
    ModelRejected,
    PromptTooLong,
    SamplingParams,
    TokenStream,
)
from headrace.engine.testing import ScriptedEngine, ScriptedRunner

PROMPTS = [[index + 1 + at * at % 89 for at in range(length)] for index, length in enumerate((3, 40, 17, 1, 60, 33))]
PAGE = tiny_models.PAGE_BYTES


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.whole_folder(tmp_path_factory.mktemp("model"))


async def answers(engine: Engine, during: Callable[[], Any] | None = None) -> list[list[int]]:
    """What all prompts give, read together with `during`."""
    params = SamplingParams(max_tokens=40, temperature=0.8, seed=5, ignore_eos=True)
    streams = [engine.stream(ids, params) for ids in PROMPTS]
    found: list[list[int]] = [[] for _ in streams]

    async def take(place: int, stream: TokenStream) -> None:
        found[place] = [token.id for token in await read(stream)]

    async with anyio.create_task_group() as group:
        for place, stream in enumerate(streams):
            group.start_soon(take, place, stream)
        if during is not None:
            await during()
    return found


@pytest.mark.parametrize("swap_memory", [0, 40 * PAGE])
def test_a_model_gives_the_same_answers_whatever_becomes_of_its_memory(folder: Path, swap_memory: int) -> None:
    async def run(during: Callable[[Engine], Any] | None = None) -> list[list[int]]:
        async with Engine(folder, dtype="float32", kv_memory=64 * PAGE, swap_memory=swap_memory) as engine:

            async def disturb() -> None:
                assert during is not None
                await during(engine)

            return await answers(engine, disturb if during else None)

    async def progress(engine: Engine, tokens: int) -> None:
        wanted = engine.stats().generated_tokens + tokens
        await until(lambda: engine.stats().generated_tokens >= wanted)

    async def disturb(engine: Engine) -> None:
        await progress(engine, 10)
        await engine.resize_kv(9 * PAGE)
        assert engine.info.num_pages == engine.stats().pages == 9
        await progress(engine, 20)
        assert engine.stats().waiting + engine.stats().swapped > 0
        await engine.resize_kv(128 * PAGE)
        await progress(engine, 20)
        await engine.sleep()
        before = engine.stats()
        assert (before.sleep_level, before.pages, before.pages_held, before.running) == (1, 0, 0, 0)
        await anyio.sleep(0.02)
        assert engine.stats().steps == before.steps
        await engine.wake()
        await progress(engine, 20)
        await engine.sleep(1)
        await engine.sleep(2)
        assert engine.stats().sleep_level == 2 and engine.stats().host_pages_used == 0
        await engine.resize_kv("1 MiB")
        await engine.wake()
        assert engine.info.num_pages == engine.stats().pages == (1 << 20) // PAGE

    assert anyio.run(run, disturb) == anyio.run(run)


@pytest.mark.anyio
async def test_who_asks_for_what_cannot_be_is_told_the_limit_and_nothing_changes() -> None:
    async with serving(capacity(num_pages=20)) as engine:
        page = engine.info.page_bytes
        stream = engine.stream("x" * 100, greedy(20))
        await stream.admitted()
        await anext(aiter(stream))
        sizes: list[Any] = ["much", page - 1, 3 * page, 2**60, 0, -5, True, 1.5]
        limits = [None, {"ge": page}, {"ge": 7 * page}, {"le": page << 20}, {"ge": page}, {"ge": page}, None, None]
        for size, limit in zip(sizes, limits, strict=True):
            with pytest.raises(InvalidParams, match=r"^kv_memory: ") as refused:
                await engine.resize_kv(size)
            assert (refused.value.field, refused.value.value, refused.value.limit) == ("kv_memory", size, limit)
        for level in (0, 3, "1"):
            with pytest.raises(InvalidParams, match=r"^level: "):
                await engine.sleep(level)  # type: ignore[arg-type]
        assert engine.info.num_pages == 20 and engine.stats().sleep_level == 0
        await engine.resize_kv(8 * page)
        with pytest.raises(PromptTooLong):
            await engine.generate("x" * 130, greedy(1))
        rest = await read(stream)
        assert rest[-1].finish_reason == "length"


@pytest.mark.anyio
async def test_requests_that_come_while_it_sleeps_wait_and_one_that_is_cancelled_leaves() -> None:
    async with serving() as engine:
        await engine.sleep()
        await engine.sleep()
        first, second, third = (engine.stream(f"prompt {name}", greedy(5)) for name in range(3))
        late = engine.stream("late", greedy(5), deadline=0.01)
        for stream in (first, second, third):
            await stream.admitted()
        await second.aclose()
        assert [token.finish_reason for token in await read(late)] == ["deadline"]
        assert (engine.stats().waiting, engine.stats().steps) == (2, 0)
        await engine.wake()
        await engine.wake()
        for name, stream in ((0, first), (2, third)):
            assert [token.id for token in await read(stream)] == expected_ids(f"prompt {name}", 5)


@pytest.mark.anyio
async def test_a_change_is_made_even_if_whoever_asked_has_gone_and_after_the_steps_in_flight() -> None:
    gate = Gate()
    async with serving(capacity(num_pages=20), gate=gate) as engine:
        gate.hold()
        stream = engine.stream("hello", greedy(30))
        await until(lambda: engine.stats().steps_in_flight)
        with anyio.move_on_after(0.02) as scope:
            await engine.resize_kv(10 * engine.info.page_bytes)
        assert scope.cancelled_caught and engine.info.num_pages == 20
        gate.release()
        await until(lambda: engine.info.num_pages == 10)
        assert [token.id for token in await read(stream)] == expected_ids("hello", 30)


@pytest.mark.anyio
async def test_a_closing_engine_lets_nobody_wait_for_a_change() -> None:
    gate = Gate()
    errors: list[Exception] = []
    async with serving(gate=gate) as engine:
        gate.hold()
        stream = engine.stream("hello", greedy(30))
        await until(lambda: engine.stats().steps_in_flight)

        async def ask() -> None:
            try:
                await engine.sleep()
            except EngineStopped as error:
                errors.append(error)

        async with anyio.create_task_group() as group:
            group.start_soon(ask)
            await anyio.sleep(0.01)
            group.start_soon(engine.aclose)
            await anyio.sleep(0.01)
            gate.release()
        assert (await read(stream))[-1].finish_reason == "cancelled"
    assert len(errors) == 1


@pytest.mark.anyio
async def test_an_engine_closes_in_its_sleep() -> None:
    async with serving() as engine:
        stream = engine.stream("hello", greedy(30))
        await stream.admitted()
        await engine.sleep(2)
    assert [token.finish_reason for token in await read(stream)][-1:] == ["cancelled"]


class Failing(ScriptedRunner):
    """One whose memory runs out, or that fails, where it is told to."""

    trouble: Exception | None = None
    sleepless: Exception | None = None

    def resize(self, num_pages: int) -> None:
        if self.trouble is not None:
            raise self.trouble
        super().resize(num_pages)

    def sleep(self, *, keep_weights: bool) -> None:
        super().sleep(keep_weights=keep_weights)
        if self.sleepless is not None:
            raise self.sleepless

    def wake(self, num_pages: int) -> None:
        self.resize(num_pages)


@pytest.mark.anyio
async def test_memory_that_is_not_there_leaves_all_as_it_was() -> None:
    sizes = capacity(num_pages=20)
    runner = Failing(sizes)
    async with ScriptedEngine(sizes, lambda: runner) as engine:
        stream = engine.stream("hello", greedy(60))
        await anext(aiter(stream))
        runner.trouble = MemoryError("none")
        page = engine.info.page_bytes
        for pages in (40, 10):
            with pytest.raises(InvalidParams, match=r"^kv_memory: the device has not so much memory now, got"):
                await engine.resize_kv(pages * page)
            assert engine.info.num_pages == engine.stats().pages == 20
        runner.trouble = None
        await engine.sleep()
        runner.trouble = MemoryError("none")
        with pytest.raises(DeviceUnavailable):
            await engine.wake()
        assert engine.stats().sleep_level == 1
        runner.trouble = ModelRejected("gone", field="model", value="x")
        with pytest.raises(ModelRejected):
            await engine.wake()
        runner.trouble = None
        await engine.wake()
        assert [token.id for token in await read(stream)] == expected_ids("hello", 60)[1:]


@pytest.mark.anyio
async def test_a_device_that_fails_in_a_change_ends_the_engine() -> None:
    sizes = capacity(num_pages=20)
    runner = Failing(sizes)
    with pytest.raises(EngineCrashed):
        async with ScriptedEngine(sizes, lambda: runner) as engine:
            stream = engine.stream("hello", greedy(60))
            await anext(aiter(stream))
            runner.trouble = EngineCrashed("gone")
            with pytest.raises(EngineCrashed):
                await engine.resize_kv(5 * engine.info.page_bytes)
            with pytest.raises(EngineCrashed):
                await read(stream)


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize(("what", "seconds"), [("resize_kv", 0.05), ("sleep", 0.5), ("wake", 0.5)])
async def test_a_change_that_hangs_is_given_up(what: str, seconds: float, caplog: pytest.LogCaptureFixture) -> None:
    release = threading.Event()
    sizes = capacity(num_pages=20)

    class Hanging(ScriptedRunner):
        armed = False

        def resize(self, num_pages: int) -> None:
            if self.armed:
                release.wait(20)
            super().resize(num_pages)

        def wake(self, num_pages: int) -> None:
            self.resize(num_pages)

    runner, threads = Hanging(sizes), Threads()
    async with no_leaks():
        with pytest.raises(EngineCrashed):
            async with ScriptedEngine(sizes, lambda: runner, hang_seconds=0.05) as engine:
                if what == "wake":
                    await engine.sleep()
                runner.armed = True
                change = partial(engine.resize_kv, 10 * engine.info.page_bytes) if what == "resize_kv" else None
                began = anyio.current_time()
                with pytest.raises(
                    EngineCrashed, match=f"^{what} is not done after {seconds:g} seconds: the device hangs"
                ):
                    await (change or getattr(engine, what))()
                assert seconds <= anyio.current_time() - began < seconds + 1
        release.set()
        await until(lambda: runner.closed)
        await until(lambda: not threads.running())
    assert "the stacks of all threads follow" in caplog.text


@pytest.mark.anyio
async def test_a_device_that_fails_in_a_change_otherwise_leaves_all_as_it_was() -> None:
    sizes = capacity(num_pages=20)
    runner = Failing(sizes)
    async with ScriptedEngine(sizes, lambda: runner) as engine:
        stream = engine.stream("hello", greedy(60))
        await anext(aiter(stream))
        runner.sleepless = MemoryError("none")
        with pytest.raises(InvalidParams, match="^level: the host has no room for the weights, got 1"):
            await engine.sleep()
        assert engine.sleep_level == 0 and engine.stats().pages == 20
        runner.sleepless = runner.trouble = RuntimeError("odd")
        with pytest.raises(HeadraceError, match="^kv_memory: the device could not be resized"):
            await engine.resize_kv(10 * engine.info.page_bytes)
        with pytest.raises(HeadraceError, match="^device: it could not be woken"):  # nor put to sleep
            await engine.sleep()
        assert engine.sleep_level == 1
        runner.sleepless = runner.trouble = None
        await engine.wake()
        assert [token.id for token in await read(stream)] == expected_ids("hello", 60)[1:]
        runner.sleepless = RuntimeError("odd")
        with pytest.raises(HeadraceError, match="^level: the device could not be put to sleep"):
            await engine.sleep(2)
        assert engine.sleep_level == 0
        assert (await engine.generate("hello", greedy(9))).choices[0].token_ids == expected_ids("hello", 9)


@pytest.mark.anyio
async def test_streams_that_run_can_be_read_and_cancelled_in_a_sleep() -> None:
    async with serving(capacity(num_pages=20)) as engine:
        streams = [engine.stream(f"prompt {name}", greedy(200)) for name in range(3)]
        for stream in streams:
            await anext(aiter(stream))
        await engine.sleep()
        came = await streams[1].next_chunk()  # what was there before it fell asleep
        streams[0].cancel()
        with anyio.move_on_after(0.01) as scope:
            await read(streams[2])
        assert scope.cancelled_caught and came is not None
        for stream in (streams[0], streams[2]):
            assert (await read(stream))[-1].finish_reason == "cancelled"
        assert engine.sleep_level == 1 and engine.stats().waiting == 1
        await engine.wake()
        tokens = [*came.tokens, *await read(streams[1])]
        assert [token.id for token in tokens] == expected_ids("prompt 1", 200)[1:]


@pytest.mark.anyio
async def test_changes_that_many_ask_for_at_once_are_made_one_after_another() -> None:
    async with serving(capacity(num_pages=20)) as engine:
        page = engine.info.page_bytes
        stream = engine.stream("hello", greedy(100))
        await anext(aiter(stream))
        async with anyio.create_task_group() as group:
            for _ in range(3):
                for change in (
                    engine.sleep,
                    partial(engine.sleep, 2),
                    partial(engine.resize_kv, 12 * page),
                    engine.wake,
                ):
                    group.start_soon(change)
                group.start_soon(engine.wake)
                group.start_soon(engine.resize_kv, 20 * page)
        await engine.wake()
        assert engine.sleep_level == 0 and engine.stats().pages == engine.info.num_pages in (12, 20)
        assert [token.id for token in await read(stream)] == expected_ids("hello", 100)[1:]
    for ask in (engine.sleep, engine.wake, partial(engine.resize_kv, page)):
        with pytest.raises(EngineStopped):
            await ask()  # type: ignore[operator]


@pytest.mark.anyio
async def test_a_drain_waits_for_a_sleeping_engine_to_be_woken() -> None:
    async with serving(capacity(num_pages=20)) as engine:
        stream = engine.stream("hello", greedy(20))
        await stream.admitted()
        await engine.sleep()
        async with anyio.create_task_group() as group:
            group.start_soon(partial(engine.aclose, drain=20))
            await anyio.sleep(0.01)
            with pytest.raises(EngineStopped):
                await engine.sleep(2)
            await engine.wake()
        assert [token.id for token in await read(stream)] == expected_ids("hello", 20)


def describe(folder: Path, name: str, **changes: Any) -> None:
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.anyio
@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "added_tokens.json"])
async def test_files_that_describe_another_model_do_not_wake_it(folder: Path, tmp_path: Path, name: str) -> None:
    model = Path(shutil.copytree(folder, tmp_path / "model"))
    async with Engine(model, dtype="float32", kv_memory=8 * PAGE) as engine:
        before = await engine.generate([1, 2, 3], SamplingParams(max_tokens=8, temperature=0.0))
        await engine.sleep(2)
        if (model / name).exists():
            describe(model, name, added_by_somebody=1)
        else:
            (model / name).write_text('{"!!": 94}')
        with pytest.raises(ModelRejected, match=f"model: {name} is not what it was") as caught:
            await engine.wake()
        assert caught.value.field == name and engine.sleep_level == 2
        if (folder / name).exists():
            shutil.copy(folder / name, model / name)
        else:
            (model / name).unlink()
        await engine.wake()
        assert await engine.generate([1, 2, 3], SamplingParams(max_tokens=8, temperature=0.0)) == before
