"""`headrace chat`: a conversation in the terminal; owns lines, commands and what was said, the engine does the rest.

The engine's event loop runs in a thread, since reading a line blocks and Ctrl-C reaches the main thread alone.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from anyio.from_thread import BlockingPortal, start_blocking_portal
from pydantic import ValidationError
from rich.console import Console
from rich.text import Text

from headrace.engine import Engine, Rejected, RequestFailed, SamplingParams
from headrace.engine.checked import invalid_params
from headrace.server.commands.interrupts import ending_at_once
from headrace.server.commands.opening import opened
from headrace.server.commands.printable import printable
from headrace.server.commands.wrapping import WordWrap
from headrace.server.protocol.bounds import SamplingBounds

__all__ = ["run_chat"]

_PROMPT: Final = "> "
_SETTABLE: Final = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "max_tokens", "seed",
)  # fmt: skip


def run_chat(
    model: str,
    *,
    system: str,
    sampling: Mapping[str, Any],
    adapters: Mapping[str, str] = MappingProxyType({}),
    **options: Any,
) -> bool:
    """Read lines and show answers until /exit or the end of input; Ctrl-C stops an answer, never the chat.

    Args:
        model: Model, as `Engine` takes it.
        system: The system message; none where it is empty.
        sampling: Fields of `SamplingParams` to begin with, as `/set` changes them.
        adapters: Folders of the adapters to choose from, by their names.
        options: Further options of `Engine`.

    Returns:
        False if a line from a pipe was refused; a person at a terminal has seen the refusal.

    Raises:
        InvalidParams: A value of `sampling` is beyond the bounds of the API.
    """
    _params(sampling)  # refused before the model is opened
    console = Console(highlight=False)
    with contextlib.ExitStack() as stack:
        portal = stack.enter_context(start_blocking_portal())
        opening = portal.wrap_async_context_manager(opened(model, console, adapter_slots=len(adapters), **options))
        with ending_at_once(f"opening {Path(model).name}", console):
            engine = stack.enter_context(opening)
        portal.call(_load, engine, adapters)
        chat = _Chat(portal, engine, console, system, sampling)
        chat.run()
        return not chat.failed


async def _load(engine: Engine, adapters: Mapping[str, str]) -> None:
    for name, folder in adapters.items():
        await engine.adapters.load(name, folder)


class _Ended(Exception):
    """The person has ended the chat."""


class _Chat:
    """One conversation."""

    def __init__(
        self, portal: BlockingPortal, engine: Engine, console: Console, system: str, sampling: Mapping[str, Any]
    ) -> None:
        self._portal = portal
        self._engine = engine
        self._console = console
        self._terminal = sys.stdin.isatty() and console.is_terminal
        self._errors = console if self._terminal else Console(stderr=True, highlight=False)
        self.failed = False
        """Whether a line from a pipe was refused."""
        self._system = system
        self._sampling = sampling
        self._params = _params(sampling)
        self._wrap = WordWrap(lambda: self._console.width)
        self._adapter: str | None = None
        self._turns: list[dict[str, str]] = []
        self._commands: dict[str, tuple[Callable[[str], None], str]] = {
            "/help": (self._help, "show this"),
            "/system": (self._set_system, "[TEXT | none]: show or change the system message"),
            "/adapter": (self._set_adapter, "[NAME | none]: show or change the adapter that answers"),
            "/set": (self._set, "[NAME VALUE]: show or change how tokens are chosen"),
            "/clear": (self._clear, "forget what was said"),
            "/exit": (self._exit, "end the chat; so does Ctrl-D"),
        }

    def run(self) -> None:
        """Read lines and act on them until the chat ends."""
        if self._terminal:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401 - gives input() its arrow keys and history
            model = self._portal.call(lambda: self._engine.info.model)
            self._tell(f"{model}. /help lists commands; Ctrl-C stops an answer, Ctrl-D ends the chat.")
        with contextlib.suppress(_Ended, EOFError):
            while True:
                try:
                    self._take(input(_PROMPT if self._terminal else "").strip())
                except KeyboardInterrupt:
                    self._console.print()
        if self._terminal:
            self._console.print()

    def _take(self, line: str) -> None:
        if not line:
            return
        if line.startswith("/"):
            name, _, rest = line.partition(" ")
            command = self._commands.get(name)
            if command is None:
                self._refuse(f"{name}: there is no such command; /help lists them")
            else:
                command[0](rest.strip())
            return
        turn = {"role": "user", "content": line}
        try:
            answer = self._show_answer([*self._turns, turn])
        except (Rejected, RequestFailed) as error:
            self._refuse(str(error))
        else:
            if answer:  # an answer stopped before its first word leaves no trace of the question
                self._turns += [turn, {"role": "assistant", "content": answer}]

    # -- answers ----------------------------------------------------------------------------------------------------

    def _show_answer(self, turns: list[dict[str, str]]) -> str:
        """Print the answer as it comes, and return it; Ctrl-C cuts it short."""
        answer = _Answer()
        system = [{"role": "system", "content": self._system}] if self._system else []

        async def read() -> None:
            try:
                async with self._engine.stream([*system, *turns], self._params, adapter=self._adapter) as stream:
                    async for chunk in stream.chunks():
                        answer.came(chunk.text, len(chunk.tokens))
                        self._show(chunk.text)
                    answer.cached = stream.usage.cached_tokens
            finally:
                answer.over.set()

        reading = self._portal.start_task_soon(read)
        stopped = False
        try:
            reading.result()
        except KeyboardInterrupt:
            stopped = True
            reading.cancel()
            answer.over.wait(5.0)
        except (Rejected, RequestFailed):
            if answer.pieces:  # the error gets a line of its own
                self._end_line()
            raise
        self._end_line()
        if self._terminal:
            self._tell(answer.summary(stopped))
        return "".join(answer.pieces)

    # -- commands ---------------------------------------------------------------------------------------------------

    def _help(self, rest: str) -> None:
        for name, (_, text) in self._commands.items():
            self._tell(f"{name:9} {text}")

    def _set_system(self, rest: str) -> None:
        if rest:
            self._system = "" if rest == "none" else rest
        self._tell(f"system message: {self._system or 'none'}")

    def _set_adapter(self, rest: str) -> None:
        names = [info.name for info in self._portal.call(lambda: self._engine.adapters.list())]
        if rest:
            if rest not in ("none", *names):
                self._refuse(f"{rest}: there is no such adapter; there are {', '.join(['none', *names])}")
                return
            self._adapter = None if rest == "none" else rest
        self._tell(f"adapter: {self._adapter or 'none'}, of {', '.join(['none', *names])}")

    def _set(self, rest: str) -> None:
        name, _, value = rest.partition(" ")
        if name and name not in _SETTABLE:
            self._refuse(f"{name}: what can be set is {', '.join(_SETTABLE)}")
            return
        if name:
            wanted = {**self._sampling, name: _number(value.strip())}
            try:
                self._params = _params(wanted)
            except Rejected as error:
                self._refuse(str(error))
                return
            self._sampling = wanted
        self._tell(", ".join(f"{name} {getattr(self._params, name)}" for name in _SETTABLE))

    def _clear(self, rest: str) -> None:
        self._turns.clear()
        self._tell("forgotten; the system message stays")

    def _exit(self, rest: str) -> None:
        raise _Ended

    # -- words ------------------------------------------------------------------------------------------------------

    def _show(self, text: str) -> None:
        """Write a piece of an answer; for a terminal, drop control characters and keep words whole."""
        self._console.file.write(self._wrap.take(printable(text)) if self._terminal else text)
        self._console.file.flush()

    def _end_line(self) -> None:
        """Write the word that was held back, and end the line."""
        self._console.file.write(f"{self._wrap.end()}\n")
        self._console.file.flush()

    def _tell(self, text: str) -> None:
        self._console.print(Text(text, style="dim"), soft_wrap=True)

    def _refuse(self, text: str) -> None:
        self.failed = self.failed or not self._terminal
        self._errors.print(Text(text, style="red"), soft_wrap=True)


class _Answer:
    """An answer and its times, collected piece by piece."""

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self.tokens = 0
        self.cached = 0
        self.over = threading.Event()
        self._asked = time.perf_counter()
        self._first = self._last = 0.0

    def came(self, text: str, tokens: int) -> None:
        """Add a piece of text that holds `tokens` tokens."""
        self._last = time.perf_counter()
        self._first = self._first or self._last
        self.pieces.append(text)
        self.tokens += tokens

    def summary(self, stopped: bool) -> str:
        """Return the answer's figures in one line."""
        parts = ["stopped"] if stopped else []
        parts.append(f"{self.tokens} tokens")
        if self._last > self._first:
            parts.append(f"{(self.tokens - 1) / (self._last - self._first):.0f} tokens/s")
        if self._first:
            parts.append(f"first after {1000 * (self._first - self._asked):.0f} ms")
        if self.cached:
            parts.append(f"{self.cached} prompt tokens from cache")
        return ", ".join(parts)


def _params(sampling: Mapping[str, Any]) -> SamplingParams:
    """Return the values of `sampling` that are not None, checked against the bounds of the API.

    Raises:
        InvalidParams: A value is no number or out of its bounds.
    """
    try:
        values = SamplingBounds(**sampling).model_dump(exclude_none=True)
    except ValidationError as error:
        raise invalid_params(error, SamplingBounds) from None
    return SamplingParams(**values)


def _number(text: str) -> Any:
    """Return the JSON value that `text` is, else the text itself, which the field then refuses."""
    try:
        return json.loads(text)
    except ValueError:
        return text
