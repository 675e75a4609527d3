"""`small_model`: a model of two layers of the kind of another, with random weights that all matter.

It has small sizes if the configuration allows them, else those of the model itself, but for the layers. Its layers are
those of the model with different attention, and windows are so short that a text of 20 tokens is longer.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from typing import Final

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from headrace.engine.errors import ModelRejected
from headrace.engine.model.fallback.interface import ATTENTION
from headrace.engine.model.fallback.loading import random_module
from headrace.engine.model.fallback.model import FallbackModel
from headrace.engine.model.fallback.network import FallbackDecoder
from headrace.engine.model.fallback.ropes import DIVISORS, ORIGINAL, freeze_ropes, long_ropes, pairs
from headrace.engine.model.fallback.values import told
from headrace.engine.model.network.foreign import ForeignOps
from headrace.engine.model.network.operations import Kv, Packed, Step
from headrace.engine.model.shared.memory import free_host_bytes
from headrace.engine.model.spec import DecoderSpec, MixerSpec

__all__ = ["SmallModel", "small_model"]

_LAYERS: Final = 2
_WINDOW: Final = 5
_SHORT: Final = 3
_LONG: Final = 64
"""Tokens up to which a longrope has the divisors of short texts: fewer than all texts of a trial have, or more."""
_FEW_IDS: Final = {"vocab_size": 128}
_SMALL: Final = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "ffn_dim": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "num_dense_layers": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "rotary_dim": 8,
    "v_head_dim": 16,
    **_FEW_IDS,
}
"""Sizes that a configuration may have, and what is small for each."""


class SmallModel:
    """A small model, once as transformers computes it and once as the fallback does, with the same weights."""

    def __init__(self, origin: FallbackModel, config: PreTrainedConfig) -> None:
        """Make both of `config`, and run transformers' on a few tokens.

        Raises:
            Exception: The configuration is impossible.
        """
        self.origin = origin
        self._model = FallbackModel(origin.found._replace(config=config), "random")
        needed, free = 2 * sum(part.nbytes for part in self._model.parts(torch.float32)), free_host_bytes() // 4
        if needed > free:
            raise MemoryError(f"a model of two layers takes {needed} bytes, and {free} may be used")
        self._plain = random_module(self._model.found, torch.float32, 0, "eager")
        _shake(self._plain)
        self.whole(torch.arange(3))

    @property
    def spec(self) -> DecoderSpec:
        """The shape of the small model."""
        return self._model.spec

    def whole(self, ids_N: Tensor) -> Tensor:
        """Return the logits [N, V], or hidden states [N, E] of a model without a head, that transformers computes."""
        found = self._plain(input_ids=ids_N[None], use_cache=False)
        result: Tensor = found.logits if self.spec.has_head else found.last_hidden_state
        return result[0].float()

    def paged(
        self,
        ops: Mapping[MixerSpec, ForeignOps[Packed, Step, Kv]],
        positions: Callable[[Step], Tensor],
        *,
        dtype: torch.dtype = torch.float32,
        activations: torch.dtype | None = None,
        taken: Collection[str] = (),
    ) -> FallbackDecoder[Packed, Step, Kv]:
        """Return the model as the fallback computes it, with weights in `dtype`.

        The other arguments are those of `FallbackDecoder`.
        """
        module = random_module(self._model.found, dtype, 0, ATTENTION)
        module.load_state_dict(self._plain.state_dict())
        freeze_ropes(module, module.config, self._model.found.context)
        traced = self._model.traced
        return FallbackDecoder(self.spec, module, traced, ops, positions, activations=activations, taken=taken)

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds (inner.py) of what may be a product or a norm."""
        return self._model.products | self._model.norms


def small_model(model: FallbackModel) -> SmallModel:
    """Return a small model of the kind of `model`, as small as can be made.

    Raises:
        ModelRejected: transformers can run no model of two layers of this configuration.
    """
    failure: Exception | None = None
    for sizes in (_SMALL, _FEW_IDS, {}):
        try:
            return SmallModel(model, _config(model, sizes))
        except Exception as error:  # another library's constructors, with sizes that were guessed
            failure = error
    assert failure is not None
    name = model.spec.architecture
    raise ModelRejected(
        f"architectures: no model of two layers of transformers' {name} could be run for a trial: {told(failure)}",
        field="architectures",
        value=name,
    ) from failure


def _config(model: FallbackModel, sizes: Mapping[str, int]) -> PreTrainedConfig:
    """Return a configuration of two layers, none of whose sizes is larger than in `sizes`."""
    config = copy.deepcopy(model.found.config)
    _cut(config, _chosen(model))
    own = config.to_dict()
    names = {config.attribute_map.get(name, name): size for name, size in sizes.items()}
    for name, size in names.items():
        if isinstance(own.get(name), int) and own[name] > size:
            setattr(config, name, size)
    if sizes is _SMALL:
        _match_heads(config, model)
    _match_ropes(config, model.found.context)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        _forget(config, name)
    if isinstance(getattr(config, "sliding_window", None), int):
        config.sliding_window = _WINDOW
    return config


def _match_heads(config: PreTrainedConfig, model: FallbackModel) -> None:
    """Give each query head its own key head where the model does so; let what is rotated have the size of its part."""
    attention = model.traced.layers[0]
    if attention.heads == attention.kv_heads and getattr(config, "num_key_value_heads", None) is not None:
        config.num_key_value_heads = config.num_attention_heads
    if hasattr(config, "qk_rope_head_dim") and hasattr(config, "head_dim"):
        config.head_dim = config.qk_rope_head_dim  # what is rotated, in models with a part that is not


def _match_ropes(config: PreTrainedConfig, context: int) -> None:
    """Leave a longrope as many divisors as there are pairs, and let it use those that it does in the model itself."""
    for rope in long_ropes(config):
        for field in DIVISORS:
            rope[field] = rope[field][: pairs(config, rope)]
        rope[ORIGINAL] = _SHORT if context > rope[ORIGINAL] else max(rope[ORIGINAL], _LONG)
        if hasattr(config, ORIGINAL):  # counts for more
            setattr(config, ORIGINAL, rope[ORIGINAL])


def _forget(config: PreTrainedConfig, name: str) -> None:
    """Take back a special token, whose id a smaller vocabulary would lack."""
    try:
        setattr(config, name, None)
    except Exception:  # some configurations want an id
        setattr(config, name, 1)


def _chosen(model: FallbackModel) -> list[int]:
    """Return the numbers of two layers: the first, and the last whose attention is another one, or the last of all.

    Feeds with experts, where they are in some layers alone, are in the last ones.
    """
    layers = model.traced.layers
    others = (number for number in reversed(range(len(layers))) if layers[number] != layers[0])
    second = next(others, len(layers) - 1)
    return [0, second] if second else [0]


def _cut(config: PreTrainedConfig, layers: list[int]) -> None:
    """Leave the layers with these numbers in a configuration, and in each list that has an element for every layer."""
    count = config.num_hidden_layers
    for name, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == count:
            setattr(config, name, [value[layer] for layer in layers])
    config.num_hidden_layers = len(layers)


def _shake(module: nn.Module) -> None:
    """Make all weights so large that each changes the logits."""
    generator = torch.Generator().manual_seed(1)
    for parameter in module.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() >= 2:
            parameter.copy_(noise * parameter.shape[-1] ** -0.5)
        else:
            parameter.add_(0.1 * noise)
        parameter.copy_(parameter.bfloat16())  # so that weights in 16 bits are the same numbers
