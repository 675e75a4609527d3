"""Where prompts are tokenised: what is charged for it, what may not run on the event loop, and what is cut to fit."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest
from leftovers import Threads
from scripted import CAPACITY, until
from tokenizer_files import byte_metadata, folder, pieces, sequence, smollm2

from headrace.engine import PromptTooLong
from headrace.engine.life.opened import Opened
from headrace.engine.many.pooled import Pair, Text
from headrace.engine.scheduling.pooling import Pooling
from headrace.engine.testing import ByteTokenizer, ScriptedEngine
from headrace.engine.tokens.gguf import SPLITS
from headrace.engine.tokens.tokenizer import Tokenizer


def replacement(old: str, new: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": old}, "content": new}


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def test_known_tokenizers_are_quick(tmp_path: Path) -> None:
    assert smollm2().table.is_quick and pieces().table.is_quick
    for pre in ("gpt-2", "smollm", "llama-bpe", "qwen2", "tekken", "glm4", "gpt-4o", "seed-coder", "hunyuan-dense"):
        assert Tokenizer.from_gguf(byte_metadata(pre=pre)).table.is_quick
    for number, pattern in enumerate(sorted(SPLITS)):
        (place := tmp_path / str(number)).mkdir()
        assert Tokenizer.from_folder(folder(place, pre_tokenizer=split(pattern))).table.is_quick


@pytest.mark.parametrize(
    "changes",
    [
        {"pre_tokenizer": split("(z+)+$")},
        {"pre_tokenizer": sequence("pretokenizers", sequence("pretokenizers", split(".*.*.*=x")))},
        {"normalizer": {"type": "Replace", "pattern": {"Regex": "(a|aa)+$"}, "content": ""}},
        {"normalizer": replacement("a", "a" * 1000)},
    ],
)
def test_a_tokenizer_that_may_take_long_for_a_short_text_is_not_quick(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert not Tokenizer.from_folder(folder(tmp_path, **changes)).table.is_quick


class Watched(ByteTokenizer):
    """Notes the threads in which it tokenises, and waits there."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: list[str] = []
        self.go_on = threading.Event()
        self.go_on.set()

    def encode(self, text: str, *, framed: bool = True) -> list[int]:
        self.threads.append(threading.current_thread().name)
        assert self.go_on.wait(30)
        return super().encode(text)


class WatchedEngine(ScriptedEngine):
    def __init__(self, tokenizer: Watched) -> None:
        super().__init__(replace(CAPACITY, max_context=8192, num_pages=1024))
        self._tokenizer = tokenizer

    def _open(self) -> Opened:
        return replace(super()._open(), tokenizer=self._tokenizer)


@pytest.mark.anyio
@pytest.mark.parametrize("quick", [True, False])
async def test_a_tokenizer_that_is_not_quick_stays_off_the_event_loop(quick: bool) -> None:
    tokenizer = Watched()
    tokenizer.table.is_quick = quick
    async with WatchedEngine(tokenizer) as engine:
        await engine.tokenize("ab")
        async with engine.stream("ab") as stream:
            await stream.admitted()
        assert {name == "headrace-helper" for name in tokenizer.threads} == {not quick}


@pytest.mark.anyio
@pytest.mark.parametrize("tenants", ["a", "ab"])
async def test_closing_does_not_wait_on_the_event_loop_for_texts_that_are_being_tokenised(tenants: str) -> None:
    """One helper thread is busy, or both are, and the event loop turns until their texts are done."""
    tokenizer, threads = Watched(), Threads()
    engine = WatchedEngine(tokenizer)
    turns = 0

    async def turn() -> None:
        nonlocal turns
        while True:
            turns += 1
            if turns == 20:
                tokenizer.go_on.set()
            await anyio.sleep(0.01)

    async with engine:
        tokenizer.go_on.clear()
        streams = [engine.stream("x" * 4000, tenant=tenant) for tenant in tenants]
        await until(lambda: len(tokenizer.threads) == len(tenants))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(turn)
            await engine.aclose()
            assert turns >= 20, "it closed before the texts were done"
            tasks.cancel_scope.cancel()
        del streams
    threads.check_ended()


@pytest.mark.anyio
async def test_closing_leaves_behind_a_text_that_takes_for_ever(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("headrace.engine.life.lifespan._PATIENCE", 0.05)
    tokenizer, threads = Watched(), Threads()
    async with WatchedEngine(tokenizer) as engine:
        tokenizer.go_on.clear()
        streams = [engine.stream("x" * 4000, tenant=tenant) for tenant in "ab"]
        await until(lambda: len(tokenizer.threads) == 2)
        with anyio.fail_after(20):
            await engine.aclose()
        assert {thread.name for thread in threads.running()} == {"headrace-helper"}
        assert "still busy" in caplog.text
        tokenizer.go_on.set()
        del streams
    threads.check_ended()


def opened_of(tokenizer: Tokenizer, max_context: int) -> Any:
    """An open model, as far as texts see it."""

    class Scoring:
        encode_pair = staticmethod(tokenizer.encode_pair)

    class Info:
        pass

    info: Any = Info()
    info.max_context = max_context
    opened: Any = Info()
    opened.tokenizer, opened.info, opened.scoring = tokenizer, info, Scoring
    return opened


def test_truncating_takes_what_fits_where_the_tokenizer_takes_less_than_the_context_could_hold(tmp_path: Path) -> None:
    """A normalizer that makes 3,600 bytes of one lets a text have 18,641 characters."""
    growing = sequence("normalizers", replacement("a", "a" * 60), replacement("b", "b" * 60))
    tokenizer = Tokenizer.from_folder(folder(tmp_path, normalizer=growing))
    assert tokenizer.table.most_characters == (64 << 20) // 3600
    opened, long = opened_of(tokenizer, 20_000), "x" * 30_000
    tokenizer.table.longest = 4
    full = Text("a" * 30_000, Pooling("last"), truncate=True).tokenize(opened)
    assert len(full.ids) == 20_000 and full.made == 60 * tokenizer.table.most_characters
    pair = Pair("q", "a" * 30_000, truncate=True).tokenize(opened)
    assert len(pair.ids) == 20_000
    for asked in (Text(long, Pooling("last"), truncate=True), Pair("q", long, truncate=True)):
        with pytest.raises(PromptTooLong, match="18641 characters at once, which do not fill"):
            asked.tokenize(opened)
    assert len(Text("x" * 10_000, Pooling("last"), truncate=True).tokenize(opened).ids) == 10_000
