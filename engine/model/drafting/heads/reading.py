"""Opens the checkpoint of a draft head: tells its format by config.json and names of tensors, and checks all of it.

Everything that makes a head unfit for its target is an error here, before any memory is taken for weights. Next to
read: loading.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

from torch import Tensor

from headrace.adapters.untrusted import refuse
from headrace.engine.errors import ModelRejected
from headrace.engine.model.checkpoint.inventory import Inventory
from headrace.engine.model.checkpoint.plan import Holding
from headrace.engine.model.checkpoint.safetensors import INDEX_FILE, SINGLE_FILE, SafetensorsFolder, pickles_in
from headrace.engine.model.drafting.heads.eagle import read_eagle, read_eagle3
from headrace.engine.model.drafting.heads.medusa_names import is_medusa, read_medusa
from headrace.engine.model.drafting.heads.mtp import read_mtp
from headrace.engine.model.drafting.heads.spec import HeadSpec, RecurrentSpec
from headrace.engine.model.drafting.heads.speculators import is_speculators, read_speculators
from headrace.engine.model.drafting.heads.vocabulary import read_map
from headrace.engine.model.families.registry import read_hf_config
from headrace.engine.model.spec import DecoderSpec

__all__ = ["HeadFiles", "open_head", "open_mtp"]

_MEDUSA_FILE: Final = "medusa_lm_head.safetensors"
_FORMATS: Final = "EAGLE, EAGLE-3, speculators (eagle3), Medusa"


@dataclass(frozen=True, slots=True)
class HeadFiles:
    """The open checkpoint of a head that fits its target."""

    spec: HeadSpec
    inventory: Inventory
    ids_D: Tensor | None
    """Target's id of each token that the head can guess, int64; None if they are the target's own ids."""


@contextmanager
def open_head(folder: Path, target: DecoderSpec, name: str | None = None) -> Iterator[HeadFiles]:
    """Yield the checked checkpoint of a head of EAGLE, EAGLE-3 (also in the speculators format) or Medusa.

    Args:
        folder: The folder of the head: a config.json, and weights in safetensors.
        target: The model that the head is to draft for.
        name: Name of the head for messages; None for that of the folder.

    Raises:
        ModelRejected: The folder holds no such head, one in pickles, one of another target, hidden size or vocabulary,
            or tensors are missing, left over or of other shapes.
    """
    single = next((file for file in (SINGLE_FILE, _MEDUSA_FILE) if (folder / file).exists()), SINGLE_FILE)
    if not (folder / single).exists() and not (folder / INDEX_FILE).exists():
        _refuse_folder(folder, name or folder.name)
    with SafetensorsFolder(folder, single) as files:
        spec = _read(read_hf_config(folder), files.shapes, target, name or folder.name)
        yield _checked(files, spec)


@contextmanager
def open_mtp(folder: Path, target: DecoderSpec) -> Iterator[HeadFiles]:
    """Yield the module for multi-token prediction in the checkpoint of a model, checked.

    Args:
        folder: The folder of the model.
        target: The model.

    Raises:
        ModelRejected: The checkpoint holds no such module, or a tensor is missing or of another shape.
    """
    with SafetensorsFolder(folder) as files:
        yield _checked(files, read_mtp(files.shapes, target, folder.name))


def _checked(files: SafetensorsFolder, spec: HeadSpec) -> HeadFiles:
    inventory = Inventory(files, Holding(spec.names, spec.all_parameters()))
    inventory.check_numbers()
    return HeadFiles(spec, inventory, read_map(files, spec) if isinstance(spec, RecurrentSpec) else None)


def _read(
    config: Mapping[str, object], shapes: Mapping[str, tuple[int, ...]], target: DecoderSpec, origin: str
) -> HeadSpec:
    """Return the spec of a head, in whichever format it is."""
    if is_speculators(config):
        return read_speculators(config, shapes, target, origin)
    if is_medusa(shapes):
        return read_medusa(shapes, target, origin)
    if any(name.endswith(".hidden_norm.weight") for name in shapes):
        nested = isinstance(config.get("eagle_config"), Mapping)
        return read_eagle3(config, shapes, target, origin, "outputs" if nested else "inputs")
    if "fc.weight" in shapes:
        return read_eagle(config, shapes, target, origin)
    refuse(origin, "the format", config.get("architectures"), f"a draft head in a format of {_FORMATS}")


def _refuse_folder(folder: Path, name: str) -> NoReturn:
    """Refuse a folder without safetensors, and say how pickles become such."""
    if not folder.is_dir():
        raise ModelRejected(f"speculation.path: {folder}: no such folder", field="speculation.path", value=str(folder))
    pickles = pickles_in(folder)
    if pickles:
        saved = _MEDUSA_FILE if pickles[0].startswith("medusa") else SINGLE_FILE
        raise ModelRejected(
            f"{name}: {pickles[0]} is a pickle, which can run code; draft heads are read from safetensors: "
            f"safetensors.torch.save_file(torch.load({pickles[0]!r}, weights_only=True), {saved!r})",
            field=pickles[0],
            limit=saved,
        )
    message = f"{name}: neither {SINGLE_FILE}, {INDEX_FILE} nor {_MEDUSA_FILE} is there"
    raise ModelRejected(message, field=SINGLE_FILE)
