"""`ScriptedEngine`: what a test scripts comes out as a model would say it, and it refuses what an engine refuses."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest
from adapter_folders import lora_folder
from scripted import Gate, no_leaks
from tiny_models import whole_folder

from headrace.engine import (
    AdapterRejected,
    Engine,
    HookFailed,
    InvalidParams,
    NoTokenLeft,
    PromptTooLong,
    Rejected,
    ResponseFormat,
    SamplingParams,
    UnknownAdapter,
)
from headrace.engine.testing import (
    Capacity,
    NotScripted,
    ScriptedEngine,
    ScriptedPrompt,
    ScriptedRunner,
    no_pages_held,
)
from headrace.engine.tools import Tool, ToolChoice, detect, parse, template_tools

pytestmark = pytest.mark.anyio

CITY = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "rivers": {"type": "array", "items": {"type": "string"}}},
    "required": ["name", "rivers"],
    "additionalProperties": False,
}


async def said(engine: Engine, prompt: Any, **fields: Any) -> str:
    return (await engine.generate(prompt, SamplingParams(**fields))).choices[0].text


# -- answers -------------------------------------------------------------------------------------------------------


async def test_a_prompt_or_the_last_message_of_a_chat_gets_its_answer() -> None:
    long = "Zur Sache: naïve 🐍\nzweite Zeile\n"
    async with no_leaks(), ScriptedEngine(answers={"Who?": "Hello!", "two\nlines": long, "": "empty"}) as engine:
        assert await said(engine, "Who?", temperature=1.5, seed=3) == "Hello!"
        assert await said(engine, list(b"Who?")) == "Hello!"
        for roles in (["user"], ["system", "user"], ["user", "assistant", "user"], ["user", "tool"]):
            chat = [{"role": role, "content": "Who?"} for role in roles]
            assert await said(engine, chat) == "Hello!"
            chat[-1]["content"] = "two\nlines"
            assert await said(engine, chat) == long
        assert await said(engine, "Who?", stop="l") == "He"
        assert await said(engine, "Who?", max_tokens=2) == "He"
        with pytest.raises(NotScripted, match="no answer is scripted for the prompt 'user: Whoo"):
            await engine.generate([{"role": "user", "content": "Whoo?"}])
        await no_pages_held(engine)


async def test_a_function_answers_once_for_each_request() -> None:
    asked: list[ScriptedPrompt] = []

    def answer(prompt: ScriptedPrompt) -> str:
        asked.append(prompt)
        if "bad" in prompt:
            raise KeyError("bad")
        return f"answer {len(asked)}"

    async with no_leaks(), ScriptedEngine(answer=answer, answers={"known": "by the mapping"}) as engine:
        assert [await said(engine, "same") for _ in range(3)] == ["answer 1", "answer 2", "answer 3"]
        assert await said(engine, "known") == "by the mapping"
        stream = engine.stream([{"role": "user", "content": "Hi"}])
        assert "".join([token.text async for token in stream]) == "answer 4"
        await stream.send([{"role": "user", "content": "and now?"}])
        assert "".join([token.text async for token in stream]) == "answer 5"
        assert asked[-1] == "user: Hi\nanswer 4\nuser: and now?\n"
        assert [token.text async for token in stream.fork()] == []
        with pytest.raises(NotScripted, match="KeyError"):
            await engine.generate("bad")
        stream.cancel()
        await no_pages_held(engine)


async def test_answers_survive_preemption_and_many_rows() -> None:
    tight = Capacity(num_pages=12, max_rows=8, max_context=128)
    prompts = [f"question {number} of many" for number in range(24)]
    answers = {prompt: f"the answer to {prompt}, at some length, so that pages run out" for prompt in prompts}
    async with no_leaks(), ScriptedEngine(tight, answers=answers) as engine:
        found = await engine.generate_many(prompts, SamplingParams())
        assert [each.choices[0].text for each in found] == list(answers.values())
        assert engine.stats().preemptions > 0


@pytest.mark.parametrize("layout", [{}, {"separators": (",", ":")}, {"indent": 2}])
async def test_an_answer_is_written_as_its_response_format_wants_it(layout: dict[str, Any]) -> None:
    city = {"name": "Rome, of  course", "rivers": ["Tiber", "Aniene"]}
    format = ResponseFormat.json_schema(CITY)
    answers = {"city": json.dumps(city, **layout), "wrong": '{"name": 3}', "cut": '{"name": "Rome"'}
    async with no_leaks(), ScriptedEngine(answers=answers) as engine:
        assert json.loads(await said(engine, "city", response_format=format)) == city
        assert await said(engine, "city") == answers["city"]
        for prompt in ("wrong", "cut"):
            with pytest.raises(NotScripted, match="does not keep to response_format from byte|at its end"):
                await engine.generate(prompt, SamplingParams(response_format=format))
    async with no_leaks(), ScriptedEngine() as engine:
        for number in range(5):
            found = json.loads(await said(engine, f"any city {number}", response_format=format, max_tokens=200))
            assert found.keys() == city.keys()


async def test_log_probabilities_hooks_and_searches() -> None:
    async with no_leaks(), ScriptedEngine(answers={"Who?": "Hello!"}) as engine:
        params = SamplingParams(logprobs=3, prompt_logprobs=1, n=2)
        stream = engine.stream("Who?", params)
        tokens = [token async for token in stream if token.index == 0]
        for token in tokens:
            assert token.logprobs is not None and len(token.logprobs.top_logprobs) == 3
            assert token.logprobs.rank == 1 and -0.01 < token.logprobs.logprob < 0
        assert stream.prompt_logprobs is not None and stream.prompt_logprobs[0] is None
        assert [each.token for each in stream.prompt_logprobs[1:] if each] == ["h", "o", "?"]
        best = await engine.generate("Who?", SamplingParams(beam_width=4, n=2, max_tokens=12))
        assert best.choices[0].text == "Hello!" != best.choices[1].text
        assert await said(engine, "Who?", best_of=3) == "Hello!"
        assert await said(engine, "Who?", forbidden_token_ids=list(b"H")) != "Hello!"
        assert await said(engine, "Who?", logit_bias={256: 100}) == ""
        seen: list[int] = []

        def only_x(tokens: list[int], logits_V: Any) -> Any:
            seen.append(len(tokens))
            logits_V[ord("x")] = 100
            return logits_V

        hooked = await engine.generate("Who?", SamplingParams(max_tokens=4), logits_processor=only_x)
        assert (hooked.choices[0].text, seen) == ("xxxx", [4, 5, 6, 7])
        with pytest.raises(HookFailed, match=r"an array \[257\]"):
            await engine.generate("Who?", logits_processor=lambda tokens, logits_V: logits_V[:5])


async def test_tools_are_offered_and_called() -> None:
    tool = Tool(name="weather", parameters={"type": "object", "properties": {"city": {"type": "string"}}})
    call = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
    prompts: list[str] = []

    def answer(prompt: ScriptedPrompt) -> str:
        prompts.append(prompt)
        return "Sunny." if "tool: 30" in prompt else call

    async with no_leaks(), ScriptedEngine(answer=answer) as engine:
        chat: list[dict[str, Any]] = [{"role": "user", "content": "Rome?"}]
        tools = template_tools([tool], ToolChoice.parse("auto"))
        text = await said(engine, await engine.tokenize(chat, tools=tools))
        assert prompts[0].startswith("tools: [{") and '"weather"' in prompts[0]
        found = parse(text, detect(engine.chat_template).tools)
        [called] = found.tool_calls
        assert (called.name, json.loads(called.arguments)) == ("weather", {"city": "Rome"})
        function = {"name": called.name, "arguments": json.loads(called.arguments)}
        chat.append({"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]})
        chat.append({"role": "tool", "content": "30 degrees"})
        assert await said(engine, chat) == "Sunny."
        assert call in prompts[1]


async def test_an_adapter_has_answers_of_its_own(tmp_path: Path) -> None:
    folders = {name: lora_folder(tmp_path / name, seed) for seed, name in enumerate(("legal", "medical", "third"))}

    def answer(prompt: ScriptedPrompt) -> str:
        return f"{prompt} by {prompt.adapter}"

    async with no_leaks(), ScriptedEngine(answer=answer, adapter_slots=2) as engine:
        with pytest.raises(UnknownAdapter):
            await engine.generate("Hi", adapter="legal")
        for name, folder in folders.items():
            await engine.adapters.load(name, folder)
        for name in (*folders, *folders):
            assert (await engine.generate("Hi", adapter=name)).choices[0].text == f"Hi by {name}"
        assert await said(engine, "Hi") == "Hi by None"
        with pytest.raises(AdapterRejected, match="missing"):
            (tmp_path / "empty").mkdir()
            await engine.adapters.load("empty", tmp_path / "empty")
        assert sorted(info.name for info in engine.adapters.list()) == sorted(folders)
    async with no_leaks(), ScriptedEngine(adapter_slots=1) as engine:
        await engine.adapters.load("legal", folders["legal"])
        base = (await engine.generate("Hi", SamplingParams(max_tokens=8))).choices
        assert (await engine.generate("Hi", SamplingParams(max_tokens=8), adapter="legal")).choices != base


# -- refusals ------------------------------------------------------------------------------------------------------


REFUSED: list[tuple[Any, dict[str, Any], dict[str, Any]]] = [
    ("", {}, {}),
    ([], {}, {}),
    (7, {}, {}),
    ([1.5], {}, {}),
    ([{"role": "user"}], {}, {}),
    ([{"content": "x"}], {}, {}),
    ([{"role": "user", "content": 3}], {}, {}),
    ([{"role": "user", "content": "x", "colour": "red"}], {}, {}),
    ([{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}], {}, {}),
    ("x", {"response_format": ResponseFormat.regex("(")}, {}),
    ("x", {"response_format": ResponseFormat.json_schema({"type": "nothing"})}, {}),
    ("x", {"allowed_token_ids": [5], "forbidden_token_ids": [5]}, {}),
    ("x", {"logit_bias": {10**6: 1.0}}, {}),
    ("x", {"stop_token_ids": [10**6]}, {}),
    ("x", {"beam_width": 2}, {"deadline": 1.0}),
    ("x", {}, {"adapter": "none"}),
    ("x", {}, {"deadline": -1.0}),
    ("x", {}, {"priority": 1.5}),
    ("x", {}, {"logits_processor": 3}),
]


async def test_it_refuses_exactly_what_an_engine_refuses(tmp_path: Path) -> None:
    """Field by field as an engine over a real model; what is scripted for the prompt makes no difference."""
    real = Engine(whole_folder(tmp_path / "model"), kv_memory="4MiB", dtype="float32", device="cpu")
    async with real, ScriptedEngine(answer=lambda prompt: "x") as scripted, ScriptedEngine(answers={}) as silent:
        for prompt, fields, keywords in REFUSED:
            told = []
            for engine in (real, scripted, silent):
                with pytest.raises(Rejected) as caught:
                    await engine.generate(prompt, SamplingParams(max_tokens=1, **fields), **keywords)
                told.append((type(caught.value), caught.value.field))
            assert told == [told[0]] * 3, f"{prompt!r} {fields} {keywords}: {told}"


async def test_sizes_among_the_options_are_kept_to() -> None:
    async with ScriptedEngine(answers={"Who?": "x" * 99}, max_model_len=20, max_rows=2) as engine:
        assert (await engine.generate("Who?")).usage.completion_tokens == 16
        with pytest.raises(PromptTooLong, match="context of 20"):
            await engine.generate("x" * 20)
        assert (engine.info.max_rows, engine.info.max_context) == (2, 20)
    async with ScriptedEngine(max_context=9000, max_batched_tokens=8) as engine:
        assert (engine.info.max_rows, engine.info.max_batched_tokens) == (8, 8)
        assert engine.info.num_pages * engine.info.page_size >= 9000
    async with ScriptedEngine(max_rows=512) as engine:
        assert engine.info.max_batched_tokens == 512
    async with ScriptedEngine(Capacity(num_pages=9), max_rows=1) as engine:
        assert (engine.info.num_pages, engine.info.max_rows) == (9, 1)
    small = Capacity(max_rows=1, num_pages=5)
    async with ScriptedEngine(make_runner=lambda: ScriptedRunner(small)) as engine:
        assert (engine.info.num_pages, engine.info.max_rows) == (5, 1)


@pytest.mark.parametrize("wrong", [{"answers": ["Hello."]}, {"answer": "Hello."}])
async def test_answers_of_the_wrong_kind_are_refused_when_it_is_made(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidParams, match=f"^{next(iter(wrong))}: must be a "):
        ScriptedEngine(**wrong)


async def test_logits_that_leave_nothing_fail_as_they_do_on_a_device() -> None:
    async with no_leaks(), ScriptedEngine() as engine:
        with pytest.raises(NoTokenLeft):
            await engine.generate("x", logits_processor=lambda tokens, logits_V: logits_V - math.inf)


# -- around it -----------------------------------------------------------------------------------------------------


async def test_no_pages_held_waits_for_the_steps_in_flight_and_names_what_is_left() -> None:
    gate = Gate()
    async with no_leaks(), ScriptedEngine(make_runner=lambda: ScriptedRunner(gate=gate)) as engine:
        stream = engine.stream("left behind", SamplingParams(ignore_eos=True))
        await anext(stream)
        with pytest.raises(AssertionError, match="requests are left behind after 0.05 s: .*running=1"):
            await no_pages_held(engine, seconds=0.05)
        gate.hold()
        stream.cancel()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(no_pages_held, engine)
            await anyio.sleep(0.01)
            assert engine.stats().pages_held, "a step in flight holds them: a look without a wait would race"
            gate.release()
        assert engine.stats().pages_held == 0


LIGHT = """
import sys, anyio
from headrace.engine import ResponseFormat, SamplingParams
from headrace.engine.testing import ScriptedEngine

async def main():
    async with ScriptedEngine(answers={"Who?": "12"}, adapter_slots=1) as engine:
        params = SamplingParams(response_format=ResponseFormat.regex("[0-9]+"), logprobs=1, presence_penalty=1.0)
        assert (await engine.generate("Who?", params)).choices[0].text == "12"

anyio.run(main)
assert not {"torch", "transformers"} & set(sys.modules)
"""


def test_it_imports_no_torch() -> None:
    done = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
