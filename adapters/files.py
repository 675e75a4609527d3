"""`read_adapter`: a PEFT folder as a `LoadedAdapter`, every rejection typed; never runs a pickle, keeps no file open.

Everything that a stranger may have written is checked before memory is taken for it: names, sizes, shapes against the
model's, then that each value is finite. Files that have not changed since they were read need only be read again.
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO, NoReturn

import numpy as np
import torch
from torch import Tensor

from headrace.adapters.errors import AdapterRejected, ModelRejected
from headrace.adapters.layout import EMBED, HEAD, MODULES, BlockLayout, ModelShape, module_row
from headrace.adapters.loaded import LoadedAdapter, Stamp
from headrace.adapters.peft_config import CONFIG_FILE, PeftConfig, parse_peft_config
from headrace.adapters.safetensors_header import TensorEntry, read_header, refuse_file
from headrace.adapters.untrusted import in_turns, parse_object, plain

__all__ = ["WEIGHTS_FILE", "read_adapter"]

WEIGHTS_FILE = "adapter_model.safetensors"
_CONFIG_BYTES = 1 << 20
_HEADER_BYTES = 2 << 20
_MOST_TENSORS = 10000
_PICKLE = re.compile(r".*\.(bin|pt|pth|ckpt|pkl)")
_SETTLED_NS = 2 * 10**9
"""Age of a file from which a change to it shows in its times, however coarse they are."""
_EXPONENTS = {
    torch.float32: (np.int32, 0x7F800000),
    torch.float16: (np.int16, 0x7C00),
    torch.bfloat16: (np.int16, 0x7F80),
}
"""The bits that are all set where a number is not finite."""
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_LAYER_KEY = re.compile(
    r"base_model\.model\.model\.layers\.(0|[1-9]\d{0,3})\.(?:self_attn|mlp)\.(q|k|v|o|gate|up|down)_proj"
    r"\.lora_([AB])\.weight"
)
_TOP_KEYS = {
    "base_model.model.model.embed_tokens.lora_embedding_A": ("embed", "A"),
    "base_model.model.model.embed_tokens.lora_embedding_B": ("embed", "B"),
    "base_model.model.lm_head.lora_A.weight": ("head", "A"),
    "base_model.model.lm_head.lora_B.weight": ("head", "B"),
}
# PEFT saves the frozen embeddings beside updates of them: they are the base model's own.
_FROZEN_KEYS = re.compile(r"base_model\.model\.(model\.embed_tokens|lm_head)(\.base_layer)?\.weight")
_PROMPT_KEY = "prompt_embeddings"
_Place = tuple[int, str]


def read_adapter(
    path: str | os.PathLike[str],
    shape: ModelShape,
    dtype: torch.dtype,
    *,
    max_rank: int,
    root: Path | None = None,
    pinned: bool = False,
    stamp: Stamp | None = None,
) -> LoadedAdapter:
    """Read and check the PEFT folder at `path`.

    Args:
        path: The folder; with `root` the plain name of a folder in it, and no link is followed.
        shape: The model's sizes.
        dtype: Of the device's arithmetic.
        max_rank: The largest rank that the engine takes.
        root: The only folder that may be read from.
        pinned: Put the weights into page-locked memory.
        stamp: Of an earlier reading. If it still holds, values are neither checked nor hashed again.

    Raises:
        AdapterRejected: The files are missing, damaged, hostile or made for another model.
    """
    name = os.path.basename(os.path.normpath(path))
    with _as_adapter_rejected(name), ExitStack() as files:
        folder = _open_folder(path, root)
        files.callback(os.close, folder)
        follow = root is None
        config_file = files.enter_context(_open_file(folder, CONFIG_FILE, follow))
        config_bytes = config_file.read(_CONFIG_BYTES + 1)
        if len(config_bytes) > _CONFIG_BYTES:
            refuse_file(CONFIG_FILE, "the file's size", f"over {_CONFIG_BYTES}", _CONFIG_BYTES)
        config = parse_peft_config(parse_object(config_bytes, CONFIG_FILE), max_rank=max_rank)
        weights_file = files.enter_context(_open_file(folder, WEIGHTS_FILE, follow))
        found = tuple(_identity(each) for each in (config_file, weights_file))
        digest = stamp.digest if stamp is not None and stamp.files == found else None
        weights = _Weights(weights_file, checked=digest is not None)
        if config.kind == "lora":
            layout, block = _read_updates(weights, config, shape, dtype, pinned)
            loaded = LoadedAdapter(layout, block, None, None, digest or _digest(layout, block))
        else:
            loaded = _read_virtual(weights, config, shape, dtype)
        if found == tuple(_identity(each) for each in (config_file, weights_file)) and _is_settled(found):
            loaded = replace(loaded, stamp=Stamp(found, loaded.digest))
    return loaded


@contextmanager
def _as_adapter_rejected(name: str) -> Iterator[None]:
    """Turn what reading raises into `AdapterRejected` that names the adapter."""
    try:
        yield
    except ModelRejected as error:
        raise AdapterRejected(
            f"adapter {name!r}: {error}", field=error.field, value=error.value, limit=error.limit
        ) from error
    except OSError as error:
        raise AdapterRejected(f"adapter {name!r}: cannot be read ({error.strerror})", field="path") from error
    except UnicodeEncodeError as error:
        raise AdapterRejected(f"adapter {name!r}: no folder can have that name", field="path") from error
    except MemoryError as error:
        raise AdapterRejected(f"adapter {name!r}: the host has too little memory for it", field="path") from error


@contextmanager
def _short_of_memory() -> Iterator[None]:
    """Name what torch raises where memory, or memory that can be pinned, is short."""
    try:
        yield
    except RuntimeError as error:
        raise MemoryError(str(error)) from error


def _open_folder(path: str | os.PathLike[str], root: Path | None) -> int:
    name = os.fspath(path)
    if "\0" in name or (root is not None and (name in ("", ".", "..") or "/" in name)):
        raise ModelRejected("path: must be the plain name of a folder", field="path", value=name)
    if root is None:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    top = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=top)
    finally:
        os.close(top)


def _open_file(folder: int, name: str, follow: bool) -> BinaryIO:
    """Open a regular file of an open folder; anything else is refused without waiting for it."""
    flags = os.O_RDONLY | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
    try:
        number = os.open(name, flags, dir_fd=folder)
    except FileNotFoundError:
        _refuse_missing(folder, name)
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        refuse_file(name, "the file", "not a regular one", "a regular file")
    return os.fdopen(number, "rb")


def _identity(file: BinaryIO) -> tuple[int, int, int, int, int]:
    """What changes when an open file is replaced or written to."""
    known = os.fstat(file.fileno())
    return known.st_dev, known.st_ino, known.st_size, known.st_mtime_ns, known.st_ctime_ns


def _is_settled(files: tuple[tuple[int, int, int, int, int], ...]) -> bool:
    """Whether none of the files changed so recently that another change could leave the same times."""
    return max(max(mtime, ctime) for *_, mtime, ctime in files) < time.time_ns() - _SETTLED_NS


def _refuse_missing(folder: int, name: str) -> NoReturn:
    pickles = sorted(each for each in os.listdir(folder) if _PICKLE.fullmatch(each))
    if name == WEIGHTS_FILE and pickles:
        found = plain(pickles[0])
        raise ModelRejected(
            f"{found} is a pickle, which can run code; only safetensors are read", field=found, limit=name
        )
    raise ModelRejected(f"the file {name} is missing", field=name)


class _Weights:
    """The tensors of an open safetensors file."""

    def __init__(self, file: BinaryIO, *, checked: bool) -> None:
        """`checked`: the same file was read before, and its values are known to be finite."""
        self._file, self._checked = file, checked
        self.entries = read_header(file, WEIGHTS_FILE, _HEADER_BYTES)
        if len(self.entries) > _MOST_TENSORS:
            refuse_file(WEIGHTS_FILE, "the number of tensors", len(self.entries), f"at most {_MOST_TENSORS}")

    def dtype(self, key: str) -> torch.dtype:
        """Of a tensor in the file."""
        dtype = _DTYPES.get(self.entries[key].dtype)
        if dtype is None:
            refuse_file(WEIGHTS_FILE, f"the dtype of {key}", self.entries[key].dtype, ", ".join(_DTYPES))
        return dtype

    def read(self, key: str) -> Tensor:
        """A tensor in the file's own dtype."""
        entry, dtype = self.entries[key], self.dtype(key)
        with _short_of_memory():
            raw = torch.empty(entry.nbytes, dtype=torch.uint8)
        self._fill(raw, key)
        return raw.view(dtype).view(entry.shape)

    def read_into(self, key: str, target: Tensor) -> None:
        """A tensor into contiguous memory of its shape and of any dtype."""
        if target.dtype == self.dtype(key):
            self._fill(target.view(-1).view(torch.uint8), key)
        else:
            target.copy_(self.read(key))

    def check_finite(self, key: str, values: Tensor) -> None:
        """Refuse what was made of a tensor if any value is not finite."""
        if self._checked:
            return
        kind, mask = _EXPONENTS[values.dtype]
        bits = values.view(torch.uint8).numpy().view(kind)
        if bits.size and int((bits & mask).max()) == mask:
            refuse_file(
                WEIGHTS_FILE, key, "not finite everywhere", "finite values, also once scaled, in the model's dtype"
            )

    def _fill(self, raw: Tensor, key: str) -> None:
        self._file.seek(self.entries[key].offset)
        if self._file.readinto(raw.numpy().data) != raw.numel():  # type: ignore[attr-defined]
            refuse_file(WEIGHTS_FILE, "the file's size", "shrinking", "what its header says")


@dataclass(frozen=True, slots=True)
class _Pair:
    """The two tensors of one module's update."""

    a: str
    b: str
    rank: int
    scale: float


def _read_updates(
    weights: _Weights, config: PeftConfig, shape: ModelShape, dtype: torch.dtype, pinned: bool
) -> tuple[BlockLayout, Tensor]:
    pairs = _pairs(weights.entries, config, shape)
    layout = BlockLayout.of(shape, {place: pair.rank for place, pair in pairs.items()})
    with _short_of_memory():
        block = torch.empty(layout.elements, dtype=dtype, pin_memory=pinned)
    for (layer, module), pair in pairs.items():
        row = module_row(layer, module) if layer >= 0 else {"embed": EMBED, "head": HEAD}[module]
        inputs, outputs = shape.size(module)
        padded, a, b = int(layout.ranks[row]), int(layout.a[row]), int(layout.b[row])
        lower, upper = block[a : a + padded * inputs], block[b : b + padded * outputs]
        if padded > pair.rank:
            lower.zero_()
            upper.zero_()
        if module == "embed":
            lower.view(inputs, padded)[:, : pair.rank] = weights.read(pair.a).T
        else:
            weights.read_into(pair.a, lower.view(padded, inputs)[: pair.rank])
        _transpose(weights.read(pair.b), pair.scale, upper.view(padded, outputs)[: pair.rank])
        weights.check_finite(pair.a, lower)
        weights.check_finite(pair.b, upper)
    return layout, block


def _transpose(b_OR: Tensor, scale: float, out_RO: Tensor) -> None:
    """The scaled transpose, rounded once."""
    if b_OR.dtype != out_RO.dtype:
        out_RO.copy_(b_OR.float().mul_(scale).T)
    else:
        kind = _EXPONENTS[b_OR.dtype][0]  # torch transposes slowly what it does not know by these names
        np.copyto(out_RO.view(torch.uint8).numpy().view(kind), b_OR.view(torch.uint8).numpy().view(kind).T)
        if scale != 1.0:
            out_RO.mul_(scale)


def _pairs(entries: dict[str, TensorEntry], config: PeftConfig, shape: ModelShape) -> dict[_Place, _Pair]:
    """The updates in the file, in the order of layers and modules, each with its two tensors of the right shapes."""
    keys: dict[_Place, dict[str, str]] = {}
    for key, entry in in_turns(entries.items()):
        found = _place(key, shape)
        if found is not None:
            keys.setdefault(found[0], {})[found[1]] = key
        elif not _is_frozen_base(key, entry, shape):
            refuse_file(WEIGHTS_FILE, "tensor", key, f"updates of {', '.join(MODULES)}, embed_tokens and lm_head")
    if not keys:
        refuse_file(WEIGHTS_FILE, "the number of updates", 0, "at least 1")
    pairs = {}
    for (layer, module), both in in_turns(sorted(keys.items())):
        if len(both) < 2:
            half, key = next(iter(both.items()))
            refuse_file(WEIGHTS_FILE, "tensor", key, f"one with its {'B' if half == 'A' else 'A'} beside it")
        pairs[layer, module] = _checked_pair(entries, both["A"], both["B"], config, shape.size(module))
    return pairs


def _place(key: str, shape: ModelShape) -> tuple[_Place, str] | None:
    """((layer, module), "A" or "B") of a tensor's name; None where it names no update that the model has."""
    if key in _TOP_KEYS:
        module, half = _TOP_KEYS[key]
        return (-1, module), half
    match = _LAYER_KEY.fullmatch(key)
    if match is None or int(match[1]) >= shape.num_layers:
        return None
    if ("mlp" in key) != (match[2] in ("gate", "up", "down")):
        return None
    return (int(match[1]), match[2]), match[3]


def _is_frozen_base(key: str, entry: TensorEntry, shape: ModelShape) -> bool:
    return _FROZEN_KEYS.fullmatch(key) is not None and entry.shape == (shape.vocab_size, shape.hidden_size)


def _checked_pair(entries: dict[str, TensorEntry], a: str, b: str, config: PeftConfig, size: tuple[int, int]) -> _Pair:
    inputs, outputs = size
    module = a.removeprefix("base_model.model.").removesuffix(".weight").rpartition(".")[0]
    rank = config.rank_of(module)
    for key, expected in ((a, (rank, inputs)), (b, (outputs, rank))):
        if entries[key].shape != expected:
            refuse_file(
                WEIGHTS_FILE, f"the shape of {key}", entries[key].shape, f"{expected}, as the model's sizes say"
            )
    return _Pair(a, b, rank, config.scale_of(module))


def _read_virtual(weights: _Weights, config: PeftConfig, shape: ModelShape, dtype: torch.dtype) -> LoadedAdapter:
    entries, count = weights.entries, config.virtual_tokens
    kv_size = shape.num_kv_heads * shape.head_dim
    width = shape.hidden_size if config.kind == "prompt" else shape.num_layers * 2 * kv_size
    if set(entries) != {_PROMPT_KEY} or entries[_PROMPT_KEY].shape != (count, width):
        found = {key: entry.shape for key, entry in entries.items()}
        refuse_file(WEIGHTS_FILE, "what it holds", found, f"{_PROMPT_KEY} of {(count, width)}")
    given_PX = weights.read(_PROMPT_KEY).to(dtype)
    weights.check_finite(_PROMPT_KEY, given_PX.contiguous().view(-1))
    layout = BlockLayout.of(shape, {})
    block = torch.zeros(0, dtype=dtype)
    digest = _digest(layout, given_PX, config.kind.encode())
    if config.kind == "prompt":
        return LoadedAdapter(layout, block, given_PX, None, digest)
    given = given_PX.view(count, shape.num_layers, 2 * shape.num_kv_heads, shape.head_dim)
    return LoadedAdapter(layout, block, None, given.transpose(0, 1).contiguous(), digest)


def _digest(layout: BlockLayout, values: Tensor, kind: bytes = b"lora") -> bytes:
    """32 bytes that stand for an adapter's content in the model's dtype."""
    digest = blake2b(kind, digest_size=32)
    digest.update(repr(values.dtype).encode())
    digest.update(layout.ranks.tobytes())
    digest.update(values.contiguous().view(torch.uint8).numpy().data)
    return digest.digest()
