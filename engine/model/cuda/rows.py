"""`DeviceRows`: the table of rows on a GPU, and the packed changes that keep it up to date.

Owns the row table and its mirror on the host, which only plans change; never runs the model. All of it is one int32
arena on the device, so that a step's changes - page numbers, prompt tokens, lengths, sampling - are pairs of (place,
word): a graph applies a few of them itself (exchange.py), many are one copy and one kernel. Next to read: runner.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.engine.model.cuda.decodes import Decodes
from headrace.engine.model.cuda.exchange import MOST_PAIRS, Exchange, Sender
from headrace.engine.scheduling.plan import Capacity, GivenTokens, NewRow, PageEntry, RowOptions, Work
from headrace.ops.cuda.memory.scatter import Batch

__all__ = ["DeviceRows"]

_STOPS = 32
"""Stop ids by which the device itself sees that a row has stopped: more than a request may name."""
_OWNED = -2
"""Length of a row, in the host's mirror, that the device alone knows."""
_Words = NDArray[np.int32]
_NONE: NDArray[np.int64] = np.empty(0, np.int64)


class DeviceRows:
    """The row table of a CUDA engine: `capacity.max_rows` rows, and one more that pads batches."""

    def __init__(self, capacity: Capacity, scratch_page: int, device: torch.device, words: int | None = None) -> None:
        """Start with empty rows, whose pages all are the scratch page.

        Args:
            capacity: Rows, pages and tokens.
            scratch_page: The page of rows that compute nothing of use.
            device: The GPU.
            words: Most words that a graph answers with; None for one of each row.
        """
        pages = self._lay_out(capacity, scratch_page, device)
        rows = capacity.max_rows + 1
        self.pages: _Words = np.full((rows, pages), scratch_page, np.int32)
        """Block table on the host, int32 [rows, pages]."""
        self._pages_flat = self.pages.reshape(-1).data
        self.filtered = np.zeros(rows, np.bool_)
        """Whether each row asks for top-k, top-p or min-p, bool [rows]."""
        self.slots: _Words = np.full(rows, -1, np.int32)
        """LoRA slot of each row, int32 [rows]; -1 for no adapter."""
        self.speculates = np.zeros(rows, np.bool_)
        """Whether the device alone knows how long a row is, once it has chosen a token for it, bool [rows]."""
        self._most: _Words = np.zeros(rows, np.int32)
        self._drafting, self._drafts = _NONE, list[int]()
        """Rows and drafts of the last call of `draft`."""
        self._lengths: NDArray[np.int64] = np.zeros(rows, np.int64)
        self._batch: _Words = np.full(capacity.max_rows, self.padding_row, np.int32)
        self._named = _NONE
        """Rows of the last call of `batch`; the array never changes."""
        self._owned = False
        """Whether the device knows the lengths of all rows of the last call of `batch`, so that none need be sent."""
        self._latest: Decodes | None = None
        """Latest decodes that `_lengths` does not include yet."""
        self.exchange = Exchange(words or capacity.max_rows, device)
        self._sender = Sender(device)
        self._pieces: list[tuple[NDArray[np.int64] | _Words, NDArray[np.int64] | _Words]] = []
        """Places and words that are still to be sent."""
        self._cells: dict[int, int] = {}
        """Single words that are still to be sent, by place."""

    def _lay_out(self, capacity: Capacity, scratch_page: int, device: torch.device) -> int:
        """Allocate the arena and name its parts; return the number of pages of a row."""
        self.page_size = capacity.page_size
        self.padding_row = capacity.max_rows
        rows, pages = capacity.max_rows + 1, -(-capacity.max_context // capacity.page_size)
        context = pages * capacity.page_size
        # Seeds have 64 bits; at the beginning they are aligned.
        sizes = {
            "seed": 2 * rows, "batch": capacity.max_rows, "active": capacity.max_rows, "lengths": rows,
            "temperature": rows, "top_k": rows, "top_p": rows, "min_p": rows, "slot": rows, "stopped": rows,
            "most": rows, "read": rows, "stops": rows * _STOPS, "table": rows * pages, "pool": rows * context,
        }  # fmt: skip
        self._offset = dict(zip(sizes, np.cumsum([0, *sizes.values()]).tolist(), strict=False))
        self._pages = pages
        self._context = context
        self._arena = torch.zeros(sum(sizes.values()), dtype=torch.int32, device=device)

        def part(name: str) -> Tensor:
            return self._arena[self._offset[name] : self._offset[name] + sizes[name]]

        self.seed_R = part("seed").view(torch.int64)
        self.batch_R = part("batch").fill_(self.padding_row)
        self.active_R = part("active")
        """Rows of the batch after `apply`: the padding row replaces those that have stopped, whose state is kept."""
        self.lengths_R = part("lengths")
        self.temperature_R = part("temperature").view(torch.float32)
        self.top_k_R = part("top_k")
        self.top_p_R = part("top_p").view(torch.float32)
        self.min_p_R = part("min_p").view(torch.float32)
        self.stopped_R = part("stopped")
        """Whether each row's last sampled token is one of its stop ids, as the sampler saw it."""
        self.most_R = part("most")
        """Most drafts of each row that a step may verify: those of the last step of the row that had any."""
        self.read_R = part("read")
        """Number of each row's positions that a drafter has read, int32, where it notes that."""
        self.stops_RS = part("stops").fill_(-1).view(rows, _STOPS)
        self.slots_R = part("slot").fill_(-1)
        self.table_RP = part("table").fill_(scratch_page).view(rows, pages)
        self.pool_RC = part("pool").view(rows, context)
        return pages

    def add(
        self,
        new_rows: Sequence[NewRow],
        entries: Sequence[PageEntry],
        options: Sequence[RowOptions] = (),
        works: Sequence[Work] = (),
    ) -> None:
        """Add a plan's new rows and page entries; `flush` or `hand_over` sends them.

        Rows with options get all their tokens, even those that are cached and will not be computed. Drafters have read
        what lies before the first of `works` of a new row.
        """
        if self._pieces or self._cells:  # a failed step left these unsent; in one send, no place may come twice
            self.flush()
        known = {each.row: each.tokens for each in options}
        begins = {work.row: work.start for work in works} if new_rows else {}
        for new in new_rows:
            self._add_row(new._replace(start=0, tokens=known[new.row]) if new.row in known else new)
            read = np.array([begins.get(new.row, new.start)], np.int32)
            self._put(np.array([self._offset["read"] + new.row]), read)
        table, columns = self._offset["table"], self.pages.shape[1]
        for row, place, page in entries:
            at = row * columns + place
            self._pages_flat[at] = self._cells[table + at] = page

    def give(self, given: Sequence[GivenTokens]) -> None:
        """Store tokens that the host chose, after `add`, to be sent with the rest. The rows are computed again.

        Drafters must have read what lies before; what they have read from there on no longer counts.
        """
        for row, start, tokens in given:
            first = self._offset["pool"] + row * self._context + start
            places = [self._offset["stopped"] + row, self._offset["read"] + row, *range(first, first + len(tokens))]
            self._put(np.array(places), np.array([0, max(0, start - 1), *tokens], np.int32))
            self._forget_length(row)

    def leave_out(self, rows: NDArray[np.int64], lines: NDArray[np.int64]) -> None:
        """Leave rows out of the choice that is enqueued next, and out of further steps until they are given a token.

        Args:
            rows: Rows to leave out.
            lines: Their lines of the batch; empty where the choice learns of them in another way.
        """
        if not len(rows):
            return
        places = np.concatenate((self._offset["stopped"] + rows, self._offset["active"] + lines))
        words = np.repeat(np.array([1, self.padding_row], np.int32), (len(rows), len(lines)))
        self._sender.send(self._arena, places.astype(np.int32), words)
        for row in rows.tolist():
            self._forget_length(row)

    def batch(self, decodes: Decodes, bucket: int) -> None:
        """Set the first `bucket` rows of the batch to those of `decodes`, padded, and set these rows' lengths."""
        rows = decodes.rows
        if rows is self._named and (decodes.goes_on or self._owned):  # the usual case: the device is up to date
            self._latest = decodes
            return
        self._settle()
        if rows is not self._named:
            wanted = np.full(bucket, self.padding_row, np.int32)
            wanted[: len(rows)] = rows
            (changed,) = np.nonzero(self._batch[:bucket] != wanted)
            if len(changed):
                self._put(self._offset["batch"] + changed, wanted[changed])
                self._batch[:bucket] = wanted
            self._named = rows
        starts = decodes.starts
        lengths = self._lengths[rows]
        (stale,) = np.nonzero((lengths != starts) & (lengths != _OWNED))
        if len(stale):
            self._put(self._offset["lengths"] + rows[stale], starts[stale])
        self._note(rows, starts + 1)
        self._owned = bool(self.speculates[rows].all())

    def draft(self, decodes: Decodes) -> None:
        """Say how many drafts the next step may verify for each row of `decodes`, which `batch` has just been given."""
        if decodes.rows is self._drafting and decodes.drafts == self._drafts:
            return
        self._drafting, self._drafts = decodes.rows, decodes.drafts
        most = decodes.most_drafts
        (changed,) = np.nonzero(self._most[decodes.rows] != most)
        if len(changed):
            self._put(self._offset["most"] + decodes.rows[changed], most[changed])
            self._most[decodes.rows] = most

    def sampled(self, row: int, length: int) -> None:
        """Note that a prefill of `row` ends by sampling, which sets the row's length on the device to `length`."""
        self._settle()
        self._lengths[row] = _OWNED if self.speculates[row] else length

    def unsampled(self, rows: NDArray[np.int64]) -> None:
        """Note that a decode of these rows chooses no token, so that their lengths on the device stay as they were."""
        self._settle()
        self._lengths[rows] = -1

    def flush(self) -> None:
        """Send the changes since the last time, on the current stream."""
        if self._cells:
            self._put(np.array(list(self._cells)), np.array(list(self._cells.values())))
            self._cells = {}
        if self._pieces:
            columns, self._pieces = zip(*self._pieces, strict=True), []
            places, words = (np.concatenate(each, dtype=np.int32, casting="same_kind") for each in columns)
            self._sender.send(self._arena, places, words)

    def hand_over(self) -> _Words:
        """Leave the changes since the last time to the graph that is replayed next, which begins with `apply`.

        Returns:
            Memory that holds the step's ids, in the order of the batch, once the step is done.
        """
        if len(self._cells) + sum(len(places) for places, _ in self._pieces) > MOST_PAIRS:
            self.flush()
        cells, pieces, self._cells, self._pieces = self._cells, self._pieces, {}, []
        return self.exchange.give(cells, pieces)

    def send(self, target: Tensor, places: NDArray[np.int64], words: _Words) -> None:
        """Send words to another tensor, on the current stream.

        Args:
            target: int32 tensor of one dimension, contiguous.
            places: Indices in it; none may come twice.
            words: int32 words to write there.
        """
        self._sender.send(target, places.astype(np.int32), words)

    def apply(self) -> None:
        """Enqueue the words that `hand_over` left to a graph, and note on the device which rows of the batch go on."""
        self.exchange.apply(self._arena, Batch(self.batch_R, self.stopped_R, self.active_R, self.padding_row))

    def _add_row(self, new: NewRow) -> None:
        row, start, tokens, sampling, slot, stop_ids, speculates = new
        first = self._offset["pool"] + row * self._context + start
        self._put(np.arange(first, first + len(tokens)), np.asarray(tokens, np.int32))
        floats = np.array([sampling.temperature, sampling.top_p, sampling.min_p], np.float32)
        seed = np.array([sampling.seed & (2**64 - 1)], np.uint64)
        names = ("temperature", "top_p", "min_p", "top_k", "slot")
        places = [self._offset[name] + row for name in names]
        places += [self._offset["seed"] + 2 * row, self._offset["seed"] + 2 * row + 1]
        self._put(
            np.array(places),
            np.concatenate((floats.view(np.int32), np.array([sampling.top_k, slot], np.int32), seed.view(np.int32))),
        )
        stops = np.full(1 + _STOPS, -1, np.int32)
        known = sorted(stop_ids)[:_STOPS]  # the host checks the others
        stops[: 1 + len(known)] = [0, *known]
        first = self._offset["stops"] + row * _STOPS
        self._put(np.array([self._offset["stopped"] + row, *range(first, first + _STOPS)]), stops)
        asks = 0 < sampling.top_k or sampling.top_p < 1.0 or sampling.min_p > 0.0
        self.filtered[row] = asks and sampling.temperature > 0.0
        self.slots[row] = slot
        self._settle()
        self.speculates[row] = speculates
        self._forget_length(row)  # the length is that of the row's former request

    def _forget_length(self, row: int) -> None:
        """Send the row's length with the next batch that has the row."""
        self._settle()
        self._lengths[row], self._named = -1, _NONE

    def _settle(self) -> None:
        """Bring `_lengths` up to date with the latest decodes."""
        if self._latest is not None:
            self._note(self._latest.rows, self._latest.starts + 1)
            self._latest = None

    def _note(self, rows: NDArray[np.int64], lengths: NDArray[np.int64]) -> None:
        """Note the lengths of rows that have just decoded; those of rows that speculate are the device's."""
        self._lengths[rows] = np.where(self.speculates[rows], _OWNED, lengths)

    def _put(self, places: NDArray[np.int64] | _Words, words: NDArray[np.int64] | _Words) -> None:
        self._pieces.append((places, words))
