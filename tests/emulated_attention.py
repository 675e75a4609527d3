"""The kernels of attention on the emulated GPU: their own declarations, with slow torch behind `run`; no tests.

FlashInfer's planned kernels stay as they are, above the emulated FlashInfer: their plans cross pinned memory. The plans
of our own tiles are real as well, and only the launch is emulated.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from emulated_kernels import Misuse, attend, attend_rows, demand, store, turned
from torch import Tensor

__all__ = ["emulated_decodes", "emulated_prefills"]


def emulated_decodes(gpu: Any, kernels: Any) -> tuple[Any, ...]:
    """The ways to attend in decodes."""
    kinds = {"fused": WholeDecodes, "even": EvenDecodes, "xqa": XqaDecodes, "split": SplitDecodes}
    return tuple(kinds[each.name](gpu, each) if each.name in kinds else each for each in kernels)


def emulated_prefills(gpu: Any, kernels: Any) -> tuple[Any, ...]:
    """The ways to attend in prefills."""
    kinds = {"tile": TilePrefills, "grouped": GroupedPrefills}
    return tuple(kinds[each.name](gpu, each) if each.name in kinds else each for each in kernels)


class _Emulated:
    """A declaration, opened on an emulated GPU."""

    def __init__(self, gpu: Any, kernel: Any) -> None:
        self._gpu, self._kernel = gpu, kernel
        self._steps = importlib.import_module("headrace.ops.cuda.attention.steps")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)

    def check(self, shape: Any, lines: int = 1) -> None:
        """Raise `Misuse` for heads that the kernel refuses, and for more lines of a row than it takes."""
        arch = importlib.import_module("headrace.ops.cuda.arch").Arch.of("cuda")
        why = self._kernel.refuses(shape, arch)
        demand(why is None, f"heads that the kernel refuses: {why}")
        demand(lines == 1 or lines <= self._kernel.most_lines(shape, arch), "more lines than the kernel takes")


class WholeDecodes(_Emulated):
    def open(self, shape: Any, inputs: Any, room: Any, lines: int = 1) -> Any:
        self.check(shape, lines)
        demand(not room.pdl or self._gpu.capability >= (9, 0), "launched dependently on a GPU that cannot")
        return self._steps.WholeStep(inputs, WholeAttention(self._gpu, shape), self._kernel.launch(pdl=room.pdl))


class EvenDecodes(_Emulated):
    def open(self, shape: Any, inputs: Any, room: Any, lines: int = 1) -> Any:
        self.check(shape, lines)
        demand(self._gpu.capability >= (9, 0), "opened on a GPU without bulk copies")
        kept = f"even {lines}", shape.key
        attention = room.keep(*kept, lambda: EvenAttention(self._gpu, shape, room.most_rows, lines))
        deal = importlib.import_module("headrace.ops.cuda.attention.kernels").DEAL
        return self._steps.DecodeStep(inputs, attention, self._kernel.launch(pdl=room.pdl), deal)


class XqaDecodes(_Emulated):
    def open(self, shape: Any, inputs: Any, room: Any, lines: int = 1) -> Any:
        self.check(shape, lines)
        demand(self._gpu.capability[0] in (9, 10, 12), "XQA on a GPU that it does not know")
        return self._steps.DecodeStep(inputs, EachRow(self._gpu, shape, "decode: xqa"))


class SplitDecodes(_Emulated):
    def open(self, shape: Any, inputs: Any, room: Any, lines: int = 1) -> Any:
        demand(not room.pdl or self._gpu.capability >= (9, 0), "launched dependently on a GPU that cannot")
        attention = EachRow(self._gpu, shape, "decode: split", lines)
        return self._steps.DecodeStep(inputs, attention, self._kernel.launch(pdl=room.pdl))


class _TiledPrefills(_Emulated):
    """A plan of tiles as it is, above the launch."""

    def tiled(self, real: Any) -> Any:
        """The class `real` with a slow launch."""
        gpu, name = self._gpu, self._kernel.name

        class Tiles(real):  # type: ignore[misc,valid-type]
            @staticmethod
            def build(shape: Any) -> None:
                """Nothing is compiled."""

            def run(self, q: Tensor, kv: Tensor, out: Tensor, scales: Any, sinks_H: Tensor | None = None) -> None:
                jobs, pages, shape = self._jobs_J4, self._pages, self._shape
                demand((sinks_H is not None) == shape.has_sinks, "sinks that are not those of the shape")

                def work() -> None:
                    out.fill_(float("nan"))
                    for token, count, position, page in jobs.tolist():
                        length = position + count
                        mine = pages[page : page - (-length // shape.page_size)]
                        out[token : token + count] = attend(
                            q[token : token + count], kv, mine, length, scale=shape.scale * scales.k,
                            window=shape.window, v_scale=scales.v, cap=shape.cap, sinks_H=sinks_H,
                        )  # fmt: skip

                gpu.launch(f"prefill: {name}", work)

        return Tiles


class TilePrefills(_TiledPrefills):
    def open(self, shape: Any, device: torch.device, *, pdl: bool) -> Any:
        self.check(shape)
        demand(self._gpu.capability[0] == 9, "opened on another GPU than Hopper")
        return self.tiled(importlib.import_module("headrace.ops.cuda.attention.tile").TileAttention)(
            shape, device, pdl=pdl
        )


class GroupedPrefills(_TiledPrefills):
    def open(self, shape: Any, device: torch.device, *, pdl: bool) -> Any:
        grouped = importlib.import_module("headrace.ops.cuda.attention.grouped").GroupedAttention
        return self.tiled(grouped)(shape, device, shared_bytes=99 << 10)


class EachRow:
    """Attention of one token of each row, or of each of its `lines`, over the pages of the row's longest line."""

    def __init__(self, gpu: Any, shape: Any, name: str, lines: int = 1) -> None:
        self._gpu, self._shape, self._name, self._lines = gpu, shape, name, lines

    def deal(self, inputs: Any) -> None:
        """Nothing."""

    def check(self, inputs: Any) -> None:
        """Raise `Misuse` where the kernel would go wrong."""

    def run(self, q: Tensor, kv: Tensor, inputs: Any, out: Tensor, scales: Any, sinks_H: Tensor | None = None) -> None:
        shape = self._shape
        demand((sinks_H is not None) == shape.has_sinks, "sinks that are not those of the shape")

        def work() -> None:
            if not len(inputs.seq_lens_B) == len(inputs.pages_BP) == len(q) or not q.is_contiguous():
                raise Misuse("rows that the kernel cannot attend for")
            self.check(inputs)
            lengths_BL = inputs.seq_lens_B.view(-1, self._lines)
            longest_B = lengths_BL.argmax(1)
            seen_BL = lengths_BL.maximum(lengths_BL[:, :1])
            longest_B += torch.arange(0, len(q), self._lines)
            out.copy_(attend_rows(
                q, kv, inputs.pages_BP[longest_B.repeat_interleave(self._lines)], seen_BL.flatten().tolist(),
                scale=shape.scale * scales.k, window=shape.window, v_scale=scales.v, cap=shape.cap, sinks_H=sinks_H,
            ))  # fmt: skip

        self._gpu.launch(self._name, work)


class EvenAttention(EachRow):
    """A plan is where each row's pages begin among those of all."""

    def __init__(self, gpu: Any, shape: Any, rows: int, lines: int) -> None:
        super().__init__(gpu, shape, "decode: even", lines)
        self._plan = torch.zeros(rows + 1, dtype=torch.int32)

    def _starts(self, inputs: Any) -> Tensor:
        window, size = self._shape.window, self._shape.page_size
        lengths_BL = inputs.seq_lens_B.view(-1, self._lines)
        first, last = lengths_BL[:, 0], lengths_BL.amax(1)
        oldest = (first - window).clamp(min=0) // size if window else torch.zeros_like(first)
        return torch.cumsum((last + size - 1) // size - oldest, 0)

    def deal(self, inputs: Any) -> None:
        def work() -> None:
            self._plan[: len(inputs.seq_lens_B) // self._lines] = self._starts(inputs)

        self._gpu.launch("deal: even", work)

    def check(self, inputs: Any) -> None:
        if not torch.equal(self._plan[: len(inputs.seq_lens_B) // self._lines], self._starts(inputs).int()):
            raise Misuse("a step under the division of another")


class WholeAttention:
    """Norms, rotation, storage and attention of each row."""

    def __init__(self, gpu: Any, shape: Any) -> None:
        self._gpu, self._shape = gpu, shape

    def run(
        self, qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, cos_sin: Tensor, kv: Tensor, inputs: Any,
        out: Tensor, scales: Any, sinks_H: Tensor | None, *, eps: float, pdl: bool,
    ) -> None:  # fmt: skip
        shape = self._shape
        demand((sinks_H is not None) == shape.has_sinks, "sinks that are not those of the shape")
        heads, keys, size = shape.heads, shape.kv_heads, shape.page_size

        def work() -> None:
            qkv_BAD = qkv.view(len(qkv), -1, shape.head_dim)
            positions_B = inputs.seq_lens_B.long() - 1
            page_B = inputs.pages_BP.gather(1, (positions_B // size)[:, None])[:, 0].long()
            slots_B = page_B * size + positions_B % size
            store(kv, slots_B, 0, turned(qkv_BAD[:, heads : heads + keys], k_norm, cos_sin, positions_B, eps), scales.k)
            store(kv, slots_B, 1, qkv_BAD[:, heads + keys :].float(), scales.v)
            q_BHD = turned(qkv_BAD[:, :heads], q_norm, cos_sin, positions_B, eps).to(qkv.dtype)
            out.copy_(attend_rows(
                q_BHD, kv, inputs.pages_BP, inputs.seq_lens_B.tolist(),
                scale=shape.scale * scales.k, window=shape.window, v_scale=scales.v, cap=shape.cap, sinks_H=sinks_H,
            ).view(out.shape))  # fmt: skip

        self._gpu.launch("decode: fused", work)
