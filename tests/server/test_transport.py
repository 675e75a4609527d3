"""`openai_transport`: official clients in the engine's process; answers stream, slow readers wait, closing cancels."""

from __future__ import annotations

import gc
import itertools
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import openai
import pytest
from scripted import Gate, acting_at, capacity, check_serving, expected_text, returned, serving, until
from starlette.types import Receive, Scope, Send

from headrace.engine.testing import ByteTokenizer, ScriptedEngine
from headrace.server import KeyLimits, OpenAITransport, ServerSettings, openai_transport, transport

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.filterwarnings("ignore:Async generator:ResourceWarning"),  # trio's, of the client's own generators
]

SIZES = capacity(num_pages=1024, max_rows=8, max_batched_tokens=256, max_context=8192)
CHAT: Any = [{"role": "user", "content": "Hello?"}]


def client_of(transport: OpenAITransport) -> openai.AsyncOpenAI:
    """The official client of the version that is installed, with the httpx that it stands on."""
    http = openai.DefaultAsyncHttpxClient(transport=transport)
    return openai.AsyncOpenAI(base_url="http://headrace/v1", api_key="none", http_client=http, max_retries=0)


@asynccontextmanager
async def asking(
    settings: ServerSettings | None = None, **options: Any
) -> AsyncIterator[tuple[ScriptedEngine, openai.AsyncOpenAI]]:
    """An open engine and a client of it, neither of which may leave anything behind."""
    async with serving(SIZES, **options) as engine, client_of(openai_transport(engine, settings)) as client:
        yield engine, client


def body(max_tokens: int = 8, **more: Any) -> dict[str, Any]:
    return {
        "model": "scripted",
        "messages": CHAT,
        "max_tokens": max_tokens,
        "temperature": 0,
        "extra_body": {"ignore_eos": True},
        **more,
    }


def answer(max_tokens: int) -> str:
    return expected_text(ByteTokenizer().encode_chat(CHAT), max_tokens)


async def test_whole_and_streamed_answers_are_those_of_the_engine() -> None:
    async with asking() as (_, client):
        whole = await client.chat.completions.create(**body(40))
        assert whole.choices[0].message.content == answer(40)
        stream = await client.chat.completions.create(**body(40), stream=True)
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == answer(40)
        said = await client.responses.create(model="scripted", input=CHAT, max_output_tokens=40, temperature=0)
        assert said.output_text and answer(40).startswith(said.output_text)
        vectors = await client.embeddings.create(model="scripted", input=["one", "two"])
        assert len(vectors.data) == 2 and vectors.data[0].embedding != vectors.data[1].embedding
        assert [model.id async for model in client.models.list()] == ["scripted"]


async def test_an_answer_is_read_while_it_is_generated() -> None:
    gate = Gate()
    async with asking(gate=gate) as (engine, client):
        gate.arm(30, gate.hold)
        stream = await client.chat.completions.create(**body(200), stream=True)
        texts = (chunk.choices[0].delta.content async for chunk in stream)
        first = await anext(text async for text in texts if text)
        await until(lambda: gate.holds)
        assert engine.stats().running == 1 and answer(200).startswith(first)
        gate.release()
        assert first + "".join([text async for text in texts if text]) == answer(200)
        await returned(engine)


async def test_a_reader_that_lags_holds_its_request_up_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "_MOST_UNREAD", 4096)
    async with asking(max_unread_tokens=32) as (engine, client):
        stream = await client.chat.completions.create(**body(500), stream=True)
        await until(lambda: engine.stats().paused == 1)
        assert engine.stats().generated_tokens < 300
        await check_serving(engine)
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == answer(500)
        await returned(engine)


async def closed(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(**body(4000), stream=True)
    await anext(stream)
    await stream.close()


async def left_in_the_middle(client: openai.AsyncOpenAI) -> None:
    async with await client.chat.completions.create(**body(4000), stream=True) as stream:
        async for _ in stream:
            break


async def dropped_while_read(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(**body(4000), stream=True)
    await anext(stream)


async def never_read(client: openai.AsyncOpenAI) -> None:
    await client.chat.completions.create(**body(4000), stream=True)


async def cancelled_while_read(client: openai.AsyncOpenAI) -> None:
    with anyio.CancelScope() as scope:
        async for _ in await client.chat.completions.create(**body(4000), stream=True):
            scope.cancel()


async def cancelled_before_the_answer(client: openai.AsyncOpenAI) -> None:
    with anyio.move_on_after(0.02):
        await client.chat.completions.create(**body(4000))


async def timed_out(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.APITimeoutError):
        await client.with_options(timeout=0.02).chat.completions.create(**body(4000))


async def client_closed(client: openai.AsyncOpenAI) -> None:
    await client.chat.completions.create(**body(4000), stream=True)
    await client.close()


WAYS = [
    closed,
    left_in_the_middle,
    dropped_while_read,
    never_read,
    cancelled_while_read,
    cancelled_before_the_answer,
    timed_out,
    client_closed,
]


@pytest.mark.parametrize("leave", WAYS)
async def test_a_request_that_nobody_reads_any_more_is_cancelled(
    leave: Callable[[openai.AsyncOpenAI], Awaitable[None]],
) -> None:
    async with asking(gate=lambda: threading.Event().wait(0.002)) as (engine, client):
        await leave(client)
        gc.collect()
        await until(lambda: engine.stats().running == engine.stats().waiting == engine.stats().paused == 0)
        assert engine.stats().generated_tokens < 3000
        await returned(engine)
        await check_serving(engine)


async def test_a_closed_response_leaves_nothing_running() -> None:
    """What `close` has waited for: the request is cancelled, and its task has ended."""
    async with serving(SIZES) as engine:
        made = openai_transport(engine)
        async with client_of(made) as client:
            stream = await client.chat.completions.create(**body(4000), stream=True)
            await anext(stream)
            (exchange,) = made._running
            await stream.close()
            assert exchange.ended.is_set() and not made._running
            await returned(engine)


@pytest.mark.parametrize("streams", [False, True])
async def test_a_request_may_be_cancelled_at_every_await(streams: bool) -> None:
    async with asking() as (engine, client):

        async def ask() -> None:
            found: Any = await client.chat.completions.create(**body(3), stream=streams)
            if streams:
                async for _ in found:
                    pass

        for place in itertools.count():
            acted: list[int] = []
            with anyio.CancelScope() as scope:
                await acting_at(place, ask(), scope.cancel, acted)
            await returned(engine, steps=10)
            if not acted:
                break
        assert place > 1
        await check_serving(engine)


async def test_refusals_and_keys_are_those_of_the_server() -> None:
    settings = ServerSettings(
        api_keys={"me": "the-key-of-tests"}, default_limits=KeyLimits(concurrency=1), served_model_name="small"
    )
    async with asking(settings) as (_, client):
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()
        mine = client.with_options(api_key="the-key-of-tests")
        assert (await mine.models.list()).data[0].id == "small"
        with pytest.raises(openai.BadRequestError) as refused:
            await mine.chat.completions.create(**body(temperature=3, model="small"))
        assert refused.value.param == "temperature"
        stream = await mine.chat.completions.create(**body(4000, model="small"), stream=True)
        with pytest.raises(openai.RateLimitError):
            await mine.chat.completions.create(**body(model="small"))
        await stream.close()


async def test_more_choices_than_a_server_would_queue_are_all_given() -> None:
    async with asking() as (_, client):
        texts: list[str] = []

        async def ask() -> None:
            found = await client.completions.create(model="scripted", prompt="x", max_tokens=1, n=128)
            texts.extend(choice.text for choice in found.choices)

        async with anyio.create_task_group() as tasks:
            for _ in range(9):
                tasks.start_soon(ask)
        assert len(texts) == 9 * 128 > ServerSettings().max_queue


async def test_an_engine_that_is_closed_says_so() -> None:
    async with serving(SIZES) as engine:
        client = client_of(openai_transport(engine))
        stream = await client.chat.completions.create(**body(8000), stream=True)
        await anext(stream)
    with pytest.raises(openai.APIError, match="shutting down"):
        async for _ in stream:
            pass
    with pytest.raises(openai.InternalServerError, match="shutting down"):
        await client.chat.completions.create(**body())


@pytest.mark.parametrize("sent", [[], [{"type": "http.response.start", "status": 200, "headers": []}]])
async def test_an_application_that_fails_is_an_error_of_the_connection(sent: list[Any]) -> None:
    async def fails(scope: Scope, receive: Receive, send: Send) -> None:
        for message in sent:
            await send(message)
        raise ValueError("a defect")

    async with serving(SIZES) as engine, client_of(OpenAITransport(engine, fails)) as client:
        with pytest.raises(openai.APIConnectionError) as caught:
            await client.models.list()
        assert type(caught.value.__cause__).__name__ == "RemoteProtocolError"
