"""`headrace chat`: a conversation in the terminal; owns the conversation only, the engine does the rest."""

from __future__ import annotations

from pathlib import Path

import anyio
from rich.console import Console

from headrace.engine import Engine, SamplingParams

__all__ = ["run_chat"]


async def run_chat(model: str, *, system: str, temperature: float, max_tokens: int) -> None:
    """Read lines, stream answers; ends at an empty line or the end of input."""
    console = Console(highlight=False)
    messages = [{"role": "system", "content": system}]
    with console.status(f"opening {Path(model).name} ..."):
        engine = Engine(model)
        await engine.__aenter__()
    try:
        while line := await anyio.to_thread.run_sync(_read, console):
            messages.append({"role": "user", "content": line})
            answer = ""
            params = SamplingParams(temperature=temperature, max_tokens=max_tokens)
            async with engine.stream(messages, params) as stream:
                async for chunk in stream.chunks():
                    answer += chunk.text
                    console.print(chunk.text, end="", markup=False, soft_wrap=True)
            console.print()
            messages.append({"role": "assistant", "content": answer})
    finally:
        await engine.__aexit__(None, None, None)


def _read(console: Console) -> str:
    try:
        return console.input("[bold]> [/]").strip()
    except EOFError:
        return ""
