"""Prepares the process of a `Child` and runs its script there: `child_start.py SEARCH_PATH SCRIPT [ARGUMENT...]`.

Imports nothing of headrace. SEARCH_PATH is the `sys.path` of the application, as JSON.
"""

from __future__ import annotations

import contextlib
import json
import resource
import runpy
import signal
import sys

__all__ = ["prepare"]


def prepare() -> None:
    """Let nothing but its script, its input and its own limits end this process."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # which go to all processes of a service
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # and so kills, whatever the application does with it
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core would hold somebody's prompt
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # where memory runs out, this process goes and not the one that holds the model


if __name__ == "__main__":
    prepare()
    sys.path[:] = json.loads(sys.argv[1])
    del sys.argv[:2]
    runpy.run_path(sys.argv[0], run_name="__main__")
