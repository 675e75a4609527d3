"""`HeadAttention`: how the layers of a draft head or model attend on CUDA, in decodes and behind prompts.

Its decodes need no plan of the host, since the drafts of a step are computed one after the other inside one graph, and
are launched without overlap: what a draft reads, the one before it has just written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from headrace.engine.errors import DeviceUnavailable
from headrace.engine.model.cuda.compiling import compiles
from headrace.engine.model.cuda.drafting.drafter import Prefilled
from headrace.engine.model.spec import MixerSpec
from headrace.ops.cuda.arch import Arch
from headrace.ops.cuda.attention.registry import DecodeKernel, DecodeRoom, resolve_prefill
from headrace.ops.cuda.attention.shape import HeadShape
from headrace.ops.cuda.attention.steps import DecodeStep, PrefillAttention, PrefillStep
from headrace.ops.cuda.block import CudaOps
from headrace.ops.cuda.fused import DecodeInputs
from headrace.ops.cuda.kernels import Kernels

__all__ = ["HeadAttention"]

_WAYS: Final = ("even", "split")
"""Ways to attend in decodes that the host does not plan, that leave storing to others and compile in seconds."""
_TOGETHER: Final = "split"
"""The one of these that takes any heads, and any number of lines of a row."""


class HeadAttention:
    """The attention of layers with heads of one shape, whose pages have the numbers of the target's."""

    def __init__(
        self,
        ops: CudaOps,
        target: Mapping[MixerSpec, CudaOps],
        pages: NDArray[np.int32],
        *,
        most_lines: int,
        kernels: Kernels,
    ) -> None:
        """Choose the kernels.

        Args:
            ops: The operations of the layers.
            target: The operations of the target, by mixer, where steps of prompts are whole; empty where not.
            pages: Block table on the host, int32 [rows, pages], kept up to date by its owner.
            most_lines: Most lines of a decode.
            kernels: The kernels of attention to choose among.

        Raises:
            DeviceUnavailable: No kernel attends for prompts.
        """
        self._shape, self._arch, self._pages = ops.shape, ops.arch, pages
        self._decodes = _decodes(ops.shape, ops.arch, kernels.decodes)
        self._together = _by_name(kernels.decodes, ops.shape, ops.arch)[_TOGETHER]
        self._room = DecodeRoom(ops.arch, ops.device, most_rows=most_lines, pdl=False)
        self._steps: dict[int, DecodeStep] = {}
        """Steps by the address of their tokens, the number of their lines, and that of a row's."""
        self._like = next((mixer for mixer, each in target.items() if _same(each.shape, ops.shape)), None)
        """Mixer of the target that attends in the same way, whose plans for prompts serve the head, too."""
        self._own = None if self._like is not None else _prefills(ops, kernels)

    def decode(self, inputs: DecodeInputs, of_row: int = 1) -> DecodeStep:
        """Return a decode step over `inputs`, and enqueue what its attention prepares; a graph captures that.

        Args:
            inputs: Inputs of the lines.
            of_row: Number of lines, one behind the other, that make up a row, whose keys are read once for all of them.
        """
        key = hash((inputs.tokens_B.data_ptr(), len(inputs.tokens_B), of_row))
        step = self._steps.get(key)
        if step is None:
            kernel = self._decodes if of_row == 1 else self._together
            opened = kernel.open(self._shape, inputs, self._room, of_row)
            assert isinstance(opened, DecodeStep)
            step = self._steps[key] = opened
        step.attention.deal(inputs)
        return step

    def prefill(self, prefilled: Prefilled) -> PrefillStep:
        """Return the step of prompts, planned."""
        step = next(iter(prefilled.steps.values())) if self._like is None else prefilled.steps[self._like]
        assert isinstance(step, PrefillStep)
        if self._own is None:
            return PrefillStep(step.positions_N, step.slots_N, step.attention)
        size = self._shape.page_size
        counts = [work.num_tokens for work in prefilled.works]
        lengths = [work.start + work.num_tokens for work in prefilled.works]
        pages = [
            self._pages[work.row, : -(-length // size)].tolist()
            for work, length in zip(prefilled.works, lengths, strict=True)
        ]
        self._own.plan(counts, lengths, pages)
        return PrefillStep(step.positions_N, step.slots_N, self._own)


def _same(one: HeadShape, other: HeadShape) -> bool:
    return all(getattr(one, name) == getattr(other, name) for name in HeadShape.__slots__)


def _by_name(kernels: Sequence[DecodeKernel], shape: HeadShape, arch: Arch) -> dict[str, DecodeKernel]:
    return {each.name: each for each in kernels if each.name in _WAYS and each.refuses(shape, arch) is None}


def _decodes(shape: HeadShape, arch: Arch, kernels: Sequence[DecodeKernel]) -> DecodeKernel:
    by_name = _by_name(kernels, shape, arch)
    able = [by_name[name] for name in _WAYS if name in by_name]
    return next(each for each in able if compiles(each.builds(shape), "drafts attend by another kernel"))


def _prefills(ops: CudaOps, kernels: Kernels) -> PrefillAttention:
    able, refused = resolve_prefill(kernels.prefills, ops.shape, ops.arch)
    for kernel in able:
        if compiles(kernel.builds(ops.shape), f"what drafts reads prompts without the kernel {kernel.name!r}"):
            return kernel.open(ops.shape, ops.device, pdl=ops.pdl)
    raise DeviceUnavailable(f"device: no kernel attends for prompts of what drafts: {refused}")
