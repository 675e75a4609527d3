"""`Engine`: whole answers, refusals, failing steps and what they leave to others, looking in; over a fake device."""

from __future__ import annotations

import math
from typing import Any

import anyio
import pytest
from scripted import (
    CAPACITY,
    Gate,
    capacity,
    check_serving,
    expected_ids,
    expected_text,
    greedy,
    no_leaks,
    read,
    returned,
    serving,
    until,
)

from headrace.engine import (
    Completion,
    HeadraceError,
    InvalidParams,
    NonFiniteLogits,
    PromptTooLong,
    Rejected,
    RequestFailed,
    SamplingParams,
    UnknownAdapter,
    Usage,
)
from headrace.engine.scheduling.plan import StepPlan
from headrace.engine.scheduling.result import NoToken
from headrace.engine.testing import ByteTokenizer, ScriptedEngine, ScriptedRunner, ScriptedStep

pytestmark = pytest.mark.anyio


# -- whole answers -------------------------------------------------------------------------------------------------


async def test_generate_gives_the_whole_answer() -> None:
    async with serving() as engine:
        answer = await engine.generate("Hello", greedy(12, n=2))
        assert isinstance(answer, Completion)
        assert answer.prompt_token_ids == list(b"Hello")
        assert answer.usage == Usage(prompt_tokens=5, completion_tokens=24)
        assert [choice.index for choice in answer.choices] == [0, 1]
        for choice in answer.choices:
            assert choice.token_ids == expected_ids("Hello", 12)
            assert choice.text == expected_text("Hello", 12)
            assert choice.finish_reason == "length"


async def test_text_ids_and_chats_are_prompts() -> None:
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    async with serving() as engine:
        for prompt in ("plain", [1, 2, 3], (4, 5), chat):
            ids = await engine.tokenize(prompt)
            answer = await engine.generate(prompt, greedy(3))
            assert answer.prompt_token_ids == ids
            assert answer.choices[0].token_ids == expected_ids(ids, 3)


async def test_many_at_once_each_as_if_alone() -> None:
    """More than rows, in chunks, with shared and own prefixes, in a pool that makes them give way."""
    prompts = [("shared beginning " * (1 + number % 3)) + f"{number}" * (number % 7) for number in range(24)]
    async with serving(capacity(num_pages=12, max_batched_tokens=16)) as engine:
        answers: dict[int, Completion] = {}

        async def ask(number: int) -> None:
            answers[number] = await engine.generate(prompts[number], greedy(10 + number))

        async with anyio.create_task_group() as tasks:
            for number in range(len(prompts)):
                tasks.start_soon(ask, number)
        for number, prompt in enumerate(prompts):
            assert answers[number].choices[0].token_ids == expected_ids(prompt, 10 + number)
        await returned(engine)


async def test_a_long_prompt_is_tokenised_elsewhere() -> None:
    async with serving(capacity(max_context=4000, num_pages=256)) as engine:
        prompt = "\u20ac" * 900 + "z" * 1200
        stream = engine.stream(prompt, greedy(2))
        assert stream.prompt_token_ids == []
        await stream.admitted()
        assert stream.prompt_token_ids == list(prompt.encode())
        assert [token.id for token in await read(stream)] == expected_ids(prompt, 2)


async def test_lower_priority_numbers_are_served_first() -> None:
    gate = Gate()
    async with serving(capacity(max_rows=1), gate=gate) as engine:
        gate.hold()
        ends: list[str] = []

        async def ask(name: str, priority: int) -> None:
            await read(engine.stream(name, greedy(3), priority=priority))
            ends.append(name)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, "running", 5)
            await until(lambda: engine.stats().running == 1)
            for name, priority in (("late", 9), ("default", 0), ("urgent", -3), ("default too", 0)):
                tasks.start_soon(ask, name, priority)
            await until(lambda: engine.stats().waiting == 4)
            gate.release()
        assert ends[:2] == ["running", "urgent"]
        assert ends[-1] == "late"


async def test_tenants_and_salts_keep_prefix_pages_apart() -> None:
    prompt = "p" * 40
    async with serving() as engine:

        async def cached(**who: Any) -> int:
            return (await engine.generate(prompt, greedy(2), **who)).usage.cached_tokens

        assert await cached() == 0
        assert await cached() == 32
        assert await cached(tenant="a") == 0
        assert await cached(tenant="a") == 32
        assert await cached(tenant="b") == 0
        assert await cached(tenant="b", cache_salt="a") == 32
        assert await cached(cache_salt="") == 0


# -- refusals ------------------------------------------------------------------------------------------------------

TIGHT = capacity(num_pages=8, page_size=4, max_context=40)  # room for 33 tokens
SHORT = capacity(max_context=20)

REFUSED: list[tuple[str, Any, dict[str, Any], type[Rejected], str, object]] = [
    ("no text", "", {}, InvalidParams, "prompt", 1),
    ("no ids", [], {}, InvalidParams, "prompt", 1),
    ("None", None, {}, InvalidParams, "prompt", None),
    ("bytes", b"bytes", {}, InvalidParams, "prompt", None),
    ("a number", 7, {}, InvalidParams, "prompt", None),
    ("a mapping", {"role": "user", "content": "x"}, {}, InvalidParams, "prompt", None),
    ("half a surrogate pair", "a\ud800", {}, InvalidParams, "prompt", None),
    ("an id past the end", [1, 257], {}, InvalidParams, "prompt[1]", 256),
    ("a negative id", [-1], {}, InvalidParams, "prompt[0]", 256),
    ("a huge id", [0, 0, 2**63], {}, InvalidParams, "prompt[2]", 256),
    ("a bool", [True], {}, InvalidParams, "prompt[0]", 256),
    ("a float", [1, 2.0], {}, InvalidParams, "prompt[1]", 256),
    ("a NaN", [math.nan], {}, InvalidParams, "prompt[0]", 256),
    ("text among ids", [1, "b"], {}, InvalidParams, "prompt[1]", 256),
    ("a message among ids", [1, {"role": "user", "content": "x"}], {}, InvalidParams, "prompt[1]", 256),
    ("a list of texts", ["a", "b"], {}, InvalidParams, "prompt[0]", 256),
    (
        "a stop token past the end",
        "x",
        {"params": greedy(3, stop_token_ids=[257])},
        InvalidParams,
        "stop_token_ids",
        256,
    ),
    ("an unknown adapter", "x", {"adapter": "nobody"}, UnknownAdapter, "adapter", None),
    ("a priority in words", "x", {"priority": "high"}, InvalidParams, "priority", None),
    ("a priority that is no number", "x", {"priority": math.nan}, InvalidParams, "priority", None),
    ("a tenant that is no text", "x", {"tenant": 5}, InvalidParams, "tenant", None),
    ("a tenant that is no text, beside a salt", "x", {"tenant": 5, "cache_salt": "a"}, InvalidParams, "tenant", None),
    ("a salt that is no text", "x", {"tenant": "a", "cache_salt": 5}, InvalidParams, "cache_salt", None),
    ("no priority", "x", {"priority": None}, InvalidParams, "priority", None),
]


@pytest.mark.parametrize(
    ("prompt", "options", "kind", "field", "limit"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED]
)
async def test_a_refusal_is_typed_comes_before_the_first_token_and_costs_others_nothing(
    prompt: Any, options: dict[str, Any], kind: type[Rejected], field: str, limit: object
) -> None:
    async with serving() as engine:
        others = [engine.stream(f"another {number}", greedy(20)) for number in range(2)]

        async def by_admitted() -> None:
            await engine.stream(prompt, **options).admitted()

        async def by_token() -> None:
            await anext(engine.stream(prompt, **options))

        async def by_chunk() -> None:
            await engine.stream(prompt, **options).next_chunk()

        async def by_generate() -> None:
            await engine.generate(prompt, **options)

        async def again() -> None:
            stream = engine.stream(prompt, **options)
            for _ in range(2):
                with pytest.raises(kind):
                    await anext(stream)
            stream.cancel()
            await stream.admitted()

        for way in (by_admitted, by_token, by_chunk, by_generate, again):
            with pytest.raises(kind) as caught:
                await way()
            assert type(caught.value) is kind
            assert (caught.value.field, caught.value.limit) == (field, limit)
            assert str(caught.value).startswith(f"{field}: ")
            named = ("at least one",) if limit == 1 else (str(limit), "the vocabulary's 257")
            assert limit is None or any(words in str(caught.value) for words in named)
        for number, other in enumerate(others):
            assert [token.id for token in await read(other)] == expected_ids(f"another {number}", 20)
        await check_serving(engine)
        await returned(engine)


@pytest.mark.parametrize(
    ("sizes", "most", "where"), [(TIGHT, 32, "page pool"), (SHORT, 19, "context")], ids=["pool", "context"]
)
@pytest.mark.parametrize("n", [1, 2])
async def test_a_prompt_needs_room_for_one_token(sizes: Any, most: int, where: str, n: int) -> None:
    async with serving(sizes) as engine:
        with pytest.raises(PromptTooLong) as caught:
            await engine.generate([1] * (most + 1), greedy(1, n=n))
        error = caught.value
        assert (error.field, error.value, error.limit) == ("prompt", most + 1, most)
        assert where in str(error)
        with pytest.raises(PromptTooLong):
            await engine.stream([1] * 100_000).admitted()
        answer = await engine.generate([1] * most, greedy(None))
        assert answer.choices[0].token_ids == expected_ids([1] * most, 1)
        assert answer.choices[0].finish_reason == "length"
        await returned(engine)


async def test_a_prompt_too_long_to_tokenise_here_is_refused_when_it_is_known() -> None:
    async with serving(SHORT) as engine:
        stream = engine.stream("x" * 5000)
        with pytest.raises(PromptTooLong):
            await stream.admitted()
        with pytest.raises(PromptTooLong):
            await anext(stream)


@pytest.mark.parametrize("length", [2, 5000], ids=["short", "long"])
async def test_a_tokenizer_that_fails_is_one_requests_matter(length: int) -> None:
    async with serving() as engine:

        def encode(text: str, *, framed: bool = True) -> list[int]:
            raise LookupError("no such thing")

        assert engine._life.opened is not None
        engine._life.opened.tokenizer.encode = encode  # type: ignore[method-assign]
        stream = engine.stream("x" * length)
        for way in (stream.admitted, stream.__anext__):
            with pytest.raises(HeadraceError, match="tokenizer failed") as caught:
                await way()
            assert isinstance(caught.value.__cause__, LookupError)
        answer = await engine.generate([1, 2], greedy(3))
        assert answer.choices[0].token_ids == expected_ids([1, 2], 3)


async def test_an_unknown_argument_is_refused_at_once() -> None:
    async with serving() as engine:
        with pytest.raises(TypeError, match="temperature"):
            engine.stream("x", temperature=0)  # type: ignore[call-arg]
        with pytest.raises(InvalidParams, match="temprature"):
            engine.stream("x", SamplingParams(temprature=0))
        await returned(engine)


# -- failing steps -------------------------------------------------------------------------------------------------


async def outcomes(engine: ScriptedEngine, streams: dict[str, Any]) -> dict[str, tuple[list[int | None], Any]]:
    """What each stream gave and what it raised."""
    found: dict[str, tuple[list[int | None], Any]] = {}

    async def collect(name: str) -> None:
        ids: list[int | None] = []
        error: BaseException | None = None
        try:
            async for chunk in streams[name].chunks():
                ids += [token.id for token in chunk.tokens]
        except HeadraceError as raised:
            error = raised
        found[name] = (ids, error)

    async with anyio.create_task_group() as tasks:
        for name in streams:
            tasks.start_soon(collect, name)
    return found


@pytest.mark.parametrize("place", [0, 1, 5])
@pytest.mark.parametrize(
    ("token", "kind", "words"),
    [(NoToken.NON_FINITE, NonFiniteLogits, "not finite"), (257, RequestFailed, "257"), (-7, RequestFailed, "-7")],
)
async def test_a_token_that_cannot_be_fails_one_request_only(
    place: int, token: int | NoToken, kind: type[RequestFailed], words: str
) -> None:
    gate = Gate()
    async with serving(gate=gate, faults={place: token}) as engine:
        streams = {name: engine.stream(name, greedy(20)) for name in ("first", "second", "third")}
        found = await outcomes(engine, streams)
        failed = {name: (ids, error) for name, (ids, error) in found.items() if error is not None}
        assert list(failed) == ["first"]
        ids, error = failed["first"]
        assert type(error) is kind and words in str(error)
        assert ids == expected_ids("first", len(ids)) and len(ids) <= place
        assert streams["first"].finish_reasons == [None]
        for name in ("second", "third"):
            assert found[name][0] == expected_ids(name, 20)
        await returned(engine)
        await check_serving(engine)


@pytest.mark.parametrize("place", [0, 1, 2, 7])
@pytest.mark.parametrize("error_type", [ValueError, MemoryError, KeyError])
@pytest.mark.parametrize("at_launch", [False, True])
async def test_a_step_that_raises_fails_its_requests_only_and_none_if_it_found_no_memory(
    place: int, error_type: type[Exception], at_launch: bool
) -> None:
    """Two rows: the third request waits and must not notice."""
    sizes = capacity(max_rows=2)
    raised = error_type("broken")

    class Runner(ScriptedRunner):
        def launch(self, plan: StepPlan) -> ScriptedStep:
            step = super().launch(plan)
            if at_launch and plan.step == place:
                raise raised
            return step

    async with no_leaks():
        runner = Runner(sizes, faults={place: raised})
        async with ScriptedEngine(sizes, lambda: runner) as engine:
            streams = {name: engine.stream(name, greedy(12)) for name in ("first", "second", "third")}
            found = await outcomes(engine, streams)
            for name in ("first", "second"):
                ids, error = found[name]
                if error_type is MemoryError:
                    assert (ids, error) == (expected_ids(name, 12), None)
                    continue
                assert type(error) is RequestFailed
                assert error.__cause__ is raised
                assert ids == expected_ids(name, len(ids)) and len(ids) <= place
            assert engine.stats().memory_retries == (error_type is MemoryError)
            assert found["third"] == (expected_ids("third", 12), None)
            await returned(engine)
            await check_serving(engine)


@pytest.mark.parametrize("n", [2, 6])
@pytest.mark.parametrize("place", [0, 3])
async def test_a_failing_choice_ends_its_whole_stream(n: int, place: int) -> None:
    async with serving(faults={place: NoToken.NON_FINITE}) as engine:
        stream = engine.stream("with several choices", greedy(30, n=n))
        with pytest.raises(NonFiniteLogits):
            await read(stream)
        await returned(engine)
        with pytest.raises(NonFiniteLogits):
            await anext(stream)
        with pytest.raises(NonFiniteLogits):
            await engine_generate_again(engine, n)
        await check_serving(engine)


async def engine_generate_again(engine: ScriptedEngine, n: int) -> None:
    """Fail once more, by `generate`: the fake device's fault is moved to a step that is still to come."""
    assert engine._life.opened is not None
    runner = engine._life.opened.runner
    assert isinstance(runner, ScriptedRunner)
    runner._faults = {runner.launched + 2: NoToken.NON_FINITE}
    await engine.generate("again", greedy(30, n=n))


async def test_what_shares_pages_with_a_failed_request_still_gets_its_own_tokens() -> None:
    shared = "a prefix of several pages that all of them share, " * 2
    for place in range(0, 10, 2):
        async with serving(capacity(max_batched_tokens=24), faults={place: RuntimeError("broken")}) as engine:
            streams = {name: engine.stream(shared + name, greedy(10)) for name in "abcdef"}
            found = await outcomes(engine, streams)
            assert any(error is None for _, error in found.values())
            for name, (ids, _) in found.items():
                assert ids == expected_ids(shared + name, len(ids))
            await returned(engine)
            answer = await engine.generate(shared + "a", greedy(10))
            assert answer.choices[0].token_ids == expected_ids(shared + "a", 10)


# -- looking in ----------------------------------------------------------------------------------------------------


async def test_tokenize_and_detokenize() -> None:
    async with serving() as engine:
        assert await engine.tokenize("caf\u00e9") == list("caf\u00e9".encode())
        assert await engine.tokenize("y" * 5000) == [ord("y")] * 5000
        assert engine.detokenize(list("caf\u00e9".encode())) == "caf\u00e9"
        assert engine.detokenize([0xC3, 65, 0xE2, 0x82]) == "\ufffdA\ufffd"
        assert engine.detokenize([65, ByteTokenizer.eos_ids[0], 66]) == "AB"
        assert engine.detokenize([]) == ""
        for ids in ([257], [-1], [True], ["a"]):
            with pytest.raises(InvalidParams):
                engine.detokenize(ids)  # type: ignore[arg-type]
        with pytest.raises(InvalidParams):
            await engine.tokenize("")


async def test_info_tells_the_sizes() -> None:
    async with serving() as engine:
        info = engine.info
        assert (info.num_pages, info.page_size, info.max_rows) == (128, 16, 4)
        assert (info.max_batched_tokens, info.max_context, info.vocab_size) == (64, 1024, 257)


async def test_stats_follow_what_runs() -> None:
    gate = Gate()
    async with serving(gate=gate) as engine:
        idle = engine.stats()
        assert (idle.waiting, idle.running, idle.paused, idle.pages_held, idle.steps) == (0, 0, 0, 0, 0)
        assert (idle.pages, idle.tokens_per_second, idle.step_seconds) == (CAPACITY.num_pages, 0.0, 0.0)
        gate.hold()
        streams = [engine.stream("x" * 20 + str(number), greedy(20)) for number in range(6)]
        await until(lambda: gate.holds and engine.stats().steps_in_flight == 2)
        busy = engine.stats()
        assert (busy.running, busy.waiting) == (4, 2)
        assert 0 < busy.live_tokens <= busy.pages_held * 16
        gate.release()
        for stream in streams:
            await read(stream)
        done = engine.stats()
        assert (done.generated_tokens, done.prompt_tokens) == (120, 126)
        assert done.steps > busy.steps
        assert done.tokens_per_second > 0 and done.step_seconds > 0
        await returned(engine)
        await until(lambda: not engine.stats().steps_in_flight)
