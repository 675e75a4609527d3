"""`rereading`: opens a model's files once more, and refuses them if they describe another model.

A device that slept without its weights reads them again, and the tokenizer, the sizes and the kernels of the model that
was opened stay in use. Files that differ in these would give tokens with another meaning.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from hashlib import blake2b
from pathlib import Path

from headrace.adapters.untrusted import read_bytes
from headrace.engine.errors import ModelRejected
from headrace.engine.model.checkpoint.gguf import GgufFile
from headrace.engine.model.checkpoint.inventory import Inventory
from headrace.engine.model.checkpoint.safetensors import SafetensorsFolder
from headrace.engine.model.checkpoint.weights import Source
from headrace.engine.model.families.registry import QUANTISATION_FILE
from headrace.engine.tokens.folder import TOKENIZER_FILES

__all__ = ["rereading"]


def rereading(source: Source) -> Callable[[], Source]:
    """Return a function that opens the same model's weights again once `source` has been closed.

    The function raises `ModelRejected` where a file, or a key of a GGUF file's metadata, has changed since this call.

    Raises:
        ModelRejected: A file cannot be read.
    """
    if isinstance(source, str) and source == "random":
        return lambda: source
    files = source.files if isinstance(source, Inventory) else source
    path = files.path if isinstance(files, GgufFile | SafetensorsFolder) else Path(files)
    before = _described(files) if isinstance(files, GgufFile) else _digests(path)

    def again() -> Source:
        now = _digests(path)
        for name in sorted(before.keys() | now.keys()):
            if before.get(name) != now.get(name):
                raise ModelRejected(
                    f"{path.name}: {name} is not what it was when the model was opened; open the model anew",
                    field=name,
                    limit="files that describe the same model",
                )
        return path

    return again


def _digests(path: Path) -> Mapping[str, bytes]:
    """Return a digest of each file of a folder, or key of a GGUF file, that decides what the weights and ids mean."""
    if path.suffix == ".gguf":
        with GgufFile(path) as file:
            return _described(file)
    limits = {**TOKENIZER_FILES, QUANTISATION_FILE: TOKENIZER_FILES["config.json"]}
    return {
        name: blake2b(read_bytes(path / name, limit)).digest()
        for name, limit in limits.items()
        if (path / name).exists()
    }


def _described(file: GgufFile) -> Mapping[str, bytes]:
    """Return a digest for each key of an open GGUF file, without those that only describe the file itself."""
    said = {key: value for key, value in file.metadata.items() if not key.startswith("general.")}
    said["the model's shape"] = file.spec()
    return {key: blake2b(repr(value).encode(errors="backslashreplace")).digest() for key, value in said.items()}
