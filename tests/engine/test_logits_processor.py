"""`logits_processor`: what it returns is chosen from, on its own rows alone, and its faults are its own stream's."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import tiny_models
import torch
from leftovers import Threads

from headrace.engine import Completion, Engine, HookFailed, InvalidParams, RequestFailed, SamplingParams
from headrace.engine.engine import Prompt

OPTIONS: dict[str, Any] = {"dtype": "float32", "kv_memory": 64 * tiny_models.PAGE_BYTES}
TIGHT: dict[str, Any] = {"dtype": "float32", "kv_memory": 12 * tiny_models.PAGE_BYTES, "page_size": 4}
SHARED = [(at * 7) % 89 + 1 for at in range(40)]
ASKED: list[tuple[Prompt, dict[str, Any]]] = [
    ([5, 6, 7], {}),
    (SHARED, {"temperature": 1.3, "seed": 1, "top_k": 20, "presence_penalty": 0.7, "logprobs": 3}),
    ([*SHARED, 9, 9, 3], {"bad_words": ["ab"], "prompt_logprobs": 2, "min_p": 0.01, "temperature": 1.0, "seed": 4}),
    ([1], {"min_tokens": 12, "stop_token_ids": list(range(16)), "logit_bias": {3: 2.0}, "frequency_penalty": 0.5}),
    ([8] * 20, {"response_format": {"type": "regex", "regex": "[a-f]{3,9}"}, "temperature": 1.5, "seed": 2}),
    ([*SHARED, 4], {"n": 3, "temperature": 1.1, "seed": 9, "logprobs": 0}),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.whole_folder(tmp_path_factory.mktemp("model"))


def params_of(asked: dict[str, Any]) -> SamplingParams:
    return SamplingParams(**({"temperature": 0.0, "max_tokens": 16} | asked))


def same(tokens: list[int], logits: Any) -> Any:
    return logits


class Watching:
    """Returns the logits as they are, in another form each time, and notes what it was called with."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []
        self.threads: set[str] = set()

    def __call__(self, tokens: list[int], logits: Any) -> Any:
        assert logits.dtype == np.float32 and logits.shape == (tiny_models.CONFIG["vocab_size"],)
        assert logits.flags.writeable
        self.seen.append(tokens)
        self.threads.add(threading.current_thread().name)
        return [logits.copy(), torch.from_numpy(logits), logits.tolist()][len(tokens) % 3]


@pytest.mark.parametrize("options", [OPTIONS, OPTIONS | {"launch_ahead": 1}, TIGHT], ids=["ahead", "in step", "tight"])
def test_a_processor_that_changes_nothing_changes_nothing_beside_any_other_option(
    folder: Path, options: dict[str, Any]
) -> None:
    """In one batch with the same requests without it, and preempted; it sees each choice's tokens so far, in order."""
    hooks = [Watching() for _ in ASKED]

    async def run() -> tuple[list[Completion], list[Completion]]:
        plain: list[Any] = [None] * len(ASKED)
        hooked: list[Any] = [None] * len(ASKED)

        async def ask(place: int) -> None:
            prompt, asked = ASKED[place]
            plain[place] = await engine.generate(prompt, params_of(asked))

        async def ask_hooked(place: int) -> None:
            prompt, asked = ASKED[place]
            hooked[place] = await engine.generate(prompt, params_of(asked), logits_processor=hooks[place])

        async with Engine(folder, **options) as engine, anyio.create_task_group() as tasks:
            for place in range(len(ASKED)):
                tasks.start_soon(ask, place)
                tasks.start_soon(ask_hooked, place)
        return plain, hooked

    plain, hooked = anyio.run(run)
    for without, with_it, hook in zip(plain, hooked, hooks, strict=True):
        assert [choice.token_ids for choice in with_it.choices] == [choice.token_ids for choice in without.choices]
        assert [choice.text for choice in with_it.choices] == [choice.text for choice in without.choices]
        for mine, theirs in zip(with_it.choices, without.choices, strict=True):
            assert [each.rank for each in mine.logprobs or ()] == [each.rank for each in theirs.logprobs or ()]
            near = pytest.approx([each.logprob for each in theirs.logprobs or ()], abs=1e-4)
            assert [each.logprob for each in mine.logprobs or ()] == near
        assert (with_it.prompt_logprobs is None) == (without.prompt_logprobs is None)
        wanted = {
            (*with_it.prompt_token_ids, *choice.token_ids[:count])
            for choice in with_it.choices
            for count in range(len(choice.token_ids))
        }
        assert {tuple(tokens) for tokens in hook.seen} == wanted
        assert all("hook" in name for name in hook.threads)


def test_what_it_returns_is_what_is_chosen_from(folder: Path) -> None:
    allowed = [3, 14, 15, 92]

    def masking(tokens: list[int], logits: Any) -> Any:
        changed = np.full_like(logits, -np.inf)
        changed[allowed] = logits[allowed]
        return changed

    def doubling(tokens: list[int], logits: Any) -> Any:
        logits *= 2
        return logits

    async def run() -> None:
        params = params_of({"temperature": 0.8, "seed": 3, "logprobs": 2})
        async with Engine(folder, **OPTIONS) as engine:
            masked = await engine.generate([5, 6], params, logits_processor=masking)
            wanted = await engine.generate([5, 6], params.model_copy(update={"allowed_token_ids": tuple(allowed)}))
            assert masked.choices == wanted.choices, "log-probabilities are those of the unmodified distribution, too"
            doubled = await engine.generate([5, 6], params, logits_processor=doubling)
            colder = await engine.generate([5, 6], params.model_copy(update={"temperature": 0.4}))
            assert doubled.choices[0].token_ids == colder.choices[0].token_ids

    anyio.run(run)


def raising(tokens: list[int], logits: Any) -> Any:
    raise KeyError("x")


def leaving(tokens: list[int], logits: Any) -> Any:
    raise SystemExit(3)


def sleeping(tokens: list[int], logits: Any) -> Any:
    time.sleep(0.5)
    return logits


HOSTILE: list[tuple[Callable[..., Any], type[RequestFailed], str]] = [
    (raising, HookFailed, r"logits_processor raised KeyError after 2 tokens"),
    (leaving, HookFailed, r"logits_processor raised SystemExit after 2 tokens"),
    (sleeping, HookFailed, r"logits_processor took longer than the 0.2 s that it has"),
    (lambda tokens, logits: None, HookFailed, r"must return an array \[\d+\], got NoneType \(\)"),
    (lambda tokens, logits: logits[:-1], HookFailed, r"got ndarray \(\d+,\)"),
    (lambda tokens, logits: "x", HookFailed, r"logits_processor raised ValueError"),
    (lambda tokens, logits: logits * np.nan, HookFailed, r"must return finite numbers or -inf"),
    (lambda tokens, logits: logits + np.inf, HookFailed, r"must return finite numbers or -inf"),
    (lambda tokens, logits: logits - np.inf, RequestFailed, r"leave no token to choose"),
    (lambda tokens: tokens, HookFailed, r"logits_processor raised TypeError"),
]


def test_a_processor_that_fails_ends_its_own_stream_alone(folder: Path) -> None:
    async def run() -> None:
        async with Engine(folder, **OPTIONS, hook_seconds=0.2) as engine:
            alone = await engine.generate([5, 6], params_of({"max_tokens": 60, "ignore_eos": True}))
            other = engine.stream([5, 6], params_of({"max_tokens": 60, "ignore_eos": True}))
            for hook, error, message in HOSTILE:
                with pytest.raises(error, match=message):
                    await engine.generate([5, 6], params_of({"n": 2}), logits_processor=hook)
            assert [token.id async for token in other] == alone.choices[0].token_ids
            again = await engine.generate(
                [5, 6], params_of({"max_tokens": 60, "ignore_eos": True}), logits_processor=same
            )
            assert again.choices == alone.choices
            while engine.stats().pages_held:  # noqa: ASYNC110 - it has no event
                await anyio.sleep(0.001)

    anyio.run(run)


def test_other_rows_do_not_wait_for_it(folder: Path) -> None:
    """While a hook waits, a stream beside it goes on; a cancelled stream is let go though its hook still waits."""
    entered, goes_on = threading.Event(), threading.Event()

    def blocking(tokens: list[int], logits: Any) -> Any:
        entered.set()
        goes_on.wait()
        return logits

    async def run() -> None:
        params = params_of({"max_tokens": 200, "ignore_eos": True})
        async with Engine(folder, **OPTIONS, hook_seconds=60) as engine:
            slow = engine.stream([5, 6], params, logits_processor=blocking)
            await slow.admitted()
            while not entered.is_set():  # noqa: ASYNC110 - of another thread
                await anyio.sleep(0.001)
            try:
                with anyio.fail_after(20):  # a stream that waited for the hook would wait for 60
                    async for token in engine.stream([7], params):
                        if token.position == 20:
                            break
                    slow.cancel()
                    while engine.stats().pages_held:  # noqa: ASYNC110 - it has no event
                        await anyio.sleep(0.001)
            finally:
                goes_on.set()

    anyio.run(run)


def test_an_engine_closes_while_hooks_run_and_are_queued(folder: Path) -> None:
    """It waits for the one that runs, not for the others, and the event loop goes on meanwhile."""
    entered, threads = [], Threads()

    def blocking(tokens: list[int], logits: Any) -> Any:
        entered.append(tokens)
        time.sleep(0.4)
        return logits

    async def run() -> None:
        beats: list[float] = []

        async def beat() -> None:
            while True:
                beats.append(time.perf_counter())
                await anyio.sleep(0.005)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(beat)
            async with Engine(folder, **OPTIONS, hook_seconds=5) as engine:
                streams = [engine.stream([5, 6], params_of({}), logits_processor=blocking) for _ in range(4)]
                while not entered:  # noqa: ASYNC110 - of another thread
                    await anyio.sleep(0.001)
                closing = time.perf_counter()
            assert len(entered) == 1
            assert [(await anext(stream)).finish_reason for stream in streams] == ["cancelled"] * 4
            tasks.cancel_scope.cancel()
        pauses = [after - before for before, after in zip(beats, beats[1:], strict=False) if before > closing]
        assert max(pauses) < 0.3
        assert not [thread for thread in threads.running() if "hook" in thread.name]

    anyio.run(run)


def test_what_cannot_be_is_refused(folder: Path) -> None:
    async def run() -> None:
        async with Engine(folder, **OPTIONS) as engine:
            for hook, params in ((7, params_of({})), (same, SamplingParams(beam_width=2))):
                with pytest.raises(InvalidParams, match="^logits_processor"):
                    await engine.generate([5], params, logits_processor=hook)  # type: ignore[arg-type]

    anyio.run(run)


def test_a_branch_and_the_next_turn_keep_their_processor(folder: Path) -> None:
    hook = Watching()

    async def run() -> None:
        params = params_of({"max_tokens": 6, "ignore_eos": True})
        async with Engine(folder, **OPTIONS) as engine, engine.stream([5, 6], params, logits_processor=hook) as stream:
            first = [await anext(stream) for _ in range(3)]
            branch = stream.fork()
            rest = [token.id async for token in branch]
            assert rest == [token.id async for token in stream]
            calls = len(hook.seen)
            await stream.send([9, 9])
            ids = [token.id async for token in stream]
            known = [5, 6, *[token.id or 0 for token in first], *rest, 9, 9]
            assert hook.seen[calls:] == [[*known, *ids[:count]] for count in range(6)]

    anyio.run(run)
