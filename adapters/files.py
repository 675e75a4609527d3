"""`read_adapter`: reads a PEFT folder into a `LoadedAdapter`, or refuses it with a typed error; never runs a pickle.

Everything that a stranger may have written is checked before memory is taken for it: names, sizes, shapes against the
model's, then that each value is finite. If the files have not changed since an earlier reading, only their bytes are
read again. Steps wait for the Python code of a reader, so there is little of it, with pauses between its parts.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from headrace.adapters.errors import ModelRejected
from headrace.adapters.folder import described, open_adapter, parse_description
from headrace.adapters.heads import order_heads, ordered
from headrace.adapters.layout import ModelShape
from headrace.adapters.loaded import LoadedAdapter, Stamp
from headrace.adapters.peft_config import CONFIG_FILE, WEIGHTS_FILE, PeftConfig
from headrace.adapters.recipe import PROMPT_KEY, recipe_of, virtual_recipe
from headrace.adapters.safetensors_header import TensorEntry, refuse_file
from headrace.adapters.stored import Recipe, Stored

__all__ = ["TakePieces", "read_adapter"]

TakePieces = Callable[[int], Sequence[Tensor]]
"""Function that returns page-locked memory for a number of bytes: uint8, in pieces of `PIECE_BYTES`, in use until the
sequence is dropped."""

_SETTLED_NS = 2 * 10**9
"""Age of a file, in nanoseconds, from which a change to it shows in its times, however coarse they are."""
_READERS = 4  # threads: one alone copies out of the page cache at a quarter of their rate
_ALONE_BYTES = 4 << 20  # size up to which one thread reads a file
_recipes: WeakValueDictionary[bytes, Recipe] = WeakValueDictionary()
"""Recipes in use, by the digest of everything that they were made from: equal files are parsed once and share one."""


def read_adapter(
    path: str | os.PathLike[str],
    shape: ModelShape,
    dtype: torch.dtype,
    *,
    max_rank: int,
    root: Path | None = None,
    take: TakePieces | None = None,
    stamp: Stamp | None = None,
) -> LoadedAdapter:
    """Read and check the PEFT folder at `path`.

    Args:
        path: The folder; with `root` the plain name of a folder in it, and no link is followed.
        shape: The model's sizes.
        dtype: Dtype of the device's arithmetic.
        max_rank: The largest rank that the engine accepts.
        root: The only folder that may be read from.
        take: Allocates the memory in which low-rank updates stay as stored. None: they are unpacked to a block.
        stamp: Stamp of an earlier reading with the same arguments. While it holds, nothing is checked or hashed again.

    Raises:
        AdapterRejected: The files are missing, damaged, hostile or made for another model.
    """
    with open_adapter(path, root) as opened:
        if stamp is not None and stamp.recipe is not None and stamp.files == _identities(opened):
            stored = _read_stored(opened[1], stamp.recipe, dtype, take)
            if stamp.files == _identities(opened):  # still, so this is what was checked
                return replace(_loaded(stored, stamp.digest, unpacked=take is None), stamp=stamp)
        found = _identities(opened)
        loaded, recipe = _read_unknown(opened, shape, dtype, max_rank, take)
        now = _identities(opened)
        if [each[:-1] for each in found] != [each[:-1] for each in now]:  # a name alone may come or go
            raise ModelRejected("the files changed while they were read", field="path", limit="files that stay")
        if found == now and _is_settled(found):
            loaded = replace(loaded, stamp=Stamp(found, loaded.digest, recipe))
    return loaded


@contextmanager
def _short_of_memory() -> Iterator[None]:
    """Raise `MemoryError` for torch's error where memory, or memory that can be pinned, is short."""
    try:
        yield
    except RuntimeError as error:
        raise MemoryError(str(error)) from error


def _identities(opened: Sequence[BinaryIO]) -> tuple[tuple[int, int, int, int, int], ...]:
    """Return device, inode, size and times of each open file, which change when it is replaced or written to."""
    known = (os.fstat(file.fileno()) for file in opened)
    return tuple((each.st_dev, each.st_ino, each.st_size, each.st_mtime_ns, each.st_ctime_ns) for each in known)


def _is_settled(files: tuple[tuple[int, int, int, int, int], ...]) -> bool:
    """Return whether no file changed so recently that another change could leave the same times."""
    return max(max(mtime, ctime) for *_, mtime, ctime in files) < time.time_ns() - _SETTLED_NS


def _read_unknown(
    opened: Sequence[BinaryIO], shape: ModelShape, dtype: torch.dtype, max_rank: int, take: TakePieces | None
) -> tuple[LoadedAdapter, Recipe | None]:
    """Read and check the contents of the two files; return the adapter, and the recipe of any low-rank updates."""
    weights_file = opened[1]
    config_bytes, header = described(opened)
    size = os.fstat(weights_file.fileno()).st_size
    asked = repr((shape, max_rank, take is None, size, len(header))).encode()
    made_of = blake2b(asked + header + config_bytes).digest()
    recipe = _recipes.get(made_of)
    if recipe is None:
        config, entries = parse_description(config_bytes, header, size, max_rank=max_rank)
        if config.kind != "lora":
            return _read_virtual(weights_file, entries, config, shape, dtype), None
        recipe = _recipes.setdefault(made_of, recipe_of(entries, config, shape, in_pieces=take is not None))
    stored = _read_stored(weights_file, recipe, dtype, take)
    _check_finite(stored)
    return _loaded(stored, stored.digest("lora"), unpacked=take is None), recipe


def _read_virtual(
    file: BinaryIO, entries: dict[str, TensorEntry], config: PeftConfig, shape: ModelShape, dtype: torch.dtype
) -> LoadedAdapter:
    if not shape.takes_virtual:
        refuse_file(CONFIG_FILE, "peft_type", config.kind, "lora: this model takes no virtual tokens")
    count, kv_size = config.virtual_tokens, shape.num_kv_heads * shape.head_dim
    width = shape.hidden_size if config.kind == "prompt" else shape.num_layers * 2 * kv_size
    if set(entries) != {PROMPT_KEY} or entries[PROMPT_KEY].shape != (count, width):
        found = {key: entry.shape for key, entry in entries.items()}
        refuse_file(WEIGHTS_FILE, "what it holds", found, f"{PROMPT_KEY} of {(count, width)}")
    scale = shape.virtual_scale if config.kind == "prompt" else 1.0
    recipe = virtual_recipe(entries[PROMPT_KEY], shape, scale)
    stored = _read_stored(file, recipe, dtype, None)
    _check_finite(stored)
    given_PX, digest = stored.unpack().view(count, width), stored.digest(config.kind)
    block = torch.empty(0, dtype=dtype)
    if config.kind == "prompt":
        return LoadedAdapter(recipe.layout, block, given_PX, None, digest)
    given = given_PX.view(count, shape.num_layers, 2 * shape.num_kv_heads, shape.head_dim)
    keys, values = given.transpose(0, 1).tensor_split(2, 2)
    return LoadedAdapter(recipe.layout, block, None, torch.cat((ordered(keys, shape), values), 2), digest)


def _loaded(stored: Stored, digest: bytes, *, unpacked: bool) -> LoadedAdapter:
    with _short_of_memory():
        block = stored.unpack() if unpacked else stored
        if isinstance(block, Tensor):
            order_heads(block, stored.recipe.layout)
    return LoadedAdapter(stored.recipe.layout, block, None, None, digest)


def _check_finite(stored: Stored) -> None:
    wrong = stored.first_not_finite()
    if wrong is not None:
        limit = "finite values, also once scaled, in the model's dtype"
        refuse_file(WEIGHTS_FILE, wrong, "not finite everywhere", limit)


def _read_stored(file: BinaryIO, recipe: Recipe, dtype: torch.dtype, take: TakePieces | None) -> Stored:
    """Read the bytes that a recipe asks for, in several threads if there are many."""
    with _short_of_memory():
        pieces = [torch.empty(recipe.nbytes, dtype=torch.uint8)] if take is None else take(recipe.nbytes)
    stored = Stored(recipe, dtype, pieces)
    reads = [(offset, memory.numpy().data) for offset, memory in stored.stretches()]
    threads = 1 if recipe.nbytes <= _ALONE_BYTES else _READERS
    if threads == 1:
        _fill(file, reads)
    else:
        share = -(-len(reads) // threads)
        with ThreadPoolExecutor(threads) as readers:
            for _ in readers.map(lambda at: _fill(file, reads[at : at + share]), range(0, len(reads), share)):
                pass
    return stored


def _fill(file: BinaryIO, reads: Sequence[tuple[int, memoryview]]) -> None:
    for offset, view in reads:
        while len(view):
            count = os.preadv(file.fileno(), [view], offset)
            if not count:
                refuse_file(WEIGHTS_FILE, "the file's size", "shrinking", "what its header says")
            offset, view = offset + count, view[count:]
