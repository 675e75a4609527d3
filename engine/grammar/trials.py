"""`Trials`: tries whether a grammar compiles in time, in a process that can be ended; compiles nothing for use.

A call of llguidance cannot be interrupted, and thirty characters are enough for one that takes for ever: a schema with
`multipleOf: 99999989`. Formats that cannot take long (`may_take_long`) are compiled at once; others are tried first.
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
"""Tokens, ids of special tokens, and ids that end a sequence."""

_SECONDS: Final = 2.0  # processor time of one trial; the same work is then done once more, in this process
_PATIENCE: Final = 10.0  # seconds within which a trial, or reading the vocabulary, must end in real time
_VALUES: Final = 500  # in a schema
_LENGTH: Final = 1000  # characters of a regular expression
_GRAMMAR: Final = 4000  # characters of a Lark grammar
_PATTERNS: Final = 3
_MULTIPLE: Final = 1000  # largest product of all `multipleOf` of a schema
_HARMLESS: Final = frozenset(
    "$schema $id $comment $ref type title description default examples required additionalProperties items prefixItems"
    " enum const anyOf oneOf allOf minLength maxLength minItems maxItems minProperties maxProperties format"
    " minimum maximum exclusiveMinimum exclusiveMaximum".split()
)
_NAMED: Final = frozenset(("properties", "$defs", "definitions"))
_DATA: Final = frozenset(("enum", "const", "default", "examples", "required"))
_SUSPICIOUS: Final = ("&", "~", "\\u", "multipleOf", "attern")
"""Parts of a grammar, or of a schema in it, that may make compiling slow."""


class Unfit(Exception):
    """A grammar that cannot be compiled."""

    def __init__(self, why: str, seconds: float) -> None:
        """Keep the result of the trial.

        Args:
            why: The fault of the grammar.
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
    """Return whether compiling might take more than a few tenths of a second."""
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
    """Counts the parts of a schema that decide how long compiling may take."""

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
            self.values += len(json.dumps(value)) // 4  # at least the number of values
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
    """Result of a trial that found no fault."""

    wanted: bool
    """Whether somebody still wants the format, which can be compiled."""
    seconds: float
    """Processor time of the trial; if it was given up, real time, but no more than a trial may have."""


class Trials:
    """The trial processes of one engine: none before the first format that may take long, then one for each thread."""

    def __init__(self) -> None:
        """Start no process."""
        self._children = Children(lambda: Child(Path(__file__).with_name("child.py")))

    def run(self, source: str, vocabulary: Callable[[], Vocabulary], still_wanted: Callable[[], bool]) -> Tried:
        """Try to compile `source`; called in any thread.

        Args:
            source: The grammar in the form that llguidance reads.
            vocabulary: Returns the vocabulary of the model, which must always be the same.
            still_wanted: Asked many times a second; once it returns False, it is not asked again, and the trial ends.

        Returns:
            Whether the format is still wanted, and the seconds of the trial.

        Raises:
            TooSlow: Compiling takes more than two seconds of processor time.
            Unfit: The grammar cannot be compiled, or its process died, for example by taking too much memory.
            Starved: Ten seconds of real time were not enough for the trial.
            OSError: No other process can be started, or a new one was ended by others.
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
        """End the processes, in which nothing runs."""
        self._children.close()


def vocabulary_line(vocabulary: Vocabulary) -> bytes:
    """Return a vocabulary as the line that child.py reads."""
    tokens, special_ids, eos_ids = vocabulary
    return json.dumps([[piece.decode("latin-1") for piece in tokens], list(special_ids), list(eos_ids)]).encode()
