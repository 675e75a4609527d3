"""Ctrl-C and SIGTERM while a model is opened end the process, and the compilers that it has started."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from leftovers import wait_until

OPENING = """
import signal, sys, threading
from pathlib import Path
from rich.console import Console
from headrace.ops.cuda.compiling.library import compile_library
from headrace.server.commands.interrupts import ending_at_once

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs start with it ignored
folder, sources = Path(sys.argv[1]), [["sh", str(Path(sys.argv[1], "nvcc"))]] * 8
with ending_at_once("opening it", Console()):
    thread = threading.Thread(target=compile_library, args=(folder / "kernel" / "kernel.so", sources, ["true"]))
    thread.start()
    thread.join()
"""
# As nvcc does: it runs cicc, and waits for it. The exit status of a killed one is an error, after which others go on.
NVCC = 'echo $$ >> "{0}/started"\nsh -c \'echo $$ >> "{0}/started"; sleep 60 & wait\'\n'


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_compilers_end_with_the_process(number: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "nvcc").write_text(NVCC.format(tmp_path))
    command = [sys.executable, "-c", OPENING, str(tmp_path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        opening = psutil.Process(process.pid)
        wait_until(lambda: len(sleepers(opening)) >= 1, lambda: "no compiler was started")
        compilers = opening.children(recursive=True)
        process.send_signal(number)
        assert process.stderr is not None
        assert process.stderr.read() == "headrace: interrupted while opening it\n"
        assert process.wait() == 128 + number
    try:
        wait_until(lambda: not any(map(runs, compilers)), lambda: f"compilers go on: {compilers}")
        wait_until(lambda: not left(tmp_path), lambda: f"compilers go on: {left(tmp_path)}")
    finally:
        for each in [*filter(runs, compilers), *left(tmp_path)]:
            each.kill()


def sleepers(process: psutil.Process) -> list[psutil.Process]:
    return [each for each in process.children(recursive=True) if each.name() == "sleep"]


def left(folder: Path) -> list[psutil.Process]:
    """The processes that noted their numbers in `folder` and still run, those begun behind the signal among them."""
    found = []
    for number in (folder / "started").read_text().split():
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(int(number))
            if runs(process) and any(str(folder) in word for word in process.cmdline()):
                found.append(process)
    return found


def runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
