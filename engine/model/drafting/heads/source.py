"""`HeadSource`: the draft head that an engine's options name, checked before anything is loaded; keeps no weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from headrace.engine.config import EngineConfig
from headrace.engine.errors import InvalidParams
from headrace.engine.life.model_files import ModelFiles
from headrace.engine.model.drafting.draft_model import quantised_as_draft
from headrace.engine.model.drafting.heads.folder import refuse_head
from headrace.engine.model.drafting.heads.loading import describe_head
from headrace.engine.model.drafting.heads.reading import HeadFiles, open_head, open_mtp
from headrace.engine.model.drafting.heads.spec import HeadSpec, MedusaSpec
from headrace.engine.model.spec import DecoderSpec
from headrace.engine.speculation import Eagle, Medusa, Mtp

__all__ = ["HeadSource", "head_source"]


@dataclass(frozen=True, slots=True)
class HeadSource:
    """A draft head that fits the model."""

    asked: Eagle | Medusa | Mtp
    target: DecoderSpec
    files: ModelFiles
    """Folder of the head, or of the model that it comes with."""
    spec: HeadSpec

    @contextmanager
    def opened(self) -> Iterator[HeadFiles]:
        """Yield the head's checked files, which are closed afterwards.

        Raises:
            ModelRejected: They cannot be used any more.
        """
        with _opened(self.asked, self.target, self.files) as found:
            yield found


def head_source(config: EngineConfig, spec: DecoderSpec, files: ModelFiles) -> HeadSource:
    """Return the draft head that `config` names, for the model `spec`; `files` is what `head_folder` found.

    Raises:
        ModelRejected: The head's files cannot be used, or the head was made for another model.
        InvalidParams: The head drafts fewer tokens than are asked for, is of another kind, or is to be quantised and is
            so already.
    """
    asked = config.speculation
    assert isinstance(asked, Eagle | Medusa | Mtp)
    with _opened(asked, spec, files) as found:
        head = found.spec
        if asked.quantize is not None:  # one that is stored so already is refused before it is read
            with quantised_as_draft():
                describe_head(found, spec, dtype=torch.bfloat16, quantize=asked.quantize)
    if isinstance(head, MedusaSpec) != isinstance(asked, Medusa):
        other = "Medusa" if isinstance(head, MedusaSpec) else "Eagle"
        refuse_head(config, f"{head.origin} holds a head for {other}")
    if asked.k > head.most_drafts:
        raise InvalidParams(
            f"speculation.k: {head.origin} drafts at most {head.most_drafts} tokens in a row, got {asked.k}",
            field="speculation.k",
            value=asked.k,
            limit=head.most_drafts,
        )
    return HeadSource(asked, spec, files, head)


@contextmanager
def _opened(asked: Eagle | Medusa | Mtp, target: DecoderSpec, files: ModelFiles) -> Iterator[HeadFiles]:
    is_part = isinstance(asked, Mtp)
    opened = open_mtp(files.path, target) if is_part else open_head(files.path, target, files.name)
    with opened as found:
        yield found
