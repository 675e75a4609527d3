"""`Trials`: whether a grammar is compiled in time, tried in a process that can be ended; compiles nothing for use.

A call of llguidance cannot be interrupted, and thirty characters are enough for one that takes for ever: a schema with
`multipleOf: 99999989`. Formats of which that cannot be are compiled at once (`may_take_long`); others are tried first.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from headrace.engine.concurrency.child import Child, ChildCrashed, ChildLate, Children, ChildTooSlow
from headrace.engine.response_format import ResponseFormat

__all__ = ["Starved", "TooSlow", "Trials", "Unfit", "Vocabulary", "may_take_long"]

Vocabulary = tuple[Sequence[bytes], Sequence[int], Sequence[int]]
"""Tokens, ids of special ones, and those that end a sequence."""

_SECONDS: Final = 2.0  # of a processor, for one trial; the same work is then done once more, in this process
_PATIENCE: Final = 10.0  # seconds in which a processor must have had time for a trial, or for reading the vocabulary
_VALUES: Final = 500  # of a schema
_LENGTH: Final = 1000  # of a regular expression
_GRAMMAR: Final = 4000  # characters
_PATTERNS: Final = 3
_MULTIPLE: Final = 1000  # of all numbers together, whose multiples may be asked for at once
_HARMLESS: Final = frozenset(
    "$schema $id $comment $ref type title description default examples required additionalProperties items prefixItems"
    " enum const anyOf oneOf allOf minLength maxLength minItems maxItems minProperties maxProperties format"
    " minimum maximum exclusiveMinimum exclusiveMaximum".split()
)
_NAMED: Final = frozenset(("properties", "$defs", "definitions"))
_DATA: Final = frozenset(("enum", "const", "default", "examples", "required"))
_SUSPICIOUS: Final = ("&", "~", "\\u", "multipleOf", "attern")
"""Parts of a grammar, or of a schema in it, with which compiling may take long."""


class Unfit(Exception):
    """A grammar that cannot be compiled."""

    def __init__(self, why: str, seconds: float) -> None:
        """Keep what the trial found.

        Args:
            why: What is wrong with the grammar.
            seconds: Processor time of the trial.
        """
        super().__init__(why)
        self.seconds = seconds


class TooSlow(Unfit):
    """A grammar that takes longer than a trial may."""

    def __init__(self, seconds: float) -> None:
        """Keep the limit.

        Args:
            seconds: Processor time that the trial had.
        """
        super().__init__(f"it takes longer than {seconds:g} s to compile", seconds)


class Starved(Exception):
    """The machine had no processor time for a trial, which says nothing about the grammar."""


def may_take_long(wanted: ResponseFormat) -> bool:
    """Whether compiling might take more than a few tenths of a second."""
    if wanted.kind in ("json_object", "choice"):
        return False
    if wanted.kind == "regex":
        return len(wanted.source) > _LENGTH
    if wanted.kind == "lark":
        return len(wanted.source) > _GRAMMAR or any(each in wanted.source for each in _SUSPICIOUS)
    survey = _Survey()
    try:
        survey.see(json.loads(wanted.source))
    except RecursionError:
        return True
    large = survey.values > _VALUES or survey.patterns > _PATTERNS or survey.multiple > _MULTIPLE
    return survey.is_suspicious or large


class _Survey:
    """What a schema holds, as far as one must know it."""

    def __init__(self) -> None:
        self.values = self.patterns = 0
        self.multiple = 1
        self.is_suspicious = False

    def see(self, schema: Any) -> None:
        self.values += 1
        if isinstance(schema, list):
            for each in schema:
                self.see(each)
        elif isinstance(schema, dict):
            for key, value in schema.items():
                self._see_keyword(key, value)

    def _see_keyword(self, key: str, value: Any) -> None:
        if key in _NAMED and isinstance(value, dict):
            for each in value.values():
                self.see(each)
        elif key in _DATA:
            self.values += len(json.dumps(value)) // 4  # at least as many as there are
        elif key == "pattern":
            self.patterns += 1
            self.is_suspicious |= not isinstance(value, str) or len(value) > _LENGTH
        elif key == "multipleOf":
            self.multiple *= value if value in range(1, _MULTIPLE + 1) else _MULTIPLE + 1
        elif key in _HARMLESS:
            self.see(value)
        else:
            self.is_suspicious = True


class Tried(NamedTuple):
    """How a trial ended that found no fault."""

    wanted: bool
    """Somebody still wants the format, which can be compiled."""
    seconds: float
    """Processor time that it took; real time, and no more than a trial may have, where it was given up."""


class Trials:
    """The processes of one engine: none before the first format that may take long, and then one for each thread."""

    def __init__(self) -> None:
        """Start none."""
        self._children = Children(lambda: Child(Path(__file__).with_name("child.py")))

    def run(self, source: str, vocabulary: Callable[[], Vocabulary], still_wanted: Callable[[], bool]) -> Tried:
        """Try `source`, in any thread.

        Args:
            source: The grammar as llguidance reads it.
            vocabulary: Returns the vocabulary of the model, which must always be the same.
            still_wanted: Asked many times a second; once it says no, it is not asked again, and the trial ends.

        Returns:
            Whether it is still wanted, and what it took.

        Raises:
            TooSlow: It takes more than two seconds of a processor.
            Unfit: It cannot be compiled, or its process died, as where it took too much memory.
            Starved: Ten seconds were not enough for that.
            OSError: There can be no other process, or a new one was ended by others.
        """
        began = time.monotonic()

        def elapsed() -> float:
            return min(time.monotonic() - began, _SECONDS)

        def attempt(child: Child) -> bytes | None:
            line = vocabulary_line(vocabulary()) if not child.answers else b""
            if line and not child.ask(line, _PATIENCE, still_wanted, patience=_PATIENCE):
                return None
            return child.ask(json.dumps(source).encode(), _SECONDS, still_wanted, patience=_PATIENCE)

        try:
            answer = self._children.ask(attempt)
        except ChildLate:
            raise Starved from None
        except ChildTooSlow:
            raise TooSlow(_SECONDS) from None
        except ChildCrashed:
            raise Unfit("compiling it takes too much memory or crashes", elapsed()) from None
        if answer is None:
            return Tried(False, elapsed())
        why, seconds = json.loads(answer)
        if why:
            raise Unfit(why, seconds)
        return Tried(True, seconds)

    def close(self) -> None:
        """End the processes; nothing runs in them."""
        self._children.close()


def vocabulary_line(vocabulary: Vocabulary) -> bytes:
    """Return a vocabulary as child.py reads it."""
    tokens, special_ids, eos_ids = vocabulary
    return json.dumps([[piece.decode("latin-1") for piece in tokens], list(special_ids), list(eos_ids)]).encode()
