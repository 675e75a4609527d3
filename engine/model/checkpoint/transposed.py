"""`transposed`: reads a matrix that a checkpoint stores [in, out], as GPT-2 does, as [out, in].

`transposed_in_stack` does so with an expert's matrix of a stack [experts, in, out].
"""

from __future__ import annotations

from dataclasses import replace

import torch

from headrace.engine.model.checkpoint.found import Checkpoint, Found, Pieces, Place, Staging, refuse_tensor
from headrace.engine.model.checkpoint.safetensors import SafetensorsFolder
from headrace.ops.formats import Dense, Stored

__all__ = ["transposed", "transposed_in_stack"]


def transposed(files: Checkpoint, found: Found) -> Found:
    """Return how to read `found` the other way round: all of it at once, since every output has a number of each row.

    Raises:
        ModelRejected: It is quantised: groups of inputs would be groups of outputs.
    """
    if not isinstance(found.format, Dense):
        refuse_tensor(files, found.tensors[0], f"stored as {found.format.name}", "plain numbers, as [in, out]")

    def pieces(elements: int, staging: Staging) -> Pieces:
        # Copies: the staging memory is used again by the next piece.
        rows = [piece.parts["values"].clone() for _, piece in found.pieces(elements, staging)]
        yield 0, Stored.from_dense(torch.cat(rows).T.contiguous())

    return replace(found, shape=found.shape[::-1], pieces=pieces)


def transposed_in_stack(files: SafetensorsFolder, tensor: str, expert: int, outputs: slice) -> Found:
    """Return how to read some outputs of an expert's matrix, all of them at once; the stack has been checked."""
    count, ins, outs = files.shapes[tensor]
    shape, format = (len(range(outs)[outputs]), ins), Dense(files.weight_dtype(tensor))

    def pieces(_elements: int, staging: Staging) -> Pieces:
        block_IO = files.rows(tensor, expert * ins, (expert + 1) * ins, staging, in_stack=True)
        yield 0, Stored.from_dense(block_IO.T[outputs].contiguous())

    place = Place(expert, count, shape[0] * ins * format.dtype.itemsize)
    return Found(format, shape, (tensor,), pieces, place=place)
