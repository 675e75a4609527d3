"""`Unpacker`: copies stored matrices from host memory to their places on the device; never decides on the places.

The bytes are copied unchanged, piece by piece, and a kernel puts each number in its place, scaled and rounded, without
work on the host. Pieces are small, so that copies of a step meanwhile wait for one of them and not for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

__all__ = ["Unpacker"]

_STAGED_PIECES = 8
_BLOCK = 4096
_COLUMNS = 8
_AT, _COUNT, _TO, _KIND = 0, 2, 4, 7


@triton.jit(do_not_specialize_on_alignment=["scales"])  # one compiled kernel serves all parts
def _unpack_kernel(
    staged, parts, scales, target, KIND: tl.constexpr, STAGED: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr
):
    line = parts + tl.program_id(0) * COLUMNS
    count = tl.load(line + 2).to(tl.int32)
    begin = tl.program_id(1) * BLOCK
    if (tl.load(line + 7) == KIND) & (begin < count):
        index = begin + tl.arange(0, BLOCK)
        here = tl.load(line) % STAGED // (staged.dtype.element_ty.primitive_bitwidth // 8)
        value = tl.load(staged + here + index, mask=index < count, other=0.0).to(tl.float32)
        element = tl.load(line + 1).to(tl.int32) + index
        columns = tl.load(line + 3).to(tl.int32)
        row = element // columns
        column = element - row * columns
        place = tl.load(line + 4) + row * tl.load(line + 5) + column * tl.load(line + 6)
        scaled = value * tl.load(scales + tl.program_id(0))
        tl.store(target + place, scaled.to(target.dtype.element_ty), mask=index < count)


class Unpacker:
    """Copier to one tensor on the device, for one user at a time."""

    def __init__(self, target: Tensor, dtypes: Sequence[torch.dtype], piece_bytes: int) -> None:
        """Allocate memory for some pieces at a time, and compile.

        Args:
            target: Target, bf16 or fp16, flat.
            dtypes: Dtypes of stored numbers, by a part's kind.
            piece_bytes: Bytes of each piece.
        """
        self._target, self._dtypes, self._piece_bytes = target, dtypes, piece_bytes
        self._staged = torch.empty(_STAGED_PIECES * piece_bytes, dtype=torch.uint8, device=target.device)
        nothing = torch.zeros(1, _COLUMNS, dtype=torch.int64)
        for kind in range(len(dtypes)):
            nothing[0, _KIND] = kind
            self._launch(nothing.to(target.device), torch.zeros(1, device=target.device), [kind], 1)

    def __call__(
        self, pieces: Sequence[Tensor], parts: NDArray[np.int64], scales: NDArray[np.float32], start: int
    ) -> None:
        """Enqueue the copy of `parts` to the target; `pieces` must not change until that is done.

        Args:
            pieces: Memory that holds the parts, each in one piece, pinned uint8.
            parts: Descriptions, [parts, 8], in the order of memory: see `Part` of adapters/stored.py.
            scales: Factor of each part's numbers, [parts].
            start: Element of the target from which places count.
        """
        placed = parts.copy()
        placed[:, _TO] += start
        on_device = torch.from_numpy(placed).to(self._target.device)
        factors = torch.from_numpy(scales).to(self._target.device)
        for group in range(0, len(pieces), _STAGED_PIECES):
            for place, piece in enumerate(pieces[group : group + _STAGED_PIECES]):
                self._staged[place * self._piece_bytes :][: len(piece)].copy_(piece, non_blocking=True)
            ends = [group * self._piece_bytes, group * self._piece_bytes + len(self._staged)]
            low, high = np.searchsorted(parts[:, _AT], ends).tolist()
            if low < high:
                kinds = np.unique(parts[low:high, _KIND]).tolist()
                self._launch(on_device[low:high], factors[low:high], kinds, int(parts[low:high, _COUNT].max()))

    def _launch(self, parts: Tensor, scales: Tensor, kinds: Sequence[int], longest: int) -> None:
        for kind in kinds:
            grid = (len(parts), triton.cdiv(longest, _BLOCK))
            staged = self._staged.view(self._dtypes[kind])
            _unpack_kernel[grid](
                staged, parts, scales, self._target,
                KIND=kind, STAGED=len(self._staged), COLUMNS=_COLUMNS, BLOCK=_BLOCK,
            )  # fmt: skip
