"""`CudaDecoder`: the decoder with the types of CUDA's operations."""

from __future__ import annotations

from typing import TypeAlias

from torch import Tensor

from headrace.engine.model.network.decoder import Decoder
from headrace.ops.cuda.block import CudaProduct, DecodeStep, PrefillStep

__all__ = ["CudaDecoder"]

CudaDecoder: TypeAlias = Decoder[CudaProduct, DecodeStep | PrefillStep, Tensor]
