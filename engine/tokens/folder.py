"""Builds a tokenizer from the files of a model folder, once they are checked; never runs code that a model names.

`transformers` reads several files whole and takes minutes over some of them, so each file is checked before: its size,
that it is a regular file, and the tokens that it would add to the vocabulary. `transformers` is imported when a
tokenizer is built, not with this module. Next to read: limits.py.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any, Final

from headrace.adapters.untrusted import check_depth, open_file, read_bytes
from headrace.engine.errors import ModelRejected
from headrace.engine.tokens.limits import check_added, check_merging

__all__ = ["TOKENIZER_FILES", "check_folder", "folder_eos_ids", "generation_config", "load_folder"]

_SOURCES: Final = ("tokenizer.json", "tokenizer.model", "vocab.json")
_VOCABULARY_BYTES: Final = 64 << 20
_SETTINGS_BYTES: Final = 16 << 20
_TEMPLATE_BYTES: Final = 1 << 20
_MOST_TEMPLATES: Final = 64
_TEMPLATES: Final = "additional_chat_templates"
_SETTINGS: Final = "tokenizer_config.json"
_TEMPLATE: Final = "chat_template.json"
_SPECIAL: Final = "special_tokens_map.json"
_ADDED: Final = "added_tokens.json"
_VOCABULARY: Final = re.compile(r"\.(json|txt|model)$|\.model\.")
TOKENIZER_FILES: Final = {
    "tokenizer.json": _VOCABULARY_BYTES,
    "tokenizer.model": _VOCABULARY_BYTES,
    "vocab.json": _VOCABULARY_BYTES,
    "vocab.txt": _VOCABULARY_BYTES,
    "merges.txt": _SETTINGS_BYTES,
    _SETTINGS: _SETTINGS_BYTES,
    _SPECIAL: _SETTINGS_BYTES,
    _ADDED: _SETTINGS_BYTES,
    "config.json": _SETTINGS_BYTES,
    "generation_config.json": _SETTINGS_BYTES,
    "chat_template.jinja": _TEMPLATE_BYTES,
    _TEMPLATE: _TEMPLATE_BYTES,
}
"""Files that define a tokenizer, with the most bytes that each may have."""
_FOREIGN: Final = {
    "auto_map": "names code of its own, which is never run; "
    "save the tokenizer as tokenizer.json with a class of transformers",
    "fast_tokenizer_files": "names other files; only tokenizer.json is read",
    "gguf_file": "names another file; only those of the folder are read",
}


def check_folder(folder: Path) -> bool:
    """Check the files of a tokenizer, and return whether tokenizer.json is among them; the tokenizer is not opened.

    Raises:
        ModelRejected: Files are missing, too large or not regular ones, hold too many tokens, or name code.
    """
    settings = _read_json(folder / _SETTINGS)
    for field, problem in _FOREIGN.items():
        if field in settings:
            message = f"{_SETTINGS}: {field} in {folder} {problem}"
            raise ModelRejected(message, field=field, value=settings[field])
    is_whole = (folder / "tokenizer.json").is_file()
    if not is_whole and not any((folder / name).is_file() for name in _SOURCES):
        raise ModelRejected(
            f"tokenizer: {folder} holds none of {', '.join(_SOURCES)}; "
            "copy the tokenizer files of the model there (tokenizer.json is enough)",
            field="tokenizer",
            value=str(folder),
            limit=_SOURCES,
        )
    _check_files(folder, is_whole)
    _check_tokens(folder, settings, is_whole)
    return is_whole


def load_folder(folder: Path) -> Any:
    """Return the `transformers.PreTrainedTokenizerFast` of a folder in Hugging Face layout.

    Raises:
        ModelRejected: Files are missing, too large or not regular ones, hold too many tokens, or name code.
        BaseException: `transformers` or `tokenizers` cannot use the files; the caller turns it into a typed error.
    """
    is_whole = check_folder(folder)
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if is_whole:
        # The file defines everything; the class that tokenizer_config names might rebuild it by rules of its own.
        return _with_template(PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True), folder)
    backend = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if not isinstance(backend, PreTrainedTokenizerFast):
        raise ModelRejected(
            f"tokenizer: {type(backend).__name__} of {folder} cannot be read as tokenizer.json; save it in that form",
            field="tokenizer",
            value=str(folder),
        )
    return _with_template(backend, folder)


def _with_template(backend: Any, folder: Path) -> Any:
    """Return a tokenizer with the chat template that a multimodal model keeps in a file of its own, if it has none."""
    if not backend.chat_template:
        backend.chat_template = _read_json(folder / _TEMPLATE).get("chat_template")
    return backend


def generation_config(folder: Path) -> dict[str, Any]:
    """Return the object in generation_config.json; empty if a folder has no such file.

    Raises:
        ModelRejected: The file is damaged, too large or not a regular one.
    """
    return _read_json(folder / "generation_config.json")


def folder_eos_ids(folder: Path) -> list[int]:
    """Return `eos_token_id` of generation_config.json, else of config.json or of its text part.

    Raises:
        ModelRejected: A file is damaged, too large or not a regular one, or the value is neither an id nor a list of
            ids.
    """
    for name in ("generation_config.json", "config.json"):
        found = _read_json(folder / name)
        inside = found.get("text_config")
        value = found.get("eos_token_id")
        if value is None and isinstance(inside, dict):
            value = inside.get("eos_token_id")
        if value is not None:
            ids = value if isinstance(value, list) else [value]
            if not all(type(index) is int and 0 <= index < 1 << 32 for index in ids):
                raise ModelRejected(
                    f"{name}: eos_token_id must be an id or a list of ids", field="eos_token_id", value=value
                )
            return ids
    return []


def _read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file of the folder, parsed as `transformers` does; empty if the file is missing."""
    if not path.exists():
        return {}
    data = read_bytes(path, TOKENIZER_FILES[path.name])
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ModelRejected(f"{path.name}: could not be read as JSON: {error}", field=path.name) from error
    if not isinstance(value, dict):
        raise ModelRejected(f"{path.name}: must hold a JSON object", field=path.name)
    check_depth(value, path.name)
    return value


def _check_files(folder: Path, is_whole: bool) -> None:
    """Refuse files for `transformers` that are too large or not regular; `is_whole`: the folder has tokenizer.json.

    Without tokenizer.json, each class of `transformers` has file names of its own.
    """
    templates = list((folder / _TEMPLATES).glob("*.jinja"))
    if len(templates) > _MOST_TEMPLATES:
        message = f"{_TEMPLATES}: holds {len(templates)} templates; at most {_MOST_TEMPLATES} allowed"
        raise ModelRejected(message, field=_TEMPLATES, value=len(templates), limit=_MOST_TEMPLATES)
    limits = TOKENIZER_FILES | {f"{_TEMPLATES}/{path.name}": _TEMPLATE_BYTES for path in templates}
    if not is_whole:
        named = (path.name for path in folder.iterdir() if _VOCABULARY.search(path.name))
        limits = dict.fromkeys(named, _VOCABULARY_BYTES) | limits
    for name, limit in limits.items():
        if (folder / name).exists():
            with open_file(folder / name) as file:
                size = os.fstat(file.fileno()).st_size
            if size > limit:
                message = f"{name}: longer than the {limit} bytes allowed"
                raise ModelRejected(message, field=name, value=size, limit=limit)


def _check_tokens(folder: Path, settings: dict[str, Any], is_whole: bool) -> None:
    """Refuse more tokens than `transformers` can add in time, in any file that may list them."""
    tokens = _entries(_read_json(folder / "tokenizer.json").get("added_tokens"))
    special = [token for token in tokens if isinstance(token, dict) and token.get("special")]
    check_added(len(tokens), len(special), "tokenizer.json")
    check_added(len(_read_json(folder / _ADDED)), 0, _ADDED)
    for name, fields in ((_SETTINGS, settings), (_SPECIAL, _read_json(folder / _SPECIAL))):
        control = [key for key in fields if key.endswith("_token")]
        for key in ("additional_special_tokens", "extra_special_tokens"):
            control += _entries(fields.get(key))
        check_added(len(_entries(fields.get("added_tokens_decoder"))), len(control), name)
    if not is_whole:
        check_merging(_read_json(folder / "vocab.json"), "vocab.json")


def _entries(value: object) -> list[Any]:
    return list(value) if isinstance(value, (list, dict)) else []
