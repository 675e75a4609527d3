"""`sorted_columns`: turns the group of each column into an order of columns in which groups are whole."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.engine.model.checkpoint.found import refuse_tensor
from headrace.engine.model.checkpoint.quantised.parts import expect, read
from headrace.engine.model.checkpoint.safetensors import SafetensorsFolder

__all__ = ["sorted_columns"]


def sorted_columns(files: SafetensorsFolder, tensor: str, ins: int, group: int | None, weight: str) -> Tensor | None:
    """Return the order [in] (int64) in which the columns of one group stand together; None if they do as they are.

    Args:
        files: The open checkpoint.
        tensor: The tensor with the group of each column.
        ins: The number of columns.
        group: Columns of a group; None for all of them.
        weight: The tensor of the codes, for messages.

    Raises:
        ModelRejected: The tensor is no int32 [in], a number is no group, or the groups have other sizes than `group`.
    """
    expect(files, tensor, [(ins,)], [torch.int32], weight)
    group_I = read(files, tensor)
    plain_I = torch.arange(ins) // (group or ins)
    if torch.equal(group_I.long(), plain_I):
        return None
    groups = int(plain_I[-1]) + 1
    low, high = int(group_I.min()), int(group_I.max())
    if low < 0 or high >= groups:
        refuse_tensor(files, tensor, f"{low if low < 0 else high}", f"groups from 0 to {groups - 1}")
    order_I = group_I.argsort(stable=True)
    if not torch.equal(group_I[order_I].long(), plain_I):
        refuse_tensor(files, tensor, "groups of other sizes", f"groups of {group} columns each")
    return order_I
