"""`Child`, a Python process that answers lines and may be ended at any time, and `Children`, which lends them out.

Code that may never return, or take any amount of memory, runs in a child: grammars on trial and chat templates. A child
is a new interpreter, not a fork, so it holds neither the model nor torch. It ends with its standard input: when the
engine closes, and when the application dies in whatever way. It depends on no setting of the application: signals may
be ignored, other code may collect the exit status of every process, and the application may fork itself. Next to read:
child_start.py, grammar/child.py and template_child.py, which run in a child.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, TypeVar

__all__ = ["Child", "ChildCrashed", "ChildDied", "ChildLate", "ChildTooSlow", "Children"]

R = TypeVar("R")

_GLANCE: Final = 0.05  # seconds between two calls of `still_wanted`
_CHUNK: Final = 1 << 20  # most bytes read at once
_IDLE: Final = 2  # most waiting children
_CRASHES: Final = (-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT, -signal.SIGFPE, -signal.SIGILL)


class ChildDied(OSError):
    """The process ended before its answer."""

    def __init__(self, code: int | None) -> None:
        """Report the end of the process.

        Args:
            code: Exit code, or minus the signal that killed the process; None if it is unknown.
        """
        name = f"signal {-code}" if code is not None and code < 0 else f"code {code}"
        super().__init__(f"the process that was to answer ended with {name}")
        self.code = code


class ChildCrashed(ChildDied):
    """The question made the process crash, and would do so again."""


class ChildTooSlow(ChildDied):
    """The question took more processor time than it was given."""


class ChildLate(OSError):
    """The answer did not come in time; the process has been ended."""

    def __init__(self, seconds: float) -> None:
        """Report the time limit, in seconds."""
        super().__init__(f"the process that was to answer did not do so within {seconds:g} s")
        self.seconds = seconds


class Child:
    """A process that answers lines. Only one thread at a time may use it."""

    def __init__(self, script: Path, *arguments: str) -> None:
        """Start `script`, whose function `answers` yields a line for each line; does not wait for the process.

        Args:
            script: A Python file that imports nothing of headrace.
            arguments: Arguments of `answers` after the lines.

        Raises:
            OSError: No process can be started.
        """
        start = Path(__file__).with_name("child_start.py")
        # With -S the application's site module does not run; the search path is given instead.
        places = json.dumps([place for place in sys.path if isinstance(place, str)])  # imports ignore other entries
        command = [_interpreter(), "-I", "-S", str(start), places, str(script), *arguments]
        # A socket, since a write to a pipe whose reader has died kills an application that has SIGPIPE at its default.
        self._socket, theirs = socket.socketpair()
        with theirs:
            theirs.setblocking(True)  # the application may have set another default
            try:
                self._process = subprocess.Popen(
                    command,
                    stdin=theirs.fileno(),
                    stdout=theirs.fileno(),
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,  # an interrupt at a terminal must not reach it
                )
            except BaseException:
                self._socket.close()
                raise
        self._socket.setblocking(False)
        self._owner = os.getpid()
        self.answers = 0
        """Number of lines that the process has answered."""
        _started.add(self)

    @property
    def is_alive(self) -> bool:
        """Whether the process can be asked; only the process that started it may do so, not a fork of that."""
        return self._owner == os.getpid() and self._process.poll() is None

    def ask(
        self,
        line: bytes,
        seconds: float,
        still_wanted: Callable[[], bool] = lambda: True,
        *,
        patience: float,
        most: int = _CHUNK,
    ) -> bytes | None:
        """Send a line and return the answer; unless there is one, the process is ended.

        Args:
            line: The question, with neither a line feed in it nor at its end.
            seconds: Processor time that the answer may take.
            still_wanted: Asked many times a second; once it returns False, it is not asked again.
            patience: Seconds of real time within which the answer must come.
            most: Most bytes of the answer.

        Returns:
            A line with its line feed, or None if the answer is no longer wanted.

        Raises:
            ChildTooSlow: The answer took more processor time than it may.
            ChildLate: There was no answer in time.
            ChildCrashed: The question made the process crash.
            ChildDied: Something else ended the process, or the answer has more than `most` bytes.
        """
        began = time.monotonic()
        watch = _Watch(began + patience, still_wanted)
        answer: bytes | None = None
        try:
            if self._send(b"%f %b\n" % (seconds, line), watch):
                answer = self._receive(most, watch)
        except _Late:
            raise ChildLate(patience) from None
        except (BrokenPipeError, ConnectionResetError):
            raise self._died(time.monotonic() - began > seconds) from None
        finally:
            if answer is None:
                self.close()
        self.answers += 1
        return answer

    def _died(self, worked_long: bool) -> ChildDied:
        """Return the error for a process that ended while it was asked; `worked_long` if its answer took its whole
        time."""
        self.close()
        code = self._process.returncode
        # Popen says 0 if other code collected the exit status, or if none is kept because SIGCHLD is ignored.
        if code == -signal.SIGPROF or (code == 0 and worked_long):
            return ChildTooSlow(code)
        return ChildCrashed(code) if code in _CRASHES else ChildDied(code)

    def _send(self, line: bytes, watch: _Watch) -> bool:
        left = memoryview(line)
        while left:
            try:
                left = left[self._socket.send(left, socket.MSG_NOSIGNAL) :]
            except BlockingIOError:
                if not watch.wait(self._socket.fileno(), select.POLLOUT):
                    return False
        return True

    def _receive(self, most: int, watch: _Watch) -> bytes | None:
        parts: list[bytes] = []
        size = 0
        while not (parts and parts[-1].endswith(b"\n")):
            if not watch.wait(self._socket.fileno(), select.POLLIN):
                return None
            parts.append(self._socket.recv(_CHUNK))
            size += len(parts[-1])
            if not parts[-1] or size > most:
                raise ConnectionResetError
        return b"".join(parts)

    def close(self) -> None:
        """End the process, whatever it does; may be called again. In a fork of the starting process, close the
        socket."""
        if self._owner == os.getpid():
            self._process.kill()
            self._process.wait()
        self._socket.close()


_started: weakref.WeakSet[Child] = weakref.WeakSet()


def _let_go_of_all() -> None:
    """Close the sockets that a fork of the application inherits, since they would keep processes alive after it."""
    for child in list(_started):
        child.close()


os.register_at_fork(after_in_child=_let_go_of_all)


class _Late(Exception):
    """The time for the answer is over."""


class _Watch:
    """The time that a question may still take, and whether its answer is wanted."""

    def __init__(self, ends: float, still_wanted: Callable[[], bool]) -> None:
        self._ends = ends
        self._still_wanted = still_wanted

    def wait(self, file: int, event: int) -> bool:
        """Wait until `file` is ready for `event`; return False if the answer is no longer wanted. Raises `_Late`."""
        poll = select.poll()  # select.select refuses descriptors above 1023
        poll.register(file, event)
        while not poll.poll(_GLANCE * 1000):
            if not self._still_wanted():
                return False
            if time.monotonic() > self._ends:
                raise _Late
        return True


class Children:
    """Processes of one kind. Each is lent to one caller at a time, so that its end concerns nobody else.

    Safe to call from several threads. The first process starts when it is needed.
    """

    def __init__(self, start: Callable[[], Child]) -> None:
        """Start no process yet.

        Args:
            start: Starts a child.
        """
        self._start = start
        self._idle: deque[Child] = deque()  # has atomic methods: a lock could be held while another thread forks
        self._closed = False
        self._end = weakref.finalize(self, _close_all, self._idle)

    def start(self) -> None:
        """Start a child for the next caller; does not wait for it.

        Raises:
            OSError: No process can be started.
        """
        self._keep(self._start())

    @contextlib.contextmanager
    def one(self) -> Iterator[Child]:
        """Lend a child: a waiting one, or a new one. It is kept for others unless it has ended.

        Raises:
            OSError: No process can be started.
        """
        child = self._take() or self._start()
        try:
            yield child
        finally:
            self._keep(child)

    def ask(self, use: Callable[[Child], R]) -> R:
        """Return the result of `use` with a child; one that has answered before and was ended by others is replaced.

        A child that waits may die at any time, for example when the system runs out of memory; it is no loss. A new one
        is replaced once, if it was killed, since the killer may have killed many at once.

        Raises:
            OSError: No process can be started, or new ones were ended by others.
            BaseException: `use` raised another error.
        """
        killed = 0
        while True:
            with self.one() as child:
                was_used = child.answers > 0
                try:
                    return use(child)
                except ChildDied as died:
                    if type(died) is not ChildDied:
                        raise
                    if not was_used:
                        killed += 1
                        if died.code != -signal.SIGKILL or killed > 1:
                            raise

    def close(self) -> None:
        """End the waiting children; those that are lent end when they come back."""
        self._closed = True
        _close_all(self._idle)

    def _take(self) -> Child | None:
        with contextlib.suppress(IndexError):
            while True:
                child = self._idle.pop()
                if child.is_alive:
                    return child
                child.close()
        return None

    def _keep(self, child: Child) -> None:
        if len(self._idle) >= _IDLE or not child.is_alive:
            child.close()
            return
        self._idle.append(child)
        if self._closed:  # `close` may have run since the check above
            _close_all(self._idle)


def _close_all(children: deque[Child]) -> None:
    with contextlib.suppress(IndexError):
        while True:
            children.pop().close()


def _interpreter() -> str:
    """Return the program that runs Python here; in some applications `sys.executable` is the application itself.

    Raises:
        OSError: No such program is found.
    """
    if not getattr(sys, "frozen", False):
        installed = Path(sys.base_exec_prefix, "bin", f"python{sys.version_info.major}.{sys.version_info.minor}")
        for path in (Path(sys.executable or ""), installed):
            if path.name.startswith(("python", "pypy")) and path.is_file():
                return str(path)
    raise OSError("it needs a process of its own, and here is no Python that could be started")
