"""Finds stop strings in text that arrives in pieces; a pure state machine that never sees a token."""

from __future__ import annotations

__all__ = ["StopMatcher"]


class StopMatcher:
    """Finds the earliest of several stop strings in text that arrives in pieces.

    With `include` the stop string itself is shown as well, and nothing after it.

    Text that may be the start of a stop string is held back. The outcome depends on the text alone, not on its pieces:
    everything before the match that starts first is shown, and nothing after. If one stop string contains another, a
    match of the inner one waits until the outer one, which would start earlier, is ruled out or complete. Each stop
    string is matched by Knuth-Morris-Pratt with its failure table grown on demand: the cost is linear in the text, and
    a new matcher costs nothing.
    """

    __slots__ = ("_cut", "_held", "_held_from", "_include", "_needles", "_starts", "matched")

    def __init__(self, stops: tuple[str, ...], include: bool = False) -> None:
        """Match any of `stops`, each of at least one character; with none, all text passes."""
        self._needles = [_Needle(stop) for stop in dict.fromkeys(stops)]
        self._starts = frozenset(stop[0] for stop in stops)
        self._held = ""
        self._held_from = 0  # position of the held text in the whole text
        self._include = include
        self._cut: tuple[int, int, str] | None = None  # the earliest match so far: its start, length and stop string
        self.matched = False
        """Whether the text has ended at a stop string; `flush` sets it if a match was still waiting."""

    def feed(self, text: str) -> tuple[str, bool]:
        """Return the text that is now safe to show, and whether a stop string ended it; text after that is dropped."""
        if self.matched:
            return "", True
        if not self._held and self._starts.isdisjoint(text):
            self._held_from += len(text)
            return text, False
        begin = self._held_from + len(self._held)
        self._held += text
        safe = begin + len(text)
        for needle in self._needles:
            start, found = needle.feed(text, begin)
            safe = min(safe, start)
            cut = start, len(needle.stop), needle.stop
            if found and (self._cut is None or cut < self._cut):
                self._cut = cut
        if self._cut is not None and safe >= self._cut[0]:
            self.matched = True
            safe = self._shown_to(self._cut)
        shown = self._held[: safe - self._held_from]
        self._held = "" if self.matched else self._held[len(shown) :]
        self._held_from += len(shown)
        return shown, self.matched

    def flush(self) -> str:
        """Return the held text at the end of the sequence, cut before a match that was still waiting."""
        if self._cut is not None and not self.matched:
            self.matched = True
            self._held = self._held[: self._shown_to(self._cut) - self._held_from]
        held, self._held = self._held, ""
        return held

    @property
    def stop(self) -> str | None:
        """The stop string that ended the text, the shortest of those that start at the same place; None without one."""
        return self._cut[2] if self.matched and self._cut is not None else None

    def _shown_to(self, cut: tuple[int, int, str]) -> int:
        return cut[0] + (cut[1] if self._include else 0)


class _Needle:
    """One stop string, and the length of its prefix that the text ends with."""

    __slots__ = ("_borders", "length", "start", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.length = 0  # characters of `stop` that the text so far ends with
        self.start: int | None = None  # position of the first full match
        self._borders = [0]  # per prefix of `stop`: length of its longest proper prefix that is also its suffix

    def feed(self, text: str, begin: int) -> tuple[int, bool]:
        """Read `text`, which starts at `begin`; return (start of a full or partial match, whether it is full)."""
        if self.start is not None:
            return self.start, True
        stop, length, index = self.stop, self.length, 0
        while index < len(text):
            if not length:
                index = text.find(stop[0], index)
                if index < 0:
                    break
            while length and stop[length] != text[index]:
                length = self._borders[length - 1]
            if stop[length] == text[index]:
                length += 1
                if length == len(stop):
                    self.start = begin + index + 1 - length
                    return self.start, True
                self._grow(length)
            index += 1
        self.length = length
        return begin + len(text) - length, False

    def _grow(self, length: int) -> None:
        """Compute the borders of the prefixes of up to `length` characters."""
        borders, stop = self._borders, self.stop
        while len(borders) < length:
            border, char = borders[-1], stop[len(borders)]
            while border and stop[border] != char:
                border = borders[border - 1]
            borders.append(border + (stop[border] == char))
