"""Reads how a model embeds texts from the files that sentence-transformers keeps beside it; never reads weights.

`modules.json` lists what a text goes through: the transformer, a pooling with a config.json of its own, and perhaps a
normalisation. A pooling that is not supported counts as not given: the caller's default applies, so that the model can
still be opened.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.adapters.untrusted import parse_json, read_bytes, read_object
from headrace.engine.errors import ModelRejected
from headrace.engine.scheduling.pooling import Embedding, PoolingKind

__all__ = ["read_embedding"]

_MODULES = "modules.json"
_FILE_BYTES = 1 << 20
_KINDS: dict[str, PoolingKind] = {"lasttoken": "last", "mean": "mean", "cls": "cls"}
_FLAG = "pooling_mode_"
_FLAGS: dict[str, PoolingKind] = {
    f"{_FLAG}lasttoken": "last",
    f"{_FLAG}mean_tokens": "mean",
    f"{_FLAG}cls_token": "cls",
}


def read_embedding(path: Path, size: int, kinds: tuple[PoolingKind, ...], default: PoolingKind) -> Embedding:
    """Return how the model at `path` embeds texts.

    Args:
        path: A model folder, or a single file, which says nothing about embedding.
        size: The model's hidden size.
        kinds: Kinds of pooling that its device can do.
        default: The kind to use where no file names one.

    Raises:
        ModelRejected: A file is damaged.
    """
    if not (path / _MODULES).is_file():
        return Embedding(size, kinds, default, normalize=True)
    modules = parse_json(read_bytes(path / _MODULES, _FILE_BYTES), _MODULES)
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ModelRejected(f"{_MODULES}: must hold a list of objects", field=_MODULES)
    types = [str(module.get("type")).rpartition(".")[2] for module in modules]
    normalize = "Normalize" in types
    poolings = [module for module, name in zip(modules, types, strict=True) if name == "Pooling"]
    if len(poolings) != 1 or not {"Transformer", "Pooling", "Normalize"}.issuperset(types):
        return Embedding(size, kinds, None, normalize)
    kind = _kind(read_object(_inside(path, poolings[0].get("path")) / "config.json", _FILE_BYTES))
    return Embedding(size, kinds, kind if kind in kinds else None, normalize)


def _kind(config: Mapping[str, object]) -> PoolingKind | None:
    """Return the pooling that a config asks for; None for one that is not supported, such as several kinds at once."""
    mode = config.get("pooling_mode")
    if mode is not None:
        return _KINDS.get(mode) if isinstance(mode, str) else None
    wanted = [name for name, value in config.items() if name.startswith(_FLAG) and value is True]
    return _FLAGS.get(wanted[0]) if len(wanted) == 1 else None


def _inside(folder: Path, name: Any) -> Path:
    """Return a folder within the model's own."""
    if not isinstance(name, str) or not name or set(name) & {"/", "\\", "\0"} or name.startswith("."):
        raise ModelRejected(f"{_MODULES}: the path of the pooling is {name!r}; wanted: a plain name", field=_MODULES)
    return folder / name
