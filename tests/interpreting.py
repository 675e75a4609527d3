"""Programs of tests in processes of their own, where Triton's interpreter runs kernels on a CPU; holds no tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

__all__ = ["interpret"]


def interpret(program: str, *arguments: str) -> list[str]:
    """Run a program, which may import what tests share, and return the lines that it prints; it must not fail."""
    path = os.pathsep.join((str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])))
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path}
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()
