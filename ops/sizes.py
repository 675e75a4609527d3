"""Rounds sizes up to a few different ones; never touches a tensor.

oneDNN generates code for each shape of a product and keeps that of the last thousand or two. At 0.6 MB or more each,
and 1 to 5 ms for the first product of a shape, unrounded lengths would cost a process a gigabyte.
"""

from __future__ import annotations

__all__ = ["padded_size"]


def padded_size(size: int, *, steps: int) -> int:
    """Return the least allowed size from `size` on; between one power of two and the next, `steps` sizes are allowed.

    With 2 steps: 1, 2, 3, 4, 6, 8, 12, 16, 24 ...; with 4: 1 to 8, 10, 12, 14, 16, 20, 24 ... `steps` is a power of 2.
    """
    between = max(1, (1 << (size - 1).bit_length()) // (2 * steps))
    return -(-size // between) * between
