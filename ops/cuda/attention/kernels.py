"""`DECODES` and `PREFILLS`: the declarations of all kernels of attention on CUDA, the preferred ones first.

A new kernel is one class here, or anywhere else, that is named in a tuple like these, with a line in the tuning of the
GPUs that it was measured on (ops/cuda/tuning/). Imports no compiler before a kernel is opened.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Final

import torch

from headrace.ops.cuda.attention.ring import KV_HEADS, QUERIES, query_room, shared_bytes
from headrace.ops.cuda.attention.steps import DecodeStep, WholeStep
from headrace.ops.cuda.hazards import Launch, Thing

if TYPE_CHECKING:
    from headrace.ops.cuda.arch import Arch
    from headrace.ops.cuda.attention.registry import DecodeKernel, DecodeRoom, PrefillKernel
    from headrace.ops.cuda.attention.shape import HeadShape
    from headrace.ops.cuda.attention.steps import PrefillAttention
    from headrace.ops.cuda.fused import DecodeInputs

__all__ = [
    "DEAL", "DECODES", "PREFILLS", "EvenDecodes", "FlashPrefills", "FusedDecodes", "GroupedPrefills", "PlannedDecodes",
    "SplitDecodes", "TilePrefills", "XqaDecodes",
]  # fmt: skip

_ACTIVATIONS: Final = frozenset[Thing](("activations",))
_PLACES: Final = frozenset[Thing](("pages", "lengths", "old keys"))
DEAL: Final = Launch("the division of pages", overlaps=False, writes=frozenset(("division",)))
_FUSED_HEADS = (64, 128, 256)
_FLASH_HEADS = (64, 128, 256)  # of FlashInfer's kernels, as they were run
_GROUP = 16  # rows of a tile of queries; for 71, as Falcon 7B has, the fused kernel takes 45 s to compile
_EVEN_TILE = 16  # tokens
_EVEN_PAGE_BYTES = 64 << 10  # keys and values of one layer: a ring has room for three halves of this
_TILE_HEAD = 128
_TILE_PAGES = (8, 16, 32, 64, 128)


class _Decode:
    """What most ways to attend in decodes have in common."""

    name: ClassVar[str]
    stores: ClassVar[bool] = False

    def refuses(self, shape: HeadShape, arch: Arch) -> str | None:
        """Return None: any GPU that the engine opens on can run the kernel."""
        return None

    def most_lines(self, shape: HeadShape, arch: Arch) -> int:
        """Return that the kernel attends for one token of each row."""
        return 1

    def builds(self, shape: HeadShape, lines: int = 1) -> Sequence[Callable[[], object]]:
        """Return nothing: the kernel is compiled when it first runs."""
        return ()


def _group_refusal(shape: HeadShape) -> str | None:
    """Return that a key head has more query heads than a kernel's tile has rows, if so."""
    group = shape.heads // shape.kv_heads
    return None if group <= _GROUP else f"a key head has {group} query heads, the kernel takes up to {_GROUP}"


def _flash_refusal(shape: HeadShape) -> str | None:
    """Return which heads FlashInfer's kernels take, if not these: others are refused by its compiler, if at all."""
    return None if shape.head_dim in _FLASH_HEADS else f"heads are of {shape.head_dim}, the kernel takes {_FLASH_HEADS}"


def _cap_refusal(shape: HeadShape) -> str | None:
    """Return that the kernel has no bound of scores, if they have one."""
    return None if shape.cap is None else "the kernel does not bound scores"


def _sink_refusal(shape: HeadShape) -> str | None:
    """Return that the kernel has no sinks, if the heads have some."""
    return "the kernel has no sinks" if shape.has_sinks else None


class FusedDecodes(_Decode):
    """Norm, rotary, KV write and attention of few rows in one kernel (decode.py)."""

    name = "fused"
    stores = True

    def refuses(self, shape: HeadShape, arch: Arch) -> str | None:
        """Return which heads the kernel takes, if not these."""
        if shape.values != "products":
            return "the kernel stores values as they are"
        if shape.head_dim in _FUSED_HEADS:
            return _group_refusal(shape)
        return f"heads are of {shape.head_dim}, the kernel takes {_FUSED_HEADS}"

    @staticmethod
    def launch(*, pdl: bool) -> Launch:
        """Return what a layer does to memory: with `pdl`, it fetches old keys while the product before it runs."""
        early, writes = _PLACES | frozenset[Thing](("rotary table",)), frozenset[Thing](("activations", "new keys"))
        return Launch("attention 'fused'", overlaps=pdl, early=early, writes=writes)

    def open(self, shape: HeadShape, inputs: DecodeInputs, room: DecodeRoom, lines: int = 1) -> DecodeStep | WholeStep:
        """Allocate for the rows of `inputs`."""
        from headrace.ops.cuda.attention.decode import FusedDecode

        rows, tuning = len(inputs.tokens_B), room.arch.tuning
        attention = FusedDecode(shape, room.device, max_rows=rows, tuning=tuning)
        return WholeStep(inputs, attention, self.launch(pdl=room.pdl))


class EvenDecodes(_Decode):
    """Equal shares of all rows' pages (even.py)."""

    name = "even"

    def refuses(self, shape: HeadShape, arch: Arch) -> str | None:
        """Return which heads, caches and pages the kernel takes, if not these, or what the GPU lacks."""
        fp8 = shape.kv_dtype == torch.float8_e4m3fn
        if (why := _cap_refusal(shape)) is not None:
            return why
        if shape.dtype != torch.bfloat16 or not (fp8 or shape.kv_dtype == shape.dtype):
            return f"the kernel takes bfloat16 and caches of 16 bits or of 8-bit floats, not {shape.kv_dtype}"
        if shape.head_dim not in ((128,) if fp8 else (64, 128)):
            return f"heads are of {shape.head_dim}, the kernel takes 128, and 64 with a cache of 16 bits"
        group, heads, tile = shape.heads // shape.kv_heads, KV_HEADS, _EVEN_TILE
        if shape.kv_heads > heads or group > tile:
            return f"{shape.kv_heads} key heads of {group} query heads each, the kernel takes {heads} of {tile}"
        if shape.page_size % tile:
            return f"pages are of {shape.page_size} tokens, the kernel takes multiples of {tile}"
        if shape.page_bytes > _EVEN_PAGE_BYTES:
            return f"a page of a layer has {shape.page_bytes} bytes, the kernel takes {_EVEN_PAGE_BYTES}"
        if (wanted := shared_bytes(shape, query_room(shape, 1) or 0)) > arch.shared_bytes:
            return f"a block wants {wanted} bytes of shared memory, {arch.name} has {arch.shared_bytes}"
        return arch.lacks("bulk_copy")

    def most_lines(self, shape: HeadShape, arch: Arch) -> int:
        """Return how many lines have room in a warp's tiles of queries, and these in shared memory."""
        group = shape.heads // shape.kv_heads
        return max(size // group for size in QUERIES if shared_bytes(shape, size) <= arch.shared_bytes)

    def builds(self, shape: HeadShape, lines: int = 1) -> Sequence[Callable[[], object]]:
        """Return the function that compiles the source."""
        return (partial(_build, "even", "EvenDecode", shape, lines),)

    @staticmethod
    def launch(*, pdl: bool) -> Launch:
        """Return what a layer does to memory: with `pdl`, it fetches old keys while the kernel before it runs."""
        early = _PLACES | frozenset[Thing](("division",))
        return Launch("attention 'even'", overlaps=pdl, early=early, writes=_ACTIVATIONS)

    def open(self, shape: HeadShape, inputs: DecodeInputs, room: DecodeRoom, lines: int = 1) -> DecodeStep | WholeStep:
        """Return one for all batch sizes of such heads and number of lines, since no two of them run at once."""
        from headrace.ops.cuda.attention.even import EvenDecode

        rows = room.most_rows // lines
        attention = room.keep(
            f"{self.name} {lines}",
            shape.key,
            lambda: EvenDecode(shape, room.device, max_rows=rows, arch=room.arch, pdl=room.pdl, lines=lines),
        )
        return DecodeStep(inputs, attention, self.launch(pdl=room.pdl), DEAL)


class XqaDecodes(_Decode):
    """FlashInfer's XQA (paged.py), which needs no plan."""

    name = "xqa"

    def refuses(self, shape: HeadShape, arch: Arch) -> str | None:
        """Return which heads the kernel takes, if not these, or what the GPU lacks."""
        why = _cap_refusal(shape) or _sink_refusal(shape) or _flash_refusal(shape) or _group_refusal(shape)
        return why or arch.lacks("xqa")

    def open(self, shape: HeadShape, inputs: DecodeInputs, room: DecodeRoom, lines: int = 1) -> DecodeStep | WholeStep:
        """Allocate for the rows of `inputs`."""
        from headrace.ops.cuda.attention.paged import XqaDecode

        return DecodeStep(inputs, XqaDecode(shape, room.device, max_rows=len(inputs.tokens_B), arch=room.arch))


class PlannedDecodes(_Decode):
    """FlashInfer's FA2 (paged.py), whose work the host plans."""

    name = "fa2"

    def refuses(self, shape: HeadShape, arch: Arch) -> str | None:
        """Return that the kernel has no sinks, if the heads have some, or which heads it takes."""
        return _sink_refusal(shape) or _flash_refusal(shape)

    def open(self, shape: HeadShape, inputs: DecodeInputs, room: DecodeRoom, lines: int = 1) -> DecodeStep | WholeStep:
        """Plan for the rows of `inputs`; all heads of a size share floats, and all batch sizes of a shape integers."""
        from headrace.ops.cuda.attention.paged import PlannedDecode

        size = PlannedDecode.workspace_bytes(shape, room.most_rows, room.arch)
        floats = room.keep("fa2 floats", size, lambda: torch.zeros(size, dtype=torch.uint8, device=room.device))
        integers = room.keep(
            "fa2 integers",
            shape.key,
            lambda: torch.empty(PlannedDecode.INT_WORKSPACE, dtype=torch.uint8, device=room.device),
        )
        planned = PlannedDecode(shape, inputs, floats, integers)
        return DecodeStep(inputs, planned, planned=planned)


class SplitDecodes(_Decode):
    """Each row's keys split among programs of Triton (split.py), for what the other kernels refuse."""

    name = "split"

    @staticmethod
    def launch(*, pdl: bool) -> Launch:
        """Return what a layer does to memory: with `pdl`, it starts while the kernel before it runs, and waits."""
        return Launch("attention 'split'", overlaps=pdl, writes=_ACTIVATIONS)

    def most_lines(self, shape: HeadShape, arch: Arch) -> int:
        """Return any number: lines that have no room in a program have one of their own."""
        return sys.maxsize

    def open(self, shape: HeadShape, inputs: DecodeInputs, room: DecodeRoom, lines: int = 1) -> DecodeStep | WholeStep:
        """Allocate for the rows of `inputs`."""
        from headrace.ops.cuda.attention.split import SplitDecode

        rows = len(inputs.tokens_B) // lines
        attention = SplitDecode(shape, room.device, max_rows=rows, arch=room.arch, pdl=room.pdl, lines=lines)
        return DecodeStep(inputs, attention, self.launch(pdl=room.pdl))


class TilePrefills:
    """Tiles of 128 tokens, the longest context first (tile.py)."""

    name = "tile"

    def refuses(self, shape: HeadShape, arch: Arch) -> str | None:
        """Return which heads, caches and pages the kernel takes, if not these, or what the GPU lacks."""
        if (why := _cap_refusal(shape) or _sink_refusal(shape)) is not None:
            return why
        if shape.head_dim != _TILE_HEAD:
            return f"heads are of {shape.head_dim}, the kernel takes {_TILE_HEAD}"
        if shape.kv_dtype != shape.dtype:
            return f"the cache is {shape.kv_dtype}, the kernel takes {shape.dtype}"
        if shape.page_size not in _TILE_PAGES:
            return f"pages are of {shape.page_size} tokens, the kernel takes {_TILE_PAGES}"
        if shape.window is not None:
            return "the kernel has no sliding window"
        if shape.dtype != torch.bfloat16:
            return f"the kernel takes bfloat16, not {shape.dtype}"
        return arch.lacks("wgmma")

    def builds(self, shape: HeadShape) -> Sequence[Callable[[], object]]:
        """Return the function that compiles the source."""
        return (partial(_build, "tile", "TileAttention", shape),)

    def open(self, shape: HeadShape, device: torch.device, *, pdl: bool) -> PrefillAttention:
        """Return the kernel of csrc/."""
        from headrace.ops.cuda.attention.tile import TileAttention

        return TileAttention(shape, device, pdl=pdl)


class FlashPrefills:
    """FlashInfer's FA3 or FA2 (paged.py)."""

    def __init__(self, backend: str) -> None:
        """Attend by "fa2" or "fa3"."""
        self.name = backend

    def refuses(self, shape: HeadShape, arch: Arch) -> str | None:
        """Return what both lack, or FA3 alone; FA2 runs on any GPU that the engine opens on."""
        if (why := _sink_refusal(shape) or _flash_refusal(shape)) is not None:
            return why
        if self.name == "fa2":
            return None
        if shape.kv_dtype != shape.dtype:
            return f"the cache is {shape.kv_dtype}, the kernel takes that only with queries of 8 bits"
        return arch.lacks("wgmma")

    def builds(self, shape: HeadShape) -> Sequence[Callable[[], object]]:
        """Return nothing: FlashInfer compiles the kernel when it first runs."""
        return ()

    def open(self, shape: HeadShape, device: torch.device, *, pdl: bool) -> PrefillAttention:
        """Return FlashInfer's kernel."""
        from headrace.ops.cuda.attention.paged import FlashAttention

        return FlashAttention(shape, device, backend=self.name)


class GroupedPrefills:
    """Tiles of tokens with the query heads of a group in Triton (grouped.py), for what the other kernels refuse."""

    name = "grouped"

    def refuses(self, shape: HeadShape, arch: Arch) -> str | None:
        """Return None: any GPU that the engine opens on can run the kernel."""
        return None

    def builds(self, shape: HeadShape) -> Sequence[Callable[[], object]]:
        """Return nothing: the kernel is compiled when it first runs."""
        return ()

    def open(self, shape: HeadShape, device: torch.device, *, pdl: bool) -> PrefillAttention:
        """Return Triton's kernel, in tiles that fit the GPU's shared memory."""
        from headrace.ops.cuda.arch import Arch
        from headrace.ops.cuda.attention.grouped import GroupedAttention

        return GroupedAttention(shape, device, shared_bytes=Arch.of(device).shared_bytes)


def _build(module: str, name: str, *sizes: object) -> None:
    from importlib import import_module

    getattr(import_module(f"headrace.ops.cuda.attention.{module}"), name).build(*sizes)


DECODES: Final[tuple[DecodeKernel, ...]] = (
    FusedDecodes(), EvenDecodes(), XqaDecodes(), PlannedDecodes(), SplitDecodes(),
)  # fmt: skip
PREFILLS: Final[tuple[PrefillKernel, ...]] = (
    TilePrefills(), FlashPrefills("fa3"), FlashPrefills("fa2"), GroupedPrefills(),
)  # fmt: skip
