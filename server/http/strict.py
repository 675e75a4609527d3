"""`StrictConnection`: h11 without the leniency that lets a proxy and this server disagree where a request ends.

It refuses what h11 accepts and RFC 9112 lets a recipient refuse: lines that end in a bare line feed, folded
header lines, `Transfer-Encoding` in HTTP/1.0, versions other than 1.0 and 1.1, bare carriage returns and line feeds in
the size of a chunk. Never writes to a connection.
"""

from __future__ import annotations

from typing import Any

import h11
from h11._receivebuffer import ReceiveBuffer

__all__ = ["Malformed", "StrictConnection"]

_VERSIONS = (b"1.0", b"1.1")


class Malformed(h11.RemoteProtocolError):
    """The client sent something that is not HTTP; the message says why without quoting it."""


class StrictConnection(h11.Connection):
    """The server's side of a connection; the first refusal is kept in `refusal` and never raised."""

    refusal: h11.RemoteProtocolError | None = None
    """Reason why nothing that the client sends is read any more; None as long as all of it was valid."""

    def __init__(self, our_role: Any, max_incomplete_event_size: int = 16_384) -> None:
        """Take h11's arguments."""
        super().__init__(our_role, max_incomplete_event_size)
        assert isinstance(self._receive_buffer, ReceiveBuffer), "h11 keeps what it has read elsewhere"
        self._receive_buffer = _StrictBuffer()

    def next_event(self) -> Any:
        """Return h11's next event; NEED_DATA from the moment on at which something was refused."""
        if self.refusal is None:
            try:
                event = super().next_event()
                self.check(event)
                return event
            except h11.RemoteProtocolError as error:
                self.refusal = error
        return h11.NEED_DATA

    def check(self, event: Any) -> None:
        """Refuse an event that h11 accepts.

        Raises:
            Malformed: The event must not be acted on.
        """
        if not isinstance(event, h11.Request):
            return
        if event.http_version not in _VERSIONS:
            raise Malformed("the version of HTTP must be 1.0 or 1.1")
        if event.http_version == b"1.0" and any(name == b"transfer-encoding" for name, _ in event.headers):
            raise Malformed("HTTP/1.0 has no Transfer-Encoding")


class _StrictBuffer(ReceiveBuffer):
    """Bytes of the client that are not parsed yet; h11 takes heads, trailers and chunk sizes from them by lines."""

    def maybe_extract_lines(self) -> list[bytearray] | None:
        """Return the lines up to a blank one without their ends, or None as long as the blank line has not come.

        Raises:
            Malformed: A line ends in a bare line feed, or continues the line before it.
        """
        size = len(self)
        lines = super().maybe_extract_lines()
        if lines is not None:
            # h11 takes CR LF and LF alike from the end of each line; only with CR LF are two bytes of each missing.
            if size - len(self) != sum(map(len, lines)) + 2 * (len(lines) + 1):
                raise Malformed("a line of the head or of a trailer ends in a bare line feed")
            if any(line.startswith((b" ", b"\t")) for line in lines):
                raise Malformed("a header line is folded")
        return lines

    def maybe_extract_next_line(self) -> bytearray | None:
        """Return the line with a chunk's size and its end, or None as long as the end has not come.

        Raises:
            Malformed: The line contains a bare carriage return or line feed.
        """
        line = super().maybe_extract_next_line()
        size = bytes(self) if line is None else line[:-2]
        if b"\n" in size or b"\r" in size[:-1]:
            raise Malformed("there is a bare carriage return or line feed in the size of a chunk")
        return line
