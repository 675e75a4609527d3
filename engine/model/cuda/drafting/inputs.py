"""`LineInputs`: the inputs of decodes of any number of lines."""

from __future__ import annotations

from dataclasses import fields

import torch
from torch import Tensor

from headrace.ops.cuda.fused import DecodeInputs

__all__ = ["LineInputs"]


class LineInputs:
    """Inputs of decodes, in memory for the largest of them."""

    def __init__(self, table_RP: Tensor, most: int) -> None:
        """Allocate for `most` lines of rows whose page numbers, int32, are `table_RP`."""
        device = table_RP.device
        tokens, positions, lengths, tails = (torch.zeros(most, dtype=torch.int32, device=device) for _ in range(4))
        slots = torch.zeros(most, dtype=torch.int64, device=device)
        pages = table_RP[:1].repeat(most, 1)  # valid page numbers: the scratch page's
        self._largest = DecodeInputs(tokens, positions, slots, lengths, pages, tails)
        self._of: dict[int, DecodeInputs] = {}

    def of(self, count: int) -> DecodeInputs:
        """Return the inputs of so many lines."""
        if count not in self._of:
            parts = (getattr(self._largest, field.name)[:count] for field in fields(DecodeInputs))
            self._of[count] = DecodeInputs(*parts)
        return self._of[count]
