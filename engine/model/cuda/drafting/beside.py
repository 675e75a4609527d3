"""`DraftOpening`: the weights that draft beside a model on a GPU: those of a head, of a draft model, or none.

Next to read: opening.py for heads, model_opening.py for draft models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Self

import torch

from headrace.engine.config import EngineConfig
from headrace.engine.model.checkpoint.parameters import Empty
from headrace.engine.model.cuda.drafting.model_opening import ModelOpening, OpenModel
from headrace.engine.model.cuda.drafting.opening import CudaHead, HeadOpening
from headrace.engine.model.cuda.operations import CudaDecoder
from headrace.engine.model.drafting.draft_model import Drafting, DraftSource
from headrace.engine.model.spec import DecoderSpec, MixerSpec
from headrace.engine.stats import WeightPart
from headrace.ops.cuda.block import CudaOps
from headrace.ops.cuda.kernels import Kernels

__all__ = ["DraftOpening"]


class DraftOpening:
    """What drafts for a model, if it has weights of its own, from its files on."""

    def __init__(self, opening: HeadOpening | ModelOpening | None) -> None:
        """Open what `opening` does; nothing for None."""
        self._opening = opening

    @classmethod
    def of(cls, config: EngineConfig, spec: DecoderSpec, draft: Drafting | None) -> Self:
        """Return what `config` names for a model, checked; `draft` is the draft model or the folder of the head.

        Raises:
            ModelRejected: A head's files cannot be used, or it was made for another model.
            InvalidParams: A head drafts fewer tokens than are asked for, or what is named does not fit the model.
        """
        if isinstance(draft, DraftSource):
            return cls(ModelOpening(config, spec, draft))
        return cls(None if draft is None else HeadOpening.of(config, spec, draft))

    def load(self, device: torch.device, empty: Empty, *, blank: bool = False) -> None:
        """Read the weights into tensors from `empty`, now or once more; draft models can have `blank` ones.

        Raises:
            ModelRejected: The weights cannot be used, or the files have changed.
        """
        if self._opening is not None:
            self._opening.load(device, empty, blank=blank)

    def made(
        self, decoder: CudaDecoder, target: Mapping[MixerSpec, CudaOps], kernels: Kernels
    ) -> CudaHead | OpenModel | None:
        """Return what drafts, for the model `decoder` with the operations `target`; None for n-grams, and for nothing.

        Raises:
            ModelRejected: Nothing computes a layer.
        """
        return None if self._opening is None else self._opening.made(decoder, target, kernels)

    def beside(self, target: Sequence[WeightPart]) -> tuple[WeightPart, ...]:
        """Return the weights `target` of the model, and those of what drafts for it."""
        return (*target, *(() if self._opening is None else self._opening.parts(target)))
