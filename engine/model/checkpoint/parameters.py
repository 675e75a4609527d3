"""Reads the parameters of a decoder from a checkpoint; never decides which there are or when they are read.

Each tensor goes block by block from its file to its place in a fused parameter, in the wanted dtype and on the wanted
device. A name that is missing, left over or of another shape is an error before anything is allocated. On a CPU several
threads may read parameters at a time.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn, TypeAlias

import torch
from torch import Tensor

from headrace.engine.errors import ModelRejected
from headrace.engine.model.checkpoint.gguf import GgufFile
from headrace.engine.model.checkpoint.plan import all_parts
from headrace.engine.model.checkpoint.safetensors import SafetensorsFolder
from headrace.engine.model.roles import Fused, Part
from headrace.engine.model.spec import DecoderSpec
from headrace.ops.paged import KvScales
from headrace.ops.quantised import GROUP, GroupQuantised

__all__ = ["Empty", "FileMaker", "Progress", "Weight"]

Weight: TypeAlias = Tensor | GroupQuantised
Empty: TypeAlias = Callable[[Sequence[int], torch.dtype], Tensor]
"""Function that makes an uninitialised tensor on the device, from its shape and dtype."""
Progress: TypeAlias = Callable[[int, int], None]
"""Function that is called with the bytes done and the bytes in all."""

_TIED_LEFTOVER = "lm_head.weight"
_PREFIX = "model."
_CPU_BLOCK_ELEMENTS = 1 << 18  # in float32 a quarter of what a core caches
_DEVICE_BLOCK_ELEMENTS = 1 << 24


class _Staging:
    """Host memory that blocks are read into: pinned, and used in turn, where the blocks go on to a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers = [torch.empty(0, dtype=torch.uint8)] * 2
        self._sent = [torch.cuda.Event(), torch.cuda.Event()] if device.type == "cuda" else []
        self._turn = 0

    def __call__(self, count: int) -> Tensor:
        """Return `count` bytes of memory that nothing reads any more."""
        if not self._sent:
            return torch.empty(count, dtype=torch.uint8)
        self._turn = 1 - self._turn
        self._sent[self._turn].synchronize()
        if len(self._buffers[self._turn]) < count:
            self._buffers[self._turn] = torch.empty(count, dtype=torch.uint8, pin_memory=True)
        return self._buffers[self._turn][:count]

    def send(self, block: Tensor, dtype: torch.dtype) -> Tensor:
        """Start to copy a block to the device, where it becomes `dtype`; its memory is reused once that is done."""
        rows = block.to(self._device, non_blocking=True)
        if self._sent:
            self._sent[self._turn].record()
        return rows.to(dtype)


class FileMaker:
    """Makes parameters from an open checkpoint whose names and shapes have been checked."""

    def __init__(
        self,
        source: SafetensorsFolder | GgufFile,
        spec: DecoderSpec,
        empty: Empty,
        dtype: torch.dtype,
        device: torch.device,
        keep_packed: bool,
        progress: Progress | None,
    ) -> None:
        self.empty = empty
        self.source = source
        self.names = spec.names
        self.is_bare = not any(name.startswith(_PREFIX) for name in source.shapes)
        """Whether the checkpoint was saved without the class that holds the head, as folders may be."""
        if self.is_bare:
            self.names = spec.names.without(_PREFIX)
        self.dtype = dtype
        self.device = device
        self.keep_packed = keep_packed
        self.progress = progress
        self.staging = _Staging(device)
        self.extremes: list[tuple[str, Tensor]] = []
        """Smallest and largest value of each block that went to a GPU."""
        self.block_elements = _CPU_BLOCK_ELEMENTS if device.type == "cpu" else _DEVICE_BLOCK_ELEMENTS
        wanted = self._check_names(spec)
        self.advancing = threading.Lock()
        self.done_bytes = 0
        self.total_bytes = sum(source.nbytes(name) for name in wanted)

    def dense(self, fused: Fused) -> Tensor:
        """Return a parameter as a tensor of its shape, in `dtype`."""
        out = self.empty(fused.shape, self.dtype)
        first = 0
        for part in fused.parts:
            self._fill(out[first : first + part.rows], part)
            first += part.rows
        return out

    def linear(self, fused: Fused) -> Weight:
        """Return a matrix in 4-bit groups where that is wanted and the file stores it so, else the same as `dense`."""
        if not self.keep_packed or not isinstance(self.source, GgufFile):
            return self.dense(fused)
        if not all(self.source.has_groups(self.names.of(part)) for part in fused.parts):
            return self.dense(fused)
        rows, columns = fused.shape
        values_OI = torch.empty(rows, columns, dtype=torch.uint8, device=self.device)
        scale_OG, minimum_OG = torch.empty(2, rows, columns // GROUP, device=self.device).unbind()
        first = 0
        for part in fused.parts:
            here = slice(first, first + part.rows)
            self._fill_groups((values_OI[here], scale_OG[here], minimum_OG[here]), self.source, part)
            first += part.rows
        return GroupQuantised(values_OI, scale_OG, minimum_OG)

    def check_tied(self, embedding: str) -> None:
        """Refuse a tied checkpoint whose stored head is not its embedding."""
        if _TIED_LEFTOVER not in self.source.shapes:
            return
        heads = self.source.blocks(_TIED_LEFTOVER, self.block_elements)
        rows = self.source.blocks(embedding, self.block_elements)
        pairs = zip(heads, rows, strict=True)
        if not all(torch.equal(head.to(self.dtype), row.to(self.dtype)) for (_, head), (_, row) in pairs):
            self._refuse(_TIED_LEFTOVER, "tensor", f"equal to {embedding}, since tie_word_embeddings is true")

    def _check_names(self, spec: DecoderSpec) -> dict[str, tuple[int, ...]]:
        wanted = {self.names.of(part): shape for part, shape in all_parts(spec)}
        found = self.source.shapes
        missing = [name for name in wanted if name not in found]
        if missing:
            self._refuse(missing[0], "missing", f"the {len(wanted)} tensors of the model ({len(missing)} missing)")
        known = wanted.keys() | {name for layer in range(spec.num_layers) for name in self._scale_names(layer)}
        left = [name for name in found if name not in known and not self.names.harmless.fullmatch(name)]
        head_shape = (spec.vocab_size, spec.hidden_size)
        if spec.tied_head and not self.is_bare and found.get(_TIED_LEFTOVER) == head_shape:
            left.remove(_TIED_LEFTOVER)  # check_tied compares it
        if left:
            self._refuse(left[0], "left over", f"the tensors of the model ({len(left)} left over)")
        for name, shape in wanted.items():
            if found[name] != shape:
                self._refuse(name, list(found[name]), f"the shape {list(shape)}")
        return wanted

    def kv_scales(self, layers: int) -> dict[int, KvScales]:
        """Return (keys, values) scales of the layers that have any.

        Checkpoints that were calibrated for an 8-bit cache hold them, under the names of one tool or another.
        """
        scales = {}
        for layer in range(layers):
            held = {name.rsplit(".", 1)[1]: name for name in self._scale_names(layer) if name in self.source.shapes}
            if held:
                scales[layer] = KvScales(**{kind[0]: self._scale(name) for kind, name in held.items()})
        return scales

    def _scale_names(self, layer: int) -> list[str]:
        prefix = self.names.layer_prefix.format(layer)
        return [prefix + name.format(kind) for kind in "kv" for name in self.names.kv_scales]

    def _scale(self, name: str) -> float:
        if math.prod(self.source.shapes[name]) != 1:
            self._refuse(name, list(self.source.shapes[name]), "one number")
        ((_, block),) = self.source.blocks(name, 1)
        value = float(block)
        if not 0.0 < value < math.inf:
            self._refuse(name, value, "a positive number")
        return value

    def _fill(self, target: Tensor, part: Part) -> None:
        """Write one tensor of the checkpoint over `target`, its rows of a fused parameter."""
        name = self.names.of(part)
        order = self._row_order(part)
        for first, rows in self._blocks(name):
            self._note_extremes(name, rows)
            _place(target, rows, first, order)
        self._advance(name)

    def _blocks(self, name: str) -> Iterator[tuple[int, Tensor]]:
        """Yield a tensor's rows in order as (first row, rows), in the wanted dtype and on the device."""
        if isinstance(self.source, GgufFile):
            for first, block in self.source.blocks(name, self.block_elements):
                yield first, block.to(self.device, self.dtype)
        else:
            for first, block in self.source.blocks(name, self.block_elements, self.staging):
                yield first, self.staging.send(block, self.dtype)

    def _fill_groups(self, targets: tuple[Tensor, Tensor, Tensor], source: GgufFile, part: Part) -> None:
        """Write the quants, scales and minima of one tensor over `targets`, its rows of a packed parameter."""
        name = self.names.of(part)
        order = self._row_order(part)
        for first, block in source.groups(name, self.block_elements):
            for target, rows in zip(targets, block, strict=True):
                _place(target, rows.to(self.device), first, order)
        for constants in targets[1:]:
            self._note_extremes(name, constants)
        self._advance(name)

    def _row_order(self, part: Part) -> Tensor | None:
        """Return the place of each of the file's rows, or None where they are in order."""
        if not self.names.interleaved or part.rotated is None:
            return None
        order = torch.arange(part.rows, device=self.device)
        return order.view(-1, 2, part.rotated // 2).transpose(1, 2).flatten()

    def _note_extremes(self, name: str, rows: Tensor) -> None:
        """Refuse a block that holds NaN or infinity: at once on a CPU, later and for all blocks together on a GPU."""
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

    def _advance(self, name: str) -> None:
        with self.advancing:
            self.done_bytes += self.source.nbytes(name)
            if self.progress is not None:
                self.progress(self.done_bytes, self.total_bytes)

    def _refuse_not_finite(self, name: str) -> NoReturn:
        self._refuse(name, "not finite", f"finite values in {str(self.dtype).removeprefix('torch.')}")

    def _refuse(self, tensor: str, value: object, limit: object) -> NoReturn:
        message = f"{self.source.name}: the tensor {tensor[:200]} is {value}; wanted: {limit}"
        raise ModelRejected(message, field=tensor, value=value, limit=limit)


def _place(target: Tensor, rows: Tensor, first: int, order: Tensor | None) -> None:
    """Write rows of a tensor, counted from `first`, to their places in `target`."""
    here = slice(first, first + len(rows))
    if order is None:
        target[here].copy_(rows)
    else:
        target.index_copy_(0, order[here], rows)
