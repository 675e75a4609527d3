"""What a request may ask of its tokens: each option against transformers' logits, all in one batch against each alone.

The model is a real tiny one; a slow account of each option says what must come of transformers' logits.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest
import tiny_models
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import Unable
from slow_sampling import log_softmax, shaped

from headrace.engine import Completion, Engine, InvalidParams, RequestFailed, SamplingParams, TokenLogprobs
from headrace.engine.intake.requests import Asking, make_requests
from headrace.engine.model.cpu import options as cpu_options
from headrace.engine.scheduling.asked import Asked
from headrace.engine.scheduling.request import Request
from headrace.engine.testing import ByteTokenizer, Capacity, ScriptedEngine
from headrace.engine.tokens.tokenizer import Tokenizer
from headrace.ops.cpu.sample import Choosing, sample

VOCAB = tiny_models.CONFIG["vocab_size"]
OPTIONS: dict[str, Any] = {"dtype": "float32", "kv_memory": 64 * tiny_models.PAGE_BYTES}
SHARED = [(at * 7) % 89 + 1 for at in range(40)]
PROMPTS = [[5, 6, 7], SHARED, [*SHARED, 9, 9, 3], [*SHARED[:33], 2], [8] * 20, [1], [*SHARED, 4], [3, 1, 4, 1, 5]]
ASKED: list[dict[str, Any]] = [
    {},
    {"presence_penalty": 1.5, "frequency_penalty": 0.7},
    {"repetition_penalty": 1.8, "logprobs": 3},
    {"logit_bias": {3: 100, 4: 99.5}, "frequency_penalty": 2.0, "temperature": 1.0, "seed": 3},
    {"allowed_token_ids": [1, 2, 3, 4, 5, 60], "temperature": 2.0, "seed": 4, "top_k": 3},
    {"forbidden_token_ids": range(0, 96, 2), "bad_words": ["ab", "c"], "prompt_logprobs": 2},
    {"min_tokens": 12, "stop_token_ids": list(range(16)), "logprobs": 0, "prompt_logprobs": 0},
    {
        "presence_penalty": -1.0,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.2,
        "logit_bias": {7: 3.5, 8: -2.0, 9: 1.0},
        "allowed_token_ids": list(range(5, 90)),
        "forbidden_token_ids": [11, 12],
        "bad_words": ["()", "xyz"],
        "min_tokens": 6,
        "stop_token_ids": [33, 34, 35],
        "temperature": 1.2,
        "min_p": 0.01,
        "seed": 11,
        "logprobs": 20,
        "prompt_logprobs": 20,
    },
]
SMALL: dict[str, Any] = {"kv_memory": 12 * tiny_models.PAGE_BYTES, "page_size": 4}
CASES = list(zip(PROMPTS, ASKED, strict=True))


def params_of(asked: dict[str, Any]) -> SamplingParams:
    return SamplingParams(**({"temperature": 0.0, "max_tokens": 24} | asked))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.whole_folder(tmp_path_factory.mktemp("model"))


class Reference:
    """The model in transformers, and generation one whole forward a token."""

    def __init__(self, folder: Path) -> None:
        import transformers

        self.model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer = Tokenizer.from_folder(folder)

    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        """float32 [tokens, vocabulary]."""
        with torch.inference_mode():
            found: torch.Tensor = self.model(torch.tensor([list(ids)])).logits[0]
        return found

    def request(self, prompt: Sequence[int], params: SamplingParams) -> Asked:
        asking = Asking(params, None, None, None, 0)
        return make_requests(prompt, asking, self.tokenizer, VOCAB, random.Random(0))[0].asked

    def generate(self, prompt: Sequence[int], params: SamplingParams) -> list[int]:
        asked = self.request(prompt, params)
        ids = list(prompt)
        while len(ids) < asked.limit and not (len(ids) > len(prompt) and ids[-1] in asked.stop_ids):
            values = self.logits(ids)[-1]
            if asked.shaping is not None:
                values = torch.tensor(shaped(values.tolist(), ids, len(prompt), asked.shaping))
            how = asked.sampling
            row = Choosing(how.temperature, how.top_k, how.top_p, how.min_p, how.seed, len(ids))
            ids += sample(values[None], [row])
        return ids[len(prompt) :]


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder)


async def answers(engine: Engine, cases: Sequence[tuple[list[int], dict[str, Any]]]) -> list[Completion]:
    """All at once."""
    found: dict[int, Completion] = {}

    async def ask(index: int) -> None:
        prompt, asked = cases[index]
        found[index] = await engine.generate(prompt, params_of(asked))

    async with anyio.create_task_group() as tasks:
        for index in range(len(cases)):
            tasks.start_soon(ask, index)
    return [found[index] for index in range(len(cases))]


def alone(folder: Path) -> list[Completion]:
    async def run() -> list[Completion]:
        async with Engine(folder, **OPTIONS, prefix_cache=False, launch_ahead=1) as engine:
            return [(await answers(engine, [case]))[0] for case in CASES]

    return anyio.run(run)


def check_logprobs(found: TokenLogprobs, token: int, count: int, logits_V: torch.Tensor) -> None:
    """Against transformers' logits and torch's log-softmax."""
    exact = torch.log_softmax(logits_V, -1)
    assert found.id == token
    assert found.logprob == pytest.approx(float(exact[token]), abs=1e-3)
    near = int(((exact - exact[token]).abs() < 1e-4).sum()) - 1
    assert abs(found.rank - 1 - int((exact > exact[token]).sum())) <= near
    assert len(found.top_logprobs) == count
    best = torch.topk(exact, count) if count else None
    if best is not None:
        assert [each.logprob for each in found.top_logprobs] == pytest.approx(best.values.tolist(), abs=1e-3)
        for each in found.top_logprobs:
            assert each.logprob == pytest.approx(float(exact[each.id]), abs=1e-3)
            text = chr(each.id + 33) if each.id < 94 else ""  # the logits are wider than the vocabulary
            assert (each.token, each.bytes) == (text, text.encode())
        assert [each.rank for each in found.top_logprobs] == sorted(each.rank for each in found.top_logprobs)


def check_all_logprobs(reference: Reference, prompt: list[int], params: SamplingParams, found: Completion) -> None:
    choice = found.choices[0]
    logits_NV = reference.logits([*prompt, *choice.token_ids])
    if params.logprobs is None:
        assert choice.logprobs is None and choice.mean_logprob is None
    else:
        assert choice.logprobs is not None and len(choice.logprobs) == len(choice.token_ids)
        for at, (token, each) in enumerate(zip(choice.token_ids, choice.logprobs, strict=True)):
            check_logprobs(each, token, params.logprobs, logits_NV[len(prompt) - 1 + at])
        mean = sum(each.logprob for each in choice.logprobs) / len(choice.logprobs)
        assert choice.mean_logprob == pytest.approx(mean)
    if params.prompt_logprobs is None:
        assert found.prompt_logprobs is None
        return
    assert found.prompt_logprobs is not None and len(found.prompt_logprobs) == len(prompt)
    assert found.prompt_logprobs[0] is None
    for at, reported in enumerate(found.prompt_logprobs[1:], 1):
        assert reported is not None
        check_logprobs(reported, prompt[at], params.prompt_logprobs, logits_NV[at - 1])


def test_each_alone_is_what_transformers_logits_and_the_slow_account_give(folder: Path, reference: Reference) -> None:
    for (prompt, asked), found in zip(CASES, alone(folder), strict=True):
        assert found.choices[0].token_ids == reference.generate(prompt, params_of(asked)), asked
        check_all_logprobs(reference, prompt, params_of(asked), found)


@pytest.mark.parametrize(
    ("sizes", "preempts"),
    [
        ({}, False),
        ({"max_batched_tokens": 9, "max_rows": 8}, False),
        (SMALL, True),
        ({**SMALL, "max_batched_tokens": 11, "max_rows": 8, "launch_ahead": 3}, True),
    ],
    ids=["roomy", "chunked", "preempted", "chunked and preempted"],
)
def test_all_in_one_batch_are_each_alone(
    folder: Path, reference: Reference, sizes: dict[str, int], preempts: bool
) -> None:
    """Twice, so that the second time finds the prefixes of the first in the cache."""
    expected = alone(folder)

    async def run() -> None:
        async with Engine(folder, **(OPTIONS | sizes)) as engine:
            for _ in range(2):
                for (prompt, asked), found, single in zip(CASES, await answers(engine, CASES), expected, strict=True):
                    assert found.choices[0].token_ids == single.choices[0].token_ids, asked
                    check_all_logprobs(reference, prompt, params_of(asked), found)
            assert bool(engine.stats().preemptions) == preempts
            assert engine._life.loop is not None
            engine._life.loop.scheduler.roster.check()

    anyio.run(run)


ids = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=8, unique=True)
some_options = st.fixed_dictionaries(
    {"seed": st.integers(0, 99)},
    optional={
        "temperature": st.sampled_from([0.0, 0.7, 1.5]),
        "presence_penalty": st.sampled_from([-1.0, 1.5]),
        "frequency_penalty": st.sampled_from([-0.5, 0.7]),
        "repetition_penalty": st.sampled_from([0.8, 1.4]),
        "logit_bias": st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-100.0, -2.0, 5.0]), max_size=4),
        "forbidden_token_ids": ids,
        "bad_words": st.lists(st.text("abcAB", min_size=1, max_size=3), max_size=3),
        "min_tokens": st.integers(0, 12),
        "stop_token_ids": ids,
        "top_k": st.integers(0, 9),
        "logprobs": st.integers(0, 5),
        "prompt_logprobs": st.integers(0, 3),
    },
)
some_prompt = st.integers(1, 40).map(lambda length: SHARED[:length]) | st.lists(
    st.integers(0, 93), min_size=1, max_size=9
)


@settings(max_examples=15, deadline=None, derandomize=True)  # near ties in float32 are rare, but not impossible
@given(st.lists(st.tuples(some_prompt, some_options), min_size=1, max_size=6))
def test_any_combination_is_what_the_slow_account_gives(
    folder: Path, reference: Reference, cases: list[tuple[list[int], dict[str, Any]]]
) -> None:
    cases = [(prompt, asked | {"max_tokens": 12, "ignore_eos": True}) for prompt, asked in cases]

    async def run() -> list[Completion]:
        async with Engine(folder, **(OPTIONS | SMALL | {"max_batched_tokens": 16, "max_rows": 4})) as engine:
            return await answers(engine, cases)

    for (prompt, asked), found in zip(cases, anyio.run(run), strict=True):
        assert found.choices[0].token_ids == reference.generate(prompt, params_of(asked)), asked
        check_all_logprobs(reference, prompt, params_of(asked), found)


def test_a_prompt_in_the_cache_is_computed_again_for_its_logprobs_and_for_nothing_else(
    folder: Path, reference: Reference
) -> None:
    async def run() -> None:
        async with Engine(folder, **OPTIONS) as engine:
            plain = await engine.generate(SHARED, params_of({"logprobs": 1}))
            asked = {"prompt_logprobs": 1, "n": 3, "temperature": 1.0, "seed": 1}
            reported = await engine.generate(SHARED, params_of(asked))
            assert reported.usage.cached_tokens == 0
            check_all_logprobs(reference, SHARED, params_of(asked | {"logprobs": None}), reported)
            again = await engine.generate(SHARED, params_of({"logprobs": 1}))
            assert again.usage.cached_tokens == 32
            assert again.choices[0].token_ids == plain.choices[0].token_ids

    anyio.run(run)


# -- the edges of each option -----------------------------------------------------------------------------------------


def generate(folder: Path, prompt: list[int], **asked: Any) -> Completion:
    async def run() -> Completion:
        async with Engine(folder, **OPTIONS) as engine:
            return await engine.generate(prompt, params_of(asked))

    return anyio.run(run)


def test_min_tokens_keeps_stop_tokens_and_stop_strings_away(folder: Path) -> None:
    plain = generate(folder, [5, 6, 7]).choices[0]
    early = plain.token_ids[2]
    stopped = generate(folder, [5, 6, 7], stop_token_ids=[early]).choices[0]
    assert len(stopped.token_ids) <= 3 and stopped.finish_reason == "stop"
    held = generate(folder, [5, 6, 7], stop_token_ids=[early], min_tokens=10).choices[0]
    assert early not in held.token_ids[:10] and len(held.token_ids) >= 10
    character = chr(early + 33)
    assert len(generate(folder, [5, 6, 7], stop=character).choices[0].token_ids) <= 3
    kept = generate(folder, [5, 6, 7], stop=character, min_tokens=10).choices[0]
    assert kept.token_ids[:10] == plain.token_ids[:10] and kept.text[:10] == plain.text[:10]
    assert character not in kept.text[10:]


def test_bad_words_are_not_completed_even_where_the_prompt_begins_them(folder: Path) -> None:
    first = generate(folder, [5, 6, 7]).choices[0].token_ids[0]
    word = chr(7 + 33) + chr(first + 33)
    assert generate(folder, [5, 6, 7], bad_words=word).choices[0].token_ids[0] != first
    assert generate(folder, [5, 6, 8], bad_words=word).choices[0].token_ids == (
        generate(folder, [5, 6, 8]).choices[0].token_ids
    )


class Framing(ByteTokenizer):
    """Begins and ends every text, as many do: 254, the bytes, 255."""

    def encode(self, text: str, *, framed: bool = True) -> list[int]:
        return [254, *text.encode(), 255]


def test_bad_words_are_without_what_frames_a_text() -> None:
    asking = Asking(SamplingParams(bad_words=["ab", " c", "d"]), None, None, None, 0)
    [request] = make_requests([1], asking, Framing(), 257, random.Random(0))
    assert request.asked.shaping is not None
    assert request.asked.shaping.bad_words == tuple(sorted(tuple(word) for word in (b"ab", b" ab", b" c", b" d")))
    assert request.asked.shaping.forbidden == (ord("c"), ord("d"))


def test_a_bad_word_may_begin_in_what_the_cache_holds(folder: Path) -> None:
    """Of such a prompt the device gets the last token alone, in a row that held another prompt before."""
    prompt, other = SHARED[:33], [50 + at % 40 for at in range(40)]

    async def run() -> None:
        async with Engine(folder, **OPTIONS, max_rows=1) as engine:
            first = (await engine.generate(prompt, params_of({}))).choices[0].token_ids[0]
            await engine.generate(other, params_of({}))
            word = "".join(chr(token + 33) for token in [*prompt[-2:], first])
            found = await engine.generate(prompt, params_of({"bad_words": word}))
            assert found.usage.cached_tokens == 32
            assert found.choices[0].token_ids[0] != first

    anyio.run(run)


def test_best_of_are_the_likeliest_of_so_many(folder: Path, reference: Reference) -> None:
    asked = {"temperature": 1.5, "seed": 8, "max_tokens": 6, "ignore_eos": True}
    everything = generate(folder, PROMPTS[0], n=6, logprobs=0, **asked)
    best = generate(folder, PROMPTS[0], n=2, best_of=6, **asked)

    def exact(ids: list[int]) -> float:
        rows = reference.logits([*PROMPTS[0], *ids])[len(PROMPTS[0]) - 1 :].tolist()
        return sum(log_softmax(row)[token] for row, token in zip(rows, ids, strict=False)) / len(ids)

    ranked = sorted(everything.choices, key=lambda choice: -exact(choice.token_ids))
    assert [choice.token_ids for choice in best.choices] == [choice.token_ids for choice in ranked[:2]]
    assert [choice.index for choice in best.choices] == [0, 1]
    assert all(choice.logprobs is None and choice.mean_logprob is not None for choice in best.choices)
    assert best.usage.completion_tokens == 36


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"logit_bias": {VOCAB: 1.0}}, "logit_bias"),
        ({"allowed_token_ids": [1, VOCAB]}, "allowed_token_ids"),
        ({"forbidden_token_ids": [VOCAB]}, "forbidden_token_ids"),
        ({"forbidden_token_ids": list(range(VOCAB))}, "forbidden_token_ids"),
        ({"allowed_token_ids": [2], "stop_token_ids": [2], "min_tokens": 1}, "allowed_token_ids"),
        ({"allowed_token_ids": [64], "bad_words": ["a"]}, "allowed_token_ids"),
        ({"bad_words": ["\u00e9"]}, "bad_words"),
    ],
)
def test_what_does_not_fit_the_vocabulary_is_refused(folder: Path, asked: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidParams) as caught:
        generate(folder, [5], **asked)
    assert caught.value.field == field and str(caught.value).startswith(f"{field}: ")


def test_log_probabilities_of_a_prompt_are_bounded() -> None:
    def asked(length: int) -> list[Request]:
        asking = Asking(SamplingParams(prompt_logprobs=20), None, None, None, 0)
        return make_requests([1] * length, asking, ByteTokenizer(), 257, random.Random(0))

    assert asked(3_120)[0].asked.reporting is not None
    with pytest.raises(InvalidParams) as caught:
        asked(3_121)
    assert caught.value.field == "prompt_logprobs" and caught.value.limit == 3_120


def test_tokens_of_bad_words_are_bounded() -> None:
    def asked(count: int) -> list[Request]:
        words = [f"{at:04d}" + "\U0001f600" * 31 for at in range(count)]  # 128 tokens, and 129 with the space
        return make_requests(
            [1], Asking(SamplingParams(bad_words=words), None, None, None, 0), ByteTokenizer(), 257, random.Random(0)
        )

    assert asked(15)[0].asked.shaping is not None
    with pytest.raises(InvalidParams, match="got 4112") as caught:
        asked(16)
    assert caught.value.field == "bad_words" and caught.value.limit == 4096


def test_masks_that_come_to_leave_nothing_fail_their_own_request_alone(folder: Path) -> None:
    async def run() -> None:
        async with Engine(folder, **OPTIONS) as engine:
            with pytest.raises(RequestFailed, match="no token to choose"):
                await engine.generate([5], params_of({"allowed_token_ids": [64], "bad_words": ["aa"]}))
            assert (await engine.generate([5], params_of({}))).choices[0].token_ids

    anyio.run(run)


@pytest.mark.parametrize(
    ("field", "value"),
    [("logit_bias", {1: 1.0}), ("min_tokens", 2), ("logprobs", 0), ("prompt_logprobs", 1), ("best_of", 2)],
)
def test_a_device_that_cannot_do_it_says_so(field: str, value: Any) -> None:
    capacity = Capacity(num_pages=8, page_size=4, max_rows=2, max_batched_tokens=8, max_context=32, vocab_size=257)

    async def run() -> None:
        async with Unable(capacity) as engine:
            with pytest.raises(InvalidParams) as caught:
                await engine.generate("a", SamplingParams(**{field: value}))
            assert caught.value.field == field

    anyio.run(run)


def test_best_of_is_not_streamed() -> None:
    capacity = Capacity(num_pages=8, page_size=4, max_rows=2, max_batched_tokens=8, max_context=32, vocab_size=257)

    async def run() -> None:
        async with ScriptedEngine(capacity) as engine:
            with pytest.raises(InvalidParams, match="best_of"):
                engine.stream("a", SamplingParams(best_of=2))

    anyio.run(run)


def test_a_request_that_asks_for_nothing_more_carries_nothing_more() -> None:
    asking = Asking(SamplingParams(temperature=0.3, top_k=4, stop=["x"]), None, None, None, 0)
    [request] = make_requests([1, 2], asking, ByteTokenizer(), 257, random.Random(0))
    assert request.asked.shaping is None and request.asked.reporting is None


def test_plain_rows_take_the_short_way_once_others_have_ended(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[int] = []
    logprobs = cpu_options.logprobs

    def counted(logits: Any, tokens: Any, counts: Any) -> Any:
        reported.append(len(tokens))
        return logprobs(logits, tokens, counts)

    monkeypatch.setattr(cpu_options, "logprobs", counted)

    async def ask() -> None:
        async with Engine(folder, **OPTIONS) as engine:
            asked = SamplingParams(n=3, max_tokens=2, logprobs=0, ignore_eos=True)
            await engine.generate(SHARED, asked)
            reported.clear()
            await engine.generate(SHARED, SamplingParams(max_tokens=2, ignore_eos=True))
            assert not reported
            assert engine._life.loop is not None
            options: Any = engine._life.loop._runner
            assert not options._rows.options._options, "the other two rows still keep what their requests asked"

    anyio.run(ask)


def test_log_probabilities_of_a_prompt_are_made_once(folder: Path) -> None:
    """As far as they are computed; a chunk of the prompt at a time."""

    async def read() -> None:
        async with Engine(folder, **OPTIONS, max_batched_tokens=8, max_rows=2) as engine:
            async with engine.stream(SHARED, SamplingParams(max_tokens=3, prompt_logprobs=1)) as stream:
                assert stream.prompt_logprobs == [None]
                await stream.admitted()
                while len(early := stream.prompt_logprobs or []) == 1:  # noqa: ASYNC110 - it has no event
                    await anyio.sleep(0.001)
                async for _ in stream:
                    found = stream.prompt_logprobs
                    assert found is not None and len(found) == len(SHARED)
                    again = stream.prompt_logprobs
                    assert again is not found and again is not None
                    assert all(one is other for one, other in zip(found, again, strict=True))
                    assert all(one is other for one, other in zip(early, found, strict=False))

    anyio.run(read)


def test_what_would_hold_up_the_event_loop_is_refused(folder: Path) -> None:
    with pytest.raises(InvalidParams, match="together") as caught:
        SamplingParams(bad_words=["a" * 100] * 11)
    assert (caught.value.field, caught.value.limit) == ("bad_words", 1024)
    SamplingParams(bad_words=["a" * 16] * 64)
    asking = Asking(SamplingParams(prompt_logprobs=20), None, None, None, 0)
    assert make_requests([1] * 3120, asking, ByteTokenizer(), VOCAB, random.Random(0))
    with pytest.raises(InvalidParams, match="prompt_logprobs"):
        make_requests([1] * 3121, asking, ByteTokenizer(), VOCAB, random.Random(0))
