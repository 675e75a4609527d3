"""`ModelOpening`: the draft model of an engine on a GPU, from its files to what drafts for a runner; keeps no row.

Next to read: model.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from headrace.engine.config import EngineConfig
from headrace.engine.errors import InvalidParams
from headrace.engine.life.progress import LoggedProgress, weights_read
from headrace.engine.model.checkpoint.parameters import Empty
from headrace.engine.model.checkpoint.reread import rereading
from headrace.engine.model.checkpoint.weight_parts import stored_parts
from headrace.engine.model.checkpoint.weights import DecoderWeights, Source, load_weights
from headrace.engine.model.cuda.drafting.drafts import OpenDrafts
from headrace.engine.model.cuda.drafting.model import CudaDraftModel, ModelDrafter
from headrace.engine.model.cuda.operations import CudaDecoder, cuda_ops, kinds_of
from headrace.engine.model.drafting.draft_model import DraftSource, refused_as_draft
from headrace.engine.model.latent import has_latents
from headrace.engine.model.network.decoder import Decoder
from headrace.engine.model.shared.device import within_context
from headrace.engine.model.shared.gpu_sizes import DTYPE, gpu_limits, kv_dtype
from headrace.engine.model.shared.kv_layout import page_shapes
from headrace.engine.model.spec import DecoderSpec, MixerSpec
from headrace.engine.stats import WeightPart
from headrace.ops.cuda.block import CudaOps
from headrace.ops.cuda.codes.packing import in_codes
from headrace.ops.cuda.kernels import Kernels

__all__ = ["ModelOpening", "OpenModel", "check_draft_model"]


class OpenModel:
    """A draft model on a GPU that knows how it makes drafts."""

    def __init__(self, model: CudaDraftModel) -> None:
        """Draft by `model`."""
        self._model = model

    def drafts(self, config: EngineConfig) -> OpenDrafts:
        """Return how the model makes drafts in an engine of `config`."""
        assert config.speculation is not None
        model = self._model
        pages = page_shapes(model.decoder.spec, model.ops)
        return OpenDrafts(partial(ModelDrafter, model), config.speculation.k, pages)


class ModelOpening:
    """The draft model that an engine's options name; it has weights once `load` was called."""

    def __init__(self, config: EngineConfig, target: DecoderSpec, draft: DraftSource) -> None:
        """Read nothing yet.

        Args:
            config: Options of the engine.
            target: The model that is drafted for.
            draft: The draft model, whose files stay open until the first call of `load` ends.

        Raises:
            InvalidParams: One of the two models keeps latent vectors.
        """
        check_draft_model(config, target, draft.spec)
        self._draft, self._engine = draft, gpu_limits(config, target).context
        self._context = min(self._engine, draft.spec.max_context)
        self._spec, self._vocab_size = within_context(draft.spec, self._context), target.vocab_size
        self._weights: DecoderWeights | None = None
        self._stored: tuple[WeightPart, ...] = ()
        self._again: Callable[[], Source] | None = None

    def load(self, device: torch.device, empty: Empty, *, blank: bool = False) -> None:
        """Read the weights into tensors from `empty`; later calls read them once more.

        Raises:
            ModelRejected: The weights cannot be used, or the files have changed.
        """
        config = self._draft.config
        with refused_as_draft(config.model):
            source: Source = self._draft.source if self._again is None else self._again()
            self._again = self._again or rereading(source)
            self._weights = load_weights(
                source, self._spec, dtype=DTYPE, device=device, seed=config.seed,
                progress=LoggedProgress(weights_read), empty=empty, layout=lambda weight: in_codes(weight, DTYPE),
                quantize=config.quantize, blank=blank,
            )  # fmt: skip

    def parts(self, target: Sequence[WeightPart]) -> tuple[WeightPart, ...]:
        """Return formats and bytes of the weights, which products take as they are loaded, beside the target's."""
        return self._draft.parts_beside(target, self._stored)

    def made(self, decoder: CudaDecoder, target: Mapping[MixerSpec, CudaOps], kernels: Kernels) -> OpenModel:
        """Return the model, whose weights are packed.

        Args:
            decoder: The model that it drafts for.
            target: The operations of the model.
            kernels: The kernels to choose among.

        Raises:
            ModelRejected: Nothing computes a layer.
        """
        weights, first = self._weights, next(iter(target.values()))
        assert weights is not None
        with refused_as_draft(self._draft.config.model):
            ops = cuda_ops(
                self._spec, page_size=first.shape.page_size, max_positions=self._context, dtype=DTYPE,
                kv_dtype=kv_dtype(self._draft.config), kv_scales=weights.kv_scales, device=first.device,
                arch=first.arch, kernels=kernels, codes=kinds_of(weights),
            )  # fmt: skip
        self._stored = stored_parts(weights)
        small: CudaDecoder = Decoder(self._spec, weights, ops)
        self._weights = None
        return OpenModel(
            CudaDraftModel(
                small, ops, target, self._context, self._context >= self._engine, self._draft.tokens,
                self._draft.tokens >= self._vocab_size, kernels,
            )
        )  # fmt: skip


def check_draft_model(config: EngineConfig, target: DecoderSpec, draft: DecoderSpec) -> None:
    """Refuse what a GPU does not compute.

    Raises:
        InvalidParams: The draft model or its target keeps latent vectors.
    """
    if has_latents(target) or has_latents(draft):
        why = "on a GPU, a model that keeps latent vectors neither has a draft model nor is one"
        asked = config.speculation
        raise InvalidParams(f"speculation: {why}, got {asked}", field="speculation", value=asked, limit=None)
