"""Processes for templates and formats work whatever signals, forks and killers the application lives with."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from leftovers import wait_until

from headrace.engine.concurrency.child import Child, ChildCrashed, ChildDied, Children

APPLICATION = """
import os, signal, sys, threading, time
from pathlib import Path
from headrace.engine.tokens.chat_template import ChatTemplate, TemplateTooCostly
from headrace.engine.concurrency.child import Child, ChildDied
from headrace.engine.grammar.trials import TooSlow, Trials, Unfit

ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
HI = [{"role": "user", "content": "hi"}]
VOCABULARY = [*(bytes([at]) for at in range(256)), b"<end>"], [256], [256]

def ends_of_work():
    told = []
    for call in (
        lambda: ChatTemplate("{{ messages[0].content }}").render(HI),
        lambda: ChatTemplate(ENDLESS, seconds=0.3).render(HI),
        lambda: trial('{"type": "integer", "multipleOf": 99999989}'),
    ):
        try:
            told.append(call())
        except Exception as error:
            told.append(type(error).__name__)
    return told

def trial(schema):
    return Trials().run('{"grammars": [{"json_schema": ' + schema + '}]}', lambda: VOCABULARY, lambda: True)
"""
ECHO = "def answers(lines):\n    for line in lines:\n        yield line\n"


@pytest.fixture
def echo(tmp_path: Path) -> Path:
    """A script that answers with what it is asked."""
    path = tmp_path / "echo.py"
    path.write_text(ECHO)
    return path


def run_application(script: str) -> str:
    """Run what follows `APPLICATION` in a process of its own, and return what it prints."""
    ran = subprocess.run([sys.executable, "-c", APPLICATION + script], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0 and not ran.stderr, (ran.returncode, ran.stderr)
    return ran.stdout


def ask(child: Child) -> bytes | None:
    return child.ask(b"hello", 5.0, patience=30.0)


def test_a_dead_process_is_an_error_where_sigpipe_kills() -> None:
    told = run_application("""
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
child = Child(Path("nothing.py"))
os.waitid(os.P_PID, child._process.pid, os.WEXITED | os.WNOWAIT)
try:
    child.ask(b"x" * 10_000_000, 1.0, patience=10.0)
except ChildDied as error:
    print(error)
""")
    assert told == "the process that was to answer ended with code 1\n"


@pytest.mark.parametrize(
    "setting",
    [
        "signal.signal(signal.SIGCHLD, signal.SIG_IGN)",
        """
def reap():
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            time.sleep(0.001)
threading.Thread(target=reap, daemon=True).start()
""",
    ],
    ids=["ignored", "collected by others"],
)
def test_what_took_too_long_is_told_where_no_exit_status_is_left(setting: str) -> None:
    """As in an application that ignores SIGCHLD, or that runs as process 1 and collects whatever ends."""
    told = run_application(setting + "\nprint(ends_of_work(), flush=True)\nos._exit(0)")
    assert told == "['hi', 'TemplateTooCostly', 'TooSlow']\n"


def test_a_fork_keeps_no_process_alive() -> None:
    """The application dies at once, and what it forked lives on."""
    told = run_application("""
template = ChatTemplate("{{ messages[0].content }}")
template.render(HI)
if forked := os.fork():
    print(template._children._idle[0]._process.pid, forked, flush=True)
    os._exit(0)
for file in (1, 2):
    os.close(file)
time.sleep(60)
""")
    child, forked = map(int, told.split())
    try:
        wait_until(lambda: not lives(child), lambda: "the process lives as long as the fork")
        assert lives(forked)
    finally:
        os.kill(forked, signal.SIGKILL)


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_no_default_of_sockets_disturbs_a_process(echo: Path) -> None:
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(0.01)
    try:
        child = Child(echo)
    finally:
        socket.setdefaulttimeout(before)
    with closing(child):
        assert ask(child) == b"hello\n"
        time.sleep(0.1)
        assert ask(child) == b"hello\n"


def test_all_processes_may_be_killed_at_once(echo: Path) -> None:
    """Those that wait, those that have begun to answer and those that start, as where memory runs out."""
    started: list[Child] = []

    def start() -> Child:
        started.append(Child(echo))
        return started[-1]

    told: list[object] = []
    killed = threading.Event()

    def use(child: Child) -> bytes | None:
        if not killed.is_set():
            barrier.wait(60)
            killed.wait(60)
        return ask(child)

    def ask_one() -> None:
        try:
            told.append(children.ask(use))
        except Exception as error:
            told.append(error)

    with closing(Children(start)) as children:
        children.start()
        children.ask(lambda child: ask(child))
        barrier = threading.Barrier(7)
        threads = [threading.Thread(target=ask_one) for _ in range(6)]
        for thread in threads:
            thread.start()
        barrier.wait(60)
        for child in started:
            child._process.kill()
        killed.set()
        for thread in threads:
            thread.join()
        assert told == [b"hello\n"] * 6
        assert len(started) == 12


@pytest.mark.parametrize(
    ("kill", "count"), [(lambda child: child._process.kill(), 2), (lambda child: child._process.terminate(), 1)]
)
def test_what_always_ends_a_new_process_is_not_tried_for_ever(
    tmp_path: Path, kill: Callable[[Child], None], count: int
) -> None:
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(60)\n")
    started: list[Child] = []

    def start() -> Child:
        child = Child(tmp_path / "slow.py")
        started.append(child)
        kill(child)
        return child

    with closing(Children(start)) as children, pytest.raises(ChildDied, match="ended with signal"):
        children.ask(ask)
    assert len(started) == count


def test_a_question_that_crashes_its_process_is_not_asked_again(tmp_path: Path) -> None:
    script = ECHO.replace("        yield line", "        yield os.abort() if line == b'crash' else line")
    (tmp_path / "crashing.py").write_text("import os\n" + script)
    started: list[Child] = []

    def start() -> Child:
        started.append(Child(tmp_path / "crashing.py"))
        return started[-1]

    with closing(Children(start)) as children:
        assert children.ask(ask) == b"hello\n"
        with pytest.raises(ChildCrashed):
            children.ask(lambda child: child.ask(b"crash", 5.0, patience=30.0))
    assert len(started) == 1
