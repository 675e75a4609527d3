"""`CpuHeadSource`: the memory that a draft head takes on a CPU, and how it is loaded. Next to read: heads.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from headrace.engine.model.cpu.heads import CpuDraftHead
from headrace.engine.model.cpu.kept import kept_head_parts
from headrace.engine.model.cpu.operations import cpu_ops
from headrace.engine.model.cpu.rows import CpuRows
from headrace.engine.model.cpu.runner import CpuDecoder
from headrace.engine.model.drafting.heads.loading import describe_head
from headrace.engine.model.drafting.heads.source import HeadSource
from headrace.engine.model.drafting.heads.spec import MedusaSpec
from headrace.engine.model.network.decoder import Decoder
from headrace.engine.model.shared.kv_layout import kv_layout
from headrace.engine.model.spec import MixerSpec
from headrace.engine.stats import WeightPart
from headrace.ops.cpu.block import CpuOps
from headrace.ops.cpu.native.library import Context

__all__ = ["CpuHeadSource"]


@dataclass(frozen=True, slots=True)
class CpuHeadSource:
    """A draft head that fits the model, with the operations that compute it."""

    source: HeadSource
    ops: Mapping[MixerSpec, CpuOps]
    """Operations of the head's layer, or those of the target for a head without one."""
    keep_packed: bool
    """Whether weights of products stay in the formats in which the checkpoint stores them."""

    @classmethod
    def of(
        cls,
        source: HeadSource,
        target: Mapping[MixerSpec, CpuOps],
        *,
        max_positions: int,
        context: Context | None,
        keep_packed: bool,
    ) -> CpuHeadSource:
        """Make the operations of a head's layer; arguments are those of `cpu_ops`.

        Args:
            source: The head.
            target: The operations of the model.
            max_positions: Number of positions for which rotations are made.
            context: Threads and memory of the operations in C; None where these do not run the model.
            keep_packed: Whether weights of products stay in the formats in which the checkpoint stores them.

        Raises:
            ModelRejected: Nothing computes the head's layer.
        """
        if isinstance(source.spec, MedusaSpec):
            return cls(source, target, keep_packed)
        first = next(iter(target.values()))
        size, dtype = first.page_size, first.dtype
        block = source.spec.block
        ops = cpu_ops(block, page_size=size, max_positions=max_positions, dtype=dtype, context=context)
        return cls(source, ops, keep_packed)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights that are not kept as they are stored, and of keys and values."""
        return next(iter(self.ops.values())).dtype

    @property
    def page_bytes(self) -> int:
        """The memory that the head takes of each page, in bytes."""
        spec = self.source.spec
        return 0 if isinstance(spec, MedusaSpec) else kv_layout(spec.block, self.ops).page_bytes(self.dtype)

    def parts(self) -> tuple[WeightPart, ...]:
        """Return the formats and bytes of the head's weights as they are kept; reads headers alone.

        Raises:
            ModelRejected: The head's files cannot be used any more.
        """
        with self.source.opened() as found:
            weights = describe_head(
                found,
                self.source.target,
                dtype=self.dtype,
                keep_packed=self.keep_packed,
                quantize=self.source.asked.quantize,
            )
        return kept_head_parts(weights, next(iter(self.ops.values())))

    def load(self, target: CpuDecoder, rows: CpuRows, pages: int) -> CpuDraftHead:
        """Read the head, as it is done at opening and after a sleep without weights."""
        assert isinstance(target, Decoder)
        with self.source.opened() as found:
            return CpuDraftHead(
                found,
                target,
                self.ops,
                rows,
                pages=pages,
                dtype=self.dtype,
                keep_packed=self.keep_packed,
                quantize=self.source.asked.quantize,
            )
