"""`head_folder` finds the folder of the draft head that an engine's options name; never reads what is in it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NoReturn

from headrace.engine.config import EngineConfig
from headrace.engine.errors import InvalidParams
from headrace.engine.life.model_files import ModelFiles, find_folder
from headrace.engine.model.checkpoint.weights import Source
from headrace.engine.model.drafting.draft_model import refused_as_draft
from headrace.engine.model.network.foreign import ForeignModel
from headrace.engine.model.spec import DecoderSpec
from headrace.engine.speculation import Eagle, Medusa, Mtp

__all__ = ["head_folder", "refuse_head"]


def head_folder(config: EngineConfig, spec: DecoderSpec, source: Source | ForeignModel) -> ModelFiles | None:
    """Return folder and name of the head that `config` names; None if it names none.

    That is a folder, a hub id, which is looked up as a model's is, or for `Mtp` the folder of the model's weights. The
    hub may give another revision the next time: opening an engine looks a head up once.

    Args:
        config: Options of the engine.
        spec: The model that is to be drafted for.
        source: Its weights.

    Raises:
        ModelRejected: It is a hub id that is not on this machine, and that may not be fetched or cannot be, or whose
            repository holds no safetensors.
        InvalidParams: The model can have no head.
    """
    asked = config.speculation
    if not isinstance(asked, Eagle | Medusa | Mtp):
        return None
    if isinstance(source, ForeignModel) or not spec.has_head:
        refuse_head(config, "a model without native code, or without an output head, has no draft head")
    if isinstance(asked, Mtp):
        if not isinstance(source, str | os.PathLike) or source == "random" or not Path(source).is_dir():
            refuse_head(config, "only a model folder with weights holds a module that drafts")
        return ModelFiles(Path(source), Path(source).name)
    own = config.model_copy(update={"model": os.path.expanduser(os.fspath(asked.path)), "file": None})
    with refused_as_draft(str(asked.path), "draft head"):
        return find_folder(own)


def refuse_head(config: EngineConfig, why: str) -> NoReturn:
    """Raise `InvalidParams` about the head that `config` names."""
    raise InvalidParams(
        f"speculation: {why}, got {config.speculation}", field="speculation", value=config.speculation, limit=None
    )
