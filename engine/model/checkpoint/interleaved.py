"""`InterleavedExperts`: reads experts as gpt-oss stores them: gates and ups in turn, in stacks of all experts.

Plain stacks are turned: `gate_up_proj` [X, E, 2F] and `down_proj` [X, F, E]. In MXFP4 they are not: they are
`gate_up_proj_blocks` [X, 2F, E / 32, 16] and `down_proj_blocks` [X, E, F / 32, 16], with exponents in `_scales`.
Families whose checkpoints look so call an expert's matrices `gate_in_turn`, `up_in_turn` and `turned`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Final

import torch
from torch import Tensor

from headrace.engine.model.checkpoint.found import Checkpoint, Found, Pieces, Place, Staging, refuse_tensor
from headrace.engine.model.checkpoint.quantised.parts import check_scale, expect
from headrace.engine.model.checkpoint.safetensors import SafetensorsFolder
from headrace.engine.model.checkpoint.transposed import transposed_in_stack
from headrace.ops.formats import Stored
from headrace.ops.quantised import Float4Groups

__all__ = ["InterleavedExperts"]

_EXPERT: Final = re.compile(r"(.+\.experts)\.(\d{1,9})\.(gate_in_turn|up_in_turn|turned)\.weight")
_ROWS: Final = {"gate_in_turn": slice(0, None, 2), "up_in_turn": slice(1, None, 2), "turned": slice(None)}
_MXFP4: Final = Float4Groups("e8m0")


class InterleavedExperts:
    """Reads what gpt-oss's family calls an expert's `gate_in_turn`, `up_in_turn` and `turned`."""

    def find(self, files: Checkpoint, name: str) -> Found | None:
        """Return the expert's rows; None where there are no such tensors.

        Raises:
            ModelRejected: A tensor is no such stack, has no such expert, or lacks its scales.
        """
        match = _EXPERT.fullmatch(name)
        if match is None or not isinstance(files, SafetensorsFolder):
            return None
        stem, expert, rows = match[1], int(match[2]), _ROWS[match[3]]
        tensor = f"{stem}.{'down_proj' if match[3] == 'turned' else 'gate_up_proj'}"
        if tensor in files.shapes:
            _check(files, tensor, len(files.shapes[tensor]) == 3, expert)
            return transposed_in_stack(files, tensor, expert, rows)
        return _packed(files, tensor, expert, rows) if f"{tensor}_blocks" in files.shapes else None


def _packed(files: SafetensorsFolder, tensor: str, expert: int, rows: slice) -> Found:
    values, scale = f"{tensor}_blocks", f"{tensor}_scales"
    shape = files.shapes[values]
    _check(files, values, len(shape) == 4 and shape[3] == _MXFP4.group // 2, expert)
    expect(files, values, [shape], [torch.uint8])
    expect(files, scale, [shape[:3]], [torch.uint8], values)
    whole = (len(range(shape[1])[rows]), shape[2] * _MXFP4.group)

    def part(name: str) -> Tensor:
        stacked = files.rows(name, expert * shape[1], (expert + 1) * shape[1], in_stack=True)
        return stacked[rows].flatten(1).contiguous()

    def pieces(_elements: int, staging: Staging) -> Pieces:
        parts = {"values": staging.send(part(values)), "scale": staging.send(part(scale))}
        yield 0, Stored(_MXFP4, whole, parts)

    check: Callable[[], None] | None = None
    if expert == 0 and rows.start != 1:  # once for all experts
        check = partial(check_scale, files, scale, may_be_zero=True)
    place = Place(expert, shape[0], sum(each.nbytes for each in _MXFP4.parts(whole).values()))
    return Found(_MXFP4, whole, (values, scale), pieces, check, _MXFP4.name, place)


def _check(files: SafetensorsFolder, tensor: str, is_stack: bool, expert: int) -> None:
    shape = files.shapes[tensor]
    if not is_stack or not all(shape):
        refuse_tensor(files, tensor, list(shape), "a stack of one matrix of each expert")
    if expert >= shape[0]:
        refuse_tensor(files, tensor, f"of {shape[0]} experts", f"more than {expert}, as the config says")
