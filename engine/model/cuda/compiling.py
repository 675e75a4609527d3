"""Which kernels are available: those of ops/cuda/csrc may be missing, with a warning of what is slower; runs none."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from headrace.ops.cuda.arch import Arch
from headrace.ops.cuda.attention.registry import DecodeChoice, DecodeKernel, resolve_decode
from headrace.ops.cuda.attention.shape import HeadShape

__all__ = ["compiles", "ways", "ways_together"]

logger = logging.getLogger("headrace.engine")


def compiles(builds: Iterable[Callable[[], object]], without: str) -> bool:
    """Call all of `builds` at once and return whether all succeeded; the engine can do without these kernels.

    Args:
        builds: Each takes a kernel from the cache or from a wheel, or compiles it.
        without: Beginning of the warning in the log, which says what is slower if a kernel is missing.
    """
    try:
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda build: build(), builds))
    except (RuntimeError, OSError) as error:
        logger.warning("%s: a kernel was not compiled: %s", without, error)
        return False
    return True


def ways(
    kernels: Sequence[DecodeKernel], shapes: Sequence[HeadShape], arch: Arch, attention: str
) -> tuple[DecodeChoice, dict[str, DecodeKernel]]:
    """Return the choice between ways to attend in decodes that could be compiled, and all that were asked for.

    All layers of a step attend in one way, which takes the heads of each.
    """
    named = {each.name: each for each in kernels if attention in ("auto", each.name)}
    able = [
        each
        for each in named.values()
        if all(each.refuses(shape, arch) is None for shape in shapes)
        and (attention != "auto" or compiles(each.builds(shapes[0]), f"decodes attend without {each.name!r}, slower"))
    ]
    return resolve_decode(able, shapes[0], arch), named


def ways_together(
    choice: DecodeChoice, shapes: Sequence[HeadShape], arch: Arch, depths: Sequence[int]
) -> dict[int, DecodeChoice]:
    """Return for each depth the choice between those of `choice` that attend for all lines of a row at once."""
    found = {}
    for depth in depths:
        able = [
            kernel
            for kernel, _ in choice.ways
            if all(kernel.most_lines(shape, arch) > depth for shape in shapes)
            and compiles(kernel.builds(shapes[0], depth + 1), f"drafts attend without {kernel.name!r}, slower")
        ]
        found[depth] = resolve_decode(able, shapes[0], arch, depth + 1)
    return found
