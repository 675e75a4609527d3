"""The helpers that look for what a test left behind see what is its own, and nothing of its neighbours."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from leftovers import Threads, open_files, settle

_HANG = 60.0  # seconds until a thread ends by itself


def started(name: str, until: threading.Event) -> threading.Thread:
    thread = threading.Thread(target=until.wait, args=(_HANG,), name=name, daemon=True)
    thread.start()
    return thread


@pytest.fixture
def end() -> Iterator[threading.Event]:
    """What ends the threads of a test; it is set when the test ends."""
    event = threading.Event()
    yield event
    event.set()


def set_later(event: threading.Event, seconds: float) -> None:
    threading.Timer(seconds, event.set).start()


def test_a_thread_of_an_earlier_test_may_end_or_not(end: threading.Event) -> None:
    neighbour = started("headrace-hook", end)
    threads = Threads()
    threads.check_ended()
    assert neighbour.is_alive()
    end.set()
    neighbour.join()
    threads.check_ended()


def test_a_thread_of_this_test_is_waited_for_and_complained_of(
    end: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = Threads()
    own = started("headrace-hook", end)
    started("of somebody else", end)
    assert threads.running() == [own]
    set_later(end, 0.1)
    threads.check_ended()
    assert not own.is_alive()
    monkeypatch.setattr("leftovers._PATIENCE", 0.05)
    end.clear()
    started("headrace-hook", end)
    with pytest.raises(AssertionError, match="threads were left behind"):
        threads.check_ended()


def test_only_files_below_the_folder_count(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    with (tmp_path / "other").open("w"), (tmp_path / "own" / "file").open("w") as file:
        assert open_files(tmp_path / "own") == {file.name}
    assert not open_files(tmp_path)


def test_settling_waits_for_what_ends_and_not_for_what_stays(
    end: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leftovers._STILL", 0.5)  # on a busy machine a thread ends late
    monkeypatch.setattr("leftovers._PATIENCE", 2 * _HANG)
    soon = threading.Event()
    stays, ends = started("stays", end), started("ends", soon)
    set_later(soon, 0.05)
    settle()
    assert stays.is_alive() and not ends.is_alive()
