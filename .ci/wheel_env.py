"""Builds the wheel and installs it into an environment of its own; never installs or upgrades a library.

The environment sees the libraries of the interpreter that runs this file, but not its editable headrace: what is
checked there is what a user gets from `pip install`. Its place stays the same from run to run, so mypy's cache holds.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def pip(*arguments: str) -> None:
    """Run this interpreter's pip; it speaks only when it fails."""
    subprocess.run([sys.executable, "-m", "pip", "--disable-pip-version-check", "-qq", *arguments], check=True)


def build_wheel(folder: Path) -> Path:
    """Build the wheel of a copy of the sources, so that no stale `build/` folder leaks into it."""
    sources = folder / "sources"
    shutil.copytree(ROOT / ".src", sources / ".src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, sources)
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(sources))
    (wheel,) = folder.glob("headrace-*.whl")
    return wheel


def main(folder: Path) -> None:
    """Make the environment at `folder` afresh, with the wheel in it."""
    venv.create(folder, clear=True, with_pip=False, symlinks=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    # Path entries of a .pth file are appended as they are: the outer folder's own .pth files, and with them the
    # editable install, stay unread.
    (site / "outer-libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    with tempfile.TemporaryDirectory() as scratch:
        wheel = build_wheel(Path(scratch))
        pip("--python", str(folder / "bin" / "python"), "install", "--no-deps", "--ignore-installed", str(wheel))
    print(f"{wheel.name} installed in {folder}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
