"""`Machine` reads a completion in pieces, once, and accounts for every character; other files know the formats.

The reader is the generator `run`: it reads to the end of the text so far, and goes on with the next piece. Text that it
has read is either held (it becomes content if the attempt at a call fails) or settled (part of a call or a tag). The
next event takes both along as its `raw`, so that joining the `raw` of all events gives the completion.
Next to read: parser.py.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from functools import lru_cache
from typing import Final, TypeVar

from headrace.engine.tools.events import (
    Content,
    End,
    Event,
    Reasoning,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    merge,
)
from headrace.engine.tools.values import SPACE, JsonScanner

__all__ = ["MAX_HELD", "MAX_NAME", "Machine", "Malformed", "Reading"]

T = TypeVar("T")
Reading = Generator[None, None, T]
"""Generator that yields when it needs more text."""

MAX_HELD: Final = 65_536  # most characters held while it is unknown whether they are a call or content
MAX_NAME: Final = 128
_MAX_SPACE: Final = 64  # most whitespace characters that may belong to the tag after them


class Malformed(Exception):
    """Signal within a parser that the text is not a call. It never leaves `feed` or `finish`."""


class Machine(ABC):
    """A state machine that turns the pieces of one completion into events.

    No text makes it raise: text that it cannot parse is content. Its memory is bounded and its time linear. After
    merging, the events do not depend on how the text was cut into pieces, except for the boundaries of their `raw`.
    """

    def __init__(self, make_id: Callable[[int], str]) -> None:
        """Start a completion whose calls get their ids from `make_id(index)`."""
        self._make_id = make_id
        self._text = ""
        self._at = 0  # number of characters of `_text` that have been read
        self._ended = False
        self._held: list[str] = []
        self._held_size = 0
        self._settled: list[str] = []
        self._events: list[Event] = []
        self._index = 0  # of the open call, or else of the next one
        self._is_open = False  # a call has started and not ended
        self._tagged = False  # a tag of calls was read, and the text after it is still undecided
        self._cut = False  # the model did not end the text itself
        self._ran_out = False  # a reader needed more text than there was
        self._dropped: tuple[str, ...] = ()  # a tag that belongs to no text, once
        self._reading = self.run()

    def feed(self, text: str) -> list[Event]:
        """Read the next piece of the completion and return the events that are now certain; often none."""
        if self._ended:
            raise RuntimeError("this completion has ended; make a parser for each one")
        self._text = self._text[self._at :] + text
        self._at = 0
        next(self._reading)
        return self._emitted()

    def finish(self, *, cut: bool = False) -> list[Event]:
        """End the completion, and return the events for the text still held, then `End`.

        Args:
            cut: Whether the text was cut before the model ended it, so that a call may lack its end. Held text of such
                a call, after a tag of calls or within a call that has started, is then not content.
        """
        if self._ended:
            raise RuntimeError("this completion has ended; make a parser for each one")
        self._ended = True
        self._cut = cut
        next(self._reading, None)
        return [*self._emitted(), End(self._raw())]

    @abstractmethod
    def run(self) -> Reading[None]:
        """Read the whole completion; return only at the end of the text."""

    # For `run`: text and tags.

    def text_until(self, tags: tuple[str, ...], kind: type[Content] | type[Reasoning] = Content) -> Reading[str]:
        """Emit text up to the first of `tags`; hold and return that tag, or return "" at the end.

        Whitespace before the tag is held, too.
        """
        endless = False  # within whitespace too long to belong to a tag
        while self._at < len(self._text) or (yield from self._more()):
            sought = tags + self._dropped
            begins = _begins(sought)
            text, at = self._text, self._at
            found = begins.search(text, at) if begins else None
            stop = found.start() if found else len(text)
            body = len(text[at:stop].rstrip(SPACE)) if sought else stop - at
            if body:
                self.take(body)
                self._say(kind)
                endless = False
            if at + body < stop:
                self.take(stop - at - body)
                if endless or self._held_size > _MAX_SPACE:
                    self._say(kind)
                    endless = True
            if found:
                if tag := (yield from self._sees_any(sought)):
                    self.take(len(tag))
                    if tag not in self._dropped:
                        self._tagged = True
                        return tag
                    self.settle()
                    self._dropped = ()
                else:
                    self.take(1)
                    self._say(kind)
                endless = False
        self._say(kind)
        return ""

    def drop_once(self, tag: str) -> None:
        """Let `text_until` leave out `tag` the first time that it comes."""
        self._dropped = (tag,) if tag else ()

    def attempt(self, reading: Reading[None]) -> Reading[bool]:
        """Read text that may be calls, and return True; if it is malformed, make it content and return False."""
        try:
            yield from reading
        except Malformed:
            self.give_up()
            return False
        else:
            self._take_cut()
            self.settle()
            return True
        finally:
            self._tagged = False

    def give_up(self) -> None:
        """Turn held text into content, unless it belongs to a call that was cut; an open call ends as incomplete."""
        if self._take_cut():
            self.settle()
        if self._is_open:
            self._close_call(complete=False, raw=self._settled_raw())
        self._say(Content)

    def take(self, count: int) -> None:
        """Hold the next `count` characters, which must be there."""
        if count:
            self._held.append(self._text[self._at : self._at + count])
            self._held_size += count
            self._at += count

    def settle(self) -> None:
        """Count held text as part of a call or tag."""
        self._settled += self._held
        self._held.clear()
        self._held_size = 0

    def held_text(self) -> str:
        """Return the text that is held."""
        return "".join(self._held)

    def peek(self) -> Reading[str]:
        """Return the next character, or "" at the end."""
        if self._at < len(self._text) or (yield from self._more()):
            return self._text[self._at]
        return ""

    def space(self) -> Reading[None]:
        """Read whitespace, if any."""
        while (char := (yield from self.peek())) and char in SPACE:
            self._claim(1)

    def sees(self, literal: str) -> Reading[bool]:
        """Return whether `literal` comes next, waiting for text until that is certain."""
        while True:
            rest = self._text[self._at : self._at + len(literal)]
            if rest == literal:
                return True
            if not literal.startswith(rest):
                return False
            if self._ended:
                self._ran_out = True
                return False
            yield

    def accept(self, literal: str) -> Reading[bool]:
        """Read `literal` if it comes next, and return whether it did."""
        if (yield from self.sees(literal)):
            self._claim(len(literal))
            return True
        return False

    def tag(self, literal: str) -> Reading[None]:
        """Read the tag `literal` if it comes next; the text after it is then taken for a call."""
        self._tagged = (yield from self.accept(literal)) or self._tagged

    def expect(self, literal: str) -> Reading[None]:
        """Read `literal`, or raise `Malformed` if something else comes next."""
        if not (yield from self.accept(literal)):
            raise Malformed

    def word(self, extra: str) -> Reading[str]:
        """Read a name of ASCII letters, digits, `_` and the characters of `extra`."""
        chars: list[str] = []
        while (char := (yield from self.peek())) and (char.isascii() and (char.isalnum() or char in "_" + extra)):
            if len(chars) == MAX_NAME:
                raise Malformed
            self._claim(1)
            chars.append(char)
        if not chars:
            raise Malformed
        return "".join(chars)

    def text_before(self, closer: str, most: int) -> Reading[str | None]:
        """Hold at most `most` characters up to `closer` and return them; read `closer`, too.

        Returns:
            None if there are more characters before `closer`; it is not read then.
        """
        parts: list[str] = []
        while piece := (yield from self._piece(closer, most + 1)):
            parts.append(piece)
            most -= len(piece)
            if most < 0:
                return None
        return "".join(parts)

    # For `run`: values and calls.

    def value(self, scanner: JsonScanner) -> Reading[str]:
        """Read one value, hold its text and return it as JSON."""
        parts: list[str] = []
        while not scanner.done:
            if not (yield from self._scan(scanner, capped=True)):
                raise Malformed
            parts.append(scanner.take())
        return "".join(parts)

    def start_call(self, name: str, call_id: str | None = None) -> None:
        """Emit the start of a call."""
        self._is_open = True
        self._events.append(ToolCallStart(self._index, call_id or self._make_id(self._index), name, self._raw()))

    def write_arguments(self, text: str) -> None:
        """Emit a part of the arguments' JSON."""
        self._events.append(ToolCallArguments(self._index, text, self._raw()))

    def stream_arguments(self, scanner: JsonScanner) -> Reading[None]:
        """Read one value and emit it as JSON piece by piece."""
        while not scanner.done:
            sound = yield from self._scan(scanner, capped=False)
            self.settle()
            if text := scanner.take():
                self.write_arguments(text)
            if not sound:
                raise Malformed

    def stream_string(self, closer: str, trims: bool = False) -> Reading[None]:
        """Read text up to `closer`, which is read too, and emit it piece by piece as the inside of a JSON string.

        With `trims`, a line feed right before `closer` is no part of the string.
        """
        kept = ""
        while piece := (yield from self._piece(closer, MAX_HELD)):
            self.settle()
            text = kept + piece
            kept = "\n" if trims and text.endswith("\n") else ""
            if text := text.removesuffix(kept):
                self.write_arguments(json.dumps(text, ensure_ascii=False)[1:-1])

    def end_call(self) -> None:
        """Emit the end of a call whose arguments are complete."""
        self._close_call(complete=True, raw=self._raw())

    # The machine's own.

    def _sees_any(self, literals: tuple[str, ...]) -> Reading[str]:
        for literal in literals:
            if (yield from self.sees(literal)):
                return literal
        return ""

    def _piece(self, closer: str, most: int) -> Reading[str]:
        """Hold and return some characters before `closer`, at most `most`; hold `closer` and return "" if it is next.

        Raises:
            Malformed: The text ends before `closer`.
        """
        if not (yield from self._more()):
            raise Malformed
        if self._text[self._at] == closer[0] and (yield from self.sees(closer)):
            self.take(len(closer))
            return ""
        begins = self._text.find(closer[0], self._at + 1, self._at + most)
        stop = begins if begins >= 0 else min(len(self._text), self._at + most)
        piece = self._text[self._at : stop]
        self.take(len(piece))
        return piece

    def _more(self) -> Reading[bool]:
        """Wait for text; return False at the end."""
        while self._at == len(self._text):
            if self._ended:
                self._ran_out = True
                return False
            yield
        return True

    def _scan(self, scanner: JsonScanner, capped: bool) -> Reading[bool]:
        """Let the scanner read available text, no more than may be held if `capped`; False if it cannot go on."""
        if not (yield from self._more()):
            return False
        stop = min(len(self._text), self._at + MAX_HELD - self._held_size) if capped else len(self._text)
        self.take(scanner.feed(self._text, self._at, stop) - self._at)
        return not scanner.bad and (scanner.done or self._at < stop or stop == len(self._text))

    def _take_cut(self) -> bool:
        """Hold the rest of the text if it belongs to a call that was cut; return whether it does."""
        is_cut = self._cut and self._ran_out and (self._tagged or self._is_open)
        if is_cut:
            self.take(len(self._text) - self._at)
        return is_cut

    def _claim(self, count: int) -> None:
        if self._held_size + count > MAX_HELD:
            raise Malformed
        self.take(count)

    def _say(self, kind: type[Content] | type[Reasoning]) -> None:
        if self._held:
            text = "".join(self._held)
            self._events.append(kind(text, self._raw()))

    def _close_call(self, complete: bool, raw: str) -> None:
        self._events.append(ToolCallEnd(self._index, complete, raw))
        self._index += 1
        self._is_open = False

    def _raw(self) -> str:
        self.settle()
        return self._settled_raw()

    def _settled_raw(self) -> str:
        raw = "".join(self._settled)
        self._settled.clear()
        return raw

    def _emitted(self) -> list[Event]:
        events = merge(self._events)
        self._events = []
        return events


@lru_cache
def _begins(tags: tuple[str, ...]) -> re.Pattern[str] | None:
    return re.compile("[" + re.escape("".join(sorted({tag[0] for tag in tags}))) + "]") if tags else None
