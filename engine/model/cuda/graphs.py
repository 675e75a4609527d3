"""`DecodeGraphs`: the decode step of each batch size as a CUDA graph, sampling included; nothing else knows of graphs.

Owns the tensors that a decode step reads and writes besides weights, pages and rows; never decides which rows run. A
step of n rows replays the graph of the smallest bucket that holds them; rows left over compute the padding row. A
choice that waits for the host's masks is a graph of its own, behind that of the logits. Next to read:
ops/cuda/block.py, what a graph is made of.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.engine.concurrency.garbage import not_collected
from headrace.engine.errors import DeviceUnavailable
from headrace.engine.model.cuda.adapters import NO_USE, AdapterUse, CudaBank
from headrace.engine.model.cuda.compiling import ways, ways_of_lines, ways_together
from headrace.engine.model.cuda.decodes import Decodes, Planned
from headrace.engine.model.cuda.drafting.drafts import CudaDrafts, depths
from headrace.engine.model.cuda.drafting.inputs import LineInputs
from headrace.engine.model.cuda.grammars import DraftsOf
from headrace.engine.model.cuda.operations import CudaDecoder
from headrace.engine.model.cuda.rows import DeviceRows
from headrace.engine.model.cuda.sampling import RowSampler, Variant
from headrace.engine.model.cuda.steps import is_lost
from headrace.engine.model.network.decoder import Decoder, HiddenStates
from headrace.engine.model.spec import MixerSpec
from headrace.ops.cuda.attention.registry import DecodeKernel, DecodeRoom
from headrace.ops.cuda.attention.steps import CudaKv, DecodeStep, WholeStep
from headrace.ops.cuda.block import CudaOps
from headrace.ops.cuda.experts.registry import Padding
from headrace.ops.cuda.fused import prepare_decode
from headrace.ops.cuda.hazards import Launch

__all__ = ["DecodeGraphs", "Key", "buckets"]

logger = logging.getLogger("headrace.engine")

_SIZES = (1, 2, 4, 8, 16, 32, 64, 96, 128, 160, 192, 256)
_STRIDE = 64
_PREPARATION: Final = Launch(
    "the preparation of the step", overlaps=False, writes=frozenset(("pages", "lengths", "activations"))
)


def buckets(max_rows: int) -> list[int]:
    """Return the batch sizes that get graphs: few, and past 64 rows each at most a third larger than the one before."""
    sizes = [*_SIZES, *range(_SIZES[-1] + _STRIDE, max_rows + _STRIDE, _STRIDE)]
    return [*(size for size in sizes if size < max_rows), max_rows]


_Way: TypeAlias = tuple[str, bool]
"""Name of a way of attention, and whether all lines of a row attend together."""
_Place: TypeAlias = tuple[int, str, int, bool]


class Key(NamedTuple):
    """Description of one graph: the work that it records."""

    bucket: int
    """Number of rows that the graph computes."""
    way: str
    """Way of attention: "fused", "even", "fa2", "xqa" or "split"; of several shapes of heads all, joined by "+"."""
    variant: Variant | None
    """Variant of the choice of tokens; None for a graph that ends with the logits."""
    use: AdapterUse
    """Adapters that the graph serves, up to the logits."""
    part: Literal["whole", "drafts", "logits", "choice"] = "whole"
    """Which part of a step the graph computes: all that is asked of it; its drafts alone, and the inputs of its lines;
    the logits behind these; or the choice alone, from the logits that another graph has left."""
    depth: int = 0
    """Most drafts that the graph computes for a row."""
    together: bool = False
    """Whether attention reads a row's keys once for all of its lines; if not, each line is a row to it."""

    @property
    def lines(self) -> int:
        """Number of tokens that the graph computes."""
        return self.bucket * (self.depth + 1)


def _keys(bucket: int, way: _Way, variant: Variant | None, use: AdapterUse = NO_USE, depth: int = 0) -> list[Key]:
    """Return the keys of a step's graphs, in the order of replay."""
    name, together = way
    if variant is None or not variant.masked:
        return [Key(bucket, name, variant, use, depth=depth, together=together)]
    logits = Key(bucket, name, None, use, depth=depth, together=together)
    choice = logits._replace(variant=variant, part="choice")
    if not depth:
        return [logits, choice]
    return [Key(bucket, "", None, NO_USE, "drafts", depth), logits._replace(part="logits"), choice]


def _place(key: Key) -> _Place:
    """Return what decides the attention of a graph: its bucket, way and depth."""
    return key.bucket, key.way, key.depth, key.together


class _Uncaptured(NamedTuple):
    """A step in the place of its graph."""

    replay: Callable[[], None]
    """Enqueues the step, operation by operation."""

    def reset(self) -> None:
        """Do nothing: there is no memory to release."""


_Graph: TypeAlias = "torch.cuda.CUDAGraph | _Uncaptured"


class DecodeGraphs:
    """Captures and replays decode steps of one runner, all on one stream."""

    def __init__(
        self,
        decoder: CudaDecoder,
        ops: Mapping[MixerSpec, CudaOps],
        rows: DeviceRows,
        sampler: RowSampler,
        kv: CudaKv,
        ids: Tensor,
        *,
        max_rows: int,
        attention: str,
        bank: CudaBank | None = None,
        drafts: CudaDrafts | None = None,
        kernels: Sequence[DecodeKernel],
    ) -> None:
        """Start without graphs.

        Args:
            decoder: The model.
            ops: The model's operations, by mixer.
            rows: The row table, which the graphs read and advance.
            sampler: The sampler of these rows.
            kv: The paged cache.
            ids: int32 [max_rows]: where sampled ids go, in the order of the batch.
            max_rows: Rows of the largest bucket.
            attention: "auto", or the one way to use.
            bank: The adapters that rows may use; None without adapters.
            drafts: The drafts of rows that speculate; None where none does.
            kernels: The kernels of attention to choose among.
        """
        self._decoder, self._ops, self._rows, self._kv, self._ids = decoder, ops, rows, kv, ids
        self._sampler, self._bank, self._drafts = sampler, bank, drafts
        self._buckets, self._choice = buckets(max_rows), attention
        self._bucket_of = [next(size for size in self._buckets if size >= rows) for rows in range(max_rows + 1)]
        """Bucket for each number of rows."""
        any_ops = next(iter(ops.values()))
        self._pdl, self._shape, self._chain = any_ops.pdl, any_ops.shape, any_ops.products.room.chain
        shapes = [each.shape for each in ops.values()]
        self._ways, self._kernels = ways(kernels, shapes, any_ops.arch, attention)
        self._line_ways = ways_of_lines(tuple(self._ways.values()))
        self._depths = [] if drafts is None else depths(drafts.most)
        self._together = ways_together(self._line_ways, shapes, any_ops.arch, self._depths)
        lines = max_rows if drafts is None else drafts.lines
        room = partial(DecodeRoom, any_ops.arch, kv[0].device)
        self._room = room(most_rows=self._buckets[-1], pdl=self._pdl)
        # A line sees the keys that other lines of its row store in the same step; as a row, it must not read too early.
        self._line_rooms = room(most_rows=lines, pdl=False), room(most_rows=lines, pdl=self._pdl)
        self._inputs = LineInputs(rows.table_RP, lines)
        self._graphs: dict[Key, _Graph] = {}
        self._is_capturing = True
        """Whether steps are captured, as all are but those of a foreign model that cannot be."""
        self._pool: Any = None
        self._plans: dict[_Place, Planned] = {}
        self._steps: dict[_Place, dict[MixerSpec, DecodeStep | WholeStep]] = {}
        self._between: dict[tuple[int, str, int, bool, AdapterUse], tuple[Tensor, HiddenStates | None]] = {}
        """Logits, and states, that one graph leaves to another, which chooses, by place and adapters."""
        self._last_planned: _Place | None = None

    def capture(self, *, contexts: Sequence[int], variants: Sequence[Variant]) -> None:
        """Capture the graphs of every bucket for attention over each of `contexts` tokens, and each of `variants`."""
        for size in reversed(self._buckets):  # the largest first: the pool's memory serves the others
            for context, variant, depth in itertools.product(contexts, variants, (0, *self.draft_depths(size))):
                for key in _keys(size, self._way(size, context, depth), variant, depth=depth):
                    self._graph(key)

    def keys(self, decodes: Decodes, variant: Variant | None) -> list[Key]:
        """Return the keys of the graphs that make up one step of `decodes`, the rows of `DeviceRows.batch_R`.

        A masked variant has a graph of its drafts, if any, one of the logits and one of the choice; any other step has
        one. Without a variant, no token is chosen.
        """
        bucket = self._bucket_of[len(decodes.rows)]
        depth, use = 0, NO_USE
        if variant is not None and self._drafts is not None:
            depth = self._drafts.depth_of(max(decodes.drafts, default=0), bucket)
        if self._bank is not None:
            use = self._bank.use_of(np.repeat(self._rows.slots[decodes.rows], depth + 1))
        return _keys(bucket, self._way(bucket, decodes.mean_context, depth), variant, use, depth)

    def ready(self, keys: Sequence[Key]) -> bool:
        """Return whether all are captured: capturing takes a hundred milliseconds, and a step without graphs may."""
        return self._is_capturing and all(key in self._graphs for key in keys)

    def prepare(self, keys: Sequence[Key], decodes: Decodes) -> list[_Graph]:
        """Return the graphs of `keys`, planned for `decodes`; capture those that are missing.

        Raises:
            DeviceUnavailable: A graph is missing and cannot be captured.
            torch.OutOfMemoryError: There is no memory to capture a graph.
        """
        graphs = [self._graph(key) for key in keys]
        bucket, depth = keys[-1].bucket, keys[-1].depth
        at = _place(keys[-1])
        if (plan := self._plans.get(at)) is not None:
            lengths_BJ = np.ones((bucket, depth + 1), np.int64)
            lengths_BJ[: len(decodes.rows)] += decodes.starts[:, None] + np.arange(depth + 1)
            last, self._last_planned = self._last_planned, None  # none, should planning fail
            with torch.inference_mode():
                plan.plan(lengths_BJ.reshape(-1), anew=last != at)
            self._last_planned = at
        return graphs

    def logits(self, keys: Sequence[Key]) -> Tensor:
        """Return a masked variant's logits behind the last known tokens of its rows: [rows or more, vocabulary]."""
        return self._between[(*_place(keys[-1]), keys[-1].use)][0][:: keys[-1].depth + 1]

    def drafts(self, key: Key, rows: NDArray[np.int64]) -> DraftsOf:
        """Enqueue the copy to the host of the drafts that the graph of `key` has made; return what waits for them."""
        assert self._drafts is not None
        return self._drafts.send(rows, key.bucket, key.depth, self._inputs.of(key.lines))

    def draft_depths(self, rows: int) -> list[int]:
        """Return the depths above 0 of the graphs for steps of `rows` rows, in rising order."""
        return [] if self._drafts is None else self._drafts.depths(self._bucket_of[rows])

    def captured(self, run: Callable[[], object]) -> torch.cuda.CUDAGraph:
        """Return a graph of what `run` enqueues, which must not compile or allocate anything more by now."""
        graph = torch.cuda.CUDAGraph()
        with not_collected():  # calls of a finaliser in this thread could end the capture
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                run()
            finally:
                graph.capture_end()
        self._pool = graph.pool()
        return graph

    def close(self) -> None:
        """Drop all graphs; none may be running."""
        for graph in self._graphs.values():
            graph.reset()
        self._graphs.clear()
        self._steps.clear()
        self._plans.clear()
        for room in (self._room, *self._line_rooms):
            room.close()
        self._between.clear()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _way(self, bucket: int, context: int, depth: int) -> _Way:
        if depth and (kernel := self._together[depth].find(bucket, context)) is not None:
            return kernel.name, True
        if self._choice != "auto":
            return self._choice, False
        if depth:
            return self._line_ways.at(bucket * (depth + 1), context).name, False
        names = [each.at(bucket, context).name for each in self._ways.values()]
        return names[0] if len(set(names)) == 1 else "+".join(names), False

    def _graph(self, key: Key) -> _Graph:
        graph = self._graphs.get(key)
        if graph is None:
            try:
                graph = self._capture(key) if self._is_capturing else self._uncaptured(key)
            except torch.OutOfMemoryError:  # already an error that callers know
                raise
            except Exception as error:
                if self._decoder.is_foreign and self._is_capturing and not is_lost():
                    self._stop_capturing(error)
                    return self._graph(key)
                if isinstance(error, torch.AcceleratorError):
                    raise
                raise DeviceUnavailable(
                    f"the decode graph of {key.bucket} rows ({key.way} attention) could not be captured: {error}"
                ) from error
            self._graphs[key] = graph
        return graph

    def _stop_capturing(self, error: Exception) -> None:
        """Do without graphs from now on: the model's module does what a graph cannot record."""
        logger.warning("decodes of this model run without CUDA graphs, and slower: %s", str(error).split("\n")[0])
        self._is_capturing = False
        for graph in self._graphs.values():
            graph.reset()
        self._graphs.clear()

    def _uncaptured(self, key: Key) -> _Uncaptured:
        self._make_steps(key)
        return _Uncaptured(partial(self._run, key))

    def _capture(self, key: Key) -> torch.cuda.CUDAGraph:
        self._last_planned = None  # later steps plan again, even if this fails
        self._make_steps(key)
        if (plan := self._plans.get(_place(key))) is not None:
            plan.plan(np.ones(key.lines, np.int64), anew=True)  # all sizes share the device's, which may be another's
        rows = self._rows
        named = (rows.batch_R[: key.bucket], rows.active_R[: key.bucket], rows.exchange.turn_2)
        kept = [words.clone() for words in named]
        for words, harmless in zip(named, (rows.padding_row, rows.padding_row, rows.exchange.spare), strict=True):
            words.fill_(harmless)
        try:
            with self._chain.watched():
                if key.depth and key.part in ("logits", "choice"):  # whose lines are those of an earlier step, or none
                    self._prepare(key)
                self._run(key)  # compiles and allocates now, which a capture must not
            return self.captured(partial(self._run, key))
        finally:
            for words, before in zip(named, kept, strict=True):
                words.copy_(before)

    def _run(self, key: Key) -> None:
        """Run the decode step, or the part of it that the graph of `key` records."""
        bucket, variant, depth = key.bucket, key.variant, key.depth
        if key.part == "drafts":
            return self._prepare(key)
        at = (*_place(key), key.use)
        logits_LV, states = self._between[at] if key.part == "choice" else self._logits(key)
        if variant is None:
            # Kept, so that no other graph of the pool gets their memory.
            self._between[at] = self._drafts.keep(logits_LV) if self._drafts and depth else logits_LV, states
            return None
        batch_B, inputs = self._rows.active_R[:bucket], self._inputs.of(key.lines)
        if depth:
            assert self._drafts is not None
            answer = self._drafts.choose(logits_LV, bucket, depth, inputs, variant, pdl=self._pdl)
        else:
            answer = self._ids[:bucket]
            self._sampler.choose(logits_LV, batch_B, inputs.positions_B, self._ids, variant, pdl=self._pdl)
        self._rows.exchange.answer(answer, pdl=self._pdl)
        if states is not None:
            assert self._drafts is not None
            self._drafts.take_up(bucket, depth, inputs, self._steps[_place(key)], states)

    def _logits(self, key: Key) -> tuple[Tensor, HiddenStates | None]:
        """Enqueue a step up to its logits, of each line; return these, and the states that a drafter reads, if any."""
        rows, inputs, use, steps = self._rows, self._inputs.of(key.lines), key.use, self._steps[_place(key)]
        batch_B = rows.active_R[: key.bucket]
        if key.part != "logits" or not key.depth:
            self._prepare(key)
        if self._drafts is not None and key.depth:
            batch_B = self._drafts.line_rows(key.bucket, key.depth)
        self._chain.note(_PREPARATION)
        for step in {id(step): step for step in steps.values()}.values():  # mixers share some
            if isinstance(step, DecodeStep):
                step.attention.deal(inputs)
                if step.deal is not None:
                    self._chain.note(step.deal)
        rotated = all(isinstance(step, DecodeStep) for step in steps.values())
        adapted = None if self._bank is None else self._bank.decode(rows.slots_R, batch_B, use, rotated=rotated)
        with next(iter(self._ops.values())).experts.padded(Padding(batch_B, rows.padding_row)):  # of all mixers
            taps = None if self._drafts is None else self._drafts.drafter.taps
            if not taps:
                hidden_LE = self._decoder.hidden(inputs.tokens_B, steps, self._kv, adapted=adapted)
                states = None if taps is None else HiddenStates(hidden_LE)
            else:
                assert isinstance(self._decoder, Decoder)  # no other model has a drafter that reads inputs of layers
                states = self._decoder.hidden_states(inputs.tokens_B, steps, self._kv, taps, adapted)
                hidden_LE = states.final_NE
        return self._decoder.logits(hidden_LE, adapted), states

    def _prepare(self, key: Key) -> None:
        """Enqueue the beginning of a step: its drafts, if it has any, and the inputs of its lines."""
        rows, inputs, size = self._rows, self._inputs.of(key.lines), self._shape.page_size
        if self._drafts is not None and key.depth:
            return self._drafts.prepare(key.bucket, key.depth, inputs, size)
        rows.apply()
        batch_B = rows.active_R[: key.bucket]
        prepare_decode(batch_B, rows.pool_RC, rows.lengths_R, rows.table_RP, inputs, page_size=size)

    def _make_steps(self, key: Key) -> None:
        """Open the attention of a graph, if no graph of its bucket, way and depth has."""
        at, lines = _place(key), key.lines
        if at in self._steps or key.part == "drafts":
            return
        inputs, names = self._inputs.of(lines), key.way.split("+")
        names = names if len(names) > 1 else names * len(self._ways)
        room = self._line_rooms[key.together] if key.depth else self._room
        of_row = key.depth + 1 if key.together else 1
        by_shape = dict[Hashable, DecodeStep | WholeStep]()
        for shape, name in zip(self._ways, names, strict=True):
            like = next(each.shape for each in self._ops.values() if each.shape.key == shape)
            by_shape[shape] = self._kernels[name].open(like, inputs, room, of_row)
        opened = by_shape.values()
        planned = [step.planned for step in opened if isinstance(step, DecodeStep) and step.planned is not None]
        if planned:
            self._plans[at] = Planned(lines, planned)
        self._steps[at] = {mixer: by_shape[ops.shape.key] for mixer, ops in self._ops.items()}
