"""`FallbackModel`: a model that transformers' own module computes, described by its config alone until it is loaded.

Next to read: tracing.py for what is found out, network.py for what runs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from headrace.adapters.untrusted import refuse
from headrace.engine.model.checkpoint.parameters import Empty
from headrace.engine.model.checkpoint.weight_parts import WeightSum
from headrace.engine.model.fallback.config import ModelClass, model_class
from headrace.engine.model.fallback.inner import inner_modules, may_be_norm, may_be_product
from headrace.engine.model.fallback.loading import check_finite, load_module, moved, random_module
from headrace.engine.model.fallback.network import FallbackDecoder
from headrace.engine.model.fallback.ropes import freeze_ropes
from headrace.engine.model.fallback.tracing import Traced, build_blank, embedding_of, trace
from headrace.engine.model.network.foreign import ForeignModel, ForeignOps
from headrace.engine.model.network.operations import Kv, Packed, Step
from headrace.engine.model.roles import Fused, Names
from headrace.engine.model.rope import UNROTATED
from headrace.engine.model.spec import LIMITS, DecoderSpec, FeedSpec, LayerSpec, MixerSpec, Norms
from headrace.engine.stats import ModelPart, WeightPart

__all__ = ["FallbackModel"]

_ORIGIN: Final = "config.json"
_NO_NAMES: Final = Names("", {}, re.compile(r"(?!)"))
_NORMS: Final = Norms(1e-6)  # of nothing: the module has norms of its own


class _ForeignFeed(FeedSpec):
    """The feed of a layer that a module computes by itself."""

    __slots__ = ()

    def parameters(self, hidden_size: int) -> Mapping[str, Fused]:
        """Return nothing: the module has its parameters."""
        return {}

    def __eq__(self, other: object) -> bool:
        """Return whether `other` is of this kind, too."""
        return isinstance(other, _ForeignFeed)

    def __hash__(self) -> int:
        """Return one number for all."""
        return hash(_ForeignFeed)


class FallbackModel(ForeignModel):
    """A model of the transformers library, with the source of its weights."""

    def __init__(self, found: ModelClass, source: Path | Literal["random"], *, seed: int = 0, why: str = "") -> None:
        """Trace the module of `found`.

        Args:
            found: The class and the configuration.
            source: A folder with safetensors, or "random".
            seed: Seed of random weights.
            why: Sentence that says why the model has no native code.

        Raises:
            ModelRejected: The module cannot be run over paged keys and values; the error says why.
        """
        self.found, self._source, self._seed, self._why = found, source, seed, why
        self.taken: Collection[str] = ()
        """Kinds of products and norms (inner.py) that a device may compute. A trial finds out."""
        blank = build_blank(found)
        self._sizes = _sizes_of(blank)
        self.products: Final = _kinds(found, blank, may_be_product)
        """Kinds of what may be a product of the device."""
        self.norms: Final = _kinds(found, blank, may_be_norm)
        """Kinds of what may be an RMS norm."""
        self.traced = trace(found, blank)
        self._spec = _spec(found, self.traced)

    @classmethod
    def read(
        cls,
        described: Mapping[str, object],
        source: Path | Literal["random"],
        *,
        max_context: int | None = None,
        seed: int = 0,
        why: str = "",
    ) -> FallbackModel:
        """Return the model that a parsed config.json describes.

        Arguments and errors are those of `model_class` and the constructor.
        """
        return cls(model_class(described, max_context), source, seed=seed, why=why)

    @property
    def spec(self) -> DecoderSpec:
        """The shape of the model; its layers have the attention that was traced."""
        return self._spec

    @property
    def why(self) -> str:
        """Sentence that says why the model has no native code here."""
        return self._why

    def parts(self, dtype: torch.dtype) -> tuple[WeightPart, ...]:
        """Return the formats of the weights in `dtype`, and their bytes."""
        total = WeightSum()
        for part, elements in self._sizes.items():
            total.add(part, str(dtype).removeprefix("torch."), elements * dtype.itemsize)
        return total.parts()

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
    ) -> FallbackDecoder[Packed, Step, Kv]:
        """Load the weights and return the model, whose weights are in tensors of `empty` if it is given.

        The other arguments and the errors are those of `ForeignModel.open`.
        """
        module = self._module(dtype)
        if empty is None:
            check_finite(module)
        else:
            module = moved(module, device, empty)
        preferred = activations if self.taken else None
        return FallbackDecoder(
            self._spec, module, self.traced, ops, positions, activations=preferred, taken=self.taken, fuses=fuses
        )

    def reload(self, *, dtype: torch.dtype, device: torch.device, empty: Empty) -> None:
        """Read the weights once more into the tensors of `empty`."""
        moved(self._module(dtype), device, empty)

    def _module(self, dtype: torch.dtype) -> PreTrainedModel:
        if self._source == "random":
            module = random_module(self.found, dtype, self._seed)
        else:
            module = load_module(self.found, self._source, dtype)
        freeze_ropes(module, self.found.config, self.found.context)
        self._widen_sinks(module)
        return module

    def _widen_sinks(self, module: PreTrainedModel) -> None:
        """Make the sinks float32, as operations take them: these then read the module's own, whatever is read again."""
        base = module.base_model if self.found.has_head else module
        for name in self.traced.sinks:
            if name is not None:
                sinks_H = base.get_parameter(name)
                sinks_H.data = sinks_H.data.float()


def _spec(found: ModelClass, traced: Traced) -> DecoderSpec:
    """Return the shape of a model as caches and schedulers need it: a layer's feed and norms are the module's affair.

    Raises:
        ModelRejected: A size is impossible.
    """
    sizes = {
        "hidden_size": traced.hidden_size,
        "vocab_size": traced.vocab_size,
        "num_layers": len(traced.layers),
    }
    for name, size in sizes.items():
        if not 1 <= size <= LIMITS[name]:
            refuse(_ORIGIN, name, size, f"an integer from 1 to {LIMITS[name]}")
    config: Any = found.config  # whose class has the fields
    return DecoderSpec(
        architecture=found.kind.__name__,
        layers=tuple(LayerSpec(attention, _ForeignFeed(), _NORMS) for attention in traced.layers),
        ropes=(UNROTATED,),
        hidden_size=traced.hidden_size,
        vocab_size=traced.vocab_size,
        max_context=config.max_position_embeddings,
        norm_eps=_NORMS.epsilon,
        tied_head=not found.has_head or bool(getattr(config, "tie_word_embeddings", False)),
        names=_NO_NAMES,
        has_head=found.has_head,
    )


def _sizes_of(model: PreTrainedModel) -> dict[ModelPart, int]:
    """Return the number of weights of each part of a module; a head that is the embedding counts once."""
    sizes: dict[ModelPart, int] = {}
    ends: dict[Tensor, ModelPart] = {embedding_of(model): "embedding"}
    find_head: Callable[[], Any] = model.get_output_embeddings  # untyped
    head = find_head()
    if head is not None:
        ends.setdefault(head.weight, "head")
    for name, parameter in model.named_parameters():
        part = ends.get(parameter) or _part(name, parameter)
        sizes[part] = sizes.get(part, 0) + parameter.numel()
    return sizes


def _kinds(found: ModelClass, model: PreTrainedModel, is_one: Callable[[nn.Module], bool]) -> frozenset[str]:
    """Return the kinds of some of a module's parts, by their paths without the head."""
    prefix = f"{model.base_model_prefix}." if found.has_head else ""
    return frozenset(each.kind.removeprefix(prefix) for each in inner_modules(model) if is_one(each.module))


def _part(name: str, parameter: Tensor) -> ModelPart:
    if parameter.dim() < 2:
        return "other"
    return "attention" if "attn" in name or "attention" in name else "feed-forward"
