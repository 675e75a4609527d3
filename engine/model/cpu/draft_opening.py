"""`CpuDraftSource`: what a draft model takes on a CPU, and how it is loaded. Next to read: draft_model.py."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace

from headrace.engine.model.checkpoint.weights import open_inventory
from headrace.engine.model.cpu.draft_model import CpuDraftModel
from headrace.engine.model.cpu.loading import loader
from headrace.engine.model.cpu.operations import cpu_ops
from headrace.engine.model.cpu.rows import CpuRows
from headrace.engine.model.cpu.runner import CpuDecoder
from headrace.engine.model.cpu.sizing import CpuSizes, cpu_dtype, cpu_sizes, runs_native
from headrace.engine.model.drafting.draft_model import DraftSource, refused_as_draft
from headrace.engine.model.shared.device import within_context
from headrace.engine.model.spec import MixerSpec
from headrace.engine.scheduling.plan import Capacity
from headrace.ops.cpu.block import CpuOps
from headrace.ops.cpu.native.library import Context

__all__ = ["CpuDraftSource"]


@dataclass(frozen=True, slots=True)
class CpuDraftSource:
    """A draft model that fits its target, with the operations that compute it."""

    draft: DraftSource
    ops: dict[MixerSpec, CpuOps]
    sizes: CpuSizes
    """Memory of the draft model alone."""
    context: int
    """Number of positions that it can read."""
    load_weights: Callable[[], CpuDecoder]
    """Reads the draft model."""

    @classmethod
    def of(
        cls, draft: DraftSource, files: ExitStack, *, max_context: int, threads: int, context: Context | None
    ) -> CpuDraftSource:
        """Open the files of a draft model, and make its operations.

        Args:
            draft: The draft model.
            files: What closes the files.
            max_context: Context of the engine in tokens.
            threads: Number of threads that one operation uses.
            context: Threads and memory of the operations in C that compute the target; None where these do not.

        Raises:
            ModelRejected: The weights cannot be used.
        """
        config = draft.config
        positions, dtype = min(max_context, draft.spec.max_context), cpu_dtype(config)
        spec = within_context(draft.spec, positions)
        own = (context or Context(threads)) if runs_native(spec) else None
        ops = cpu_ops(spec, page_size=config.page_size, max_positions=positions, dtype=dtype, context=own)
        with refused_as_draft(config.model):
            source = draft.source
            weights = source if source == "random" else files.enter_context(open_inventory(source, spec))
            sizes = cpu_sizes(config, spec, weights, ops)
        read = loader(config, spec, weights, ops, dtype, threads, "draft model")

        def load() -> CpuDecoder:
            with refused_as_draft(config.model):
                return read()

        return cls(draft, ops, sizes, positions, load)

    def beside(self, target: CpuSizes) -> CpuSizes:
        """Return the memory of both models; as `DraftSource.parts_beside` says."""
        parts = self.draft.parts_beside(target.weights, self.sizes.weights)
        return replace(target, page_bytes=target.page_bytes + self.sizes.page_bytes, weights=(*target.weights, *parts))

    def load(self, rows: CpuRows, capacity: Capacity) -> CpuDraftModel:
        """Read the draft model for the rows of a table."""
        return CpuDraftModel(
            self.load_weights, self.ops, rows, capacity, context=self.context, tokens=self.draft.tokens
        )
