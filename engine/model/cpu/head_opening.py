"""`HeadSource`: the draft head that an engine's options name, checked before anything is loaded, and how to load it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch

from headrace.engine.config import EngineConfig
from headrace.engine.errors import InvalidParams
from headrace.engine.model.checkpoint.weights import Source
from headrace.engine.model.cpu.heads import CpuDraftHead, LoadHead
from headrace.engine.model.cpu.operations import cpu_ops, kv_layout
from headrace.engine.model.cpu.rows import CpuRows
from headrace.engine.model.cpu.runner import CpuDecoder
from headrace.engine.model.drafting.heads.reading import HeadFiles, open_head, open_mtp
from headrace.engine.model.drafting.heads.spec import HeadSpec, MedusaSpec
from headrace.engine.model.network.decoder import Decoder
from headrace.engine.model.network.foreign import ForeignModel
from headrace.engine.model.spec import DecoderSpec, MixerSpec
from headrace.engine.speculation import Eagle, Medusa, Mtp
from headrace.ops.cpu.block import CpuOps
from headrace.ops.cpu.native.library import Context

__all__ = ["HeadSource", "head_source"]


@dataclass(frozen=True, slots=True)
class HeadSource:
    """A draft head that fits the model."""

    asked: Eagle | Medusa | Mtp
    target: DecoderSpec
    folder: Path | None
    """Folder of the model; None for a GGUF file."""
    spec: HeadSpec

    def ops(
        self, target: Mapping[MixerSpec, CpuOps], *, max_positions: int, dtype: torch.dtype, context: Context | None
    ) -> Mapping[MixerSpec, CpuOps]:
        """Return the operations of the head's layer, or those of the target for a head without one."""
        if isinstance(self.spec, MedusaSpec):
            return target
        size = next(iter(target.values())).page_size
        return cpu_ops(self.spec.block, page_size=size, max_positions=max_positions, dtype=dtype, context=context)

    def page_bytes(self, ops: Mapping[MixerSpec, CpuOps]) -> int:
        """Return the memory that the head takes of each page, in bytes, with what `ops` returned."""
        if isinstance(self.spec, MedusaSpec):
            return 0
        return kv_layout(self.spec.block, ops).page_bytes(next(iter(ops.values())).dtype)

    def loader(self, ops: Mapping[MixerSpec, CpuOps], *, dtype: torch.dtype, keep_packed: bool) -> LoadHead:
        """Return the function that reads the head, now and after a sleep without weights."""

        def load(target: CpuDecoder, rows: CpuRows, pages: int) -> CpuDraftHead:
            assert isinstance(target, Decoder)
            with _opened(self.asked, self.target, self.folder) as found:
                return CpuDraftHead(found, target, ops, rows, pages=pages, dtype=dtype, keep_packed=keep_packed)

        return load


def head_source(config: EngineConfig, spec: DecoderSpec, source: Source | ForeignModel) -> HeadSource | None:
    """Return the draft head that `config` names; None if it names none.

    Raises:
        ModelRejected: The head's files cannot be used, or the head was made for another model.
        InvalidParams: The head drafts fewer tokens than are asked for, or the model can have no head.
    """
    asked = config.speculation
    if not isinstance(asked, Eagle | Medusa | Mtp):
        return None
    if isinstance(source, ForeignModel) or not spec.has_head:
        _refuse(config, "a model without native code, or without an output head, has no draft head")
    folder = Path(source) if isinstance(source, str | os.PathLike) and source != "random" else None
    if folder is not None and not folder.is_dir():
        folder = None
    if folder is None and isinstance(asked, Mtp):
        _refuse(config, "only a model folder with weights holds a module that drafts")
    with _opened(asked, spec, folder) as found:
        head = found.spec
    if isinstance(head, MedusaSpec) != isinstance(asked, Medusa):
        other = "Medusa" if isinstance(head, MedusaSpec) else "Eagle"
        _refuse(config, f"{head.origin} holds a head for {other}")
    if asked.k > head.most_drafts:
        raise InvalidParams(
            f"speculation.k: {head.origin} drafts at most {head.most_drafts} tokens in a row, got {asked.k}",
            field="speculation.k",
            value=asked.k,
            limit=head.most_drafts,
        )
    return HeadSource(asked, spec, folder, head)


@contextmanager
def _opened(asked: Eagle | Medusa | Mtp, target: DecoderSpec, folder: Path | None) -> Iterator[HeadFiles]:
    if isinstance(asked, Mtp):
        assert folder is not None
        opened = open_mtp(folder, target)
    else:
        opened = open_head(Path(asked.path).expanduser(), target, folder)
    with opened as found:
        yield found


def _refuse(config: EngineConfig, why: str) -> NoReturn:
    raise InvalidParams(
        f"speculation: {why}, got {config.speculation}", field="speculation", value=config.speculation, limit=None
    )
