"""`Child`, a Python process that answers lines and may be ended at any time, and `Children`, which lends them out.

What may never return, or take any amount of memory, runs there: grammars on trial and chat templates. A child is a new
interpreter, not a fork, so it holds neither the model nor torch. It ends with its standard input: when the engine
closes, and when the application dies in whatever way. Next to read: child_start.py, grammar_child.py and
template_child.py, which run there.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

__all__ = ["Child", "ChildDied", "ChildLate", "Children"]

_GLANCE: Final = 0.05  # seconds between two looks at whether the answer is still wanted
_CHUNK: Final = 1 << 20  # bytes read at once, at most
_IDLE: Final = 2  # children kept for later


class ChildDied(OSError):
    """The process ended before its answer."""

    def __init__(self, code: int | None) -> None:
        """Say how it ended.

        Args:
            code: Its exit code, or minus the signal that killed it.
        """
        name = f"signal {-code}" if code is not None and code < 0 else f"code {code}"
        super().__init__(f"the process that was to answer ended with {name}")
        self.code = code


class ChildLate(OSError):
    """The answer did not come in time; the process has been ended."""

    def __init__(self, seconds: float) -> None:
        """Say how long it was given, in seconds."""
        super().__init__(f"the process that was to answer did not do so within {seconds:g} s")
        self.seconds = seconds


class Child:
    """A process that answers lines. Only one thread at a time may use it."""

    def __init__(self, script: Path, *arguments: str) -> None:
        """Start `script`, which reads a line, writes a line, and so on; does not wait for it.

        Args:
            script: A Python file that imports nothing of headrace.
            arguments: What the script finds in `sys.argv[1:]`.

        Raises:
            OSError: No process can be started.
        """
        start = Path(__file__).with_name("child_start.py")
        # -S: the search path is given, and whatever else an application's site module does is not for it
        places = json.dumps([place for place in sys.path if isinstance(place, str)])  # an import heeds no others
        command = [_interpreter(), "-I", "-S", str(start), places, str(script), *arguments]
        self._process = subprocess.Popen(
            command,
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # an interrupt at a terminal is not for it
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        os.set_blocking(self._stdin.fileno(), False)
        os.set_blocking(self._stdout.fileno(), False)
        self._owner = os.getpid()
        self.answers = 0
        """Number of lines that it has answered."""

    @property
    def is_alive(self) -> bool:
        """Whether it can be asked, which only the process that started it may do, not a fork of that."""
        return self._owner == os.getpid() and self._process.poll() is None

    def ask(
        self, line: bytes, seconds: float, still_wanted: Callable[[], bool] = lambda: True, *, most: int = _CHUNK
    ) -> bytes | None:
        """Send a line and return the answer; whenever there is none, the process has been ended.

        Args:
            line: The question, with neither a line feed in it nor at its end.
            seconds: How long it may take.
            still_wanted: Asked many times a second; once it says no, it is not asked again.
            most: Bytes that the answer may have.

        Returns:
            A line with its line feed, or None if it is no longer wanted.

        Raises:
            ChildLate: It took too long.
            ChildDied: The process ended, or answered more than `most` bytes.
        """
        watch = _Watch(time.monotonic() + seconds, still_wanted)
        answer: bytes | None = None
        try:
            if self._send(line + b"\n", watch):
                answer = self._receive(most, watch)
        except _Late:
            raise ChildLate(seconds) from None
        except BrokenPipeError:
            self.close()
            raise ChildDied(self._process.returncode) from None
        finally:
            if answer is None:
                self.close()
        self.answers += 1
        return answer

    def _send(self, line: bytes, watch: _Watch) -> bool:
        left = memoryview(line)
        while left:
            try:
                left = left[os.write(self._stdin.fileno(), left) :]
            except BlockingIOError:
                if not watch.wait(self._stdin.fileno(), select.POLLOUT):
                    return False
        return True

    def _receive(self, most: int, watch: _Watch) -> bytes | None:
        parts: list[bytes] = []
        size = 0
        while not (parts and parts[-1].endswith(b"\n")):
            if not watch.wait(self._stdout.fileno(), select.POLLIN):
                return None
            parts.append(os.read(self._stdout.fileno(), _CHUNK))
            size += len(parts[-1])
            if not parts[-1] or size > most:
                self.close()
                raise ChildDied(self._process.returncode)
        return b"".join(parts)

    def close(self) -> None:
        """End it, whatever it does; may be called again. In a fork of the process that started it, only let go."""
        if self._owner == os.getpid():
            self._process.kill()
            self._process.wait()
        for pipe in (self._stdin, self._stdout):
            with contextlib.suppress(OSError):
                pipe.close()


class _Late(Exception):
    """The time is over."""


class _Watch:
    """How long a question may still take, and whether its answer is wanted."""

    def __init__(self, ends: float, still_wanted: Callable[[], bool]) -> None:
        self._ends, self._still_wanted = ends, still_wanted

    def wait(self, file: int, event: int) -> bool:
        """Wait until `file` is ready for `event`; False if the answer is no longer wanted. Raises _Late."""
        poll = select.poll()  # select.select refuses descriptors above 1023
        poll.register(file, event)
        while not poll.poll(_GLANCE * 1000):
            if not self._still_wanted():
                return False
            if time.monotonic() > self._ends:
                raise _Late
        return True


class Children:
    """Processes of one kind. Each is lent to one caller at a time, so that what ends it concerns nobody else.

    Safe to call from several threads. None runs before the first is needed.
    """

    def __init__(self, start: Callable[[], Child]) -> None:
        """Start none yet.

        Args:
            start: Makes a child.
        """
        self._start = start
        self._idle: deque[Child] = deque()  # whose methods are atomic: a lock could be held while another thread forks
        self._closed = False
        self._end = weakref.finalize(self, _close_all, self._idle)

    def start(self) -> None:
        """Start a child for whoever comes first; does not wait for it.

        Raises:
            OSError: No process can be started.
        """
        self._keep(self._start())

    @contextlib.contextmanager
    def one(self) -> Iterator[Child]:
        """Lend a child: one that has answered others before, or a new one. It is kept for others unless it has ended.

        Raises:
            OSError: No process can be started.
        """
        child = self._take() or self._start()
        try:
            yield child
        finally:
            self._keep(child)

    def close(self) -> None:
        """End the children that wait; those that are lent end when they come back."""
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
        if self._closed:  # perhaps just now
            _close_all(self._idle)


def _close_all(children: deque[Child]) -> None:
    with contextlib.suppress(IndexError):
        while True:
            children.pop().close()


def _interpreter() -> str:
    """Return the program that runs Python here; in some applications `sys.executable` is the application.

    Raises:
        OSError: There is none.
    """
    if not getattr(sys, "frozen", False):
        installed = Path(sys.base_exec_prefix, "bin", f"python{sys.version_info.major}.{sys.version_info.minor}")
        for path in (Path(sys.executable or ""), installed):
            if path.name.startswith(("python", "pypy")) and path.is_file():
                return str(path)
    raise OSError("it needs a process of its own, and here is no Python that could be started")
