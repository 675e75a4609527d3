"""Lines of the log: fields of one event as `key=value` for people or JSON for machines; never holds prompts.

Values are ids, names that an operator chose, and numbers. The only text of a client among them is the request id, which
the gate has reduced to harmless characters.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping
from typing import Any, Literal, TextIO

import orjson

__all__ = ["JsonLines", "Line", "LogFormat", "set_up_logs"]

LogFormat = Literal["text", "json", "off"]


class Line:
    """One event with its fields; costs nothing until somebody formats it."""

    __slots__ = ("event", "fields")

    def __init__(self, event: str, fields: Mapping[str, Any]) -> None:
        """Hold an event and its fields; leave out fields that are None."""
        self.event = event
        self.fields = {name: value for name, value in fields.items() if value is not None}

    def __str__(self) -> str:
        """Return the event, and `key=value` for each field."""
        return " ".join([self.event, *(f"{name}={_shown(value)}" for name, value in self.fields.items())])


class JsonLines(logging.Formatter):
    """One JSON object a line: time, level, logger, the event and its fields, or the message of a record without one."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of one record."""
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        first = record.args[0] if isinstance(record.args, tuple) and record.args else None
        if isinstance(first, Line):
            line |= {"event": first.event, **first.fields}
        else:
            line["message"] = _clean(record.getMessage())
        if record.exc_info:
            line["exception"] = _clean(self.formatException(record.exc_info))
        return orjson.dumps(line, default=str).decode()


def _clean(text: str) -> str:
    """Return `text` with half surrogates replaced, since JSON allows none."""
    return text.encode("utf-8", "replace").decode()


class _CurrentStderr(logging.StreamHandler[TextIO]):
    """A handler that writes to the present `sys.stderr`, which a spinner replaces so that lines go above it."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def set_up_logs(style: LogFormat) -> None:
    """Send this process' log to stderr; call it in processes that are servers and nothing else.

    The style `off` leaves out the line of each request.
    """
    handler = _CurrentStderr()
    text = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JsonLines() if style == "json" else text)
    root = logging.getLogger()
    root.addHandler(handler)
    logging.getLogger("headrace").setLevel(logging.INFO)
    logging.getLogger("headrace.server.requests").setLevel(logging.WARNING if style == "off" else logging.INFO)


def _shown(value: object) -> str:
    if isinstance(value, Mapping):
        return orjson.dumps(value, default=str).decode()
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
