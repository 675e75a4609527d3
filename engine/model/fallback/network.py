"""`FallbackDecoder`: a transformers module that computes flat batches over headrace's pages.

Owns the module; never knows a request or a scheduler. The module gets all tokens of a step as one sequence, [1, N],
with the position of each in its own request, and no mask and no cache. Its attention function hands queries, keys and
values, which the module has rotated, to the device's operations, which store and attend by the places of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Final, Generic

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from headrace.engine.model.fallback.fusing import FusedLayers
from headrace.engine.model.fallback.head import split_head
from headrace.engine.model.fallback.interface import attach
from headrace.engine.model.fallback.norms import replace_norms
from headrace.engine.model.fallback.products import pack_products
from headrace.engine.model.fallback.tracing import Traced
from headrace.engine.model.network.foreign import ForeignOps
from headrace.engine.model.network.operations import BlockOps, Kv, Packed, Step
from headrace.engine.model.spec import DecoderSpec, MixerSpec

__all__ = ["FallbackDecoder"]


@dataclass(slots=True)
class _Now(Generic[Step, Kv]):
    """The step that is being computed."""

    steps: Mapping[MixerSpec, Step] | None = None
    kv: Kv | None = None


class _Layer(Generic[Packed, Step, Kv]):
    """The attention of one layer."""

    def __init__(self, number: int, mixer: MixerSpec, ops: ForeignOps[Packed, Step, Kv], now: _Now[Step, Kv]) -> None:
        self._number, self._mixer, self._ops, self._now = number, mixer, ops, now

    def __call__(self, qkv_NX: Tensor, _width: int) -> Tensor:
        """Store the keys and values of all tokens, and attend over the pages of their rows."""
        steps, kv = self._now.steps, self._now.kv
        assert steps is not None and kv is not None
        return self._ops.attend_with(self._ops.given(qkv_NX), None, steps[self._mixer], kv, self._number)


class FallbackDecoder(Generic[Packed, Step, Kv]):
    """A transformers module in the place of `Decoder`."""

    is_foreign: Final = True

    def __init__(
        self,
        spec: DecoderSpec,
        model: PreTrainedModel,
        traced: Traced,
        ops: Mapping[MixerSpec, ForeignOps[Packed, Step, Kv]],
        positions: Callable[[Step], Tensor],
        *,
        activations: torch.dtype | None = None,
        taken: Collection[str] = (),
        fuses: Callable[[Step], bool] | None = None,
    ) -> None:
        """Take over `model`.

        Args:
            spec: The shape of the model.
            model: The module with its weights, made with the attention `interface.ATTENTION`.
            traced: What the module was found to ask of its attention.
            ops: The device's operations, by each of the different mixers of `spec`. They must not rotate heads.
            positions: Returns the position of each of a step's tokens, [N].
            activations: Dtype that the device prefers for activations, to give it the module's products and norms; None
                leaves these to torch.
            taken: Kinds of products and norms (inner.py) that the device computes then; others are left to torch, too.
            fuses: Returns whether layers are to be compiled in a step; None where they never are.
        """
        self.spec: Final = spec
        self.model = model
        self.base, self._head = split_head(model, has_head=spec.has_head)
        if activations is not None:
            any_ops = ops[spec.layers[0].mixer]
            activations = pack_products(model, self.base, any_ops, activations, taken)
            if activations is torch.float32:  # narrower ones are rounded by each module in its own way
                replace_norms(self.base, any_ops, taken)
        self._fuses, self._fused = fuses, None if fuses is None else self._compiled(traced.modules)
        self._positions, self._kind = positions, spec.layers[0].mixer
        self._now: _Now[Step, Kv] = _Now()
        layers = zip(traced.modules, traced.sinks, spec.layers, strict=True)
        for number, (name, sinks, layer) in enumerate(layers):
            attach([self.base.get_submodule(name)], _Layer(number, layer.mixer, ops[layer.mixer], self._now))
            if sinks is not None:
                ops[layer.mixer].keep_sinks(number, self.base.get_parameter(sinks).detach().float())

    def hidden(
        self,
        tokens_N: Tensor,
        steps: Mapping[MixerSpec, Step],
        kv: Kv,
        last_S: Tensor | None = None,
        adapted: Mapping[MixerSpec, BlockOps[Packed, Step, Kv]] | None = None,
    ) -> Tensor:
        """Do what `Decoder.hidden` does; no token may use an adapter."""
        assert adapted is None, "adapters are refused when the model is opened"
        positions_N = self._positions(steps[self._kind]).long()
        if len(positions_N) < len(tokens_N):  # tokens behind the step's own, whose results nobody reads
            positions_N = functional.pad(positions_N, (0, len(tokens_N) - len(positions_N)))
        self._now.steps, self._now.kv = steps, kv
        try:
            with self._layers_of(steps[self._kind]):
                found = self.base(input_ids=tokens_N.long()[None], position_ids=positions_N[None], use_cache=False)
        finally:
            self._now.steps = self._now.kv = None
        hidden_NE: Tensor = found.last_hidden_state[0]
        return hidden_NE if last_S is None else hidden_NE[last_S]

    def logits(
        self, hidden_SE: Tensor, adapted: Mapping[MixerSpec, BlockOps[Packed, Step, Kv]] | None = None
    ) -> Tensor:
        """Return float32 logits [S, V] by the model's own head, which rounds them to the module's dtype."""
        assert adapted is None and self._head is not None
        return self._head(hidden_SE[None])[0].float()

    def _compiled(self, modules: tuple[str, ...]) -> FusedLayers | None:
        """Return the layers compiled; None where they cannot be, or compute something else then."""
        layers = FusedLayers(self.base, modules)
        return layers if layers.agree() else None

    def _layers_of(self, step: Step) -> AbstractContextManager[None]:
        """Return a context in which the layers are compiled, if they are to be in `step`."""
        if self._fused is None or self._fuses is None or not self._fuses(step):
            return nullcontext()
        return self._fused.used()
