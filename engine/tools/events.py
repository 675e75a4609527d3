"""Parsed completions, as events and as one value: content, reasoning and tool calls; never reads the model's text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby

__all__ = [
    "Content",
    "End",
    "Event",
    "Parsed",
    "Reasoning",
    "ToolCall",
    "ToolCallArguments",
    "ToolCallEnd",
    "ToolCallStart",
    "collect",
    "merge",
]


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the user. `raw` of every event is the part of the completion that it covers, tags included."""

    text: str
    raw: str = ""


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model wrote to itself."""

    text: str
    raw: str = ""


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """Start of a call; `index` counts the calls of a completion from 0."""

    index: int
    id: str
    name: str
    raw: str = ""


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """Next part of the arguments' JSON text, of the call that started last."""

    index: int
    text: str
    raw: str = ""


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    """End of a call. `complete` is False if the text ended before its arguments were a whole JSON object."""

    index: int
    complete: bool
    raw: str = ""


@dataclass(frozen=True, slots=True)
class End:
    """End of the completion; exactly one, after all other events."""

    raw: str = ""


Event = Content | Reasoning | ToolCallStart | ToolCallArguments | ToolCallEnd | End


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a finished completion. `arguments` is JSON text: an object if `complete`."""

    id: str
    name: str
    arguments: str
    complete: bool


@dataclass(frozen=True, slots=True)
class Parsed:
    """A finished completion."""

    content: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]


@dataclass(slots=True)
class _Call:
    """A call whose parts are being collected."""

    id: str
    name: str
    arguments: list[str] = field(default_factory=list)
    complete: bool = False


def collect(events: Iterable[Event]) -> Parsed:
    """Join all events of one completion."""
    texts: dict[type[Content] | type[Reasoning], list[str]] = {Content: [], Reasoning: []}
    calls: list[_Call] = []
    for event in events:
        if isinstance(event, Content | Reasoning):
            texts[type(event)].append(event.text)
        elif isinstance(event, ToolCallStart):
            calls.append(_Call(event.id, event.name))
        elif isinstance(event, ToolCallArguments):
            calls[event.index].arguments.append(event.text)
        elif isinstance(event, ToolCallEnd):
            calls[event.index].complete = event.complete
    done = tuple(ToolCall(call.id, call.name, "".join(call.arguments), call.complete) for call in calls)
    return Parsed("".join(texts[Content]), "".join(texts[Reasoning]), done)


def merge(events: list[Event]) -> list[Event]:
    """Merge neighbouring events that continue each other."""
    if len(events) < 2:
        return events
    merged: list[Event] = []
    for _, run in groupby(events, _continues):
        same = list(run)
        first = same[0]
        if len(same) == 1:
            merged.append(first)
            continue
        text = "".join([event.text for event in same if isinstance(event, Content | Reasoning | ToolCallArguments)])
        raw = "".join([event.raw for event in same])
        if isinstance(first, ToolCallArguments):
            merged.append(ToolCallArguments(first.index, text, raw))
        elif isinstance(first, Content | Reasoning):
            merged.append(type(first)(text, raw))
    return merged


def _continues(event: Event) -> object:
    """Return a key that is equal for two events if, and only if, they may be merged."""
    if isinstance(event, Content | Reasoning):
        return type(event)
    return ("arguments", event.index) if isinstance(event, ToolCallArguments) else id(event)
