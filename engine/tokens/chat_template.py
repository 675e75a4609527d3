"""`ChatTemplate`: renders a model's chat template in processes with limits of time and memory; never tokenises.

A template is a program that comes with the model, and nobody vouches for it. It runs in Jinja's sandbox, in a process
whose processor time and memory the operating system limits, so no template can cost more. Next to read:
template_child.py, which runs there, and concurrency/child.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from headrace.engine.concurrency.child import Child, ChildCrashed, Children, ChildTooSlow

__all__ = ["MAX_SOURCE", "ChatTemplate", "TemplateRefused", "TemplateTooCostly"]

MAX_SOURCE: Final = 2**18
"""Most characters of a template; those of the supported families have up to 20,000."""

_SECONDS: Final = 2.0
_MEMORY: Final = 2**30
_MAX_CHARS: Final = 16 * 2**20
_LATE: Final = 20.0  # seconds of real time, if the processor is busy with other work
_WIDEST: Final = 6  # most bytes of a character in an answer


class TemplateRefused(Exception):
    """The template is not valid, or refuses the messages."""


class TemplateTooCostly(Exception):
    """The template takes more time or memory than it may, or writes too much."""


class _OutOfMemory(TemplateTooCostly):
    """The template needs more memory than its limit, or than the machine has now."""


_ERRORS: Final = {"refused": TemplateRefused, "costly": TemplateTooCostly, "memory": _OutOfMemory}


class ChatTemplate:
    """One chat template. Safe to render from several threads: each uses a process of its own meanwhile."""

    def __init__(
        self,
        source: str,
        names: Mapping[str, Any] | None = None,
        *,
        seconds: float = _SECONDS,
        memory: int = _MEMORY,
        max_chars: int = _MAX_CHARS,
    ) -> None:
        """Keep a template; it is compiled before its first rendering.

        Args:
            source: Jinja text, of at most `MAX_SOURCE` characters.
            names: Special tokens by the names that templates use, such as `bos_token`.
            seconds: Processor time of one rendering, and of compiling.
            memory: Most bytes that one rendering may use.
            max_chars: Most characters that a rendering may write.
        """
        script = Path(__file__).with_name("template_child.py")
        self._children = Children(lambda: Child(script, str(memory), str(max_chars)))
        self._seconds = seconds
        self._most = _WIDEST * max_chars + 2**16
        self._source = json.dumps([source, dict(names or {})], default=str).encode()
        self._refusal: TemplateRefused | TemplateTooCostly | None = None
        self._closings = 0

    def start(self) -> None:
        """Start a process for the first rendering; does not wait for it.

        Raises:
            OSError: No process can be started.
        """
        self._children.start()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        more: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the text of a chat, up to where the assistant's next answer begins. Blocks; not for the event loop.

        Args:
            messages: `role`, `content` and any other value that the template reads, as JSON can express it.
            tools: Definitions, as OpenAI's API writes them; None if the model is offered none.
            add_generation_prompt: Whether the beginning of the assistant's next answer is written.
            more: Values by name, as JSON can express them; they never replace the template's own.

        Raises:
            TemplateTooCostly: The template takes more time or memory than it may, or writes too much.
            TemplateRefused: The template is not valid, or refuses the messages.
            OSError: No process can be started, or it was ended by others or by `close`.
        """
        values = {**(more or {}), "add_generation_prompt": add_generation_prompt}
        chat, closings = _line([messages, tools, values]), self._closings

        def still_wanted() -> bool:
            return self._closings == closings

        if self._refusal is not None:
            raise type(self._refusal)(*self._refusal.args)

        def attempt(child: Child) -> str:
            if not child.answers:
                self._compile(child, still_wanted)
            return self._ask(child, chat, still_wanted)

        return self._children.ask(attempt)

    def close(self) -> None:
        """End the processes and their renderings. A later rendering starts a new process each time."""
        self._closings += 1
        self._children.close()

    def _compile(self, child: Child, still_wanted: Callable[[], bool]) -> None:
        try:
            self._ask(child, self._source, still_wanted)
        except (TemplateRefused, TemplateTooCostly) as error:
            child.close()
            if not isinstance(error, _OutOfMemory):  # a lack of memory may pass; other errors come again
                self._refusal = error
            raise

    def _ask(self, child: Child, line: bytes, still_wanted: Callable[[], bool]) -> str:
        try:
            answer = child.ask(line, self._seconds, still_wanted, patience=_LATE, most=self._most)
        except ChildTooSlow:
            raise TemplateTooCostly(f"the chat template runs for more than {self._seconds:g} seconds") from None
        except ChildCrashed:
            raise TemplateTooCostly("the chat template crashes Python") from None
        if answer is None:
            raise OSError("the engine closed meanwhile")
        kind, text = json.loads(answer)
        if kind == "text":
            return str(text)
        raise _ERRORS[kind](text)


def _line(value: object) -> bytes:
    try:
        return json.dumps(value, default=_plain).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise TemplateRefused(f"they are no JSON data: {error}") from None


def _plain(value: object) -> object:
    """Return a mapping or a sequence of another class as a dict or a list."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        return list(value)
    raise TypeError(f"{type(value).__name__} has no JSON")
