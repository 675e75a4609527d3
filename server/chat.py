"""`headrace chat`: a conversation in the terminal; owns the conversation only, the engine does the rest.

The engine's event loop runs in a thread, since reading a line blocks and Ctrl-C reaches the main thread alone.
"""

from __future__ import annotations

from anyio.from_thread import BlockingPortal, start_blocking_portal
from rich.console import Console

from headrace.engine import Engine, Rejected, RequestFailed, SamplingParams
from headrace.server.opening import opened

__all__ = ["run_chat"]

Messages = list[dict[str, str]]


def run_chat(model: str, *, system: str, temperature: float, max_tokens: int) -> None:
    """Read lines, show answers; ends at an empty line, the end of input or Ctrl-C at the prompt."""
    console = Console(highlight=False)
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens)
    messages = [{"role": "system", "content": system}]
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(opened(model, console)) as engine,
    ):
        while line := _read(console):
            turn = {"role": "user", "content": line}
            try:
                answer = _show_answer(portal, engine, [*messages, turn], params, console)
            except (Rejected, RequestFailed) as error:
                console.print(str(error), style="red", markup=False, soft_wrap=True)
            else:
                messages += [turn, {"role": "assistant", "content": answer}]


def _show_answer(
    portal: BlockingPortal, engine: Engine, messages: Messages, params: SamplingParams, console: Console
) -> str:
    """Print the answer as it comes, and return it; Ctrl-C cuts it short."""
    pieces: list[str] = []

    async def read() -> None:
        async with engine.stream(messages, params) as stream:
            async for chunk in stream.chunks():
                pieces.append(chunk.text)
                console.print(chunk.text, end="", markup=False, soft_wrap=True)

    reading = portal.start_task_soon(read)
    try:
        reading.result()
    except KeyboardInterrupt:
        reading.cancel()
    console.print()
    return "".join(pieces)


def _read(console: Console) -> str:
    try:
        return console.input("[bold]> [/]").strip()
    except (EOFError, KeyboardInterrupt):
        console.print()
        return ""
