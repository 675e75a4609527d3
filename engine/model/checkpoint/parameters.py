"""Reads the parameters of a decoder from a checkpoint; never decides which there are or when they are read.

Each tensor goes piece by piece from its file to its place in a fused parameter, in its own format or in the wanted
dtype, and on the wanted device. On a CPU several threads may read parameters at a time. Next to read: readers.py.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import NoReturn, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.engine.errors import InvalidParams
from headrace.engine.model.checkpoint.inventory import Inventory
from headrace.engine.model.checkpoint.plan import top_plan
from headrace.engine.model.checkpoint.readers import Found
from headrace.engine.model.roles import Fused, Part, Rotated
from headrace.engine.model.rope import head_places
from headrace.engine.model.spec import DecoderSpec
from headrace.ops.formats import Dense, Format, Stacked, Stored, joins
from headrace.ops.paged import KvScales
from headrace.ops.quantise import Method, quantise

__all__ = ["BlankMaker", "Empty", "FileMaker", "Layout", "MetaMaker", "Progress", "kept"]

Empty: TypeAlias = Callable[[Sequence[int], torch.dtype], Tensor]
"""Function that makes an uninitialised tensor on the device, from its shape and dtype."""
Layout: TypeAlias = Callable[[Stored], Stored]
"""Function that returns a weight, as a checkpoint stores it, in the form in which a device keeps it."""
Progress: TypeAlias = Callable[[int, int], None]
"""Function that is called with the bytes done and the bytes in all."""

_CPU_BLOCK_ELEMENTS = 1 << 18  # in float32 a quarter of what a core caches
_DEVICE_BLOCK_ELEMENTS = 1 << 24


def kept(weight: Stored, empty: Empty, layout: Layout | None, quantize: Method | None) -> Stored:
    """Return a weight, quantised and in the device's layout if these are given, in memory from `empty`."""
    packed = weight if quantize is None else quantise(weight, quantize)
    packed = packed if layout is None else layout(packed)
    found = Stored.allocate(packed.format, packed.shape, empty)
    for name, part in found.parts.items():
        part.copy_(packed.parts[name])
    return found


class _Staging:
    """Host memory that blocks are read into: pinned, and used in turn, where the blocks go on to a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers = [torch.empty(0, dtype=torch.uint8)] * 2
        self._sent = [torch.cuda.Event(), torch.cuda.Event()] if device.type == "cuda" else []
        self._turn = 0

    def __call__(self, count: int) -> Tensor:
        """Return `count` bytes of memory that nothing reads any more; a weight's piece has room in one call."""
        if not self._sent:
            return torch.empty(count, dtype=torch.uint8)
        self._turn = 1 - self._turn
        self._sent[self._turn].synchronize()
        if len(self._buffers[self._turn]) < count:
            self._buffers[self._turn] = torch.empty(count, dtype=torch.uint8, pin_memory=True)
        return self._buffers[self._turn][:count]

    def send(self, block: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Copy a block to the device, where it becomes `dtype` unless that is None.

        If it lies in this memory, the copy is only started, and the memory is reused once it is done.
        """
        staged = self._buffers[self._turn].untyped_storage().data_ptr()
        if not self._sent or block.untyped_storage().data_ptr() != staged:
            return block.to(self._device, dtype)
        rows = block.to(self._device, non_blocking=True)
        self._sent[self._turn].record()
        return rows if dtype is None else rows.to(dtype)


class FileMaker:
    """Makes parameters from an open checkpoint whose names and shapes have been checked."""

    def __init__(
        self,
        inventory: Inventory,
        spec: DecoderSpec,
        empty: Empty,
        dtype: torch.dtype,
        device: torch.device,
        keep_packed: bool,
        progress: Progress | None,
        layout: Layout | None = None,
        quantize: Method | None = None,
        quantize_head: bool = False,
    ) -> None:
        self.inventory = inventory
        self.empty = empty
        self.names = inventory.names
        self.dtype = dtype
        self.device = device
        self.keep_packed = keep_packed or layout is not None or quantize is not None
        self.layout = layout
        self.quantize = quantize
        self.quantize_head = quantize_head
        self.progress = progress
        self.staging = _Staging(device)
        self.extremes: list[tuple[str, Tensor]] = []
        """Smallest and largest value of each block that went to a GPU."""
        self.block_elements = _CPU_BLOCK_ELEMENTS if device.type == "cpu" else _DEVICE_BLOCK_ELEMENTS
        self.advancing = threading.Lock()
        self.done_bytes = 0
        self.total_bytes = inventory.nbytes
        if quantize_head and spec.has_head and spec.tied_head:  # the table of embeddings is read twice
            self.total_bytes += inventory.of(top_plan(spec)["embedding_VE"].parts[0]).nbytes(inventory.files)

    def dense(self, fused: Fused) -> Tensor:
        """Return a parameter as a tensor of its shape, in `dtype`; routers and norms with an offset in float32."""
        offset = self.names.norm_offset if fused.is_norm else 0.0
        has_offset = offset != 0.0 or (fused.is_norm and self.names.has_float32_norms)
        out = self.empty(fused.shape, torch.float32 if has_offset or fused.in_float32 else self.dtype)
        first = 0
        for part in fused.parts:
            self._fill(Stored.from_dense(out[first : first + part.rows]), part)
            first += part.rows
        return out.add_(offset) if offset else out

    def weight(self, fused: Fused) -> Stored:
        """Return a matrix, each of its tensors in the checkpoint's own format where that is kept, else in `dtype`.

        Tensors of one format become one weight in it if they join. Otherwise each keeps its own, in a `Stacked` weight.
        """
        formats = [self._format(part) for part in fused.parts]
        is_dense = all(isinstance(each, Dense) for each in formats)
        if self.quantize is not None and not is_dense:
            self._refuse_to_quantise(fused, formats)
        if self.quantize is None and (is_dense or self.layout is None):
            return self._stored(fused, formats, self.empty)
        return kept(self._stored(fused, formats, self._temporary), self.empty, self.layout, self.quantize)

    def table(self, fused: Fused) -> Stored:
        """Return the embeddings or an output head as a matrix of a layer, but dense where layers are quantised."""
        return self.weight(fused) if self.quantize is None else Stored.from_dense(self.dense(fused))

    def _temporary(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def _stored(self, fused: Fused, formats: Sequence[Format], empty: Empty) -> Stored:
        """Return a matrix whose tensors have `formats`, in memory from `empty`."""
        outputs = [part.rows for part in fused.parts]
        if all(each == formats[0] for each in formats) and joins(formats[0], fused.shape, outputs):
            whole = Stored.allocate(formats[0], fused.shape, empty)
            pieces = whole.split(outputs)
        else:
            shapes = [(rows, *fused.shape[1:]) for rows in outputs]
            pieces = [Stored.allocate(*each, empty) for each in zip(formats, shapes, strict=True)]
            whole = Stored.stack(pieces)
        for piece, part in zip(pieces, fused.parts, strict=True):
            self._fill(piece, part)
        return whole

    def check_tied(self, embedding: Part) -> None:
        """Refuse a tied checkpoint whose stored head is not its embedding."""
        head, name = self.inventory.tied_leftover, self.inventory.names.of(embedding)
        if head is None:
            return
        found = self.inventory.of(embedding)
        is_equal = head.kind == found.kind  # pieces of two kinds are cut at different places
        if is_equal:
            pairs = zip(*(self._host_blocks(each) for each in (head, found)), strict=True)
            is_equal = all(torch.equal(*pair) for pair in pairs)
        if not is_equal:
            self._refuse(head.tensors[0], "another matrix", f"equal to {name}, since tie_word_embeddings is true")

    def kv_scales(self) -> dict[int, KvScales]:
        """Return (keys, values) scales of the layers that have any.

        Checkpoints that were calibrated for an 8-bit cache hold them, under the names of one tool or another.
        """
        scales = {}
        for layer, names in enumerate(self.inventory.scales):
            held = {kind: self._scale(name) for name, kind in names.items() if name in self.inventory.files.shapes}
            if held:
                scales[layer] = KvScales(**held)
        return scales

    def _scale(self, name: str) -> float:
        files = self.inventory.files
        if math.prod(files.shapes[name]) != 1:
            self._refuse(name, list(files.shapes[name]), "one number")
        ((_, block),) = files.blocks(name, 1)
        value = float(block)
        if not 0.0 < value < math.inf:
            self._refuse(name, value, "a positive number")
        return value

    def _format(self, part: Part) -> Format:
        """Return the format in which a tensor of the checkpoint is kept."""
        found, plain = self.inventory.of(part), Dense(self.dtype)
        if not self.keep_packed or isinstance(found.format, Dense):
            return plain
        return found.format if not self._is_reordered(part) or _can_move(found, part) else plain

    def _fill(self, target: Stored, part: Part) -> None:
        """Write one tensor of the checkpoint over `target`, its part of a parameter."""
        name, order = self.inventory.names.of(part), self.row_order(part)
        found = self.inventory.of(part)
        is_kept = not isinstance(target.format, Dense)
        dtype = target.format.dtype if isinstance(target.format, Dense) else self.dtype
        for first, piece in found.pieces(self.block_elements, self.staging):
            parts = piece.parts
            if is_kept:
                parts = {name: each.to(self.device) for name, each in parts.items()}
            elif isinstance(piece.format, Dense):
                parts = {name: self.staging.send(each, dtype) for name, each in parts.items()}
            else:
                parts = {"values": piece.to(self.device).dense(dtype)}
            if not is_kept:
                self._note_extremes(name, parts["values"])
            _place(target, parts, first, order)
        if is_kept:
            for each in target.parts.values():
                if each.is_floating_point():
                    self._note_extremes(name, each)
        self._advance(found)

    def _host_blocks(self, found: Found) -> Iterator[Tensor]:
        for _, piece in found.pieces(self.block_elements, _Staging(torch.device("cpu"))):
            yield piece.dense(self.dtype)

    def row_order(self, part: Part) -> Tensor | None:
        """Return the place of each of the file's rows, int64 on the device, or None where they are in order."""
        rotated = part.rotated
        if rotated is None or not self._is_reordered(part):
            return None
        places = self._places(rotated)
        order = torch.arange(part.rows, device=self.device)
        if places is not None:
            heads = order[: rotated.rows].view(-1, rotated.head_dim)
            heads.copy_(heads[:, torch.from_numpy(places).to(self.device)])
        return order if part.groups is None else order[_ungrouped(part.rows, part.groups, rotated.head_dim).to(order)]

    def _places(self, rotated: Rotated) -> NDArray[np.int64] | None:
        interleaved = rotated.interleaved or self.names.interleaved
        return head_places(rotated.head_dim, rotated.rotary_dim, interleaved=interleaved)

    def _is_reordered(self, part: Part) -> bool:
        """Return whether rows change places, without a tensor: torch imports sympy for the first on a meta device."""
        return part.rotated is not None and (part.groups is not None or self._places(part.rotated) is not None)

    def _note_extremes(self, name: str, rows: Tensor) -> None:
        """Refuse a block that holds NaN or infinity: at once on a CPU, later and for all blocks together on a GPU."""
        if rows.dtype == torch.float8_e4m3fn:  # whose only values that are not finite are two codes for NaN
            has_nan = (rows.view(torch.uint8) & 0x7F).max() == 0x7F
            rows = torch.where(has_nan, torch.nan, 0.0)
        extremes = torch.aminmax(rows)
        if self.device.type != "cpu":
            self.extremes.append((name, torch.stack(extremes).float()))
        elif not all(math.isfinite(float(extreme)) for extreme in extremes):
            self._refuse_not_finite(name)

    def check_finite(self) -> None:
        """Refuse the weights on a GPU if any is NaN or infinite: one check for all, so that no block waits for it."""
        if not self.extremes:
            return
        finite = torch.stack([values for _, values in self.extremes]).isfinite().all(dim=1).tolist()
        for (name, _), is_finite in zip(self.extremes, finite, strict=True):
            if not is_finite:
                self._refuse_not_finite(name)

    def _advance(self, found: Found) -> None:
        with self.advancing:
            self.done_bytes += found.nbytes(self.inventory.files)
            if self.progress is not None:
                self.progress(self.done_bytes, self.total_bytes)

    def _refuse_not_finite(self, name: str) -> NoReturn:
        self._refuse(name, "not finite", f"finite values in {str(self.dtype).removeprefix('torch.')}")

    def _refuse_to_quantise(self, fused: Fused, formats: Sequence[Format]) -> NoReturn:
        name, format = next(
            (self.inventory.names.of(part), format.name)
            for part, format in zip(fused.parts, formats, strict=True)
            if not isinstance(format, Dense)
        )
        raise InvalidParams(
            f"quantize: {name[:200]} is stored as {format} already; leave quantize out, or give a checkpoint that is "
            "not quantised",
            field="quantize",
            value=self.quantize,
        )

    def _refuse(self, tensor: str, value: object, limit: object) -> NoReturn:
        self.inventory.refuse(tensor, value, limit)


class BlankMaker(FileMaker):
    """Makes zeros in the formats of a checkpoint, whose weights it does not read."""

    def check_tied(self, embedding: Part) -> None:
        """Do nothing: what the checkpoint holds does not matter."""

    def _fill(self, target: Stored, part: Part) -> None:
        for each in target.parts.values():
            each.zero_()


class MetaMaker(FileMaker):
    """Describes the parameters of a checkpoint on the meta device; matrices that are alike are one object."""

    @cached_property
    def _alike(self) -> dict[Hashable, Stored]:
        """The matrices that have been described, by what those that are alike have in common."""
        return {}

    def weight(self, fused: Fused) -> Stored:
        """Return a matrix, the same one wherever tensors of the same roles have the same formats and shapes."""
        formats = tuple(self._format(part) for part in fused.parts)
        key = (formats, fused.shape, *((part.role, part.rows) for part in fused.parts))
        if key not in self._alike:
            self._alike[key] = super().weight(fused)
        return self._alike[key]

    def _fill(self, target: Stored, part: Part) -> None:
        """Read nothing."""


def _can_move(found: Found, part: Part) -> bool:
    """Return whether rows may change places in their format: what several rows share has whole heads.

    Heads that lie group by group change places, too, so that then no rows may share anything.
    """
    if part.rotated is None or isinstance(found.format, Stacked):
        return False
    size = part.rotated.head_dim
    shared = (spec.outputs for spec in found.format.parts(found.shape).values())
    if part.groups is not None:
        return all(outputs is None or outputs == 1 for outputs in shared)
    return all(outputs is None or outputs == 1 or outputs % size == 0 for outputs in shared)


def _ungrouped(rows: int, groups: int, head_dim: int) -> Tensor:
    """Return the place of each row of a tensor that holds heads group by group, once all queries come first.

    All keys follow, then all values; int64 [rows].
    """
    heads_KGD = torch.arange(rows).view(groups, -1, head_dim)
    kinds = heads_KGD[:, :-2], heads_KGD[:, -2], heads_KGD[:, -1]
    return torch.cat([kind.flatten() for kind in kinds]).argsort()


def _place(target: Stored, parts: Mapping[str, Tensor], first: int, order: Tensor | None) -> None:
    """Write parts of a weight's outputs, counted from `first`, to their places in `target`."""
    for name, spec in target.format.parts(target.shape).items():
        rows, whole = parts[name], target.parts[name]
        if spec.outputs is None:
            whole.copy_(rows)
            continue
        start = first // spec.outputs
        here = slice(start, start + len(rows))
        if order is None or spec.outputs != 1:
            whole[here].copy_(rows)
        else:
            if rows.dtype == torch.float8_e4m3fn:  # which torch does not index
                whole, rows = whole.view(torch.uint8), rows.view(torch.uint8)
            whole.index_copy_(0, order[here], rows)
