"""`OwnTexts`: sequences to calibrate with that the model writes itself, once for a copy; knows no model."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from headrace.engine.model.quantising.partial import Partial

__all__ = ["OwnTexts"]


class OwnTexts(NamedTuple):
    """Sequences that are written when they are needed; a run that goes on behind an earlier one finds them there."""

    sequences: int
    tokens: int
    """Ids of each sequence."""
    write: Callable[[], list[list[int]]]
    """Function that returns the ids of all sequences."""

    def __str__(self) -> str:
        """Return what decides the ids besides the model, the versions and the device."""
        return f"{self.sequences} x {self.tokens} of its own"

    def ids_ST(self, written: Partial) -> Tensor:
        """Return the ids, int64, which are kept beside the copy."""
        return torch.tensor(written.kept(self.write))
