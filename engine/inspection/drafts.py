"""`DraftTensors`: the draft model that an engine's options name, as its files describe it; reads no weights."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import Literal, NamedTuple

from headrace.engine.config import EngineConfig
from headrace.engine.model.checkpoint.inventory import Inventory
from headrace.engine.model.checkpoint.weights import open_files
from headrace.engine.model.cpu.sizing import CpuSizes, cpu_sizes
from headrace.engine.model.drafting.draft_model import (
    DraftSource,
    open_draft_model,
    quantised_as_draft,
    refused_as_draft,
)
from headrace.engine.model.spec import DecoderSpec

__all__ = ["DraftTensors"]


class DraftTensors(NamedTuple):
    """A draft model with its tensors in open files."""

    draft: DraftSource
    tensors: Inventory | Literal["random"]

    @classmethod
    def of(cls, config: EngineConfig, target: DecoderSpec, files: ExitStack) -> DraftTensors | None:
        """Return the draft model that `config` names, whose tokens are not compared; None if it names none.

        Args:
            config: Options of the engine.
            target: The model that is drafted for.
            files: What closes the files.

        Raises:
            ModelRejected: The draft model's files cannot be used, or it is no causal language model with native code.
            InvalidParams: The target generates nothing.
        """
        draft = files.enter_context(open_draft_model(config, target, None, None))
        if draft is None:
            return None
        if draft.source == "random":
            return cls(draft, "random")
        assert not isinstance(draft.source, str)
        with refused_as_draft(draft.config.model):
            return cls(draft, Inventory(open_files(draft.source, files), draft.spec))

    def beside(self, target: CpuSizes) -> CpuSizes:
        """Return the memory of both models on a CPU.

        Raises:
            InvalidParams: An option does not fit the draft model.
        """
        with quantised_as_draft():
            own = cpu_sizes(self.draft.config, self.draft.spec, self.tensors)
        parts = self.draft.parts_beside(target.weights, own.weights)
        return replace(target, page_bytes=target.page_bytes + own.page_bytes, weights=(*target.weights, *parts))
