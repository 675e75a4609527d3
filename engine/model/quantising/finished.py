"""`Record`: the file in a whole copy that says what it was made from, so that a repeated run knows its own work."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from headrace.engine.model.quantising.arguments import difference, refusal

__all__ = ["Record"]

_RECORD = "headrace_quantize.json"
_FILES = "files"


class Record:
    """What decides the bytes of a copy, to write into it and to find there again."""

    def __init__(self, arguments: Mapping[str, object]) -> None:
        """Take everything that decides the bytes of the copy, as plain JSON."""
        self._arguments = arguments

    def write(self, folder: Path) -> None:
        """Write the record into a folder that holds all other files of the copy.

        Raises:
            OSError: The file cannot be written.
        """
        text = json.dumps({**self._arguments, _FILES: _sizes(folder)}, sort_keys=True, indent=2)
        (folder / _RECORD).write_text(text + "\n", encoding="utf-8")

    def is_of(self, out: Path) -> bool:
        """Return whether `out` is a whole copy that was made with these arguments; False where it is no copy.

        Raises:
            InvalidParams: `out` is a copy that was made with other arguments, or that has lost or changed a file.
        """
        try:
            found = json.loads((out / _RECORD).read_text(encoding="utf-8"))
            files = found.pop(_FILES)
            there = _sizes(out)
            changed = [name for name, size in files.items() if there.get(name) != size]
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            return False
        if told := difference(found, self._arguments):
            raise refusal(out, f"{out} is there already, made {told}; name another folder, or delete it")
        if changed:
            told = f"{changed[0]} is missing or has changed since"
            raise refusal(out, f"{out} was made by this command, but {told}; delete the folder to make it again")
        return True


def _sizes(folder: Path) -> dict[str, int]:
    """Return the bytes of each file of a copy but its record."""
    paths = [path for path in folder.rglob("*") if path.is_file() and path != folder / _RECORD]
    return {str(path.relative_to(folder)): path.stat().st_size for path in paths}
