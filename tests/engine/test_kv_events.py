"""A router outside knows from an engine's events what a prompt would find there."""

from __future__ import annotations

import anyio
import pytest
from scripted import capacity, greedy, serving, until

from headrace.engine import (
    EngineCrashed,
    EngineStopped,
    KvEvents,
    KvLoad,
    KvReset,
    PageRemoved,
    PageStored,
    UnknownAdapter,
)
from headrace.engine.delivery import kv_events as module
from headrace.engine.testing import ScriptedEngine

pytestmark = pytest.mark.anyio


class Router:
    """Follows one engine."""

    def __init__(self, events: KvEvents) -> None:
        self.events = events
        self.pages: dict[str, PageStored] = {}
        self.load: KvLoad | None = None
        self.resets = 0

    async def follow(self) -> None:
        """Read until the end."""
        async for event in self.events:
            if isinstance(event, KvReset):
                self.resets += 1
                self.pages.clear()
            elif isinstance(event, PageStored):
                self.pages[event.key] = event
            elif isinstance(event, PageRemoved):
                if self.pages[event.key].medium == event.medium:  # it may be in host memory by now
                    del self.pages[event.key]
            else:
                self.load = event

    async def knows_all(self, engine: ScriptedEngine) -> None:
        """Wait until this knows what a resting engine has."""
        assert engine._life.loop is not None
        pool, scheduler = engine._life.loop.scheduler.pool, engine._life.loop.scheduler
        await until(lambda: not scheduler.roster.requests and self.load == KvLoad.of(scheduler))
        # the last page of a finished request, partly full, is only for what goes on after it
        assert self.pages.keys() == {key.hex() for page, key in pool._key_of.items() if page not in pool._partly}

    def finds(self, scope: str, tokens: list[int]) -> int:
        """Tokens of a prompt that the engine would not compute."""
        index = {(page.scope, page.parent, page.tokens): page.key for page in self.pages.values()}
        parent, found = None, 0
        while (parent := index.get((scope, parent, tuple(tokens[found : found + 16])))) is not None:
            found += 16
        return min(found, (len(tokens) - 1) // 16 * 16)


async def test_what_a_router_expects_is_what_a_request_finds() -> None:
    async with serving(capacity(num_pages=24)) as engine, anyio.create_task_group() as group:
        router = Router(engine.kv_events())
        group.start_soon(router.follow)
        shared = "the same beginning of sixty-four characters, that all of these have"
        asked = [(shared + " one", "a"), (shared + " two", "a"), (shared + " three", "b"), ("x" * 100, None)]
        found = 0
        for text, tenant in [*asked, (shared, "b")] * 3:
            await router.knows_all(engine)
            expected = router.finds(engine.kv_scope(tenant=tenant), list(text.encode()))
            answer = await engine.generate(text, greedy(20), tenant=tenant)
            assert answer.usage.cached_tokens == expected
            found += expected
        assert found > 300 and router.resets == 1
        await engine.aclose()


async def test_a_scope_is_that_of_an_adapter_and_a_tenant_or_salt() -> None:
    async with serving() as engine:
        assert engine.kv_scope(tenant="a") == engine.kv_scope(cache_salt="a") != engine.kv_scope(tenant="b")
        assert engine.kv_scope() not in (engine.kv_scope(tenant="a"), engine.kv_scope(tenant=""))
        with pytest.raises(UnknownAdapter):
            engine.kv_scope(adapter="none")


async def test_a_reader_that_falls_behind_starts_anew_and_misses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ROOM", 10)
    async with serving(capacity(num_pages=24)) as engine, anyio.create_task_group() as group:
        prompt, late = Router(engine.kv_events()), Router(engine.kv_events())
        group.start_soon(prompt.follow)
        assert isinstance(await anext(late.events), KvReset)
        for name in range(5):
            await engine.generate(f"{name}" * 60, greedy(10))
            await prompt.knows_all(engine)
        assert len(late.events._events) <= 10
        group.start_soon(late.follow)
        group.start_soon((third := Router(engine.kv_events())).follow)
        for router, resets in ((prompt, 1), (late, 1), (third, 1)):
            await router.knows_all(engine)
            assert router.resets == resets
        await engine.aclose()


async def test_the_events_end_with_the_engine() -> None:
    async with serving() as engine:
        events = engine.kv_events()
        await engine.generate("hello", greedy(3))
    assert [type(event) async for event in events] == [KvReset, KvLoad]
    with pytest.raises(EngineStopped):
        engine.kv_events()


async def test_the_events_of_an_engine_that_crashes_end_with_its_error() -> None:
    sizes = capacity()
    with pytest.raises(EngineCrashed):
        async with ScriptedEngine(sizes) as engine:
            assert engine._life.loop is not None
            events = engine.kv_events()
            engine._life.loop.scheduler.plan = None  # type: ignore[method-assign,assignment]
            engine._life.loop.wake()
            with pytest.raises(EngineCrashed):
                _ = [event async for event in events]


async def test_readers_that_nobody_holds_are_forgotten() -> None:
    async with serving() as engine:
        assert engine._life.loop is not None
        events = engine.kv_events()
        engine.kv_events()
        assert len(engine._life.loop.kv._readers) == 1
        del events
        assert not engine._life.loop.kv._readers


async def test_nothing_is_noted_once_nobody_reads_and_a_later_reader_is_told_of_what_comes_then() -> None:
    async with serving(capacity(num_pages=24)) as engine, anyio.create_task_group() as group:
        assert engine._life.loop is not None
        log = engine._life.loop.scheduler.pool.log
        events = engine.kv_events()
        await engine.generate("x" * 100, greedy(3))
        assert log.is_on and log.present()
        del events
        await engine.generate("y" * 100, greedy(3))
        assert not log.is_on and not log.present()
        router = Router(engine.kv_events())
        group.start_soon(router.follow)
        await engine.generate("x" * 100, greedy(3))  # found in the cache
        await engine.generate("z" * 100, greedy(3))
        await until(lambda: len(router.pages) == 6)
        assert {page.tokens[0] for page in router.pages.values()} == {ord("z")}
        await engine.aclose()


@pytest.mark.parametrize("places", [0, 40])
async def test_a_router_follows_memory_that_goes_and_comes_back(places: int) -> None:
    sizes = capacity(num_pages=24)
    async with serving(sizes, swap_memory=places * 16) as engine, anyio.create_task_group() as group:
        router = Router(engine.kv_events())
        group.start_soon(router.follow)
        for text in ("x" * 100, "y" * 100):
            await engine.generate(text, greedy(3))
        await until(lambda: len(router.pages) == 12)
        await engine.resize_kv(8 * engine.info.page_bytes)
        await until(lambda: len([page for page in router.pages.values() if page.medium == "device"]) <= 8)
        await engine.sleep()
        await until(lambda: router.load is not None and router.load.pages == 0)
        assert {page.medium for page in router.pages.values()} <= ({"host"} if places else set())
        assert bool(router.pages) == bool(places)
        await engine.wake()
        await engine.generate("z" * 100, greedy(3))
        z = [(ord("z"),) * 16] * 6
        await until(lambda: [page.tokens for page in router.pages.values() if page.medium == "device"] == z)
        await engine.aclose()
