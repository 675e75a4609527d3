"""`open_adapter`: opens the two files of a PEFT folder and parses their descriptions; reads no weights, needs no torch.

Everything that a stranger may have written is checked before memory is taken for it. Next to read: files.py, which
reads the weights.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO, NoReturn

from headrace.adapters.errors import AdapterRejected, ModelRejected
from headrace.adapters.peft_config import CONFIG_FILE, WEIGHTS_FILE, PeftConfig, parse_peft_config
from headrace.adapters.safetensors_header import TensorEntry, header_bytes, parse_header, refuse_file
from headrace.adapters.untrusted import open_file, parse_object, plain

__all__ = ["described", "open_adapter", "parse_description"]

_CONFIG_BYTES = 1 << 20
_HEADER_BYTES = 2 << 20
_MOST_TENSORS = 10000
_PICKLE = re.compile(r".*\.(bin|pt|pth|ckpt|pkl)")


@contextmanager
def open_adapter(path: str | os.PathLike[str], root: Path | None) -> Iterator[list[BinaryIO]]:
    """Open the config and the weights of the PEFT folder at `path`, which are closed at the end of the block.

    Args:
        path: The folder; with `root` the plain name of a folder in it, and no link is followed.
        root: The only folder that may be read from.

    Raises:
        AdapterRejected: A file is missing or not a regular one, or the block raised `ModelRejected`, `OSError` or
            `MemoryError`.
    """
    name = os.path.basename(os.path.normpath(path))
    with _as_adapter_rejected(name, "" if root is not None else os.fspath(path)), ExitStack() as files:
        folder = _open_folder(path, root)
        files.callback(os.close, folder)
        yield [files.enter_context(_open_file(folder, each, root is None)) for each in (CONFIG_FILE, WEIGHTS_FILE)]


def described(opened: Sequence[BinaryIO]) -> tuple[bytes, bytes]:
    """Return the text of the config and the header of the weights of the two open files.

    Raises:
        ModelRejected: One of them is too large or cut off.
    """
    config_file, weights_file = opened
    config_bytes = config_file.read(_CONFIG_BYTES + 1)
    if len(config_bytes) > _CONFIG_BYTES:
        refuse_file(CONFIG_FILE, "the file's size", f"over {_CONFIG_BYTES}", _CONFIG_BYTES)
    return config_bytes, header_bytes(weights_file, WEIGHTS_FILE, _HEADER_BYTES)


def parse_description(
    config_bytes: bytes, header: bytes, size: int, *, max_rank: int
) -> tuple[PeftConfig, dict[str, TensorEntry]]:
    """Parse the result of `described`; the file of weights has `size` bytes.

    Raises:
        ModelRejected: The text is damaged, hostile, of a kind that is not supported or of a rank above `max_rank`.
    """
    config = parse_peft_config(parse_object(config_bytes, CONFIG_FILE), max_rank=max_rank)
    entries = parse_header(header, size, WEIGHTS_FILE)
    if len(entries) > _MOST_TENSORS:
        refuse_file(WEIGHTS_FILE, "the number of tensors", len(entries), f"at most {_MOST_TENSORS}")
    return config, entries


@contextmanager
def _as_adapter_rejected(name: str, path: str) -> Iterator[None]:
    """Turn an error of reading into `AdapterRejected` with the folder's name, with its path unless that is empty."""
    try:
        yield
    except ModelRejected as error:
        raise AdapterRejected(
            f"adapter folder {name!r}: {error}", field=error.field, value=error.value, limit=error.limit
        ) from error
    except OSError as error:
        what = f"{plain(path)} cannot be read" if path else "cannot be read"
        raise AdapterRejected(f"adapter folder {name!r}: {what} ({error.strerror})", field="path") from error
    except UnicodeEncodeError as error:
        raise AdapterRejected(f"adapter folder {name!r}: no folder can have that name", field="path") from error
    except MemoryError as error:
        raise AdapterRejected(
            f"adapter folder {name!r}: the host has too little memory for it", field="path"
        ) from error


def _open_folder(path: str | os.PathLike[str], root: Path | None) -> int:
    name = os.fspath(path)
    if "\0" in name or (root is not None and (name in ("", ".", "..") or "/" in name)):
        refused = f"the folder must be a plain name, got '{plain(name)}'"
        raise ModelRejected(refused, field="path", value=name, limit="a plain name")
    if root is None:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    top = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=top)
    except NotADirectoryError:
        raise ModelRejected(
            "is no folder, or a link to one: links are not followed", field="path", value=name
        ) from None
    finally:
        os.close(top)


def _open_file(folder: int, name: str, follow: bool) -> BinaryIO:
    """Open a regular file of an open folder, or raise an error that says what is wrong with it."""
    try:
        return open_file(name, folder=folder, follow=follow)
    except ModelRejected:
        if name not in os.listdir(folder):
            _refuse_missing(folder, name)
        raise
    except OSError as error:
        if error.errno == errno.ELOOP:
            refuse_file(name, "the file", "a link", "a regular file")
        raise


def _refuse_missing(folder: int, name: str) -> NoReturn:
    pickles = sorted(each for each in os.listdir(folder) if _PICKLE.fullmatch(each))
    if name == WEIGHTS_FILE and pickles:
        found = plain(pickles[0])
        raise ModelRejected(
            f"{found} is a pickle, which can run code; only safetensors are read", field=found, limit=name
        )
    raise ModelRejected(f"the file {name} is missing", field=name)
