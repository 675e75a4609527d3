"""Finds the files of the model that a configuration names, on this machine or at the hub; never reads their contents.

A path that cannot be opened is refused with a hint at one that can. huggingface_hub is imported to look up a hub id.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path, PurePath
from typing import Final, NamedTuple, NoReturn

from headrace.adapters.gguf_parts import first_parts, model_stem, parts_of
from headrace.engine.config import EngineConfig
from headrace.engine.errors import ModelRejected

__all__ = ["ModelFiles", "find_folder", "find_model"]

_HUB_ID: Final = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_PICKLES: Final = (".bin", ".pt", ".pth", ".ckpt")
_WEIGHTS: Final = (*_PICKLES, ".gguf", ".ggml", ".safetensors", ".onnx")
"""Endings of the names of files with weights, whether or not they are read."""
_WANTED: Final = ["*.json", "*.safetensors", "tokenizer.model", "*.jinja"]
_RUNS: Final = "a folder with config.json and safetensors, or a .gguf file"
_MOST_LISTED: Final = 20


class ModelFiles(NamedTuple):
    """Path and name of a model."""

    path: Path
    """A folder in Hugging Face layout, or a GGUF file: the first one of a model that is split."""
    name: str


def find_model(config: EngineConfig) -> ModelFiles:
    """Return the folder or the file of the model that `config` names; a hub id is fetched if that is allowed.

    Raises:
        ModelRejected: There is no such model, headrace does not run its kind, or several files match.
    """
    path, name = Path(config.model), None
    if not _is_there(path):
        path, name = _from_hub(config), config.model.rpartition("/")[2]
    if path.is_dir():
        path = _of_folder(path, config)
    elif config.file is not None and str(path) == config.model:
        _refuse("file", config.file, f"chooses in a folder or a hub repository, and {config.model} is a file")
    elif config.load_format == "random":
        path = path.parent
    elif path.suffix != ".gguf":
        _refuse("model", config.model, f"{config.model} is no .gguf file; {_RUNS} would run{_advice(path)}")
    if path.is_dir():
        return ModelFiles(path, name or path.name)
    return ModelFiles(path, model_stem(path.name))


def find_folder(config: EngineConfig) -> ModelFiles:
    """Return the path that `config.model` is, whether or not it is there; a hub id is fetched if that is allowed.

    Raises:
        ModelRejected: The hub id is not on this machine, and may not be fetched or cannot be, or what would be fetched
            holds no safetensors.
    """
    path = Path(config.model)
    if _is_there(path) or not _is_hub_id(config.model):
        return ModelFiles(path, path.name)
    return ModelFiles(_from_hub(config, as_folder=True), config.model.rpartition("/")[2])


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError as error:  # a name that is too long, or a folder that may not be searched
        raise ModelRejected(f"model: {path}: {error.strerror}", field="model", value=str(path)) from error


def _of_folder(folder: Path, config: EngineConfig) -> Path:
    """Return the folder itself or the one GGUF file in it that is meant."""
    if config.file is not None:
        return folder / _one_gguf(_ggufs(folder, config), config, str(folder))
    has_config = (folder / "config.json").exists()
    if has_config and (config.load_format == "random" or any(folder.glob("*.safetensors*"))):
        return folder
    if found := _ggufs(folder, config):
        return folder / _one_gguf(found, config, str(folder))
    if (folder / "adapter_config.json").exists() and not has_config:
        told = "is an adapter in PEFT's format: open its base model with adapter_slots=1, and load the folder with "
        _refuse("model", config.model, f"{folder} {told}engine.adapters.load(name, folder)")
    if not has_config:
        held = _held(path.name for path in folder.iterdir())
        _refuse("config.json", None, f"no such file in {folder}{held}; {_RUNS} would run")
    return folder


def _ggufs(folder: Path, config: EngineConfig) -> list[str]:
    """Return the GGUF files of a folder; those of its subfolders only if `config.file` chooses one."""
    found = folder.glob("*.gguf") if config.file is None else folder.rglob("*.gguf")
    return sorted(str(path.relative_to(folder)) for path in found if path.is_file())


def _meant(names: Iterable[str], config: EngineConfig) -> list[str]:
    """Return the GGUF files of `names` whose path or last part `config.file` matches; all of them without it."""
    pattern = (config.file or "*.gguf").casefold()
    ends = [(name, name.casefold()) for name in names if name.endswith(".gguf")]
    return [name for name, end in ends if fnmatchcase(end, pattern) or fnmatchcase(PurePath(end).name, pattern)]


def _holds_one(names: list[str], config: EngineConfig) -> bool:
    """Return whether `names` hold all files of the one GGUF model that is meant, and of no other."""
    found = first_parts(_meant(names, config))
    return len(found) == 1 and set(parts_of(found[0])) <= set(names)


def _one_gguf(names: Iterable[str], config: EngineConfig, where: str) -> str:
    """Return the one GGUF file of `names` that is meant, of a model that is split its first."""
    names = list(names)
    found = first_parts(_meant(names, config))
    if len(found) == 1:
        return found[0]
    if found:
        told = "holds several GGUF files" if config.file is None else f"has several files for {config.file}"
        _refuse("file", config.file, f'{where} {told}: choose one, such as file="{found[0]}", of {_listed(found)}')
    held = _listed([name for name in names if name.endswith(".gguf")]) or "no .gguf file"
    if config.file is None:
        _refuse("model", config.model, f"{where} holds neither safetensors nor a .gguf file{_held(names)}")
    _refuse("file", config.file, f"nothing in {where} matches {config.file}; it holds {held}")


def _from_hub(config: EngineConfig, *, as_folder: bool = False) -> Path:
    """Return the copy of a hub id in the local cache, or with `allow_download` the hub's; as a folder, never a file."""
    model = config.model
    if not _is_hub_id(model):
        _refuse("model", model, f"no such folder or file: {model}")
    from huggingface_hub import HfApi, hf_hub_download, snapshot_download

    try:
        kept = Path(snapshot_download(model, local_files_only=True))
    except Exception:  # one of many kinds: the model is not there, or the id is not valid
        kept = None
    if not config.allow_download:
        if kept is None:
            is_path = Path(model).parent.is_dir()  # true for any name without a slash
            told = "" if is_path else "; if it is a hub id, allow_download=True fetches the model"
            _refuse("model", model, f"no such folder or file: {model}{told}")
        if config.file is not None and not _meant(_ggufs(kept, config), config):
            told = f"nothing of {model} on this machine matches {config.file}; allow_download=True fetches what does"
            _refuse("file", config.file, told)
        return kept
    if kept is not None and config.file is not None and _holds_one(_ggufs(kept, config), config):
        return kept
    try:
        names = [each.rfilename for each in HfApi().model_info(model).siblings or ()]
        if as_folder:
            _check_safetensors(names, model)
        elif config.file is not None or not any(name.endswith((".safetensors", ".bin")) for name in names):
            parts = [hf_hub_download(model, each) for each in parts_of(_one_gguf(names, config, model))]
            return Path(parts[0])
        return Path(snapshot_download(model, allow_patterns=_WANTED))
    except ModelRejected:
        raise
    except Exception as error:
        if kept is not None:  # the hub cannot be reached
            return kept
        raise ModelRejected(f"model: the hub did not give {model}: {error}", field="model", value=model) from error


def _check_safetensors(names: list[str], model: str) -> None:
    """Refuse a repository that holds none."""
    if not any(name.endswith(".safetensors") for name in names):
        _refuse("model", model, f"{model} holds no safetensors{_held(names)}")


def _is_hub_id(model: str) -> bool:
    """Return whether a text may be a hub id, which looks like a relative path of one or two parts, of no file."""
    is_long = os.sep in model.partition("/")[2]
    return not is_long and _HUB_ID.fullmatch(model) is not None and not model.endswith((*_WEIGHTS, ".json"))


def _advice(path: Path) -> str:
    return "; give the folder that the file is in" if path.suffix in (".safetensors", ".json") else ""


def _held(names: Iterable[str]) -> str:
    """Return the end of a message that says which of `names` are files with weights; nothing if none is."""
    held = sorted(name for name in names if name.endswith(_WEIGHTS))
    if not held:
        return ""
    are_pickles = any(name.endswith(_PICKLES) for name in held)
    told = ", of which pickles can run code and are not read: convert them to safetensors" if are_pickles else ""
    return f"; it holds {_listed(held)}{told}"


def _listed(names: list[str]) -> str:
    more = len(names) - _MOST_LISTED
    return ", ".join(names[:_MOST_LISTED]) + (f" and {more} more" if more > 0 else "")


def _refuse(field: str, value: object, told: str) -> NoReturn:
    raise ModelRejected(f"{field}: {told}", field=field, value=value)
