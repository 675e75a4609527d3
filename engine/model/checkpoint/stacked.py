"""`StackedExperts`: reads an expert's matrices from tensors that hold those of all experts; never knows a family.

GGUF files hold them in `ffn_gate_exps`, `ffn_up_exps` and `ffn_down_exps`, each a stack of one matrix of each expert.
In place of the first two there may be `ffn_gate_up_exps`, a stack of gates above ups.

Checkpoints of transformers 5 may hold the experts of a layer as `experts.gate_up_proj` [X, 2F, E] and
`experts.down_proj` [X, E, F], and Granite's as `input_linear.weight` and `output_linear.weight` of the same shapes.
The published ones of Qwen3-VL hold the first two as [X, E, 2F] and [X, F, E], which no other pair of shapes can be.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Final

from headrace.engine.model.checkpoint.found import Checkpoint, Found, Pieces, Place, Staging, refuse_tensor
from headrace.engine.model.checkpoint.gguf import GgufFile
from headrace.engine.model.checkpoint.quantised.parts import CODES, is_plain, present
from headrace.engine.model.checkpoint.safetensors import SafetensorsFolder
from headrace.engine.model.checkpoint.transposed import transposed_in_stack
from headrace.ops.formats import Dense, Stored

__all__ = ["StackedExperts"]

_EXPERT: Final = re.compile(r"(.+)\.experts\.(\d{1,9})\.(gate_proj|up_proj|down_proj)\.weight")
_IN_GGUF: Final = re.compile(r"(.+_exps)\.(\d{1,9})(\.gate|\.up)?\.weight")
_GATE_UP: Final = ("experts.gate_up_proj", "input_linear.weight")
_DOWN: Final = ("experts.down_proj", "output_linear.weight")


class StackedExperts:
    """Reads what checkpoints call an expert's `gate_proj`, `up_proj` and `down_proj` from one tensor of all experts."""

    def find(self, files: Checkpoint, name: str) -> Found | None:
        """Return the expert's rows of the tensor of all experts; None where there is no such tensor.

        Raises:
            ModelRejected: The tensor is no stack of matrices or has no such expert, or the expert has a tensor of its
                own, too.
        """
        if isinstance(files, GgufFile):
            return _in_gguf(files, name)
        match = _EXPERT.fullmatch(name)
        if match is None:
            return None
        prefix, expert, role = match[1], int(match[2]), match[3]
        names = (f"{prefix}.{each}" for each in (_DOWN if role == "down_proj" else _GATE_UP))
        tensor = next((each for each in names if each in files.shapes), None)
        if tensor is None:
            return None
        for own in present(files, name.removesuffix(".weight"), CODES):
            refuse_tensor(files, own, "left over", f"either each expert's own tensors or {tensor}, not both")
        if _are_turned(files, f"{prefix}.experts"):
            return _turned(files, tensor, expert, role)
        shape = files.shapes[tensor]
        parts = 1 if role == "down_proj" else 2
        if len(shape) != 3 or shape[1] % parts or not all(shape):
            refuse_tensor(files, tensor, list(shape), _shape_of(parts))
        _check_stack(files, tensor, shape[0], expert)
        rows = shape[1] // parts
        first = expert * shape[1] + (rows if role == "up_proj" else 0)
        format = Dense(files.weight_dtype(tensor))
        place = Place(expert, shape[0], rows * shape[2] * format.dtype.itemsize)
        pieces = partial(_pieces, files, tensor, first, (rows, shape[2]))
        return Found(format, (rows, shape[2]), (tensor,), pieces, place=place)


def _are_turned(files: SafetensorsFolder, experts: str) -> bool:
    """Return whether the two stacks of a layer's experts are [in, out], by their shapes together."""
    up, down = (files.shapes.get(f"{experts}.{each}", ()) for each in ("gate_up_proj", "down_proj"))
    return len(up) == len(down) == 3 and all(up) and all(down) and up[1:] == (down[2], 2 * down[1])


def _turned(files: SafetensorsFolder, tensor: str, expert: int, role: str) -> Found:
    """Return an expert's matrix of a stack of [in, out], where ups lie beside gates."""
    count, _, outs = files.shapes[tensor]
    _check_stack(files, tensor, count, expert)
    half = {"gate_proj": slice(outs // 2), "up_proj": slice(outs // 2, None)}.get(role, slice(None))
    return transposed_in_stack(files, tensor, expert, half)


def _in_gguf(files: GgufFile, name: str) -> Found | None:
    match = _IN_GGUF.fullmatch(name)
    if match is None or (tensor := f"{match[1]}.weight") not in files.tensors:
        return None
    shape, expert, half = files.shapes[tensor], int(match[2]), match[3]
    parts = 1 if half is None else 2
    if len(shape) != 3 or shape[1] % parts or not all(shape):
        refuse_tensor(files, tensor, list(shape), _shape_of(parts))
    _check_count(files, tensor, shape[0], expert)
    rows = shape[1] // parts
    first = expert * shape[1] + (rows if half == ".up" else 0)

    def pieces(elements: int, _staging: Staging) -> Pieces:
        return files.in_stack(tensor, range(first, first + rows), elements)

    place = Place(expert, shape[0], files.nbytes(tensor) // (shape[0] * parts))
    return Found(files.stacked_format(tensor), (rows, shape[2]), (tensor,), pieces, place=place)


def _shape_of(parts: int) -> str:
    """Return in words the shape of a stack of matrices, or of pairs of matrices."""
    return "the shape [experts, out, in]" if parts == 1 else "the shape [experts, 2 * width, in]"


def _check_stack(files: SafetensorsFolder, tensor: str, count: int, expert: int) -> None:
    _check_count(files, tensor, count, expert)
    if not is_plain(files, tensor):
        dtype = str(files.dtype(tensor)).removeprefix("torch.")
        refuse_tensor(files, tensor, dtype, "plain floats; of quantised experts each has tensors of its own")


def _check_count(files: Checkpoint, tensor: str, count: int, expert: int) -> None:
    if expert >= count:
        refuse_tensor(files, tensor, f"of {count} experts", f"more than {expert}, as the config says")


def _pieces(
    files: SafetensorsFolder, tensor: str, offset: int, shape: tuple[int, int], elements: int, staging: Staging
) -> Pieces:
    rows, columns = shape
    step = max(elements // columns, 1)
    for first in range(0, rows, step):
        stop = min(first + step, rows)
        block = files.rows(tensor, offset + first, offset + stop, staging, in_stack=True)
        yield first, Stored.from_dense(block)
