"""Texts that a model writes itself: full sequences, all different, and the same again."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import tiny_models

from headrace.engine import Engine, InvalidParams
from headrace.engine.many.own_texts import own_texts

pytestmark = pytest.mark.anyio
FIRST, END = 65, 256


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.chat_folder(tmp_path_factory.mktemp("model"))


async def texts(model: Path, sequences: int, tokens: int, max_rows: int = 8) -> tuple[list[list[int]], list[int]]:
    told: list[int] = []
    async with Engine(model, device="cpu", kv_memory="8MiB", max_rows=max_rows) as engine:
        return await own_texts(engine, FIRST, sequences=sequences, tokens=tokens, wrote=told.append), told


async def test_sequences_are_full_and_all_different_and_go_on_behind_an_end(model: Path) -> None:
    found, told = await texts(model, sequences=19, tokens=60)  # two requests of eight rows, and one of three
    assert [len(text) for text in found] == [60] * 19 and {text[0] for text in found} == {FIRST}
    assert len({tuple(text[1:9]) for text in found}) == 19
    assert any(END in text[:-1] for text in found)
    assert told[-1] == 19 * 59 and all(one < other for one, other in pairwise(told))
    assert (await texts(model, sequences=19, tokens=60))[0] == found


async def test_a_small_room_is_shared(model: Path) -> None:
    """With pages for two sequences, none is preempted or cut short."""
    tokens, page = 100, tiny_models.PAGE_BYTES
    async with Engine(model, device="cpu", dtype="float32", kv_memory=15 * page) as engine:
        found = await own_texts(engine, FIRST, sequences=5, tokens=tokens, wrote=lambda done: None)
        assert [len(text) for text in found] == [tokens] * 5
        assert engine.stats().preemptions == 0
        with pytest.raises(InvalidParams, match=r"^sequence_tokens: must be at most 240, ") as refused:
            await own_texts(engine, FIRST, sequences=1, tokens=241, wrote=lambda done: None)
        assert refused.value.limit == 240
