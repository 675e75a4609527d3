"""Starts and ends the server process that a benchmark loads; measures only its memory and processor time."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headrace.server.bench.client import Endpoint

__all__ = ["Server", "cpu_seconds", "resident_mb", "started"]

_SLACK = 512


class Server:
    """A running server process."""

    def __init__(self, process: subprocess.Popen[str], target: Endpoint) -> None:
        """Hold a started process that serves `target`."""
        self.target = target
        self._process = process

    def stop(self) -> dict[str, Any]:
        """Stop the process, and return the engine's figures and the live requests at its end."""
        assert self._process.stdout is not None
        self._process.terminate()
        line = self._process.stdout.readline()
        self._process.wait()
        if not line:
            raise RuntimeError("the server ended without its last word")
        held: dict[str, Any] = json.loads(line)
        return held

    def kill(self) -> None:
        """End the process if it still runs."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()


@contextmanager
def started(engine: dict[str, Any], *, fake: bool, connections: int, **settings: Any) -> Iterator[Server]:
    """Start a server process, and kill it at the end of the block if it still runs.

    Args:
        engine: Options of the engine, with its `model` unless it is a fake one.
        fake: Whether to serve over a device that only takes time.
        connections: Connections that will be open at once; both processes need as many file descriptors.
        settings: Fields of `ServerSettings`.

    Raises:
        RuntimeError: The system does not allow so many file descriptors, or the server did not start.
    """
    _allow_files(connections + _SLACK)
    options = json.dumps({"engine": engine, "fake": fake, "settings": settings})
    command = [sys.executable, "-m", "headrace.server.bench.target", options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        if not line:
            raise RuntimeError("the server did not start")
        server = Server(process, Endpoint(**json.loads(line), pid=process.pid))
        yield server
        server.kill()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def resident_mb(target: Endpoint) -> float:
    """Return the resident memory of the server, in MB (10**6 bytes)."""
    pages = int(Path(f"/proc/{target.pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def cpu_seconds(target: Endpoint) -> float:
    """Return the processor time that the server has used, in seconds."""
    fields = Path(f"/proc/{target.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _allow_files(count: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < count:
        if hard != resource.RLIM_INFINITY and hard < count:
            raise RuntimeError(f"{count} file descriptors are needed, and the limit is {hard}: raise `ulimit -n`")
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))
