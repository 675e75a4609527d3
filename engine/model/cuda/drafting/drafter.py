"""`CudaDrafter`: the protocol of what guesses tokens inside the graphs of decode steps; it has no behaviour of its own.
`LateDrafter` is that of one which reads a step without drafts later.

A step of depth k computes k + 1 lines for each of its rows: line (b, j), in row-major order, is row b's token j places
behind its last known one, so that j = 0 is the token that any step computes and the others are drafts. Lines without a
draft compute the padding row. Drafts are made at the beginning of the step that verifies them, from what the steps
before it left, so that a prompt, a decode without drafts and one with drafts leave the same. Next to read: ngram.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from headrace.engine.model.network.decoder import HiddenStates
from headrace.engine.model.spec import MixerSpec
from headrace.engine.scheduling.plan import Work
from headrace.ops.cuda.attention.steps import CudaKv, CudaStep
from headrace.ops.cuda.fused import DecodeInputs
from headrace.ops.cuda.sampling.sample import Asks

__all__ = ["CudaDrafter", "Decoded", "LateDrafter", "Prefilled", "RowTable"]


class RowTable(NamedTuple):
    """What a drafter sees of its rows; tensors over R rows, of which the last one is padding and stays empty."""

    pool_RC: Tensor
    """Tokens of each row from position 0, int32. A row's drafts go behind its known tokens."""
    lengths_R: Tensor
    """Position of each row's last known token, int32: the number of tokens whose keys and values are written."""
    most_R: Tensor
    """Largest number of drafts of each row that the present step may verify, int32; there are pages for so many."""
    read_R: Tensor
    """Number of each row's positions that the drafter has read, int32. A drafter that reads keeps it up to date; its
    owner sets it to the first position that is computed where a row begins, and to the one before, which another token
    may follow now, where a row goes back."""
    table_RP: Tensor
    """Page numbers of each row, int32."""
    pages: NDArray[np.int32]
    """The same on the host, which its owner keeps up to date."""
    kv: CudaKv
    """Pages of each layer, [pages, 2, T, K, D]; layers of a drafter's own are the last."""
    most_lines: int
    """Most lines of a decode."""
    asks: Asks
    """What each row asks of the choice of its tokens."""


class Decoded(NamedTuple):
    """A decode step of B rows that has chosen its tokens, of which the row table has them all."""

    depth: int
    rows_B: Tensor
    """Row numbers, int32; the padding row for rows that take no part."""
    inputs: DecodeInputs
    """Inputs of the B * (depth + 1) lines: tokens, positions, places of keys and values, pages."""
    line_rows_L: Tensor
    """Row of each line, int32; the padding row for lines that hold no draft."""
    counts_B: Tensor
    """Number of tokens that each row gained, int32, from 1 to depth + 1: lines before that are of right tokens."""
    steps: Mapping[MixerSpec, CudaStep]
    """Places in the cache, by mixer of the target."""
    states: HiddenStates
    """Hidden states of the lines."""


class Prefilled(NamedTuple):
    """Prompts, or parts of prompts, that a step computed outside its graph, N tokens packed one work after the other.

    The row table holds all tokens of their rows, also the one that followed if the work sampled it.
    """

    works: Sequence[Work]
    tokens_N: Tensor
    """Token ids, int32."""
    rows_N: Tensor
    """Row of each token, int64."""
    last_W: Tensor
    """Index of the last token of each work, int64."""
    steps: Mapping[MixerSpec, CudaStep]
    """Positions and places in the cache, by mixer of the target."""
    states: HiddenStates
    """Hidden states of all tokens."""


class CudaDrafter(Protocol):
    """Something that guesses tokens on a GPU. A wrong guess costs time and changes nothing else."""

    @property
    def taps(self) -> tuple[int, ...] | None:
        """Layers of the target whose inputs `take_up` and `take_up_prompts` read, in rising order.

        With a tuple, even an empty one, they are called for all steps, those without drafts too, and get the final
        hidden states in any case. None if the drafter reads tokens alone; they are then never called.
        """
        ...

    def draft(self, rows_B: Tensor, depth: int, counts_B: Tensor) -> None:
        """Enqueue the drafts of a step; a graph captures the launches.

        Draft i of a row (from 0) is written to `pool_RC[row, lengths_R[row] + 1 + i]` of the row table. Drafts behind
        `most_R` are never looked at, nor those behind the pool's end, which must not be written. Nothing may be written
        for the padding row.

        Args:
            rows_B: Row numbers, int32; the padding row may come more than once.
            depth: Largest number of drafts of a row, at least 1.
            counts_B: Output, int32: number of drafts of each row.
        """
        ...

    def take_up(self, decoded: Decoded) -> None:
        """Enqueue what the drafter keeps of a decode step; a graph captures the launches."""
        ...

    def take_up_prompts(self, prefilled: Prefilled) -> None:
        """Enqueue what the drafter keeps of prompts, outside a graph."""
        ...


@runtime_checkable
class LateDrafter(CudaDrafter, Protocol):
    """A drafter that reads what steps without drafts compute when `catch_up` says so, if it is not too late by then."""

    @property
    def behind(self) -> int:
        """Number of a row's last positions that may be unread where it drafts, and that a step with drafts leaves."""
        ...

    def catch_up(self, rows_B: Tensor) -> None:
        """Enqueue the reading of up to `LAG` unread positions of each of some rows; a graph captures the launches.

        Args:
            rows_B: Row numbers, int32, at most `MOST_ROWS`; the padding row may come more than once.
        """
        ...
