"""Runs the script of a `Child` in a process of its own: `child_start.py SEARCH_PATH SCRIPT [ARGUMENT...]`.

It imports nothing of headrace. SEARCH_PATH is the `sys.path` of the application, as JSON. SCRIPT has a function
`answers(lines, *arguments)`, which yields the answer to each line, both without a line feed. Each line on standard
input begins with the seconds of processor time that its answer may take, and a space. When they are over, the system
ends the process with SIGPROF.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import runpy
import signal
import sys
from collections.abc import Callable, Iterator

__all__ = ["prepare", "serve"]


def prepare() -> None:
    """Let only the script, the input and the limits of this process end it."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # these go to all processes of a service
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # kills the process, whatever the application does with this signal
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core would hold somebody's prompt
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # if memory runs out, this process is killed and not the one with the model


def serve(answers: Callable[..., Iterator[bytes]], *arguments: str) -> None:
    """Answer the lines of standard input until there are no more, or `answers` ends."""
    for answer in answers(_lines(), *arguments):
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        sys.stdout.buffer.write(answer + b"\n")
        sys.stdout.buffer.flush()
        del answer


def _lines() -> Iterator[bytes]:
    """Yield the lines of standard input; start the limit of processor time of each."""
    while line := sys.stdin.buffer.readline():
        seconds, _, line = line.removesuffix(b"\n").partition(b" ")
        signal.setitimer(signal.ITIMER_PROF, float(seconds))
        yield line


if __name__ == "__main__":
    prepare()
    sys.path[:] = json.loads(sys.argv[1])
    with contextlib.suppress(BrokenPipeError):  # the application has ended
        serve(runpy.run_path(sys.argv[2], run_name="headrace_child")["answers"], *sys.argv[3:])
    os._exit(0)
