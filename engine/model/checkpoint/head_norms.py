"""`HeadNormRows`: reads the norm of one head from a tensor with those of all heads, as Command R+ stores them."""

from __future__ import annotations

import re
from functools import partial
from typing import Final

from headrace.engine.model.checkpoint.found import Checkpoint, Found, Pieces, Place, Staging, refuse_tensor
from headrace.engine.model.checkpoint.safetensors import SafetensorsFolder
from headrace.ops.formats import Dense, Stored

__all__ = ["HeadNormRows"]

_NORM: Final = re.compile(r"(.+\.[qk]_norm)\.(\d{1,4})\.weight")


class HeadNormRows:
    """Reads what families call `q_norm.0.weight`, the norm of the first head, from `q_norm.weight` [heads, head]."""

    def find(self, files: Checkpoint, name: str) -> Found | None:
        """Return the head's row; None where there is no such tensor.

        Raises:
            ModelRejected: The tensor is no stack of rows, or has none for the head.
        """
        match = _NORM.fullmatch(name)
        if match is None or not isinstance(files, SafetensorsFolder):
            return None
        tensor, head = f"{match[1]}.weight", int(match[2])
        shape = files.shapes.get(tensor)
        if shape is None:
            return None
        if len(shape) != 2 or head >= shape[0]:
            refuse_tensor(
                files, tensor, list(shape), f"the shape [heads, elements of a head], with more than {head} heads"
            )
        dtype = files.weight_dtype(tensor)
        place = Place(0, 0, shape[1] * dtype.itemsize)
        return Found(Dense(dtype), shape[1:], (tensor,), partial(_row, files, tensor, head), place=place)


def _row(files: SafetensorsFolder, tensor: str, head: int, _elements: int, staging: Staging) -> Pieces:
    yield 0, Stored.from_dense(files.rows(tensor, head, head + 1, staging).flatten())
