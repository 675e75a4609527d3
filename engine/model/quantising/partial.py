"""`Partial`: the folder beside OUT in which a copy grows until it is whole, and its journal; knows no tensor.

The journal has one line with the arguments, then one for each tensor or module that is on the disk. A run with the same
arguments goes on behind its last whole line. OUT gets its name last, so that nobody finds it half written.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from headrace.engine.errors import InvalidParams

__all__ = ["Partial"]

_JOURNAL = "journal.jsonl"
_FOLDER = "folder"


class Partial:
    """A copy that is being written. Close it, or leave its `with` block; it stays on the disk until `finish`."""

    def __init__(self, out: Path, arguments: Mapping[str, object]) -> None:
        """Begin beside `out`, or go on with what an earlier run with the same arguments has left there.

        Args:
            out: The folder to be; it may exist if it is empty.
            arguments: Everything that decides the bytes to be written, as plain JSON.

        Raises:
            InvalidParams: `out` is a file or not empty, or what is beside it comes from other arguments, from another
                program, or from a run that has not ended.
            OSError: The folder cannot be made.
        """
        self._out = out
        self._path = out.with_name(out.name + ".partial")
        self.folder = self._path / _FOLDER
        """The folder in which the files of the copy are written."""
        if out.is_symlink() or (out.exists() and (not out.is_dir() or any(out.iterdir()))):
            _refuse(out, f"{out} is there already and not an empty folder; name another, or delete it")
        self._path.mkdir(parents=True, exist_ok=True)
        line = json.dumps(arguments, sort_keys=True)
        if _JOURNAL not in os.listdir(self._path) and any(self._path.iterdir()):
            _refuse(out, f"{self._path} is in the way and was not begun by this command; move it")
        self._file = os.open(self._path / _JOURNAL, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            self.done = self._read(line)
            """Names of the tensors and modules that an earlier run has written."""
            self.folder.mkdir(exist_ok=True)
        except BaseException:
            self.close()
            raise

    def _read(self, arguments: str) -> set[str]:
        """Return the names in the journal, whose first line becomes `arguments` if it has none."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _refuse(self._out, f"another run is writing {self._path}; wait for its end")
        data = os.pread(self._file, os.fstat(self._file).st_size, 0)
        whole = data[: data.rfind(b"\n") + 1]
        os.ftruncate(self._file, len(whole))  # a line that was cut off
        os.lseek(self._file, 0, os.SEEK_END)
        if not whole:
            self._append(arguments)
            return set()
        first, *rest = whole.decode(errors="replace").splitlines()
        if first != arguments:
            told = _difference(first, arguments)
            _refuse(self._out, f"{self._path} was begun {told}; give the same arguments to go on, or delete it")
        return {json.loads(line) for line in rest}

    def __enter__(self) -> Partial:
        """Return the copy itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the journal."""
        self.close()

    def close(self) -> None:
        """Let another run go on; idempotent."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def mark(self, name: str) -> None:
        """Note that a tensor or module is on the disk.

        Raises:
            OSError: The journal cannot be written.
        """
        self.done.add(name)
        self._append(json.dumps(name))

    def _append(self, line: str) -> None:
        os.write(self._file, (line + "\n").encode())
        os.fdatasync(self._file)

    def finish(self) -> None:
        """Give the folder its name, now that all files are in it, and drop the journal.

        Raises:
            InvalidParams: Something has taken the name meanwhile.
            OSError: The folder cannot be renamed.
        """
        for path in [*self.folder.rglob("*"), self.folder]:
            _synced(path)
        try:
            os.rename(self.folder, self._out)
        except OSError as error:
            if self._out.exists():
                raise _refusal(
                    self._out, f"{self._out} has been filled meanwhile; the copy is {self.folder}"
                ) from error
            raise
        _synced(self._out.parent)
        self.close()
        with suppress(OSError):
            shutil.rmtree(self._path)


def _synced(path: Path) -> None:
    """Wait until the system has a file, or the names in a folder, on its disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _difference(first: str, second: str) -> str:
    """Return how the arguments of an earlier run differ, in words."""
    try:
        before, now = json.loads(first), json.loads(second)
        names = [name for name in now if before.get(name) != now[name]]
        told = [f"{name} {before.get(name)!r} and not {now[name]!r}" for name in names if _is_short(before.get(name))]
    except (ValueError, AttributeError):
        return "by another program"
    others = [name for name in names if not _is_short(before.get(name))]
    return "with " + ", ".join([*told, *(f"another {name}" for name in others)] or ["more arguments"])


def _is_short(value: object) -> bool:
    return isinstance(value, (str, int, type(None))) and len(str(value)) < 20


def _refuse(out: Path, told: str) -> NoReturn:
    raise _refusal(out, told)


def _refusal(out: Path, told: str) -> InvalidParams:
    return InvalidParams(f"out: {told}", field="out", value=str(out), limit="a new or empty folder")
