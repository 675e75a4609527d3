"""`Partial`: the folder beside OUT in which a copy grows until it is whole, and its journal; knows no tensor.

The journal has one line with the arguments, then one for each tensor or module that is on the disk. A run with the same
arguments goes on behind its last whole line. Texts that the model has written to be calibrated with are kept beside it.
OUT gets its name last, so that nobody finds it half written.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from headrace.engine.model.quantising.arguments import difference, refusal

__all__ = ["Partial", "drop_leftover"]

_JOURNAL = "journal.jsonl"
_TEXTS = "texts.json"
_FOLDER = "folder"
_SUFFIX = ".partial"


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
        self._path = out.with_name(out.name + _SUFFIX)
        self.folder = self._path / _FOLDER
        """The folder in which the files of the copy are written."""
        if out.is_symlink() or (out.exists() and (not out.is_dir() or any(out.iterdir()))):
            _refuse(out, f"{out} is there already and not an empty folder; name another, or delete it")
        self._path.mkdir(parents=True, exist_ok=True)
        if _JOURNAL not in os.listdir(self._path) and any(self._path.iterdir()):
            _refuse(out, f"{self._path} is in the way and was not begun by this command; move it")
        self._file = os.open(self._path / _JOURNAL, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            self.done = self._read(arguments)
            """Names of the tensors and modules that an earlier run has written."""
            self.folder.mkdir(exist_ok=True)
        except BaseException:
            self.close()
            raise

    def _read(self, arguments: Mapping[str, object]) -> set[str]:
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
            self._append(json.dumps(arguments, sort_keys=True))
            return set()
        first, *rest = whole.decode(errors="replace").splitlines()
        if told := difference(_parsed(first), arguments):
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

    def kept(self, write: Callable[[], list[list[int]]]) -> list[list[int]]:
        """Return the texts that an earlier run has kept; if none has, keep those that `write` returns.

        Raises:
            OSError: The file cannot be written or read.
        """
        path = self._path / _TEXTS
        if not path.exists():
            new = path.with_suffix(".new")
            new.write_text(json.dumps(write()))
            _synced(new)
            new.rename(path)
        texts: list[list[int]] = json.loads(path.read_text())
        return texts

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
                raise refusal(self._out, f"{self._out} has been filled meanwhile; the copy is {self.folder}") from error
            raise
        _synced(self._out.parent)
        self.close()
        with suppress(OSError):
            shutil.rmtree(self._path)


def drop_leftover(out: Path) -> None:
    """Remove what a run that was killed between its last two steps has left beside `out`, which is whole."""
    path = out.with_name(out.name + _SUFFIX)
    if (path / _FOLDER).exists():
        return
    with suppress(OSError):
        (path / _TEXTS).unlink(missing_ok=True)
        (path / _JOURNAL).unlink(missing_ok=True)
        path.rmdir()


def _parsed(line: str) -> object:
    """Return what a line of JSON holds, None if it holds none."""
    try:
        return json.loads(line)
    except ValueError:
        return None


def _synced(path: Path) -> None:
    """Wait until the system has a file, or the names in a folder, on its disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _refuse(out: Path, told: str) -> NoReturn:
    raise refusal(out, told)
