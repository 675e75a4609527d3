"""`head_folder` finds the folder of the draft head that an engine's options name; never reads what is in it."""

from __future__ import annotations

import os

from headrace.engine.config import EngineConfig
from headrace.engine.life.model_files import ModelFiles, find_folder
from headrace.engine.model.drafting.draft_model import refused_as_draft
from headrace.engine.speculation import Eagle, Medusa

__all__ = ["head_folder"]


def head_folder(config: EngineConfig, asked: Eagle | Medusa) -> ModelFiles:
    """Return folder and name of a head: a folder, or a hub id, which is looked up as a model's is.

    Raises:
        ModelRejected: It is a hub id that is not on this machine, and that may not be fetched or cannot be, or whose
            repository holds no safetensors.
    """
    own = config.model_copy(update={"model": os.path.expanduser(os.fspath(asked.path)), "file": None})
    with refused_as_draft(str(asked.path), "draft head"):
        return find_folder(own)
