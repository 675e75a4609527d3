"""`LATENT_DECODES` and `LATENT_PREFILLS`: the declarations of all kernels of attention to latent vectors on CUDA.

They stand beside those of attention to keys and values (attention/kernels.py) and have the same protocols, with shapes
that are `LatentShape`. Imports no compiler before a kernel is opened.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar, Final

import torch

from headrace.ops.cuda.attention.steps import DecodeStep
from headrace.ops.cuda.hazards import Launch, Thing
from headrace.ops.cuda.latents.shape import LatentShape

if TYPE_CHECKING:
    from headrace.ops.cuda.arch import Arch
    from headrace.ops.cuda.attention.registry import DecodeKernel, DecodeRoom, PrefillKernel
    from headrace.ops.cuda.attention.shape import HeadShape
    from headrace.ops.cuda.attention.steps import PrefillAttention
    from headrace.ops.cuda.fused import DecodeInputs

__all__ = ["LATENT_DECODES", "LATENT_PREFILLS", "LatentDecodes", "LatentPrefills"]

_MOST_LATENTS = 512
_MOST_ROTATED = 64


class _Latent:
    """What decodes and prefills have in common."""

    name = "latent"

    def refuses(self, shape: HeadShape, arch: Arch) -> str | None:
        """Return which vectors the kernel takes, if not these."""
        if not isinstance(shape, LatentShape):
            return "the kernel attends to latent vectors alone"
        if shape.dtype != torch.bfloat16:
            return f"the kernel takes bfloat16, not {shape.dtype}"
        if shape.latent_dim > _MOST_LATENTS or shape.rotated_dim > _MOST_ROTATED:
            sizes = f"{shape.latent_dim} and {shape.rotated_dim}"
            return (
                f"latent vectors and rotated keys are of {sizes}, the kernel takes {_MOST_LATENTS} and {_MOST_ROTATED}"
            )
        return None

    def builds(self, shape: HeadShape, lines: int = 1) -> Sequence[Callable[[], object]]:
        """Return nothing: Triton compiles the kernel when it first runs."""
        return ()


class LatentDecodes(_Latent):
    """One token of each row, rows cut into shares where they are few (running.py)."""

    stores: ClassVar[bool] = False

    @staticmethod
    def launch(*, pdl: bool) -> Launch:
        """Return what a layer does to memory: with `pdl`, it reads lengths while the kernel before it runs."""
        early = frozenset[Thing](("lengths",))
        return Launch("attention 'latent'", overlaps=pdl, early=early, writes=frozenset(("activations",)))

    def most_lines(self, shape: HeadShape, arch: Arch) -> int:
        """Return that the kernel attends for one token of each row."""
        return 1

    def open(self, shape: HeadShape, inputs: DecodeInputs, room: DecodeRoom, lines: int = 1) -> DecodeStep:
        """Make room for the rows of `inputs`; all batch sizes share the memory of parts."""
        from headrace.ops.cuda.latents.running import LatentDecode

        assert isinstance(shape, LatentShape)
        memory = room.keep(self.name, None, lambda: LatentDecode.memory(shape, room.arch, room.device))
        attention = LatentDecode(shape, rows=len(inputs.tokens_B), arch=room.arch, memory=memory, pdl=room.pdl)
        return DecodeStep(inputs, attention, self.launch(pdl=room.pdl))


class LatentPrefills(_Latent):
    """Several tokens of each row, by pieces of their queries, the longest context first (running.py)."""

    def open(self, shape: HeadShape, device: torch.device, *, pdl: bool) -> PrefillAttention:
        """Return the kernel."""
        from headrace.ops.cuda.arch import Arch
        from headrace.ops.cuda.latents.running import LatentPrefill

        assert isinstance(shape, LatentShape)
        return LatentPrefill(shape, device, arch=Arch.of(device), pdl=pdl)


LATENT_DECODES: Final[tuple[DecodeKernel, ...]] = (LatentDecodes(),)
LATENT_PREFILLS: Final[tuple[PrefillKernel, ...]] = (LatentPrefills(),)
