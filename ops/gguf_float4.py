"""MXFP4 as GGUF files hold it: blocks of 32 four-bit floats behind their exponent; never reads a file.

They become `Float4Groups`, with the same numbers: GGUF has the first 16 of a block in the low halves of its bytes and
the others in the high ones, where that format has neighbours in one byte (Rouhani et al., 2023, "Microscaling data
formats for deep learning").
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from headrace.ops.formats import Stored
from headrace.ops.quantised import Float4Groups

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["MXFP4", "float4_from_file"]

MXFP4: Final = Float4Groups("e8m0")
"""The format that such blocks become."""
_BYTES: Final = 17  # of a block: its exponent, then its codes


def float4_from_file(raw_Ob: Tensor) -> Stored:
    """Return rows of blocks, uint8 [out, bytes], as a weight."""
    blocks_OBb = raw_Ob.view(len(raw_Ob), -1, _BYTES)
    codes_OBg = torch.cat((blocks_OBb[..., 1:] & 15, blocks_OBb[..., 1:] >> 4), -1)
    values_OBh = codes_OBg[..., ::2] | codes_OBg[..., 1::2] << 4
    parts = {"values": values_OBh.flatten(1), "scale": blocks_OBb[..., 0].contiguous()}
    return Stored(MXFP4, (len(raw_Ob), codes_OBg.shape[1] * MXFP4.group), parts)
