"""Adapters load, serve, change and go while the engine serves, and every request wears what it asked for."""

from __future__ import annotations

import dataclasses
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
import transformers
from adapter_folders import BOTH, SIZES, lora_folder, lora_tensors, merged, prompt_folder
from tiny_models import whole_folder

from headrace.engine import (
    AdapterRejected,
    AdapterUnavailable,
    Engine,
    InvalidParams,
    PromptTooLong,
    SamplingParams,
    UnknownAdapter,
)

pytestmark = pytest.mark.anyio
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
PROMPT = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46, 26, 43, 38, 32, 79, 50, 28, 8, 41]
OPTIONS: dict[str, Any] = {"dtype": "float32", "kv_memory": "4MiB", "max_rows": 8, "adapter_slots": 4, "page_size": 4}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return whole_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def reference(model: Path) -> Callable[..., list[int]]:
    base = transformers.LlamaForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    def tokens(seed: int | None, rank: int = 4, modules: Any = BOTH, count: int = 10, ids: list[int] = PROMPT) -> Any:
        wearing = base if seed is None else merged(base, lora_tensors(seed, rank, modules))
        made = wearing.generate(
            torch.tensor([ids]), max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0
        )
        return made[0, len(ids) :].tolist()

    return tokens


async def tokens_of(engine: Engine, adapter: str | None, **changes: Any) -> list[int]:
    params = GREEDY.model_copy(update=changes)
    return (await engine.generate(PROMPT, params, adapter=adapter)).choices[0].token_ids


async def test_many_adapters_of_mixed_ranks_share_few_slots(
    model: Path, reference: Callable[..., list[int]], tmp_path: Path
) -> None:
    """Requests of 9 adapters and of none on 2 slots and 8 rows: all end, each as if it were alone."""
    shapes = [(seed, 1 + 3 * seed, list(SIZES)[: 1 + seed % 7]) for seed in range(9)]
    found: dict[tuple[int, int], list[int]] = {}
    async with Engine(model, **OPTIONS | {"adapter_slots": 2}) as engine:
        for seed, rank, modules in shapes:
            await engine.adapters.load(f"a{seed}", lora_folder(tmp_path / str(seed), seed, rank, modules))

        async def one(seed: int, turn: int) -> None:
            found[seed, turn] = await tokens_of(engine, f"a{seed}" if seed >= 0 else None)

        async with anyio.create_task_group() as group:
            for turn in range(3):
                for seed in range(-1, 9):
                    group.start_soon(one, seed, turn)
        on_device = [info for info in engine.adapters.list() if info.where == "device"]
        assert 1 <= len(on_device) <= 2 and all(info.requests == 0 for info in engine.adapters.list())
    for seed, rank, modules in shapes:
        expected = reference(seed, rank, modules)
        assert all(found[seed, turn] == expected for turn in range(3)), seed
        assert expected != reference(None), "the adapter does nothing"
    assert all(found[-1, turn] == reference(None) for turn in range(3))


async def test_a_replaced_name_changes_for_new_requests_alone(
    model: Path, reference: Callable[..., list[int]], tmp_path: Path
) -> None:
    async with Engine(model, **OPTIONS) as engine:
        await engine.adapters.load("a", lora_folder(tmp_path / "one", 1))
        stream = engine.stream(PROMPT, GREEDY.model_copy(update={"max_tokens": 120}), adapter="a")
        running = [(await anext(stream)).id]
        await engine.adapters.load("a", lora_folder(tmp_path / "two", 2))
        assert await tokens_of(engine, "a") == reference(2), "stale pages or weights of the first version"
        await engine.adapters.unload("a")
        with pytest.raises(UnknownAdapter, match="'a'") as caught:
            await tokens_of(engine, "a")
        assert caught.value.field == "adapter"
        running += [token.id async for token in stream]
        assert running == reference(1, count=120)
        assert engine.adapters.list() == []
        assert await tokens_of(engine, None) == reference(None)


async def test_equal_weights_are_one_version_and_share_pages(model: Path, tmp_path: Path) -> None:
    async with Engine(model, **OPTIONS) as engine:
        for name in ("a", "b", "c"):
            await engine.adapters.load(name, lora_folder(tmp_path / name, 2 if name == "c" else 1))
        first, same, other = engine.adapters.list()
        assert first.digest == same.digest != other.digest
        cached = {}
        for name in ("a", "b", "c", None):
            cached[name] = (await engine.generate(PROMPT, GREEDY, adapter=name)).usage.cached_tokens
        assert cached == {"a": 0, "b": 16, "c": 0, None: 0}
        await engine.adapters.unload("a")
        await engine.adapters.load("b", tmp_path / "c")
        assert (await engine.generate(PROMPT, GREEDY, adapter="b")).usage.cached_tokens == 16


async def test_prompt_adapters_count_no_tokens_and_share_pages(model: Path, tmp_path: Path) -> None:
    async with Engine(model, **OPTIONS) as engine:
        await engine.adapters.load("p", prompt_folder(tmp_path / "p", 1))
        first = await engine.generate(PROMPT, GREEDY, adapter="p")
        again = await engine.generate(PROMPT, GREEDY, adapter="p")
        assert first.choices[0].token_ids == again.choices[0].token_ids != await tokens_of(engine, None)
        assert first.prompt_token_ids == PROMPT and first.usage.prompt_tokens == len(PROMPT)
        assert first.usage.completion_tokens == GREEDY.max_tokens
        assert again.usage.cached_tokens == 24 - 5
        seen: list[list[int]] = []

        def watch(tokens: list[int], logits: Any) -> Any:
            seen.append(tokens)
            return logits

        await engine.generate(PROMPT, GREEDY, adapter="p", logits_processor=watch)
        assert seen == [PROMPT + first.choices[0].token_ids[:count] for count in range(10)]
        stream = engine.stream(PROMPT, GREEDY, adapter="p")
        said = [(await anext(stream)).id for _ in range(4)]
        forked = [token.id async for token in stream.fork()]
        said += [token.id async for token in stream]
        assert said == first.choices[0].token_ids and forked == said[4:]
        again = [token.id async for token in await stream.send([5, 6])]
        whole = await engine.generate([*PROMPT, *said, 5, 6], GREEDY, adapter="p")
        assert again == whole.choices[0].token_ids
        with pytest.raises(InvalidParams, match="virtual tokens"):
            await engine.generate(PROMPT, GREEDY.model_copy(update={"prompt_logprobs": 1}), adapter="p")
        with pytest.raises(PromptTooLong):
            await engine.generate([1] * 253, GREEDY, adapter="p")
        beams = SamplingParams(temperature=0, beam_width=2, ignore_eos=True)
        searched = await engine.generate([1] * 240, beams, adapter="p")
        assert searched.usage.completion_tokens == engine.info.max_context - (240 + 5)
        await engine.generate([1] * 253, GREEDY.model_copy(update={"max_tokens": 2}))


async def test_choices_beams_and_hidden_states_wear_it_too(
    model: Path, reference: Callable[..., list[int]], tmp_path: Path
) -> None:
    async with Engine(model, **OPTIONS) as engine:
        await engine.adapters.load("a", lora_folder(tmp_path / "a", 1))
        expected = reference(1)
        completion = await engine.generate(PROMPT, GREEDY.model_copy(update={"n": 2}), adapter="a")
        assert [choice.token_ids for choice in completion.choices] == [expected, expected]
        beams = SamplingParams(beam_width=2, max_tokens=4, temperature=0)
        with_it = await engine.generate(PROMPT, beams, adapter="a")
        assert with_it.choices[0].token_ids != (await engine.generate(PROMPT, beams)).choices[0].token_ids
        states = [await engine.hidden_states(PROMPT, adapter=name) for name in ("a", None)]
        assert (states[0] - states[1]).abs().max() > 0.1


async def test_what_is_not_in_memory_is_read_again(
    model: Path,
    reference: Callable[..., list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One slot, and host memory for one adapter: every change of adapter reads files, which must be the same ones."""
    async with Engine(model, **OPTIONS | {"adapter_slots": 1, "adapter_host_memory": 1}) as engine:
        for seed in (1, 2):
            lora_folder(tmp_path / str(seed), seed)
        monkeypatch.chdir(tmp_path)
        await engine.adapters.load("a1", "1")
        await engine.adapters.load("a2", "2", root=".")
        monkeypatch.chdir("/")
        for seed in (1, 2, 1):
            assert await tokens_of(engine, f"a{seed}") == reference(seed)
        assert [info.where for info in engine.adapters.list()] == ["device", "disk"]
        lora_folder(tmp_path / "2", 3)
        with pytest.raises(AdapterUnavailable, match="changed since"):
            await tokens_of(engine, "a2")
        assert "adapter a2 could not" in caplog.text and "changed since" in caplog.text
        assert await tokens_of(engine, "a1") == reference(1)
        await engine.adapters.load("a2", tmp_path / "2")
        assert await tokens_of(engine, "a2") == reference(3)


async def test_who_waits_for_an_adapter_blocks_nobody_and_has_it_before_its_turn(
    model: Path, reference: Callable[..., list[int]], tmp_path: Path
) -> None:
    async with Engine(model, **OPTIONS | {"adapter_slots": 1, "adapter_host_memory": 1}) as engine:
        for seed in (1, 2):
            await engine.adapters.load(f"a{seed}", lora_folder(tmp_path / str(seed), seed))
        for seed in (2, 1):
            assert await tokens_of(engine, f"a{seed}") == reference(seed)
        device, may_read = engine.adapters._device, threading.Event()
        assert device is not None

        def read(*source: Any) -> Any:
            may_read.wait(60)
            return device.read(*source)

        engine.adapters._device = dataclasses.replace(device, read=read)
        found: list[list[int]] = []

        async def wait_for_it() -> None:
            found.append(await tokens_of(engine, "a2"))

        async with anyio.create_task_group() as group:
            group.start_soon(wait_for_it)
            assert await tokens_of(engine, None, max_tokens=100) == reference(None, count=100)
            assert not found and where(engine)["a2"] == "loading"
            may_read.set()
        assert found == [reference(2)]
        others = [engine.stream(PROMPT, GREEDY.model_copy(update={"max_tokens": 200})) for _ in range(8)]
        assert [await anext(stream) for stream in others], "all rows are taken"
        async with anyio.create_task_group() as group:
            group.start_soon(tokens_of, engine, "a1")
            with anyio.fail_after(30):
                while where(engine)["a1"] != "device":  # noqa: ASYNC110 - nobody tells
                    await anyio.sleep(0.001)
            assert engine.stats().waiting == 1 and engine.stats().running == 8
            for stream in others:
                await stream.aclose()


def where(engine: Engine) -> dict[str, str]:
    return {info.name: info.where for info in engine.adapters.list()}


async def test_loads_of_one_name_at_once_take_turns(
    model: Path, reference: Callable[..., list[int]], tmp_path: Path
) -> None:
    async with Engine(model, **OPTIONS) as engine:
        async with anyio.create_task_group() as group:
            for seed in (1, 2, 3):
                group.start_soon(engine.adapters.load, "a", lora_folder(tmp_path / str(seed), seed))
        adapters = engine.adapters
        (only,) = adapters.list()
        assert only.name == "a"
        assert await tokens_of(engine, "a") in [reference(seed) for seed in (1, 2, 3)], "a mixture"
    assert not adapters._pool, "a closed engine keeps weights"


async def test_a_name_outlives_another_of_the_same_weights(
    model: Path, reference: Callable[..., list[int]], tmp_path: Path
) -> None:
    """What one loaded from a folder of its own is read again from there, whatever becomes of the other's."""
    async with Engine(model, **OPTIONS | {"adapter_slots": 1, "adapter_host_memory": 1}) as engine:
        folders = [lora_folder(tmp_path / name, 1) for name in ("mine", "theirs", "gone")]
        for name, number in (("mine", 2), ("mine", 0), ("theirs", 1)):
            await engine.adapters.load(name, folders[number])
        await engine.adapters.load("other", lora_folder(tmp_path / "other", 2))
        for folder in folders[1:]:
            shutil.rmtree(folder)
        assert await tokens_of(engine, "other") == reference(2)
        assert await tokens_of(engine, "mine") == reference(1)
        await engine.adapters.unload("theirs")
        assert await tokens_of(engine, "other") == reference(2)
        assert await tokens_of(engine, "mine") == reference(1)


async def test_a_rejected_adapter_changes_nothing(
    model: Path, reference: Callable[..., list[int]], tmp_path: Path
) -> None:
    good = lora_folder(tmp_path / "good", 1)
    async with Engine(model, **OPTIONS | {"max_adapters": 2, "adapter_memory": "16KiB"}) as engine:
        await engine.adapters.load("a", good)
        await engine.adapters.load("b", good)
        for name, path, field in [
            ("../a", good, "name"),
            (".a", good, "name"),
            ("a/b", good, "name"),
            ("a" * 65, good, "name"),
            (engine.info.model, good, "name"),
            ("c", good, "max_adapters"),
            ("a", tmp_path / "none", "path"),
            ("a", lora_folder(tmp_path / "wide", 1, 64, SIZES), "adapter_memory"),
        ]:
            with pytest.raises(AdapterRejected) as caught:
                await engine.adapters.load(name, path)
            assert caught.value.field == field, name
        assert [info.name for info in engine.adapters.list()] == ["a", "b"]
        assert await tokens_of(engine, "a") == reference(1)
        with pytest.raises(UnknownAdapter):
            await engine.adapters.unload("c")
    async with Engine(model, **OPTIONS | {"adapter_slots": 0}) as engine:
        for ask in (engine.generate, engine.embed):
            with pytest.raises(UnknownAdapter, match="opened with adapter_slots=1 or more"):
                await ask([PROMPT], adapter="a") if ask == engine.embed else await ask(PROMPT, adapter="a")
        with pytest.raises(InvalidParams, match="adapter_slots"):
            await engine.adapters.load("a", good)
        with pytest.raises(UnknownAdapter):
            await tokens_of(engine, "a")


async def test_the_largest_rank_that_is_allowed_finds_room(
    model: Path, reference: Callable[..., list[int]], tmp_path: Path
) -> None:
    async with Engine(model, **OPTIONS | {"adapter_slots": 1, "max_adapter_rank": 64}) as engine:
        await engine.adapters.load("a", lora_folder(tmp_path / "a", 1, 64, SIZES))
        assert await tokens_of(engine, "a") == reference(1, 64, SIZES)


async def test_pinned_adapters_stay_as_long_as_others_find_room(model: Path, tmp_path: Path) -> None:
    async with Engine(model, **OPTIONS | {"adapter_slots": 2}) as engine:
        for seed in range(4):
            await engine.adapters.load(f"a{seed}", lora_folder(tmp_path / str(seed), seed))
        engine.adapters.pin("a3")
        with pytest.raises(InvalidParams, match="at most 1"):
            engine.adapters.pin("a2")
        for seed in (0, 1, 2, 0):
            await tokens_of(engine, f"a{seed}")
            there = where(engine)
            assert there["a3"] == "device" and there[f"a{seed}"] == "device"
        with pytest.raises(InvalidParams, match="at most 1"):
            await engine.adapters.load("a4", tmp_path / "0", pinned=True)
        assert "a4" not in engine.adapters.versions
        await engine.adapters.load("a4", tmp_path / "3", pinned=True)  # the same weights: the same slot
        engine.adapters.pin("a3", False)
        await engine.adapters.load("a4", tmp_path / "1", pinned=False)
        engine.adapters.pin("a2")


async def test_of_two_loads_that_want_the_last_pin_one_changes_nothing(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    refused: list[str] = []

    async def load(name: str) -> None:
        try:
            await engine.adapters.load(name, tmp_path / name, pinned=True)
        except InvalidParams:
            refused.append(name)

    async with Engine(model, **OPTIONS | {"adapter_slots": 2}) as engine:
        async with anyio.create_task_group() as group:
            for seed in (1, 2):
                lora_folder(tmp_path / str(seed), seed)
                group.start_soon(load, str(seed))
        (pinned,) = engine.adapters.list()
        assert pinned.pinned and refused == [{"1": "2", "2": "1"}[pinned.name]]
    assert not caplog.records, "an engine that closes while it loads complains"


async def test_a_step_wears_no_more_adapters_than_its_budget(model: Path, tmp_path: Path) -> None:
    async with Engine(model, **OPTIONS | {"max_step_adapters": 1}) as engine:
        for seed in range(3):
            await engine.adapters.load(f"a{seed}", lora_folder(tmp_path / str(seed), seed))
        async with anyio.create_task_group() as group:
            for seed in (0, 1, 2, 0, 1, 2):
                group.start_soon(tokens_of, engine, f"a{seed}")
            await anyio.sleep(0.02)
            while engine.stats().running or engine.stats().waiting:
                slots = engine._serving.parts().loop.scheduler.slots
                assert len(slots.active) <= 1
                await anyio.sleep(0.001)


async def test_load_returns_what_it_has_loaded(model: Path, tmp_path: Path) -> None:
    async with Engine(model, **OPTIONS) as engine:
        loaded = await engine.adapters.load("a", lora_folder(tmp_path / "a", 1), pinned=True)
        (listed,) = engine.adapters.list()
        assert loaded == dataclasses.replace(listed, where=loaded.where) and loaded.name == "a" and loaded.pinned
        again = await engine.adapters.load("a", lora_folder(tmp_path / "b", 2))
        assert again.digest != loaded.digest and again.digest == engine.adapters.list()[0].digest
