"""One streamed request, followed through the engine's files: the tour lists them all in their order, and they are few.

A file is on the path if one of its functions starts while a plain request (a text, default parameters) runs on a real
`Engine` with a scripted runner, from `Engine.stream` to the end of the stream. What does not count, since nobody has to
read it to follow the request:

- stand-ins for the device and its model: engine/scripted/ and engine/testing.py (engine/model/ and ops/ do not run);
- plain values and errors, whose constructors and validators run: engine/{checked,errors,events,options,params}.py;
- functions that started before the request and only go on, such as `StepLoop.run`.

The aim is 20 files and 3,600 lines. The limits below are what has been reached: most of the files are needed for a few
functions alone.
"""

from __future__ import annotations

import dis
import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import anyio
import anyio.lowlevel
from source_files import ROOT, name_of

from headrace.engine.testing import ScriptedEngine, no_pages_held

STAND_INS = ("engine/scripted/", "engine/testing.py")
VALUES = {f"engine/{name}.py" for name in ("checked", "errors", "events", "options", "params")}
MOST_FILES = 24
MOST_LINES = 4800


@cache
def counted(code: CodeType) -> str | None:
    """Return the name of a function's file, if it is one that counts."""
    path = Path(os.path.realpath(code.co_filename))
    if not path.is_relative_to(ROOT / "engine"):
        return None
    name = name_of(path)
    return None if name.startswith(STAND_INS) or name in VALUES else name


def starts(frame: FrameType) -> bool:
    """Return whether a frame that is entered starts, and does not go on after an `await` or a `yield`."""
    code, at = frame.f_code.co_code, frame.f_lasti
    return not (at >= 0 and code[at] == dis.opmap["RESUME"] and code[at + 1] & 3)


class Trace:
    """The files whose functions start while `on`, in any thread, in the order in which each is first entered."""

    def __init__(self) -> None:
        self.on = False
        self.files: dict[str, set[str]] = {}

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if self.on and event == "call" and starts(frame) and (name := counted(frame.f_code)):
            self.files.setdefault(name, set()).add(frame.f_code.co_qualname)


@contextmanager
def tracing() -> Iterator[Trace]:
    trace, before = Trace(), sys.getprofile()
    threading.setprofile(trace)
    sys.setprofile(trace)
    try:
        yield trace
    finally:
        sys.setprofile(before)
        threading.setprofile(None)


async def stream_one(trace: Trace) -> None:
    async with ScriptedEngine() as engine:
        await engine.generate("a request before it, so that nothing is made for the first time")
        await no_pages_held(engine)
        trace.on = True
        async for _ in engine.stream("hello"):
            pass
        trace.on = False


@cache
def path() -> dict[str, set[str]]:
    """Return the files of the path in their order, each with the functions that start in it."""
    with tracing() as trace:
        anyio.run(stream_one, trace)
    return trace.files


def listed() -> list[str]:
    """Return the files that the tour lists as the path."""
    tour = (ROOT / "docs" / "tour.md").read_text(encoding="utf-8")
    section = re.split(r"^## ", tour.split("## The path of one request", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]
    return re.findall(r"`(engine/[\w/]+\.py)`", section)


def test_the_tour_lists_every_file_of_the_path_and_no_other() -> None:
    assert len(listed()) == len(set(listed()))
    assert {"hidden": path().keys() - set(listed()), "not entered": set(listed()) - path().keys()} == {
        "hidden": set(),
        "not entered": set(),
    }


def test_the_path_is_short() -> None:
    lines = {name: len((ROOT / name).read_text(encoding="utf-8").splitlines()) for name in path()}
    assert len(lines) <= MOST_FILES, sorted(lines)
    assert sum(lines.values()) <= MOST_LINES, lines


def test_functions_that_only_go_on_are_told_from_those_that_start() -> None:
    entered: list[tuple[str, bool]] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename == __file__:
            entered.append((frame.f_code.co_name, starts(frame)))

    async def waits() -> None:
        await anyio.lowlevel.checkpoint()

    def numbers() -> Iterator[int]:
        yield 1
        yield 2

    async def run() -> None:
        await waits()
        assert list(numbers()) == [1, 2]

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        anyio.run(run)
    finally:
        sys.setprofile(before)
    for name in ("run", "waits", "numbers"):
        assert [start for found, start in entered if found == name][:1] == [True]
        assert not any([start for found, start in entered if found == name][1:])
        assert len([start for found, start in entered if found == name]) > 1
