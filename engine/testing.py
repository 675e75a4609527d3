"""Public fakes for tests of applications and of headrace itself: a runner and a tokenizer that need no model.

The engine under test is the real one. Next to read: scripted/runner.py and scripted/answers.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Unpack

import anyio

from headrace.engine.config import EngineConfig
from headrace.engine.engine import Engine
from headrace.engine.errors import InvalidParams
from headrace.engine.grammar.compiled import CompiledGrammar
from headrace.engine.intake.intake import Turn
from headrace.engine.intake.messages import Message, checked_messages
from headrace.engine.life.opened import Opened
from headrace.engine.options import EngineOptions
from headrace.engine.scheduling import plan as plans
from headrace.engine.scheduling.pooling import Embedding
from headrace.engine.scheduling.result import NoToken
from headrace.engine.scripted.answers import Answer, Answers, NotScripted, ScriptedPrompt
from headrace.engine.scripted.runner import (
    VECTOR,
    Capacity,
    ScriptedRunner,
    ScriptedStep,
    scripted_token,
    scripted_vector,
)
from headrace.engine.stats import EngineInfo
from headrace.engine.tokens.interface import ChatEnd
from headrace.engine.tokens.token_table import TokenTable

__all__ = [
    "NON_FINITE",
    "ByteTokenizer",
    "Capacity",
    "NotScripted",
    "ScriptedEngine",
    "ScriptedPrompt",
    "ScriptedRunner",
    "ScriptedStep",
    "no_pages_held",
    "scripted_token",
    "scripted_vector",
]

NON_FINITE: Final = NoToken.NON_FINITE
"""Fault of a step whose first row has logits with NaN or infinity, for `ScriptedRunner(faults=...)`."""

_ABILITIES: Final = frozenset[plans.Ability](("hooks", "shaping", "logprobs", "grammar", "pooling"))
_SIZES: Final = frozenset(("max_context", "max_rows", "max_batched_tokens", "page_size"))
"""Engine options that set the size of a step or a context."""


class ByteTokenizer:
    """Tokenizer with one token for each byte: ids 0 to 255; 256 ends a sequence. Any text round-trips."""

    name = "bytes"
    vocab_size = 257
    eos_ids = (256,)
    special_tokens: Mapping[str, Any] = {"eos_token": "<end>"}
    chat_template = (
        "{% if tools %}tools: {{ tools | tojson }}\n{% endif %}{% for message in messages %}"
        "{{ message.role }}: {{ message.content }}{% for call in message.tool_calls %}"
        "<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}\n{% endfor %}"
    )
    """Jinja template of the text of `encode_chat`; it also identifies models that write calls in this way."""

    def __init__(self) -> None:
        """Build the table of single bytes."""
        self.table = TokenTable([bytes([value]) for value in range(256)] + [b"<end>"], special_ids=frozenset({256}))

    def encode(self, text: str, *, framed: bool = True) -> list[int]:
        """Return the UTF-8 bytes of `text`; no special tokens are added around it."""
        try:
            return list(text.encode())
        except UnicodeEncodeError as error:
            raise InvalidParams(f"prompt: is not text: {error.reason}", field="prompt", value=text) from None

    def encode_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        end: ChatEnd = "answer",
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the ids of a line `role: content` for each message, with its calls; a line with the tools precedes it.

        The last line has no line feed if it is to be continued. `template_kwargs` are ignored.
        """
        offered = f"tools: {json.dumps(list(tools))}\n" if tools else ""
        text = offered + "".join(map(_line, checked_messages(messages)))
        return self.encode(text.removesuffix("\n") if end == "open" else text)

    def encode_more(self, text: str) -> list[int]:
        """Return the same ids as `encode`."""
        return self.encode(text)

    def encode_reply(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the ids of the end of the answer's line and of `messages`."""
        return [*b"\n", *self.encode_chat(messages)]

    def close(self) -> None:
        """Do nothing, since there are no resources to release."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, with U+FFFD for bytes that are not UTF-8."""
        return bytes(value for value in ids if value < 256).decode(errors="replace")


def _line(message: Mapping[str, Any]) -> str:
    calls = message.get("tool_calls") or ()
    written = "".join(f"<tool_call>{json.dumps(call['function'], ensure_ascii=False)}</tool_call>" for call in calls)
    return f"{message['role']}: {message.get('content') or ''}{written}\n"


class ScriptedEngine(Engine):
    """Engine over a `ScriptedRunner` and a `ByteTokenizer`: all of headrace but the model, in milliseconds.

    It rejects what `Engine` rejects, by the same code. Answers do not depend on the temperature or the seed, so all
    choices of a prompt are the same.
    """

    def __init__(
        self,
        capacity: plans.Capacity | None = None,
        make_runner: Callable[[], ScriptedRunner] | None = None,
        *,
        answers: Mapping[str, str] | None = None,
        answer: Answer | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        """Answer prompts by `answers` or `answer`; without either, with arbitrary bytes that depend on the prompt.

        Args:
            capacity: Sizes of the pool, the rows and the vocabulary (257 for the tokenizer's); None takes those of
                the runner that `make_runner` makes, or `Capacity()`.
            make_runner: Called when the engine opens; None makes a plain `ScriptedRunner`, in which `max_context`,
                `max_rows`, `max_batched_tokens` and `page_size` among `options` replace those of `capacity`.
            answers: The answer to each prompt: to a text, or to a chat whose last message has this content.
            answer: Returns the answer to a prompt that is not among `answers`; for a chat it receives a line
                `role: content` for each message. Called once for each request, on the event loop.
            options: Fields of `EngineConfig` other than the model. `kv_memory` is checked, but has no effect.

        Raises:
            InvalidParams: An option is unknown or out of its range, `answers` is no mapping or `answer` no function.
        """
        super().__init__("scripted", **options)
        if answers is not None and not isinstance(answers, Mapping):
            why = f"answers: must be a mapping of prompts to answers, got {type(answers).__name__}"
            raise InvalidParams(why, field="answers", value=answers)
        if answer is not None and not callable(answer):
            why = f"answer: must be a function of a prompt, got {type(answer).__name__}"
            raise InvalidParams(why, field="answer", value=answer)
        if make_runner is None:
            capacity = _sized(capacity, self.config)
        self._capacity = capacity
        self._make_runner = make_runner or (lambda: ScriptedRunner(capacity))
        self._script = (answers, answer)
        self._intake.submitted = self._write_script

    def _open(self) -> Opened:
        self._runner = self._make_runner()
        capacity = self._capacity or self._runner.capacity
        names = {"model": "scripted", "architecture": "scripted", "dtype": "none", "device": "none"}
        info = EngineInfo.of(capacity, **names, page_bytes=capacity.page_size, embedding_size=VECTOR, weights=())
        embedding = Embedding(VECTOR, ("last", "mean"), "last", normalize=True)
        adapters = self._runner.bank.device(self.config)
        is_scripted = any(each is not None for each in self._script)
        self._answers = Answers(*self._script, ByteTokenizer.eos_ids[0], capacity.vocab_size) if is_scripted else None
        return Opened(self._runner, ByteTokenizer(), capacity, info, _ABILITIES, embedding, adapters=adapters)

    def _write_script(self, turn: Turn, ids: list[int], grammar: CompiledGrammar | None) -> None:
        """Write the script of a request that the engine has accepted, before a step is planned for it."""
        if self._answers is None:
            return
        adapter = turn.asking.adapter
        prompt = ScriptedPrompt(ByteTokenizer().decode(ids))
        prompt.adapter = adapter
        try:
            self._runner.scripts[adapter, tuple(ids), grammar] = self._answers.script(prompt, grammar)
        except NotScripted as error:
            turn.generation.fail(error)


def _sized(capacity: plans.Capacity | None, config: EngineConfig) -> plans.Capacity:
    """Return `capacity`, or the default one, with the sizes that were asked for; a default pool holds one context."""
    asked = {name: getattr(config, name) for name in _SIZES & config.model_fields_set}
    sizes: dict[str, int] = {name: size for name, size in asked.items() if size is not None}
    sized = replace(capacity or Capacity(), **sizes)
    if "max_rows" not in sizes:
        sized = replace(sized, max_rows=min(sized.max_rows, sized.max_batched_tokens))
    sized = replace(sized, max_batched_tokens=max(sized.max_rows, sized.max_batched_tokens))
    if capacity is not None:
        return sized
    return replace(sized, num_pages=max(sized.num_pages, -(-sized.max_context // sized.page_size)))


async def no_pages_held(engine: Engine, seconds: float = 5.0) -> None:
    """Wait until no request waits, runs or holds a page; a test ends with it to check that none is left behind.

    A step that was launched before a request ended holds its pages for a moment longer.

    Raises:
        AssertionError: Some request or page is left after so many seconds.
    """
    with anyio.move_on_after(seconds):
        while True:
            now = engine.stats()
            if not (now.pages_held or now.waiting or now.running or now.paused or now.steps_in_flight):
                return
            await anyio.sleep(0.001)
    raise AssertionError(f"requests are left behind after {seconds:g} s: {engine.stats()}")
