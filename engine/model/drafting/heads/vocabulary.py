"""The vocabulary of a draft head against that of its target: maps between ids, and tokenizers that have to be equal."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final, NoReturn

import torch
from torch import Tensor

from headrace.adapters.untrusted import read_object, refuse
from headrace.engine.model.checkpoint.found import refuse_tensor
from headrace.engine.model.checkpoint.safetensors import SafetensorsFolder
from headrace.engine.model.drafting.heads.spec import RecurrentSpec

__all__ = ["check_tokenizers", "read_map"]

_TOKENIZER: Final = "tokenizer.json"
_TOKENIZER_BYTES: Final = 64 << 20
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


def check_tokenizers(head: Path, target: Path) -> None:
    """Refuse a head whose folder has a tokenizer that gives other ids to tokens than the target's.

    Nothing is compared where one of the folders has no tokenizer.json: heads mostly come without one.

    Raises:
        ModelRejected: The vocabularies differ, or a tokenizer.json is damaged.
    """
    paths = head / _TOKENIZER, target / _TOKENIZER
    if not all(path.is_file() for path in paths) or head.resolve() == target.resolve():
        return
    own, wanted = map(_vocabulary, paths)
    for token in own.keys() | wanted.keys():
        if own.get(token) != wanted.get(token):
            _refuse_token(head, token, own.get(token), wanted.get(token))


def _refuse_token(head: Path, token: str, own: int | None, wanted: int | None) -> NoReturn:
    limit = "no such token" if wanted is None else wanted
    refuse(f"{head.name}/{_TOKENIZER}", f"the id of the token {token!r}", own, f"{limit}, as in the target's tokenizer")


def _vocabulary(path: Path) -> dict[str, int]:
    """Return the ids of a tokenizer.json by their tokens."""
    data = read_object(path, _TOKENIZER_BYTES)
    model = data.get("model")
    vocabulary = model.get("vocab") if isinstance(model, Mapping) else None
    found: dict[str, int] = {}
    if isinstance(vocabulary, Mapping):
        found.update((str(token), number) for token, number in vocabulary.items() if isinstance(number, int))
    elif isinstance(vocabulary, list):  # pieces with scores, in the order of their ids
        found.update(
            (str(each[0]), number) for number, each in enumerate(vocabulary) if isinstance(each, list) and each
        )
    else:
        refuse(path.name, "model.vocab", None, "the tokens with their ids")
    added = data.get("added_tokens")
    for each in added if isinstance(added, list) else ():
        if isinstance(each, Mapping) and isinstance(each.get("id"), int):
            found[str(each.get("content"))] = int(each["id"])
    return found
