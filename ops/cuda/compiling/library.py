"""`compile_library`: compiles sources to one shared library, with progress and readable errors; knows no kernel.

A library appears in its place at once and whole. Files of a process that was killed before are removed by the next
compilation of the same library. Processes that want the same library wait for the first of them.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from headrace.ops.cuda.compiling.toolkit import CannotCompile

__all__ = ["PROGRESS", "Progress", "compile_library", "run_compiler"]

logger = logging.getLogger("headrace.ops")

_SECONDS_BETWEEN_LINES = 5.0
_jobs = os.environ.get("MAX_JOBS", "")  # as torch and FlashInfer read it
_WORKERS = int(_jobs) if _jobs.isdigit() and int(_jobs) else len(os.sched_getaffinity(0))
_compilers = threading.BoundedSemaphore(_WORKERS)
"""Slots for compilers that run at the same time, over all libraries: each takes a core, and up to 2 GB of memory."""
_ERROR = re.compile(r"\b(?:fatal|error|undefined reference|cannot find|not found|no such file|killed)\b", re.IGNORECASE)
_PART = "part-"
_LONGEST_NAME = 60


class Progress:
    """Progress of compiling: a line in the log for each source of nvcc, and now and then one for Triton's kernels.

    Where the application has set up no logging, lines go to standard error, if that is a terminal.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wanted = self._done = self._others = 0
        self._told = 0.0

    def expect(self, count: int) -> None:
        """Add `count` sources to those that will be compiled."""
        with self._lock:
            self._wanted += count

    def start(self, name: str) -> None:
        """Report that the source `name` is about to be compiled."""
        with self._lock:
            self._done += 1
            line = f"compiling kernel {self._done} of {self._wanted} for this GPU, once: {name[:_LONGEST_NAME]}"
        self.tell(line)

    def count_other(self) -> None:
        """Count a kernel that Triton compiled, in about a second; the number of those to come is not known."""
        with self._lock:
            self._others += 1
            now = time.monotonic()
            if now - self._told < _SECONDS_BETWEEN_LINES:
                return
            self._told = now
            line = f"compiled {self._others} Triton kernels for this GPU so far"
        self.tell(line)

    @staticmethod
    def tell(line: str) -> None:
        """Log `line`, or show it on the terminal."""
        if logger.hasHandlers():
            logger.info(line)
        elif sys.stderr.isatty():
            print(f"headrace: {line}", file=sys.stderr, flush=True)


PROGRESS = Progress()


def compile_library(
    target: Path,
    sources: Sequence[Sequence[str]],
    link: Sequence[str],
    is_usable: Callable[[Path], bool] = Path.exists,
) -> None:
    """Compile every source and link the objects, unless another process has done so meanwhile.

    Args:
        target: The shared library, in a folder of its own, which also gets a lock file and the log of a failure.
        sources: The compiler's argv for each source, to which `-o` and the object's path are appended.
        link: The linker's argv, to which the objects, `-o` and the library's path are appended.
        is_usable: Returns whether the library at `target` can be used as it is; if not, it is replaced.

    Raises:
        CannotCompile: A command failed; the message has its first error.
        OSError: A command cannot be run, or a file cannot be written.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.parent / "lock", target.stem):
        if not is_usable(target):
            for left in target.parent.glob(f"{_PART}*"):
                shutil.rmtree(left, ignore_errors=True)
            _compile(target, sources, link)


def _compile(target: Path, sources: Sequence[Sequence[str]], link: Sequence[str]) -> None:
    log = target.with_suffix(".log")
    PROGRESS.expect(len(sources))
    with tempfile.TemporaryDirectory(prefix=_PART, dir=target.parent) as folder:
        objects = [str(Path(folder) / f"{index}.o") for index in range(len(sources))]

        def compile_one(source: Sequence[str], output: str) -> None:
            with _compilers:
                PROGRESS.start(target.stem)
                run_compiler([*source, "-o", output], target.stem, log, folder)

        with ThreadPoolExecutor(max(1, min(_WORKERS, len(sources)))) as pool:
            list(pool.map(compile_one, sources, objects))
        library = str(Path(folder) / target.name)
        run_compiler([link[0], *objects, *link[1:], "-o", library], target.stem, log, folder)
        os.replace(library, target)


def run_compiler(command: Sequence[str], name: str, log: Path, scratch: str) -> None:
    """Run a compiler whose temporary files go to the folder `scratch`.

    Raises:
        CannotCompile: The compiler failed; its output is in `log`.
        OSError: The compiler cannot be run.
    """
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, errors="replace", env={**os.environ, "TMPDIR": scratch}, check=False,
    )  # fmt: skip
    if done.returncode == 0:
        return
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text(f"{shlex.join(command)}\n\n{done.stdout}\nexit status {done.returncode}\n", encoding="utf-8")
    raise CannotCompile(
        f"compiling {name} failed: {_first_error(done.stdout, done.returncode)} (the whole log is {log})"
    )


def _first_error(printed: str, status: int) -> str:
    """Return the first line that looks like an error, else the last line, else the exit status."""
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    if not lines:
        return f"{'signal' if status < 0 else 'exit status'} {abs(status)}"
    return next((line for line in lines if _ERROR.search(line)), lines[-1])


@contextlib.contextmanager
def _locked(path: Path, what: str) -> Iterator[None]:
    """Hold the lock file `path` exclusively; the system releases it when the process dies."""
    with open(path, "w", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            PROGRESS.tell(f"waiting for another process or thread that compiles {what}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
