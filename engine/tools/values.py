"""Reads one JSON or Python literal that arrives in pieces and writes it as JSON; never builds or evaluates a value.

A scanner reads each character once and stores no more than its nesting and an unfinished escape or word, so that a
literal may be of any length. When it is done, its output is valid JSON. Small models need it to be lenient in two ways:
control characters inside strings are written as escapes, and whitespace is kept.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Final

__all__ = ["MAX_DEPTH", "MAX_NUMBER", "SPACE", "JsonScanner", "PythonScanner"]

SPACE: Final = " \t\n\r"
MAX_DEPTH: Final = 128  # deeper than any tool needs, and far from what exhausts a recursive reader's stack
MAX_NUMBER: Final = 1000  # most characters of a number: Python refuses to read integers of more than 4,300 digits

_HEX = re.compile(r"[0-9a-fA-F]*\Z")
_RUNS = {'"': re.compile(r'[^"\\\x00-\x1f]+'), "'": re.compile(r"""[^'"\\\x00-\x1f]+""")}
_CLOSERS = {"{": "}", "[": "]"}

# Transitions of the grammar of a JSON number: state and kind of character to the next state.
_NUMBER_STEPS: Final = {
    "sign": {"0": "zero", "9": "whole"},
    "zero": {".": "point", "e": "e"},
    "whole": {"0": "whole", "9": "whole", ".": "point", "e": "e"},
    "point": {"0": "fraction", "9": "fraction"},
    "fraction": {"0": "fraction", "9": "fraction", "e": "e"},
    "e": {"0": "power", "9": "power", "+": "e sign"},
    "e sign": {"0": "power", "9": "power"},
    "power": {"0": "power", "9": "power"},
}
_NUMBER_ENDS: Final = {"zero", "whole", "fraction", "power"}
_NUMBER_KINDS: Final = {"0": "0", ".": ".", "e": "e", "E": "e", "+": "+", "-": "+"} | dict.fromkeys("123456789", "9")


class JsonScanner:
    """Scanner of one JSON value. Feed it until it is `done` or `bad`; a bad character is left unread."""

    quotes = '"'
    words: dict[str, str] = {"true": "true", "false": "false", "null": "null"}

    __slots__ = (
        "_closers",
        "_is_key",
        "_number",
        "_number_length",
        "_partial",
        "_quote",
        "_read",
        "bad",
        "done",
        "out",
    )

    def __init__(self) -> None:
        """Expect a value, or whitespace before it."""
        self.out: list[str] = []
        """Text read so far, as JSON; `take` empties it."""
        self.done = False
        self.bad = False
        self._closers: list[str] = []  # closing characters of the open containers
        self._partial = ""  # unfinished escape or word
        self._quote = ""  # opening quote of the string being read
        self._is_key = False
        self._number = ""  # state of the number being read
        self._number_length = 0
        self._read: Callable[[str, int, int], int] = self._value

    def feed(self, text: str, at: int, limit: int) -> int:
        """Read `text[at:limit]`; return the position reached: `limit`, the end of the value, or a bad character."""
        while at < limit and not (self.done or self.bad):
            at = self._read(text, at, limit)
        return at

    def take(self) -> str:
        """Return the output so far, and empty it."""
        text = "".join(self.out)
        self.out.clear()
        return text

    # States: each reads some of `text[at:limit]`, or only changes the state, and returns the position reached.

    def _value(self, text: str, at: int, limit: int) -> int:
        char = text[at]
        if char in SPACE:
            return self._copy(char, at)
        if char in self.quotes:
            return self._open_string(char, at, is_key=False)
        if char in _CLOSERS:
            if len(self._closers) == MAX_DEPTH:
                return self._reject(at)
            self._closers.append(_CLOSERS[char])
            self._read = self._first_key if char == "{" else self._first_value
            return self._copy(char, at)
        if char == "-" or char in "0123456789":
            self._number = "sign" if char == "-" else "zero" if char == "0" else "whole"
            self._number_length = 1
            self._read = self._digits
            return self._copy(char, at)
        self._read = self._letters
        return at

    def _first_value(self, text: str, at: int, limit: int) -> int:
        if text[at] in SPACE:
            return self._copy(text[at], at)
        self._read = self._after if text[at] == "]" else self._value
        return at

    def _first_key(self, text: str, at: int, limit: int) -> int:
        if text[at] in SPACE:
            return self._copy(text[at], at)
        self._read = self._after if text[at] == "}" else self._key
        return at

    def _key(self, text: str, at: int, limit: int) -> int:
        char = text[at]
        if char in SPACE:
            return self._copy(char, at)
        return self._open_string(char, at, is_key=True) if char in self.quotes else self._reject(at)

    def _colon(self, text: str, at: int, limit: int) -> int:
        char = text[at]
        if char == ":":
            self._read = self._value
        elif char not in SPACE:
            return self._reject(at)
        return self._copy(char, at)

    def _after(self, text: str, at: int, limit: int) -> int:
        char, closer = text[at], self._closers[-1]
        if char == ",":
            self._read = self._key if closer == "}" else self._value
        elif char == closer:
            self._closers.pop()
            self._end_value()
        elif char not in SPACE:
            return self._reject(at)
        return self._copy(char, at)

    def _string(self, text: str, at: int, limit: int) -> int:
        if run := _RUNS[self._quote].match(text, at, limit):
            self.out.append(run.group())
            return run.end()
        char = text[at]
        if char == "\\":
            self._read = self._escape
        elif char == self._quote:
            self.out.append('"')
            if self._is_key:
                self._read = self._colon
            else:
                self._end_value()
        else:  # a control character, or the other quote
            self.out.append(json.dumps(char)[1:-1])
        return at + 1

    def _escape(self, text: str, at: int, limit: int) -> int:
        self._partial += text[at]
        written = self.translate(self._partial)
        if self.bad:
            return at
        if written is not None:
            self.out.append(written)
            self._partial = ""
            self._read = self._string
        return at + 1

    def _digits(self, text: str, at: int, limit: int) -> int:
        char = text[at]
        state = _NUMBER_STEPS[self._number].get(_NUMBER_KINDS.get(char, ""))
        if state is None:  # the number ends here, or is malformed
            if self._number not in _NUMBER_ENDS:
                return self._reject(at)
            self._end_value()
            return at
        self._number_length += 1
        if self._number_length > MAX_NUMBER:
            return self._reject(at)
        self._number = state
        return self._copy(char, at)

    def _letters(self, text: str, at: int, limit: int) -> int:
        word = self._partial + text[at]
        if not any(known.startswith(word) for known in self.words):
            return self._reject(at)
        self._partial = word
        if word in self.words:
            self.out.append(self.words[word])
            self._partial = ""
            self._end_value()
        return at + 1

    def translate(self, escape: str) -> str | None:
        """Return an escape, given without its backslash, as JSON; None if unfinished. Set `bad` if it is invalid."""
        if escape in '"\\/bfnrt':
            return "\\" + escape
        if escape[0] == "u" and _HEX.match(escape, 1):
            return "\\" + escape if len(escape) == 5 else None
        self.bad = True
        return None

    def _open_string(self, quote: str, at: int, is_key: bool) -> int:
        self._quote = quote
        self._is_key = is_key
        self._read = self._string
        self.out.append('"')
        return at + 1

    def _end_value(self) -> None:
        self._read = self._after
        self.done = not self._closers

    def _copy(self, char: str, at: int) -> int:
        self.out.append(char)
        return at + 1

    def _reject(self, at: int) -> int:
        self.bad = True
        return at


class PythonScanner(JsonScanner):
    """Scanner of one Python literal: strings, numbers as in JSON, True, False, None, lists, dicts with string keys."""

    quotes = "\"'"
    words = {"True": "true", "False": "false", "None": "null"} | JsonScanner.words

    __slots__ = ()

    def translate(self, escape: str) -> str | None:
        """Return a Python escape as JSON; a backslash before any other character stands for itself, as in Python."""
        kind, digits = escape[0], escape[1:]
        if kind in _HEX_LENGTHS and _HEX.match(digits):
            if len(digits) < _HEX_LENGTHS[kind]:
                return None
            code = int(digits, 16)
            self.bad = code > 0x10FFFF
            return None if self.bad else json.dumps(chr(code))[1:-1]
        self.bad = kind in _UNSUPPORTED_ESCAPES
        return _PYTHON_ESCAPES.get(kind) or json.dumps("\\" + kind)[1:-1]


_HEX_LENGTHS: Final = {"x": 2, "u": 4, "U": 8}
_UNSUPPORTED_ESCAPES: Final = frozenset("01234567N\nxuU")  # for x, u and U: the next character is no hex digit
_PYTHON_ESCAPES: Final = {"'": "'", "a": "\\u0007", "v": "\\u000b"} | {char: "\\" + char for char in '"\\bfnrt'}
