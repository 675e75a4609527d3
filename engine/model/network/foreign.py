"""`Network`: what a runner needs of a model, and `ForeignModel`: a model whose network is another library's.

A runner knows nothing else of the layers: `Decoder` computes them here, and fallback/ leaves them to transformers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from headrace.engine.model.checkpoint.parameters import Empty
from headrace.engine.model.network.operations import BlockOps, DeviceOps, Kv, Packed, Step
from headrace.engine.model.spec import DecoderSpec, MixerSpec
from headrace.engine.stats import WeightPart

__all__ = ["ForeignModel", "ForeignOps", "Network"]

_Packed = TypeVar("_Packed", covariant=True)
_Step = TypeVar("_Step")
_Kv = TypeVar("_Kv")
_UsedStep = TypeVar("_UsedStep", contravariant=True)
_UsedKv = TypeVar("_UsedKv", contravariant=True)


class Network(Protocol[_Packed, _Step, _Kv]):
    """Protocol of a model on a device: embeddings, layers and output head."""

    @property
    def spec(self) -> DecoderSpec:
        """The shape of the model."""
        ...

    @property
    def is_foreign(self) -> bool:
        """Whether the layers are another library's, so that nobody knows whether a graph can capture them."""
        ...

    def hidden(
        self,
        tokens_N: Tensor,
        steps: Mapping[MixerSpec, _Step],
        kv: _Kv,
        last_S: Tensor | None = None,
        adapted: Mapping[MixerSpec, BlockOps[_Packed, _Step, _Kv]] | None = None,
    ) -> Tensor:
        """Return hidden states, [S, E], of the tokens `last_S`, or [N, E]; see `Decoder.hidden`."""
        ...

    def logits(
        self, hidden_SE: Tensor, adapted: Mapping[MixerSpec, BlockOps[_Packed, _Step, _Kv]] | None = None
    ) -> Tensor:
        """Return float32 logits [S, V] of hidden states."""
        ...


class ForeignOps(DeviceOps[Packed, _UsedStep, _UsedKv], Protocol[Packed, _UsedStep, _UsedKv]):
    """Protocol of a device's operations for layers that another library computes."""

    def given(self, qkv_NX: Tensor) -> Tensor:
        """Return queries, keys and values, [N, (H + 2 * K) * D], computed by others, as `attend_with` takes them."""
        ...


class ForeignModel(ABC):
    """A model that another library computes, before it is loaded."""

    @property
    @abstractmethod
    def spec(self) -> DecoderSpec:
        """The shape of the model, as far as caches and schedulers need it."""

    @property
    @abstractmethod
    def why(self) -> str:
        """Sentence that says why the model has no native code here."""

    @abstractmethod
    def parts(self, dtype: torch.dtype) -> tuple[WeightPart, ...]:
        """Return the formats of the weights in `dtype`, and their bytes."""

    @abstractmethod
    def open(
        self,
        ops: Mapping[MixerSpec, ForeignOps[Packed, Step, Kv]],
        positions: Callable[[Step], Tensor],
        *,
        dtype: torch.dtype,
        device: torch.device,
        empty: Empty | None = None,
        activations: torch.dtype | None = None,
        fuses: Callable[[Step], bool] | None = None,
    ) -> Network[Packed, Step, Kv]:
        """Load the weights and return the model.

        Args:
            ops: The device's operations, by each of the different mixers of `spec`.
            positions: Returns the position of each of a step's tokens, [N].
            dtype: Dtype of the weights and of what the module computes.
            device: The device of the weights.
            empty: Makes all tensors of weights, always in the same order; None leaves them where they were read.
            activations: Dtype that the device prefers for activations, if it is to compute products where it can; None
                leaves them to the module.
            fuses: Returns whether the layers are to be compiled in a step, if they can be; None where they never are.

        Raises:
            ModelRejected: The weights cannot be used.
        """

    @abstractmethod
    def reload(self, *, dtype: torch.dtype, device: torch.device, empty: Empty) -> None:
        """Read the weights once more into the tensors of `empty`; arguments and errors are those of `open`."""
