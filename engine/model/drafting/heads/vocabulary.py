"""The vocabulary of a draft head against that of its target: maps between ids, and tokenizers that have to agree."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from headrace.engine.config import EngineConfig
from headrace.engine.life.model_files import ModelFiles
from headrace.engine.model.checkpoint.found import refuse_tensor
from headrace.engine.model.checkpoint.gguf import GgufFile
from headrace.engine.model.checkpoint.safetensors import SafetensorsFolder
from headrace.engine.model.drafting.draft_model import check_vocabularies, refused_as_draft
from headrace.engine.model.drafting.heads.spec import RecurrentSpec
from headrace.engine.speculation import Eagle, Medusa
from headrace.engine.tokens.token_table import TokenTable

__all__ = ["check_tokenizer", "read_map"]

_TOKENIZER: Final = "tokenizer.json"
_INTEGERS: Final = (torch.int64, torch.int32)


def read_map(files: SafetensorsFolder, spec: RecurrentSpec) -> Tensor | None:
    """Return the target's id of each token that a head can guess, int64 [D]; None if they are the target's own ids.

    `d2t` holds how far each id moves: target id = id + d2t[id]. `t2d`, if it is there, marks the target's ids that the
    head can guess, and has to say the same.

    Raises:
        ModelRejected: A map is missing, of another shape or dtype, or does not fit the target's vocabulary.
    """
    drafts, whole = spec.draft_vocab_size, spec.block.vocab_size
    if "d2t" not in files.shapes:
        if drafts == whole:
            return None
        refuse_tensor(files, "d2t", "missing", f"the target's ids of the {drafts} tokens that the head can guess")
    if files.shapes["d2t"] != (drafts,) or files.dtype("d2t") not in _INTEGERS:
        refuse_tensor(files, "d2t", _told(files, "d2t"), f"torch.int64 [{drafts}], as draft_vocab_size says")
    ids_D = files.rows("d2t", 0, drafts).long() + torch.arange(drafts)
    if not bool(((ids_D >= 0) & (ids_D < whole)).all()):
        wrong = int(ids_D[(ids_D < 0) | (ids_D >= whole)][0])
        refuse_tensor(files, "d2t", f"a map to the id {wrong}", f"ids from 0 to {whole - 1}, as the target has them")
    if len(ids_D.unique()) != drafts:
        refuse_tensor(files, "d2t", "a map of two tokens to one id", "another id of the target for each token")
    if "t2d" in files.shapes:
        _check_marks(files, ids_D, whole)
    return ids_D


def _check_marks(files: SafetensorsFolder, ids_D: Tensor, whole: int) -> None:
    if files.shapes["t2d"] != (whole,) or files.dtype("t2d") != torch.bool:
        refuse_tensor(files, "t2d", _told(files, "t2d"), f"torch.bool [{whole}], the vocabulary of the target")
    marked = files.rows("t2d", 0, whole).nonzero().view(-1)
    if not torch.equal(marked, ids_D.sort().values):
        refuse_tensor(files, "t2d", f"a mark at {len(marked)} ids", f"the {len(ids_D)} ids that d2t maps to")


def _told(files: SafetensorsFolder, name: str) -> str:
    return f"{files.dtype(name)} {list(files.shapes[name])}"


def check_tokenizer(
    config: EngineConfig,
    head: ModelFiles,
    table: TokenTable,
    read_table: Callable[[GgufFile | Path], TokenTable],
) -> None:
    """Refuse the draft head that `config` names if its folder has a tokenizer whose ids stand for other tokens.

    Nothing is compared where the head comes without a tokenizer.json, as most do, or is a part of the model, or where
    the model has no tokenizer.

    Args:
        config: Options of the engine.
        head: Folder and name of the head.
        table: Tokens of the model that is to be drafted for; empty if it has no tokenizer.
        read_table: Returns the tokens of a folder.

    Raises:
        ModelRejected: An id stands for two tokens, or the tokenizer of the head cannot be used.
    """
    asked = config.speculation
    if not isinstance(asked, Eagle | Medusa) or not table.pieces:
        return
    if (head.path / _TOKENIZER).is_file():
        with refused_as_draft(str(asked.path), "draft head"):
            check_vocabularies(head.name, read_table(head.path), table)
