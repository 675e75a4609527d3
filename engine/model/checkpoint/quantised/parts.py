"""Reads the parts of quantised weights from safetensors: by outputs, or turned; never knows a tool's names."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import torch
from torch import Tensor

from headrace.engine.model.checkpoint.found import Allocate, Found, Pieces, Staging, refuse_tensor
from headrace.engine.model.checkpoint.safetensors import SafetensorsFolder
from headrace.ops.formats import Format, Stored

__all__ = [
    "CODES",
    "FLOATS",
    "Rows",
    "Turn",
    "Whole",
    "by_rows",
    "check_scale",
    "expect",
    "is_plain",
    "present",
    "read",
    "turned",
]

CODES: Final = ("weight", "weight_packed", "qweight", "weight_blocks")
"""Names of a module's tensors that may be codes."""
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_PLAIN = (*FLOATS, torch.float64)
_CHECKED_ELEMENTS = 1 << 18
_NOT_FINITE = {
    torch.float32: (torch.int32, -(1 << 31), 0x7F800000),
    torch.float16: (torch.int16, -(1 << 15), 0x7C00),
    torch.bfloat16: (torch.int16, -(1 << 15), 0x7F80),
    torch.float8_e4m3fn: (torch.uint8, 0x80, 0x7F),
    torch.float8_e8m0fnu: (torch.uint8, 0, 0xFF),
    torch.uint8: (torch.uint8, 0, 0xFF),
}
"""By dtype: integers of its size, the bit of the sign, and the least of the others that stand for no finite number."""


def _as_it_is(block: Tensor) -> Tensor:
    return block


@dataclass(frozen=True, slots=True)
class Rows:
    """A part that is a tensor of the file, cut by outputs as the part is."""

    tensor: str
    change: Callable[[Tensor], Tensor] = _as_it_is
    """Function that makes the part of some rows from these rows, on any device."""
    each: int = 1
    """Rows of the tensor that make one of the part."""


@dataclass(frozen=True, slots=True)
class Whole:
    """A small part that is made at once for the whole weight; every part that no outputs share is."""

    make: Callable[[], Tensor]
    """Function that returns the part in host memory."""


Parts: TypeAlias = Mapping[str, Rows | Whole]
Turn: TypeAlias = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
"""Function that makes a format's parts from the file's tensors, on any device."""


def is_plain(files: SafetensorsFolder, tensor: str) -> bool:
    """Return whether the file has a tensor as plain numbers, from which no scale is missing."""
    return tensor in files.shapes and files.dtype(tensor) in _PLAIN


def present(files: SafetensorsFolder, module: str, names: Iterable[str]) -> tuple[str, ...]:
    """Return those of a module's tensors that the file has."""
    return tuple(tensor for name in names if (tensor := f"{module}.{name}") in files.shapes)


def expect(
    files: SafetensorsFolder,
    tensor: str,
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[torch.dtype],
    beside: str = "",
) -> None:
    """Refuse a tensor that is missing, or that has none of the given shapes or dtypes.

    Args:
        files: The open checkpoint.
        tensor: The tensor's name.
        shapes: The shapes that it may have.
        dtypes: The dtypes that it may have.
        beside: The tensor from whose shape these shapes follow, for the message; empty if there is none.
    """
    wanted = f"{_either(str(each).removeprefix('torch.') for each in dtypes)} {_either(str(list(s)) for s in shapes)}"
    if beside:
        wanted += f" beside {beside} {list(files.shapes[beside])}"
    if tensor not in files.shapes:
        refuse_tensor(files, tensor, "missing", wanted)
    if files.shapes[tensor] not in shapes or files.dtype(tensor) not in dtypes:
        dtype = str(files.dtype(tensor)).removeprefix("torch.")
        refuse_tensor(files, tensor, f"{dtype} {list(files.shapes[tensor])}", wanted)


def _either(values: Iterable[str]) -> str:
    return " or ".join(dict.fromkeys(values))


def read(files: SafetensorsFolder, tensor: str, *allocate: Allocate) -> Tensor:
    """Return a whole tensor in host memory, which `allocate` makes if it is given."""
    shape = files.shapes[tensor]
    return files.rows(tensor, 0, shape[0] if shape else 1, *allocate).view(shape)


def check_scale(
    files: SafetensorsFolder, tensor: str, *, may_be_zero: bool = False, may_be_negative: bool = False
) -> None:
    """Refuse scales that are NaN or infinite, and zeros and negative ones where they mean damage.

    Args:
        files: The open checkpoint.
        tensor: The tensor of scales.
        may_be_zero: Whether scales may be zero, as those of groups of zeros are.
        may_be_negative: Whether scales may be negative, as AutoRound's for integers are.

    Raises:
        ModelRejected: There is such a scale.
    """
    whole, sign, least = _NOT_FINITE[files.dtype(tensor)]
    low = 0 if may_be_zero or not sign else 1  # exponents have no zero
    for first, block in files.raw_blocks(tensor, _CHECKED_ELEMENTS):
        # As integers positive floats are in their order. Negative ones lie below all of them, or above if unsigned.
        size = block.view(whole) & ~sign if may_be_negative else block.view(whole)
        if int(size.max()) < least and int(size.min()) >= low:
            continue
        at = ((size >= least) | (size < low)).nonzero()[0].tolist()
        exponents = block.view(torch.float8_e8m0fnu) if block.dtype == torch.uint8 else block
        value = float(exponents[tuple(at)])
        at[0] += first
        wanted = "not zero" if may_be_negative else "not negative" if may_be_zero else "above zero"
        is_any = not sign or (may_be_zero and may_be_negative)
        refuse_tensor(files, tensor, f"{value} at {at}", "finite scales" + ("" if is_any else f", {wanted}"))


def by_rows(
    files: SafetensorsFolder,
    format: Format,
    shape: tuple[int, int],
    parts: Parts,
    tensors: Sequence[str],
    check: Callable[[], None],
    kind: str | None = None,
) -> Found:
    """Return how `files` hold a weight whose parts are cut by outputs there, as they are in the format.

    Args:
        files: The open checkpoint.
        format: The format of the weight.
        shape: Shape of the weight, [out, in].
        parts: How each part is read.
        tensors: All tensors of the weight, those that nobody reads included.
        check: Refuses scales, zeros and orders that are damaged.
        kind: What all tensors of a product have to have in common; None for the name of the format.
    """
    specs = format.parts(shape)

    def pieces(elements: int, staging: Staging) -> Pieces:
        whole = {name: staging.send(part.make()) for name, part in parts.items() if isinstance(part, Whole)}
        rows = {name: part for name, part in parts.items() if isinstance(part, Rows)}
        largest = max(rows, key=lambda name: files.nbytes(rows[name].tensor))
        grain = math.lcm(*(spec.outputs or 1 for spec in specs.values()))
        step = max(elements // shape[1] // grain, 1) * grain
        for first in range(0, shape[0], step):
            stop = min(first + step, shape[0])
            made = {}
            for name, spec in specs.items():
                if spec.outputs is None:
                    made[name] = whole[name]
                    continue
                start, end = first // spec.outputs, -(-stop // spec.outputs)
                if name in whole:
                    made[name] = whole[name][start:end]
                    continue
                allocate: Sequence[Allocate] = [staging] if name == largest else []
                part = rows[name]
                block = staging.send(files.rows(part.tensor, start * part.each, end * part.each, *allocate))
                made[name] = part.change(block)
            yield first, Stored(format, (stop - first, shape[1]), made)

    return Found(format, shape, tuple(tensors), pieces, check, kind or format.name)


def turned(
    files: SafetensorsFolder,
    format: Format,
    shape: tuple[int, int],
    read_from: Mapping[str, str],
    turn: Turn,
    tensors: Sequence[str],
    check: Callable[[], None],
    kind: str | None = None,
) -> Found:
    """Return how `files` hold a weight that is not cut by outputs there: it is read and turned in one go.

    The arguments are those of `by_rows`, with the tensors that `turn` takes, by the names that it knows.
    """

    def pieces(_elements: int, staging: Staging) -> Pieces:
        largest = max(read_from, key=lambda name: files.nbytes(read_from[name]))
        raw = {name: staging.send(read(files, tensor)) for name, tensor in read_from.items() if name != largest}
        raw[largest] = staging.send(read(files, read_from[largest], staging))
        yield 0, Stored(format, shape, turn(raw))

    return Found(format, shape, tuple(tensors), pieces, check, kind or format.name)
