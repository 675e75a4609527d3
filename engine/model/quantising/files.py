"""The files of a model folder beside its weights, which a quantised copy has, too; never opens a tensor."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from headrace.adapters.untrusted import open_file
from headrace.engine.errors import ModelRejected
from headrace.engine.model.families.registry import QUANTISATION_FILE, read_hf_config

__all__ = ["copy_others", "digests", "read_plain_config", "write_config"]

_CONFIG: Final = "config.json"
_WEIGHTS: Final = frozenset(
    (
        ".safetensors",
        ".bin",
        ".pt",
        ".pth",
        ".ckpt",
        ".gguf",
        ".h5",
        ".msgpack",
        ".onnx",
        ".onnx_data",
        ".npz",
        ".tflite",
    )
)
_INDEX: Final = ".index.json"
_READ_BYTES: Final = 1 << 20


def read_plain_config(model: Path) -> dict[str, object]:
    """Return config.json of a model folder that is not quantised.

    Raises:
        ModelRejected: `model` is no folder with safetensors, or its weights are quantised already.
    """
    if model.suffix == ".gguf" or (model.is_dir() and any(model.glob("*.gguf")) and not (model / _CONFIG).exists()):
        raise ModelRejected(
            f"model: {model} is a GGUF file, whose weights are quantised or packed in its own way; give the folder "
            "with the safetensors that it was made from",
            field="model",
            value=str(model),
        )
    if not model.is_dir():
        told = "is a single file; give the folder that it is in" if model.exists() else "is not there"
        raise ModelRejected(f"model: {model} {told}", field="model", value=str(model))
    config = read_hf_config(model)
    given = config.get("quantization_config")
    if given is not None:
        method = given.get("quant_method") if isinstance(given, Mapping) else None
        where = _CONFIG if not (model / QUANTISATION_FILE).exists() else QUANTISATION_FILE
        raise ModelRejected(
            f"model: {model.name} is quantised already ({where} says {method}); give the model that it was made from",
            field="quantization_config",
            value=method,
            limit="a model in bfloat16, float16 or float32",
        )
    return config


def write_config(folder: Path, config: Mapping[str, object], quantization: Mapping[str, Any]) -> None:
    """Write config.json of the quantised copy."""
    text = json.dumps({**config, "quantization_config": quantization}, indent=2, ensure_ascii=False)
    (folder / _CONFIG).write_text(text + "\n", encoding="utf-8")


def copy_others(model: Path, folder: Path) -> None:
    """Copy everything that is neither the config nor weights: tokenizer, generation config, templates, the licence.

    Subfolders that hold weights, in other formats as a rule, are left out, and so are hidden files.

    Raises:
        ModelRejected: A file is no regular one, or a link that leads out of the folder.
    """
    for path in _others(model):
        target = folder / path.relative_to(model)
        target.parent.mkdir(parents=True, exist_ok=True)
        with open_file(path) as source, target.open("wb") as out:
            shutil.copyfileobj(source, out)


def digests(model: Path) -> dict[str, str]:
    """Return what tells a model's files from others: a digest of each small one, size and time of each with weights.

    Raises:
        ModelRejected: The same errors as from `copy_others`.
    """
    found = {}
    for path in [*_others(model), model / _CONFIG]:
        digest = hashlib.blake2b()
        with open_file(path) as file:
            while data := file.read(_READ_BYTES):
                digest.update(data)
        found[str(path.relative_to(model))] = digest.hexdigest()
    for path in sorted(model.glob("*.safetensors")):
        stat = path.stat()
        found[path.name] = f"{stat.st_size} {stat.st_mtime_ns}"
    return found


def _others(folder: Path) -> list[Path]:
    """Return the files that are copied, after a check of where links among them lead."""
    found: list[Path] = []
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):
            continue
        if path.is_dir():
            if not any(map(_is_weights, path.rglob("*"))):
                found += (each for each in sorted(path.rglob("*")) if each.is_file())
        elif path.name != _CONFIG and not _is_weights(path):
            found.append(path)
    for path in found:
        _check_inside(path, folder)
    return found


def _check_inside(path: Path, model: Path) -> None:
    """Refuse a link that leads out of the folder: what a stranger's link names would be handed on with the copy."""
    folder, target = model.resolve(), path.resolve()
    kept = folder.parent.parent / "blobs"  # where the hub's cache keeps the files of a snapshot
    if not target.is_relative_to(folder) and not target.is_relative_to(kept):
        message = f"{path.name}: a link to {target}, out of the model's folder; copy the file there, or delete the link"
        raise ModelRejected(message, field=path.name, value=str(target), limit="files of the folder")


def _is_weights(path: Path) -> bool:
    return path.suffix in _WEIGHTS or path.name.endswith(_INDEX)
