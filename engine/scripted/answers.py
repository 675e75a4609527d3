"""`Answers`: finds the text that a test wants for a prompt, as token ids of one byte each; never sees a device.

Next to read: testing.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

from headrace.engine.errors import HeadraceError
from headrace.engine.params import shown
from headrace.engine.scheduling.shaping import Grammar
from headrace.engine.scripted.rows import allowed_ids

__all__ = ["Answer", "Answers", "NotScripted", "ScriptedPrompt"]

_ROLE: Final = re.compile(r"(?:user|tool|system|developer|assistant): ")
_SPACE: Final = ord(" ")
_BLANK: Final = frozenset(b" \t\r\n")


class NotScripted(HeadraceError):
    """A `ScriptedEngine` has no answer for a prompt, or one that the request's format does not allow."""


class ScriptedPrompt(str):
    """The text of a prompt as the model sees it; for a chat, a line `role: content` for each message."""

    adapter: str | None = None
    """Name of the adapter that the request uses; None for the base model."""


Answer: TypeAlias = Callable[[ScriptedPrompt], str]


class Answers:
    """The script of one engine."""

    def __init__(self, answers: Mapping[str, str] | None, answer: Answer | None, end: int, vocab_size: int) -> None:
        """Answer by the mapping, then by the function; `end` is the token behind every answer."""
        self._answers = answers or {}
        self._answer = answer
        self._end = end
        self._vocab_size = vocab_size

    def script(self, prompt: ScriptedPrompt, grammar: Grammar | None) -> list[int]:
        """Return the ids of the answer to `prompt`, spaced as `grammar` demands.

        Raises:
            NotScripted: There is no answer, or `grammar` does not allow it.
        """
        text = self._text(prompt)
        ids = [*text.encode(), self._end]
        return ids if grammar is None else self._spaced(text, ids, grammar)

    def _text(self, prompt: ScriptedPrompt) -> str:
        text = self._answers.get(prompt)
        if text is None and prompt.endswith("\n"):  # a chat: look for the content of its last message
            starts = [found.end() for found in _ROLE.finditer(prompt) if prompt[: found.start()][-1:] in ("", "\n")]
            said = (self._answers.get(prompt[start:-1]) for start in starts)
            text = next((each for each in said if each is not None), None)
        if text is None and self._answer is not None:
            try:
                text = self._answer(prompt)
            except Exception as error:
                raise NotScripted(f"the function that answers raised {type(error).__name__}: {error}") from error
        if not isinstance(text, str):
            what = "no answer is scripted" if text is None else f"the answer must be a str, got {type(text).__name__},"
            raise NotScripted(f"{what} for the prompt {shown(str(prompt))}")
        return text

    def _spaced(self, text: str, ids: list[int], grammar: Grammar) -> list[int]:
        """Return `ids` with only those blanks that a grammar demands, since a format fixes the spaces in JSON."""
        state, spaced, place = grammar.begin(()), list[int](), 0
        while place < len(ids):
            allowed_V = allowed_ids(state.allowed(), self._vocab_size)
            token = ids[place]
            if allowed_V[token]:
                place += 1
            elif token in _BLANK:
                place += 1
                continue
            elif allowed_V[_SPACE] and spaced[-1:] != [_SPACE]:
                token = _SPACE
            else:
                where = f"from byte {place} on" if place < len(ids) - 1 else "at its end"
                raise NotScripted(f"the scripted answer {shown(text)} does not keep to response_format {where}")
            spaced.append(token)
            if token != self._end:
                state.advance(token)
        return spaced
