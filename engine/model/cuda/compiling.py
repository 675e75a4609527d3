"""Which kernels are available: those of ops/cuda/csrc may be missing, with a warning of what is slower; runs none."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from headrace.ops.cuda.arch import Arch
from headrace.ops.cuda.attention.registry import DecodeChoice, DecodeKernel, resolve_decode
from headrace.ops.cuda.attention.shape import HeadShape

__all__ = ["compiles", "ways", "ways_of_lines", "ways_together"]

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
) -> tuple[dict[Hashable, DecodeChoice], dict[str, DecodeKernel]]:
    """Return by shape of heads the choice between ways to attend in decodes that could be compiled, and all ways that
    were asked for.

    Layers that attend alike do so in one way, which takes the shape of each.
    """
    by_key: dict[Hashable, list[HeadShape]] = {}
    for shape in shapes:
        by_key.setdefault(shape.key, []).append(shape)
    named = {each.name: each for each in kernels if attention in ("auto", each.name)}
    found = {}
    for key, alike in by_key.items():
        able = [
            each
            for each in named.values()
            if all(each.refuses(shape, arch) is None for shape in alike)
            and (
                attention != "auto" or compiles(each.builds(alike[0]), f"decodes attend without {each.name!r}, slower")
            )
        ]
        found[key] = resolve_decode(able, alike[0], arch)
    return found, named


def ways_of_lines(choices: Sequence[DecodeChoice]) -> DecodeChoice:
    """Return the choice between ways for lines, several of which may be of one row: all layers attend in one way.

    Args:
        choices: The choices of each shape of heads that layers have.
    """
    names = set.intersection(*({kernel.name for kernel, _ in each.ways} for each in choices))
    first = choices[0]
    return first._replace(ways=tuple(each for each in first.ways if each[0].name in names and not each[0].stores))


def ways_together(
    choice: DecodeChoice, shapes: Sequence[HeadShape], arch: Arch, depths: Sequence[int]
) -> dict[int, DecodeChoice]:
    """Return for each depth the choice between those of `choice` that attend for all lines of a row at once.

    What pays is decided by the layers with the most query heads for a key head, whose lines need the most room.
    """
    found, widest = {}, max(shapes, key=lambda shape: shape.heads // shape.kv_heads)
    distinct = list({shape.key: shape for shape in shapes}.values())
    for depth in depths:
        able = [
            kernel
            for kernel, _ in choice.ways
            if all(kernel.most_lines(shape, arch) > depth for shape in shapes)
            and compiles(
                [build for shape in distinct for build in kernel.builds(shape, depth + 1)],
                f"drafts attend without {kernel.name!r}, slower",
            )
        ]
        found[depth] = resolve_decode(able, widest, arch, depth + 1)
    return found
