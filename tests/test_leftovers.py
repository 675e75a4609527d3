"""The helpers that look for what a test left behind see what is its own, and nothing of its neighbours."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from leftovers import Threads, open_files, settle


def started(name: str, seconds: float) -> threading.Thread:
    thread = threading.Thread(target=time.sleep, args=(seconds,), name=name, daemon=True)
    thread.start()
    return thread


def test_a_thread_of_an_earlier_test_may_end_or_not() -> None:
    neighbour = started("headrace-hook", 0.2)
    threads = Threads()
    threads.check_ended()
    assert neighbour.is_alive()
    neighbour.join()
    threads.check_ended()


def test_a_thread_of_this_test_is_waited_for_and_complained_of(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = Threads()
    own = started("headrace-hook", 0.3)
    started("of somebody else", 0.3)
    assert threads.running() == [own]
    threads.check_ended()
    assert not own.is_alive()
    monkeypatch.setattr("leftovers._PATIENCE", 0.05)
    own = started("headrace-hook", 0.3)
    with pytest.raises(AssertionError, match="threads were left behind"):
        threads.check_ended()
    own.join()


def test_only_files_below_the_folder_count(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    with (tmp_path / "other").open("w"), (tmp_path / "own" / "file").open("w") as file:
        assert open_files(tmp_path / "own") == {file.name}
    assert not open_files(tmp_path)


def test_settling_waits_for_what_ends_and_not_for_what_stays() -> None:
    stays, ends = started("stays", 3), started("ends", 0.05)
    settle()
    assert stays.is_alive() and not ends.is_alive()
