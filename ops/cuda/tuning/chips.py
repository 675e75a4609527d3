"""`tuning_for`: the numbers for a GPU: its own where it was measured, and a default for all others."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from headrace.ops.cuda.tuning.h200 import H200
from headrace.ops.cuda.tuning.table import Tuning

__all__ = ["DEFAULT", "tuning_for"]

DEFAULT: Final = replace(H200, is_measured=False)
"""Numbers for GPUs that nobody measured: those of the H200, until somebody does."""
_MEASURED: Final = {((9, 0), 132): H200}


def tuning_for(capability: tuple[int, int], processors: int) -> Tuning:
    """Return the numbers for a GPU of a compute capability and a number of multiprocessors."""
    return _MEASURED.get((capability, processors), DEFAULT)
