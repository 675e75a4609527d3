"""`CudaHead`: a trained draft head on a GPU, from its checked files to what drafts for a runner; keeps no row.

Next to read: heads.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self

import torch

from headrace.engine.config import EngineConfig
from headrace.engine.errors import InvalidParams
from headrace.engine.life.model_files import ModelFiles
from headrace.engine.model.checkpoint.parameters import Empty
from headrace.engine.model.checkpoint.weight_parts import WeightSum, name_of
from headrace.engine.model.cuda.drafting.attention import HeadAttention
from headrace.engine.model.cuda.drafting.drafter import CudaDrafter, RowTable
from headrace.engine.model.cuda.drafting.drafts import OpenDrafts
from headrace.engine.model.cuda.drafting.heads import MedusaDrafter, RecurrentDrafter
from headrace.engine.model.cuda.operations import CudaDecoder, cuda_ops, kinds_in
from headrace.engine.model.drafting.heads.folder import refuse_head
from headrace.engine.model.drafting.heads.loading import MedusaWeights, RecurrentWeights, load_head
from headrace.engine.model.drafting.heads.medusa import MedusaHeads
from headrace.engine.model.drafting.heads.recurrent import RecurrentHead
from headrace.engine.model.drafting.heads.source import HeadSource, head_source
from headrace.engine.model.drafting.heads.spec import MedusaSpec
from headrace.engine.model.latent import has_latents
from headrace.engine.model.network.decoder import Decoder
from headrace.engine.model.shared.gpu_sizes import DTYPE, gpu_limits, kv_dtype
from headrace.engine.model.shared.heads import attention_kinds
from headrace.engine.model.spec import Attention, DecoderSpec, MixerSpec
from headrace.engine.stats import WeightPart
from headrace.ops.cuda.attention.steps import CudaKv, CudaStep
from headrace.ops.cuda.block import CudaOps
from headrace.ops.cuda.codes.packing import in_codes
from headrace.ops.cuda.kernels import Kernels
from headrace.ops.cuda.products.packed import CudaProduct

__all__ = ["CudaHead", "HeadOpening", "check_drafts"]


@dataclass(frozen=True, slots=True)
class CudaHead:
    """A draft head on a GPU, which may serve several runners one after the other."""

    head: RecurrentHead[CudaProduct, CudaStep, CudaKv] | MedusaHeads[CudaProduct, CudaStep, CudaKv]
    ops: Mapping[MixerSpec, CudaOps]
    """Operations of the head: of its layer, or of the target's for a head without one."""
    target: Mapping[MixerSpec, CudaOps]
    """Operations of the target."""
    kernels: Kernels

    @property
    def layers(self) -> int:
        """Number of the head's layers, whose keys and values lie in the pages behind those of the target."""
        return 1 if isinstance(self.head, RecurrentHead) else 0

    def drafts(self, config: EngineConfig) -> OpenDrafts:
        """Return how the head makes drafts in an engine of `config`."""
        assert config.speculation is not None
        shape = next(iter(self.target.values())).page_shape
        return OpenDrafts(self.drafter, config.speculation.k, [shape] * self.layers)

    def drafter(self, table: RowTable) -> CudaDrafter:
        """Return what drafts for the rows of one runner."""
        if isinstance(self.head, MedusaHeads):
            return MedusaDrafter(self.head, table, next(iter(self.ops.values())).shape.dtype)
        (ops,) = self.ops.values()
        shape = ops.shape
        kv = table.kv[-1].view(*table.kv[-1].shape[:-2], shape.kv_heads, shape.head_dim)
        attention = HeadAttention(ops, self.target, table.pages, most_lines=table.most_lines, kernels=self.kernels)
        return RecurrentDrafter(self.head, self.ops, attention, table, kv)


class HeadOpening:
    """The draft head that an engine's options name, from its files on; it has weights once `load` was called."""

    def __init__(self, config: EngineConfig, source: HeadSource) -> None:
        """Read nothing yet.

        Raises:
            InvalidParams: The head's layer keeps latent vectors, or keys and values of another size than the model's.
        """
        _check(config, source)
        self._config, self._source = config, source
        self._weights: RecurrentWeights | MedusaWeights | None = None

    @classmethod
    def of(cls, config: EngineConfig, spec: DecoderSpec, files: ModelFiles) -> Self:
        """Return the head that `config` names for a model, and whose folder was found, checked.

        Raises:
            ModelRejected: The head's files cannot be used, or the head was made for another model.
            InvalidParams: The head drafts fewer tokens than are asked for, is of another kind, or does not fit into the
                pages.
        """
        return cls(config, head_source(config, spec, files))

    def load(self, device: torch.device, empty: Empty, *, blank: bool = False) -> None:
        """Read the weights into tensors from `empty`, whether or not those of the model are `blank`.

        They are dense, or in codes where the head is to be quantised.

        Raises:
            ModelRejected: A tensor is not finite, or the head's files have changed.
        """
        method = self._source.asked.quantize
        layout = None if method is None else partial(in_codes, dtype=DTYPE)
        with self._source.opened() as found:
            self._weights = load_head(
                found, self._source.target, dtype=DTYPE, device=device, empty=empty, layout=layout, quantize=method
            )

    def parts(self, target: Sequence[WeightPart]) -> tuple[WeightPart, ...]:
        """Return formats and bytes of the weights, which products take as they are loaded, beside the target's."""
        weights, total = self._weights, WeightSum()
        assert weights is not None
        for tensor in weights.others:
            total.add("draft head", name_of(tensor), tensor.nbytes)
        for weight in (*weights.products, *weights.outputs):
            total.add("draft head", weight.format.name, weight.nbytes)
        return total.parts()

    def made(self, decoder: CudaDecoder, target: Mapping[MixerSpec, CudaOps], kernels: Kernels) -> CudaHead:
        """Return the head, whose weights are packed.

        Args:
            decoder: The model that it drafts for.
            target: The operations of the model.
            kernels: The kernels to choose among.

        Raises:
            ModelRejected: Nothing computes the head's layer.
        """
        spec, weights, first = self._source.spec, self._weights, next(iter(target.values()))
        assert weights is not None and isinstance(decoder, Decoder)  # no other model has a head
        context = gpu_limits(self._config, decoder.spec).context
        block, positions = (decoder.spec, 1) if isinstance(spec, MedusaSpec) else (spec.block, context)
        ops = cuda_ops(
            block,
            page_size=first.shape.page_size,
            max_positions=positions,
            dtype=DTYPE,
            kv_dtype=kv_dtype(self._config),
            kv_scales={},
            device=first.device,
            arch=first.arch,
            kernels=kernels,
            codes=kinds_in((*weights.products, *weights.outputs)),
        )
        if isinstance(spec, MedusaSpec):
            assert isinstance(weights, MedusaWeights)
            return CudaHead(MedusaHeads(spec, weights, next(iter(ops.values()))), ops, target, kernels)
        assert isinstance(weights, RecurrentWeights)
        return CudaHead(RecurrentHead(spec, weights, ops, decoder, DTYPE), ops, target, kernels)


def check_drafts(config: EngineConfig, kernels: Kernels) -> None:
    """Refuse drafts where a way of decoding was chosen that attends to one token of a row.

    Raises:
        InvalidParams: A GPU verifies no drafts in this way.
    """
    way = config.decode_attention
    if any(each.name == way and each.stores for each in kernels.decodes):
        raise InvalidParams(
            f"decode_attention: {way} attends to one token of a row at a time, and drafts are several; choose auto",
            field="decode_attention",
            value=way,
            limit="auto",
        )


def _check(config: EngineConfig, source: HeadSource) -> None:
    """Refuse a head whose keys and values do not fit into the pages of its target."""
    spec = source.spec
    if isinstance(spec, MedusaSpec):
        return
    if has_latents(spec.block) or has_latents(source.target):
        refuse_head(
            config, f"{spec.origin} drafts for a model that keeps latent vectors, which only a CPU computes yet"
        )
    own, wanted = (_page_elements(each) for each in (spec.block.layers[0].mixer, attention_kinds(source.target)[0]))
    if own != wanted:
        refuse_head(
            config,
            f"{spec.origin} keeps {own} elements of keys for a token and the model's layers {wanted}, which on a GPU "
            "have to be as many; a CPU takes any",
        )


def _page_elements(mixer: MixerSpec) -> int:
    assert isinstance(mixer, Attention)
    return mixer.kv_heads * mixer.head_dim
