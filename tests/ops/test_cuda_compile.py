"""Progress of compilations reaches whoever watches: the application's log, or a bare terminal, and nothing else."""

from __future__ import annotations

import logging
import os
import pty
import subprocess
import sys

import pytest

from headrace.ops.cuda.compiling.library import Progress

CODE = """
from headrace.ops.cuda.compiling.library import Progress
progress = Progress()
progress.expect(2)
progress.start("one")
progress.expect(1)
progress.start("two")
for _ in range(100):
    progress.count_other()
"""


def test_a_terminal_shows_progress_where_no_logging_is_set_up() -> None:
    leader, follower = pty.openpty()
    subprocess.run([sys.executable, "-c", CODE], stderr=follower, check=True)
    os.close(follower)
    shown = os.read(leader, 1 << 16).decode().splitlines()
    os.close(leader)
    assert shown == [
        "headrace: compiling kernel 1 of 2 for this GPU, once: one",
        "headrace: compiling kernel 2 of 3 for this GPU, once: two",
        "headrace: compiled 1 Triton kernels for this GPU so far",
    ]


def test_what_is_no_terminal_gets_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")


def test_the_log_gets_progress(caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress()
    with caplog.at_level(logging.INFO, "headrace"):
        progress.expect(1)
        progress.start("one")
    assert caplog.messages == ["compiling kernel 1 of 1 for this GPU, once: one"]
    assert capsys.readouterr().err == ""
