"""Messages as OpenAI's API and its clients write them reach the chat template in the words that templates know."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest

from headrace.engine import Engine, InvalidParams, SamplingParams
from headrace.engine.intake.messages import checked_messages
from headrace.engine.testing import ScriptedEngine

CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at": ["sky", 2]}'}}
PARTS = [{"type": "text", "text": "What is"}, {"type": "text", "text": "in the sky?"}]


def call(arguments: Any) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": "look", "arguments": arguments}}


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ({"role": "user", "content": PARTS}, {"role": "user", "content": "What is\nin the sky?"}),
        ({"role": "user", "content": "Hi", "name": "ann"}, {"role": "user", "content": "Hi", "name": "ann"}),
        ({"role": "developer", "content": "Be brief."}, {"role": "system", "content": "Be brief."}),
        (
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "assistant", "content": "", "tool_calls": [call({"at": ["sky", 2]})]},
        ),
        (
            {"role": "assistant", "tool_calls": [call("")]},
            {"role": "assistant", "content": "", "tool_calls": [call({})]},
        ),
        (
            {"role": "assistant", "content": "", "tool_calls": [call('{"at": ')]},
            {"role": "assistant", "content": "", "tool_calls": [call('{"at": ')]},
        ),
        (
            {"role": "tool", "tool_call_id": "1", "content": PARTS[:1]},
            {"role": "tool", "tool_call_id": "1", "content": "What is"},
        ),
        (
            {"role": "assistant", "content": "Yes.", "refusal": None, "annotations": [], "tool_calls": None},
            {"role": "assistant", "content": "Yes."},
        ),
    ],
)
def test_what_openai_writes_is_read(written: Any, read: Any) -> None:
    before = repr(written)
    assert checked_messages([written]) == [read]
    assert repr(written) == before


def test_what_openais_client_answers_goes_back_as_it_is() -> None:
    from openai.types.chat import ChatCompletionMessage

    answer = ChatCompletionMessage.model_validate({"role": "assistant", "content": None, "tool_calls": [CALL]})
    (read,) = checked_messages([answer.model_dump()])
    assert read["content"] == "" and read["tool_calls"][0]["function"]["arguments"] == {"at": ["sky", 2]}


@pytest.mark.anyio
async def test_a_message_that_is_no_mapping_is_refused_as_one() -> None:
    from openai.types.chat import ChatCompletionMessage

    answer, question = ChatCompletionMessage(role="assistant", content="Yes."), {"role": "user", "content": "No?"}
    async with ScriptedEngine() as engine:
        for chat, place in (([answer, question], 0), ([question, answer], 1)):
            told = rf"^messages\[{place}\]: .*, got ChatCompletionMessage; give its model_dump\(\)$"
            with pytest.raises(InvalidParams, match=told):
                await engine.tokenize(chat)


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file"])
def test_a_part_that_is_no_text_is_refused_by_name(kind: str) -> None:
    with pytest.raises(InvalidParams, match=f"{kind} parts are not supported, only text is") as caught:
        checked_messages([{"role": "user", "content": [PARTS[0], {"type": kind, kind: {}}]}])
    assert caught.value.field == "messages[0].content[1]"


def test_a_chat_of_parts_is_the_chat_of_its_text(smollm2: Path) -> None:
    async def run() -> None:
        async with Engine(smollm2, kv_memory="16MiB") as engine:
            plain = [{"role": "user", "content": "What is\nin the sky?"}]
            parts: list[dict[str, Any]] = [{"role": "user", "content": PARTS, "name": None}]
            assert await engine.tokenize(parts) == await engine.tokenize(plain)
            asked = SamplingParams(max_tokens=2, temperature=0)
            stream = engine.stream(parts, asked)
            first = [token.id async for token in stream]
            assert first == (await engine.generate(plain, asked)).choices[0].token_ids
            await stream.send([{"role": "user", "content": PARTS}], asked)
            assert [token async for token in stream]

    anyio.run(run)
