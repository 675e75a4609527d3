"""`transposed`: reads a matrix that a checkpoint stores [in, out], as GPT-2 does, as [out, in]."""

from __future__ import annotations

from dataclasses import replace

import torch

from headrace.engine.model.checkpoint.found import Checkpoint, Found, Pieces, Staging, refuse_tensor
from headrace.ops.formats import Dense, Stored

__all__ = ["transposed"]


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
