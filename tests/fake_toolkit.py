"""A CUDA toolkit as pip lays it out, whose nvcc is the system's C++ compiler: slow or failing on demand."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

NVCC = """#!{python} -S
import os, sys, time
if "--version" in sys.argv:
    print("Cuda compilation tools, release {release}, V{release}.88")
    sys.exit()
with open({calls!r}, "a") as calls:
    calls.write("called\\n")
time.sleep({seconds})
if {error!r}:
    print("some remark\\n" + {error!r} + "\\n1 error detected")
    sys.exit(2)
arguments = sys.argv[1:]
if "-ccbin" in arguments:
    at = arguments.index("-ccbin")
    del arguments[at : at + 2]
os.execvp("c++", ["c++", "-x", "c++", "-fPIC", *arguments])
"""


def make_toolkit(
    home: Path, *, release: str = "13.0", seconds: float = 0.0, error: str = "", complete: bool = True
) -> Path:
    """Make `home`; the file that gets a line for every compilation."""
    for folder in ("bin", "include", "nvvm/bin"):
        (home / folder).mkdir(parents=True, exist_ok=True)
    calls = home / "calls"
    calls.touch()
    nvcc = home / "bin" / "nvcc"
    nvcc.write_text(NVCC.format(python=sys.executable, release=release, calls=str(calls), seconds=seconds, error=error))
    nvcc.chmod(0o755)
    if complete:
        (home / "nvvm" / "bin" / "cicc").touch()
    return calls


class Spec:
    """What the cache uses of FlashInfer's description of a module; `load` reads the file, and refuses a broken one."""

    needs_device_linking = False
    extra_ldflags = None

    def __init__(self, name: str, sources: Sequence[Path], nvcc: Path) -> None:
        self.name, self._sources, self._nvcc = name, sources, nvcc
        self.aot_path = Path("/nonexistent") / f"{name}.so"

    def get_compile_commands(self) -> list[dict[str, str]]:
        return [{"file": str(each), "command": f"{self._nvcc} -c {each} -o x.o"} for each in self._sources]

    def load(self, library: Path) -> Any:
        if not library.read_bytes().startswith(b"\x7fELF"):
            raise RuntimeError("not a library")
        return SimpleNamespace(path=library)
