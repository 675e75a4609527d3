"""`ReportedRows`: the rows on a GPU that want log-probabilities, and the lines that hold these; chooses no token.

Owns the lines on the device, which are allocated when a first row asks, and their decoding on the host. Next to read:
sampling.py, and ops/cuda/sampling/logprobs.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.engine.model.cuda.rows import DeviceRows
from headrace.engine.scheduling.plan import Capacity, NewRow, RowOptions, Work
from headrace.engine.scheduling.shaping import Report, Reporting
from headrace.ops.cuda.sampling.logprobs import HEAD, ListScratch, logprobs

__all__ = ["MOST_POSITIONS", "USUAL_PLACES", "Lines", "ReportedRows", "SentLines", "read_reports"]

USUAL_PLACES: Final = 32
"""Places of a line for the likeliest tokens: more than `SamplingParams.logprobs` may be. A beam search may ask more."""
MOST_POSITIONS: Final = 256
"""Most prompt positions whose logits are held at once: 64 MB in bfloat16 with 128k tokens in the vocabulary."""
_Words = NDArray[np.int32]


class Lines(NamedTuple):
    """Lines of a step on the device."""

    words_LW: Tensor
    entries: list[tuple[int, int, int]]
    """Lines to be read, as (line, row, number of likeliest tokens wanted)."""
    of_prompt: bool
    ahead: int = 0
    """Place of the new token in the run of tokens that its row gained."""


class SentLines(NamedTuple):
    """Lines of a step in pinned memory."""

    start: int
    shape: tuple[int, int]
    entries: list[tuple[int, int, int]]
    """Lines to be read, as (line, index of the work, number of likeliest tokens wanted)."""
    of_prompt: bool
    ahead: int = 0
    """Place of the new token in the run of tokens that its work gained."""


class ReportedRows:
    """The rows that want log-probabilities."""

    def __init__(self, rows: DeviceRows, capacity: Capacity, device: torch.device, lines: int) -> None:
        """Start without rows, and without memory but one word for each row.

        Args:
            rows: The row table, through which words are sent.
            capacity: Most rows, and the width of the logits.
            device: The GPU.
            lines: Most tokens that a step chooses.
        """
        self._most_lines = lines
        self._rows, self._capacity, self._device = rows, capacity, device
        count = capacity.max_rows + 1
        self._on_device_2R = torch.zeros(2, count, dtype=torch.int32, device=device)
        self._wants_2R: _Words = np.zeros((2, count), np.int32)
        """Reports that each row wants on completion and prompt: 0 for none, else 1 + the number of likeliest tokens."""
        self._prompt_len_R: NDArray[np.int64] = np.zeros(count, np.int64)
        self._lines: dict[int, Tensor] = {}
        self._scratch: dict[int, ListScratch] = {}

    def take(self, new_rows: Sequence[NewRow], options: Sequence[RowOptions]) -> None:
        """Enqueue the reports that new rows want, and clear those of the rows' former requests."""
        asking = {each.row: (each.prompt_len, each.reporting) for each in options if each.reporting is not None}
        changed = [new.row for new in new_rows if new.row in asking or self._wants_2R[:, new.row].any()]
        if not changed:
            return
        wants_2C = np.zeros((2, len(changed)), np.int32)
        for place, row in enumerate(changed):
            self._prompt_len_R[row], reporting = asking.get(row, (0, Reporting()))
            wants_2C[:, place] = [0 if k is None else 1 + k for k in (reporting.completion, reporting.prompt)]
        places = np.array(changed) + np.array([[0], [self._wants_2R.shape[1]]])
        self._rows.send(self._on_device_2R.view(-1), places.reshape(-1), wants_2C.reshape(-1))
        self._wants_2R[:, changed] = wants_2C

    def places(self, rows: NDArray[np.int64]) -> int:
        """Return the places for likeliest tokens in these rows' lines, a power of two; 0 if no row wants a report."""
        return _places(int(self._wants_2R[0, rows].max(initial=0)))

    def prompt_count(self, work: Work) -> int:
        """Return how many positions of a work, from its first, are followed by a prompt token to report on."""
        if not self._wants_2R[1, work.row]:
            return 0
        return max(0, min(work.start + work.num_tokens, int(self._prompt_len_R[work.row]) - 1) - work.start)

    def write(
        self, logits_BV: Tensor, rows_B: Tensor, ids_B: Tensor, places: int, first: int, *, pdl: bool = False
    ) -> None:
        """Write the lines for sampled tokens, from line `first` on.

        Raises:
            torch.OutOfMemoryError: Lines with this number of places are new, and there is no memory for them.
        """
        lines_LW, scratch = self._memory(places)
        logprobs(
            logits_BV, rows_B, self._on_device_2R[0], ids_B, lines_LW[first : first + len(logits_BV)], scratch, pdl=pdl
        )

    def written(self, rows: NDArray[np.int64], places: int, first: int, ahead: int = 0) -> Lines:
        """Return the lines of these rows that `write` has just written, directly or in a replayed graph."""
        wants_B = self._wants_2R[0, rows].tolist()
        entries = [
            (line, row, wants - 1)
            for line, (row, wants) in enumerate(zip(rows.tolist(), wants_B, strict=True))
            if wants
        ]
        return Lines(self._memory(places)[0][first : first + len(rows)], entries, of_prompt=False, ahead=ahead)

    def prompt_lines(self, works: Sequence[Work]) -> Lines:
        """Return unwritten lines for all prompt positions of `works` to report on, which must be one at least."""
        wants = [(work.row, int(self._wants_2R[1, work.row]), self.prompt_count(work)) for work in works]
        places = _places(max(each for _, each, count in wants if count))
        asked = [(row, each - 1) for row, each, count in wants for _ in range(count)]
        words_PW = torch.empty(len(asked), HEAD + 2 * places, dtype=torch.int32, device=self._device)
        return Lines(words_PW, [(line, *each) for line, each in enumerate(asked)], of_prompt=True)

    def write_prompt(self, logits_BV: Tensor, rows_B: Tensor, tokens_B: Tensor, lines_BW: Tensor) -> None:
        """Write some lines of a prompt, at most `MOST_POSITIONS`.

        Raises:
            torch.OutOfMemoryError: Lines with this number of places are new, and there is no memory for them.
        """
        _, scratch = self._memory((lines_BW.shape[1] - HEAD) // 2)
        logprobs(logits_BV, rows_B, self._on_device_2R[1], tokens_B, lines_BW, scratch)

    def _memory(self, places: int) -> tuple[Tensor, ListScratch]:
        if places not in self._scratch:
            size = self._capacity
            rows = max(size.max_rows, MOST_POSITIONS)
            shape = (self._most_lines, HEAD + 2 * places)
            self._lines[places] = torch.zeros(shape, dtype=torch.int32, device=self._device)
            self._scratch[places] = ListScratch(rows, size.vocab_size, places, self._device)
        return self._lines[places], self._scratch[places]


def _places(wants: int) -> int:
    return max(USUAL_PLACES, 1 << (wants - 2).bit_length()) if wants else 0


def read_reports(
    words: _Words, sent: Sequence[SentLines]
) -> tuple[dict[tuple[int, int], Report], dict[int, list[Report]]]:
    """Decode log-probabilities from pinned `words`.

    Returns:
        Those of new tokens, by the index of the work and the token's place in the run that the work gained, and those
        of prompts, by index of the work.
    """
    chosen: dict[tuple[int, int], Report] = {}
    prompts: dict[int, list[Report]] = {}
    for each in sent:
        for work, report in _read(words, each):
            if each.of_prompt:
                prompts.setdefault(work, []).append(report)
            else:
                chosen[work, each.ahead] = report
    return chosen, prompts


def _read(words: _Words, sent: SentLines) -> Iterator[tuple[int, Report]]:
    """Yield (index of the work, report) for each entry of some lines."""
    count, width = sent.shape
    lines_LW = words[sent.start : sent.start + count * width].reshape(sent.shape)
    places = (width - HEAD) // 2
    most = max(top for *_, top in sent.entries)
    logprobs_L = lines_LW[:, 0].view(np.float32).tolist()
    ranks_L = lines_LW[:, 1].tolist()
    ids_LK = lines_LW[:, HEAD : HEAD + most].tolist()
    values_LK = lines_LW[:, HEAD + places : HEAD + places + most].view(np.float32).tolist()
    for line, work, top in sent.entries:
        best = tuple(zip(ids_LK[line][:top], values_LK[line][:top], strict=True))
        yield work, Report(logprobs_L[line], ranks_L[line], best)
