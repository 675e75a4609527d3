"""A GPU's defaults, and the memory for pages beside a model; asks no device and allocates nothing."""

from __future__ import annotations

from typing import Final

import torch

from headrace.engine.config import EngineConfig
from headrace.engine.model.shared.device import Limits
from headrace.engine.model.spec import DecoderSpec

__all__ = ["DTYPE", "FREE_SHARE", "GRAPH_BYTES", "PAGE_SIZE", "bytes_for_pages", "gpu_limits", "kv_dtype"]

FREE_SHARE: Final = 0.9
"""Share of the memory that weights, activations and graphs leave free that pages take by default."""
GRAPH_BYTES: Final = 1 << 30
"""Memory that is left for graphs, beside their logits."""
PAGE_SIZE: Final = 16
DTYPE: Final = torch.bfloat16
_ROWS = 256
_BATCHED_TOKENS = 8192


def gpu_limits(config: EngineConfig, spec: DecoderSpec) -> Limits:
    """Return the sizes of a step on a GPU.

    Raises:
        InvalidParams: The context is longer than the model was made for.
    """
    return Limits.of(config, spec, rows=_ROWS, batched_tokens=_BATCHED_TOKENS)


def kv_dtype(config: EngineConfig) -> torch.dtype:
    """Return the dtype of keys and values on a GPU."""
    return torch.float8_e4m3fn if config.kv_dtype == "fp8" else DTYPE


def bytes_for_pages(free: int, activations: int, rows: int, vocab_size: int) -> int:
    """Return the bytes that pages may take.

    Args:
        free: Bytes that are free once the weights are loaded.
        activations: Bytes that the largest prefill needs.
        rows: Most requests in one step.
        vocab_size: Width of the logits.
    """
    logits = torch.float32.itemsize * rows * vocab_size
    graphs = GRAPH_BYTES + 2 * logits  # graphs of choices that wait for masks are kept beside the others
    return int(FREE_SHARE * (free - activations - graphs))
